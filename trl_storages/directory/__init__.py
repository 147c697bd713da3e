"""Rows in a directory: the arena in a file, beside a description of it."""

from trl_storages.directory.description import Description
from trl_storages.directory.directory import Directory

__all__ = ["Description", "Directory"]
