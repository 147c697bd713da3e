"""What other libraries call what there is here, and what a slip was meant to be."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

__all__ = ["METHOD_NAMES", "OTHER_NAMES", "STEP_NAMES", "meant"]

#: Name elsewhere -> name here. Elsewhere is Stable-Baselines 2 and 3, rllte, PyTorchRL, garage, TorchRL,
#: CleanRL, cpprb, tianshou, flashbax and dopamine.
OTHER_NAMES = {
    "Nstep": "n_step",
    "add_batch_size": "num_envs",
    "additional_goals": "num_goals",
    "buffer_num": "num_envs",
    "buffer_size": "storage_size",
    "capacity": "storage_size",
    "capacity_in_transitions": "storage_size",
    "cmin": "c_min",
    "compute_reward": "reward_fn",
    "compute_reward_fn": "reward_fn",
    "copy_info_dict": "info_keys",
    "env_dict": "observation_space",
    "env_spec": "observation_space",
    "envs": "num_envs",
    "epsilon": "eps",
    "estimation_step": "n_step",
    "future_k": "num_goals",
    "gamma": "discount",
    "her_function": "reward_fn",
    "her_ratio": "num_goals",
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
    "num_sampled_goals": "num_goals",
    "num_steps": "n_step",
    "obs_shape": "observation_space",
    "prioritized_replay_alpha": "alpha",
    "prioritized_replay_beta": "beta",
    "prioritized_replay_eps": "eps",
    "priority_exponent": "alpha",
    "random_seed": "seed",
    "replay_capacity": "storage_size",
    "replay_dir": "path",
    "replay_k": "num_goals",
    "reward_func": "reward_fn",
    "sample_batch_size": "batch_size",
    "scratch_dir": "path",
    "size": "storage_size",
    "size_in_transitions": "storage_size",
    "storage_dir": "path",
    "strategy": "goal_selection_strategy",
    "total_size": "storage_size",
    "update_horizon": "n_step",
    "weight_norm": "normalize",
    # Arguments of methods here.
    "fetch_every": "loader(fetch_every=...)",
    "num_workers": "loader(num_workers=...)",
    "pin_memory": "loader(pin_memory=...)",
    "save_snapshot": "close(keep=...)",
}

#: Arguments of a step, of their `add` -> of `record`.
STEP_NAMES = {
    "act": "actions",
    "action": "actions",
    "done": "terminateds and truncateds",
    "dones": "terminateds and truncateds",
    "info": "infos",
    "next_obs": "next_observations",
    "next_observation": "next_observations",
    "obs": "observations",
    "obs_next": "next_observations",
    "obs_t": "observations",
    "obs_tp1": "next_observations",
    "observation": "observations",
    "rew": "rewards",
    "reward": "rewards",
    "terminated": "terminateds",
    "terminations": "terminateds",
    "truncated": "truncateds",
    "truncations": "truncateds",
}

#: Method or attribute of their buffers -> what is written here.
METHOD_NAMES = {
    "add_episode": "extend",
    "add_episode_batch": "extend",
    "add_path": "extend",
    "add_transition": "add or record",
    "add_transitions": "extend",
    "after_gradients": "update_tensordict_priority",
    "clear": "empty",
    "full": "is_full",
    "generate_batches": "batches",
    "get_all_buffer_data": "storage[:]",
    "get_all_transitions": "storage[:]",
    "get_data_slice": "storage[start:end]",
    "get_sequence_priority": "sequence_priority",
    "get_stored_size": "len(storage)",
    "insert_data_slice": "extend",
    "insert_transition": "add or record",
    "load_hdf5": "loads",
    "load_transitions": "loads",
    "n_transitions_stored": "len(storage)",
    "on_episode_end": "end_episodes",
    "replay_iter": "loader",
    "reset": "empty",
    "sample_path": "sample_episodes",
    "sample_timesteps": "sample",
    "sample_transitions": "sample",
    "save_hdf5": "dumps",
    "save_transitions": "dumps",
    "set_beta": "beta, an attribute",
    "size": "len(storage)",
    "store_episode": "nothing, rows are stored at once; end_episodes cuts what runs",
    "truncate_last_trajectory": "end_episodes",
    "unfinished_index": "episodes",
    "update_eta": "ReturnImprovementEta",
    "update_priorities": "update_tensordict_priority or update_priority",
    "update_storage_parameter": "an attribute, such as alpha",
    "update_weight": "update_tensordict_priority or update_priority",
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
