"""What a user sees: tests that know public names alone, and make their storages through `make.py`."""
