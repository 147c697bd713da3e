"""Measurements of this package next to other libraries: `python -m tests.benchmarks --help`."""
