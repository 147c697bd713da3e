"""Compiled loops over arrays: nothing above them loops over rows, steps or lanes."""
