"""The TensorDict keys of a transition, as TorchRL's collectors and losses name them."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import Any

from tensordict import NestedKey, unravel_key

__all__ = [
    "ACHIEVED_GOAL",
    "ACTION",
    "ANCHOR_GENERATION",
    "ANCHOR_INDEX",
    "BUFFER_IDS",
    "DESIRED_GOAL",
    "DONE",
    "GOAL_INDEX",
    "HER_MASK",
    "INDEX",
    "INDEX_GENERATION",
    "IS_INIT",
    "LEARNING_MASK",
    "MASK",
    "OBSERVATION",
    "PRIORITY_WEIGHT",
    "REWARD",
    "SEQUENCE_ID",
    "STEPS_TO_NEXT_OBS",
    "STEP_IN_SEQUENCE",
    "TERMINATED",
    "TRAJECTORY_IDS",
    "TRUNCATED",
    "VALIDITY_MASK",
    "check_free",
    "check_storable",
    "continued_keys",
    "goal_keys",
    "have_next",
    "info_key",
    "key_path",
    "leaves",
    "nested",
    "next_key",
    "overlapping",
    "shared_keys",
    "stored_info",
]

OBSERVATION: NestedKey = "observation"
ACTION: NestedKey = "action"
ACHIEVED_GOAL: NestedKey = "achieved_goal"
DESIRED_GOAL: NestedKey = "desired_goal"
REWARD: NestedKey = ("next", "reward")
DONE: NestedKey = ("next", "done")
TERMINATED: NestedKey = ("next", "terminated")
TRUNCATED: NestedKey = ("next", "truncated")
TRAJECTORY_IDS: NestedKey = ("collector", "traj_ids")

# Keys of a sampled batch in addition to the stored fields.
INDEX: NestedKey = "index"
INDEX_GENERATION: NestedKey = "index_generation"
MASK: NestedKey = ("collector", "mask")
GOAL_INDEX: NestedKey = "goal_index"
HER_MASK: NestedKey = "her_mask"
PRIORITY_WEIGHT: NestedKey = "priority_weight"
ANCHOR_INDEX: NestedKey = "anchor_index"
ANCHOR_GENERATION: NestedKey = "anchor_generation"
VALIDITY_MASK: NestedKey = "validity_mask"
LEARNING_MASK: NestedKey = "learning_mask"
SEQUENCE_ID: NestedKey = "sequence_id"
STEP_IN_SEQUENCE: NestedKey = "step_in_sequence"
BUFFER_IDS: NestedKey = "buffer_ids"
# Stored fields must not have these names: sampling would overwrite them.
_SET_BY_SAMPLING: tuple[NestedKey, ...] = (
    INDEX,
    INDEX_GENERATION,
    MASK,
    GOAL_INDEX,
    HER_MASK,
    PRIORITY_WEIGHT,
    ANCHOR_INDEX,
    ANCHOR_GENERATION,
    VALIDITY_MASK,
    LEARNING_MASK,
    SEQUENCE_ID,
    STEP_IN_SEQUENCE,
    BUFFER_IDS,
)
# May be stored as well, as TorchRL's InitTracker and MultiStep write them.
IS_INIT: NestedKey = "is_init"
STEPS_TO_NEXT_OBS: NestedKey = "steps_to_next_obs"


def goal_keys(goal_key: NestedKey) -> tuple[NestedKey, NestedKey]:
    """Returns the keys of a goal's slots and of its relabelling mask in a batch.

    >>> goal_keys("desired_goal"), goal_keys(("goals", "actor"))
    (('goal_index', 'her_mask'), (('goals', 'actor_index'), ('goals', 'actor_mask')))
    """
    if goal_key == DESIRED_GOAL:
        return GOAL_INDEX, HER_MASK
    *path, name = key_path(goal_key)
    return unravel_key((*path, f"{name}_index")), unravel_key((*path, f"{name}_mask"))


def check_storable(key: NestedKey) -> None:
    """Raises a ValueError if a name of a key is empty, or if sampling sets the key in batches."""
    if not all(key_path(key)):
        raise ValueError(
            f"a stored field must have a name, got the empty name in {key!r}: rename it in its space, "
            "info_keys, extra_fields, fields or data."
        )
    if (reserved := overlapping(key, _SET_BY_SAMPLING)) is not None:
        raise ValueError(
            f"a stored field must not have a name that sampling sets in batches, got {key!r}, which "
            f"overlaps {reserved!r}: rename it in its space, info_keys, extra_fields, fields or data."
        )


def check_free(key: NestedKey, taken: Iterable[NestedKey]) -> None:
    """Raises a ValueError if `key` overlaps one of the keys `taken` of a transition."""
    if (conflict := overlapping(key, taken)) is not None:
        raise ValueError(
            f"the keys of a transition must differ, got {key!r} and {conflict!r}: rename one of them."
        )


def overlapping(key: NestedKey, others: Iterable[NestedKey]) -> NestedKey | None:
    """Returns the first of `others` that equals `key`, or contains or is contained in it; else None.

    >>> overlapping(("next", "reward"), ["next"]), overlapping("reward", [("next", "reward")])
    ('next', None)
    """
    path = key_path(key)
    for candidate in others:
        # A key that is a prefix of another key would be both a tensor and a TensorDict.
        if all(a == b for a, b in zip(path, key_path(candidate), strict=False)):
            return candidate
    return None


# Fields with these names belong to a single step: the next step does not begin with their next values.
_STEP_NAMES = frozenset({"reward", "done", "terminated", "truncated", "step_count"})


def next_key(key: NestedKey) -> NestedKey:
    """Returns the key of the same field one step later.

    >>> next_key("observation"), next_key(("goals", "achieved"))
    (('next', 'observation'), ('next', 'goals', 'achieved'))
    """
    return ("next", *key_path(key))


def info_key(key: NestedKey) -> NestedKey:
    """Returns the key under which an info is stored: a plain name under `next`, a nested key unchanged.

    Infos describe the outcome of a step, and TorchRL's info readers also write them under `next`.

    >>> info_key("force"), info_key(("robot", "force"))
    (('next', 'force'), ('robot', 'force'))
    """
    return next_key(key) if isinstance(key, str) else key


def stored_info(key: NestedKey, stored: Container[NestedKey]) -> NestedKey:
    """Returns the key of a stored info: `info_key(key)` if it is stored, else `key`.

    >>> stored_info("force", ["action", ("next", "force")]), stored_info("action", ["action"])
    (('next', 'force'), 'action')
    """
    return under_next if (under_next := info_key(key)) in stored else key


def continued_keys(keys: Collection[NestedKey]) -> list[NestedKey]:
    """Returns the keys whose next value is the value of the next transition of the episode.

    Args:
        keys: the keys of a transition.

    >>> continued_keys(["pixels", ("next", "pixels"), "done", ("next", "done")])
    ['pixels']
    """
    if OBSERVATION in keys and next_key(OBSERVATION) in keys:
        return [OBSERVATION]
    # The desired goal is excluded, because an environment may change it within an episode.
    return [key for key in shared_keys(keys) if key != DESIRED_GOAL]


def shared_keys(keys: Collection[NestedKey]) -> list[NestedKey]:
    """Returns the keys whose next value may be the value of the next transition.

    Args:
        keys: the keys of a transition.

    >>> shared_keys(["observation", ("next", "observation"), "desired_goal", ("next", "desired_goal")])
    ['observation', 'desired_goal']
    """
    return [key for key in keys if key_path(key)[-1] not in _STEP_NAMES and next_key(key) in keys]


def have_next(keys: Collection[NestedKey]) -> bool:
    """Returns whether a key has a next value, except `is_init`, which TorchRL's InitTracker adds.

    >>> have_next(["observation", "is_init", ("next", "reward"), ("next", "is_init")])
    False
    """
    return any(key != IS_INIT for key in shared_keys(keys))


def key_path(key: NestedKey) -> tuple[str, ...]:
    """Returns the key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(key)


def leaves(
    tree: Any, what: str, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and value of each leaf of nested mappings; the inverse of `nested`.

    An empty mapping within a mapping is a leaf, so that it is not dropped silently.

    Args:
        tree: a mapping, or a single value.
        what: name of `tree` in messages.
        path: path of `tree`.

    Raises:
        TypeError: a name is not a string.

    >>> [*leaves({"goals": {"last": 1}, "speed": 2}, "it")]
    [(('goals', 'last'), 1), (('speed',), 2)]
    """
    if not isinstance(tree, Mapping) or (path and not tree):
        yield path, tree
        return
    for name, branch in tree.items():
        if not isinstance(name, str):
            raise TypeError(f"{what} must have names that are strings, got {name!r}.")
        yield from leaves(branch, what, (*path, name))


def nested(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Builds nested dictionaries from (path, value) pairs; no path may be a prefix of another path.

    >>> nested([(("goals", "last"), 1), (("speed",), 2)])
    {'goals': {'last': 1}, 'speed': 2}
    """
    tree: dict[str, Any] = {}
    for (*names, last), leaf in leaves:
        branch = tree
        for name in names:
            branch = branch.setdefault(name, {})
        branch[last] = leaf
    return tree
