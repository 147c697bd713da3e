"""Storages from datasets: arrays (D4RL, OGBench, garage), Minari, and other libraries' buffers."""

from trl_storages.datasets.from_arrays import from_arrays
from trl_storages.datasets.from_stable_baselines3 import from_stable_baselines3
from trl_storages.datasets.minari_datasets import from_minari, to_minari

__all__ = ["from_arrays", "from_minari", "from_stable_baselines3", "to_minari"]
