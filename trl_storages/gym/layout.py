"""Maps the arguments of a step, which may be nested, to the fields of a transition."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import NestedKey, unravel_key

from trl_storages.gym.columns import Column, as_tensor
from trl_storages.gym.fields import OUTCOME_FIELDS, Field, check_free
from trl_storages.keys import (
    ACTION,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    key_path,
    leaves,
    nested,
    next_key,
)

__all__ = [
    "Leaf",
    "StepLayout",
    "Tree",
    "TreeReader",
    "add_field",
    "entries",
    "layout_of",
    "learn_fields",
    "tree_of",
]


class Leaf(NamedTuple):
    """The keys of a value, now and one step later, and its label in messages."""

    key: NestedKey
    next_key: NestedKey
    label: str


Tree = Leaf | dict[str, Any]


def tree_of(keys: Iterable[NestedKey], *, skip: int = 0) -> dict[str, Any]:
    """Returns the tree of the keys: dictionaries, with a `Leaf` for each key.

    Args:
        keys: of the leaves, none a prefix of another.
        skip: how many leading names the labels leave out.

    >>> tree_of(["speed", ("goals", "last")])["goals"]["last"].label
    "['goals']['last']"
    """
    keys = list(keys)
    # A plain array may stand for a dictionary with only an observation.
    skip = 1 if keys == [OBSERVATION] else skip
    found = ((key_path(key), key) for key in keys)
    return nested((path, Leaf(key, next_key(key), _label(path[skip:]))) for path, key in found)


def _label(path: Sequence[str]) -> str:
    return "".join(f"[{name!r}]" for name in path)


class TreeReader:
    """Reads nested dictionaries that must have exactly the keys of a tree.

    Args:
        tree: the required keys.
    """

    def __init__(self, tree: Tree) -> None:
        # The names, and which of them are dictionaries; None for a plain value.
        self._names: list[str] | None = None
        self._below: list[tuple[int, TreeReader]] = []
        #: The leaves, in the order in which values are read.
        self.leaves: list[Leaf] = [tree] if isinstance(tree, Leaf) else []
        if isinstance(tree, dict):
            self._names = [*tree]
            branches = [TreeReader(branch) for branch in tree.values()]
            self.leaves = [leaf for branch in branches for leaf in branch.leaves]
            below = [(at, it) for at, it in enumerate(branches) if it._names is not None]
            # Last first, so that splicing in nested values does not shift the remaining positions.
            self._below = below[::-1]

    def read(self, values: Any, argument: str) -> list[Any]:
        """Returns the value of each leaf.

        Raises:
            KeyError: an entry is missing.
            TypeError: a value is not a dictionary where the tree has one.
            ValueError: there are entries that the tree lacks.
        """
        if self._names is None:
            return [values]
        # An isinstance check against Mapping takes longer than the reading.
        if type(values) is not dict or len(values) != len(self._names):
            self._check(values, argument)
        try:
            found = [values[name] for name in self._names]
        except KeyError:
            self._check(values, argument)
            raise
        for at, branch in self._below:
            found[at : at + 1] = branch.read(found[at], argument)
        return found

    def _check(self, values: Any, argument: str) -> None:
        """Raises the error for values that are not a mapping with exactly the keys of the tree."""
        names: list[str] = self._names  # type: ignore[assignment]
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{argument} must be a dictionary with the keys {sorted(names)}, "
                f"got {type(values).__name__}"
            )
        if missing := [name for name in names if name not in values]:
            raise KeyError(
                f"{argument} must have the key {missing[0]!r}; there are {sorted(map(str, values))}"
            )
        if extra := sorted(str(name) for name in values if name not in names):
            raise ValueError(
                f"{argument} must have the keys {sorted(names)} only, got {extra} too; "
                "leave them out, or make the storage for a space that has them"
            )


class StepLayout(NamedTuple):
    """The fields of a transition, how each is read, and how the arguments are nested."""

    fields: Mapping[NestedKey, Field]
    columns: Mapping[NestedKey, Column]
    observations: TreeReader
    actions: TreeReader
    pairs: Sequence[tuple[NestedKey, NestedKey]]
    """The keys of each observation, now and one step later."""
    places: Sequence[tuple[NestedKey, Column, str, str]]
    """Key, column, argument and label of each value of a step, in the order of reading."""


def entries(observations: Any) -> Any:
    """Returns the observations as a dictionary, with the names of TorchRL's environments."""
    # An isinstance check against Mapping takes longer than the reading.
    if type(observations) is not dict and not isinstance(observations, Mapping):
        return {"observation": observations}
    if "state" in observations and "observation" not in observations:
        return {
            OBSERVATION if name == "state" else name: value for name, value in observations.items()
        }
    return observations


def layout_of(
    fields: Mapping[NestedKey, Field], info_keys: Sequence[NestedKey], num_envs: int
) -> StepLayout:
    """Returns the layout of known fields.

    Keys that also exist under `next` are observations; the rest, infos aside, are actions.
    """
    at_root = [key for key in fields if key_path(key)[0] != "next" and key not in info_keys]
    pairs = [(key, next_key(key)) for key in at_root if next_key(key) in fields]
    actions = [key for key in at_root if next_key(key) not in fields]
    # "action" is the argument itself; a TorchRL spec may name its actions otherwise.
    is_plain = all(key_path(key)[0] == "action" for key in actions)
    columns = {key: Column(*field, num_envs, lossy=key == REWARD) for key, field in fields.items()}
    seen = TreeReader(tree_of(key for key, _ in pairs))
    done = TreeReader(tree_of(actions, skip=1)["action"] if is_plain else tree_of(actions))
    places = [
        (TERMINATED, columns[TERMINATED], "terminateds", ""),
        (TRUNCATED, columns[TRUNCATED], "truncateds", ""),
        (REWARD, columns[REWARD], "rewards", ""),
        *((leaf.key, columns[leaf.key], "observations", leaf.label) for leaf in seen.leaves),
        *((leaf.key, columns[leaf.key], "actions", leaf.label) for leaf in done.leaves),
        *(
            (leaf.next_key, columns[leaf.key], "next_observations", leaf.label)
            for leaf in seen.leaves
        ),
    ]
    return StepLayout(fields, columns, seen, done, pairs, places)


def learn_fields(observations: Any, actions: Any, *, is_vector: bool) -> dict[NestedKey, Field]:
    """Returns the fields of a first step without its infos, with the dtypes of its values.

    Raises:
        TypeError: a value is not numeric, or a name is not a string.
        ValueError: two entries have the same key.
    """
    fields, what = dict(OUTCOME_FIELDS), "observations and actions"
    for path, value in leaves(observations, what):
        key, label = unravel_key(path), _label(path)
        add_field(fields, key, value, f"observations{label}", is_vector=is_vector)
        check_free(next_key(key), fields)
        fields[next_key(key)] = fields[key]
    for path, value in leaves(actions, what, key_path(ACTION)):
        label = _label(path[1:])
        add_field(fields, unravel_key(path), value, f"actions{label}", is_vector=is_vector)
    return fields


def add_field(
    fields: dict[NestedKey, Field], key: NestedKey, value: Any, name: str, *, is_vector: bool
) -> None:
    """Adds the field of a value to `fields`.

    Raises:
        TypeError: the value is not made of numbers.
        ValueError: the key is taken.
    """
    tensor = as_tensor(value, name)
    check_free(key, fields)
    fields[key] = (tensor.dtype, tensor.shape[1:] if is_vector else tensor.shape)
