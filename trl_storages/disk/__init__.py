"""Rows in files: one writer, any number of readers."""
