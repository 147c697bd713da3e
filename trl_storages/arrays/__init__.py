"""Transitions out of dictionaries of arrays, by the names that datasets use."""

from trl_storages.arrays.transitions import Transitions, steps_of

__all__ = ["Transitions", "steps_of"]
