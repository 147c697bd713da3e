"""Compiled loops over arrays, for what lies on the CPU or on disk."""

__all__: list[str] = []
