"""What other libraries call the options of a storage, and which name a slip was meant to be."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

__all__ = ["OTHER_NAMES", "meant"]

#: Name elsewhere -> name here. Elsewhere is Stable-Baselines 2 and 3, rllte, PyTorchRL, garage, TorchRL,
#: cpprb, tianshou, flashbax and dopamine.
OTHER_NAMES = {
    "add_batch_size": "num_envs",
    "buffer_num": "num_envs",
    "buffer_size": "storage_size",
    "capacity": "storage_size",
    "capacity_in_transitions": "storage_size",
    "compute_reward": "reward_fn",
    "compute_reward_fn": "reward_fn",
    "copy_info_dict": "info_keys",
    "env_dict": "observation_space",
    "env_spec": "observation_space",
    "estimation_step": "n_step",
    "future_k": "num_goals",
    "gamma": "discount",
    "importance_sampling_exponent": "beta",
    "max_capacity": "storage_size",
    "max_length": "storage_size",
    "max_size": "storage_size",
    "max_sz": "storage_size",
    "mmap_prefix": "path",
    "n_env": "num_envs",
    "n_envs": "num_envs",
    "n_goals": "num_goals",
    "n_sampled_goal": "num_goals",
    "n_steps": "n_step",
    "nstep": "n_step",
    "Nstep": "n_step",
    "num_steps": "n_step",
    "num_sampled_goals": "num_goals",
    "priority_exponent": "alpha",
    "replay_capacity": "storage_size",
    "replay_k": "num_goals",
    "sample_batch_size": "batch_size",
    "scratch_dir": "path",
    "size": "storage_size",
    "storage_dir": "path",
    "strategy": "goal_selection_strategy",
    "weight_norm": "normalize",
    "total_size": "storage_size",
    "update_horizon": "n_step",
    # Arguments of methods here.
    "fetch_every": "loader(fetch_every=...)",
    "num_workers": "loader(num_workers=...)",
    "pin_memory": "loader(pin_memory=...)",
    "save_snapshot": "close(keep=...)",
}


def meant(name: str, names: Collection[str]) -> str:
    """Returns the end of an error message, which says what to write instead of a name.

    Args:
        name: as it came.
        names: those that there are.

    >>> meant("gamma", ["alpha", "discount"]), meant("alhpa", ["alpha"]), meant("x", ["alpha"])
    ('it is called discount here.', 'do you mean alpha?', 'there are alpha.')
    """
    ours = OTHER_NAMES.get(name)
    if ours is not None and (ours in names or "(" in ours):
        return f"it is called {ours} here."
    # What an option of a ready-made storage is called on the storage.
    if (other := next((key for key in names if OTHER_NAMES.get(key) == name), None)) is not None:
        return f"it is called {other} here."
    if close := get_close_matches(name, names, 1):
        return f"do you mean {close[0]}?"
    return f"there are {', '.join(sorted(names))}."
