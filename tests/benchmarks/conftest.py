"""Keeps what needs libraries that may not be installed from being imported for docstrings."""

collect_ignore_glob = ["peers/*.py"]
