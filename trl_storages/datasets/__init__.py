"""Replay buffers from datasets: arrays (D4RL, OGBench, garage) and Minari."""

from trl_storages.datasets.arrays import from_arrays
from trl_storages.datasets.minari_datasets import from_minari, to_minari

__all__ = ["from_arrays", "from_minari", "to_minari"]
