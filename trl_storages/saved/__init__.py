"""Saved states: fully checked before any of them is loaded."""
