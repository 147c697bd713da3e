"""Turns dictionaries of arrays, with the names that datasets use, into transitions."""

from trl_storages.arrays.transitions import Transitions, steps_of

__all__ = ["Transitions", "steps_of"]
