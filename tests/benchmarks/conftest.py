"""Keeps the adapters, whose libraries may not be installed, from being imported for docstrings."""

collect_ignore_glob = ["peers/*.py"]
