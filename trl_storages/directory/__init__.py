"""Transitions in a directory: an arena in a file, and its description."""

from trl_storages.directory.description import Description
from trl_storages.directory.directory import Directory

__all__ = ["Description", "Directory"]
