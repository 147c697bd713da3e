"""What other libraries call things, and what to write here instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

__all__ = ["OTHER_NAMES", "meant"]


def _by_their_name(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, said in names.items() for theirs in said.split()}


#: Their name -> ours, for Stable-Baselines 2 and 3, rllte, PyTorchRL, garage, TorchRL, CleanRL, cpprb,
#: tianshou, flashbax and dopamine.
OTHER_NAMES = _by_their_name(
    {
        "alpha": "prioritized_replay_alpha priority_exponent",
        "batch_size": "sample_batch_size",
        "beta": "importance_sampling_exponent prioritized_replay_beta",
        "c_min": "cmin",
        "close(keep=...)": "save_snapshot",
        "discount": "gamma",
        "eps": "epsilon prioritized_replay_eps",
        "frame_stack": "save_only_last_obs stack_compress stack_num stack_size",
        "strategy": "goal_selection_strategy",
        "info_keys": "copy_info_dict",
        "loader(fetch_every=...)": "fetch_every",
        "loader(num_workers=...)": "num_workers workers",
        "loader(pin_memory=...)": "pin_memory",
        "n_step": "Nstep estimation_step n_steps nstep num_steps update_horizon",
        "normalize": "weight_norm",
        "num_envs": "add_batch_size buffer_num envs n_env n_envs",
        "num_goals": "additional_goals future_k n_goals n_sampled_goal num_sampled_goals replay_k",
        "num_goals (4 for a ratio of 0.8)": "her_ratio",
        "observation_space": "env_dict env_spec obs_shape",
        "path": "mmap_prefix replay_dir scratch_dir storage_dir",
        "reward_fn": "compute_reward compute_reward_fn her_function reward_func",
        "sample_unit=EpisodeSequence(...)": (
            "length batch_length bootstrap burn_in sample_sequence_length seq_len sequence_length "
            "slice_len unroll_length"
        ),
        "seed": "random_seed",
        "share_next": "ignore_obs_next next_of optimize_memory_usage",
        "storage_size": (
            "buffer_size capacity capacity_in_transitions max_capacity max_length max_size max_sz "
            "replay_capacity size size_in_transitions total_size"
        ),
        "update_tensordict_priority(batch, batch[priority_key])": "priority_key",
        "truncateds, an argument of record(...)": "handle_timeout_termination",
    }
)


def meant(name: str, names: Collection[str]) -> str:
    """Returns the end of an error message: what to write instead of an unknown name.

    Args:
        name: the unknown name.
        names: the valid names.

    >>> meant("gamma", ["alpha", "discount"]), meant("alhpa", ["alpha"]), meant("x", ["alpha"])
    ('it is called discount here.', 'do you mean alpha?', 'there are alpha.')
    """
    ours = OTHER_NAMES.get(name, name)
    # All names of one thing: parts, too, differ in how they call it.
    of_it = [ours, *(theirs for theirs, each in OTHER_NAMES.items() if each == ours)]
    known = next((each for each in of_it if each in names), ours)
    if known in names or "(" in known:
        return f"it is called {known} here."
    if close := get_close_matches(name, names, 1):
        return f"do you mean {close[0]}?"
    return f"there are {', '.join(sorted(names))}." if names else "it takes none."
