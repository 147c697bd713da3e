"""Maps the arguments of a step, which may be nested, to the fields of a transition."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import NestedKey, unravel_key

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
from trl_storages.writing.columns import Column, as_tensor
from trl_storages.writing.fields import OUTCOME_FIELDS, Field, check_free

__all__ = ["Leaf", "StepLayout", "Tree", "entries", "leaves_of", "plan", "read_tree", "tree_of"]


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


def read_tree(tree: Tree, values: Any, argument: str) -> list[Any]:
    """Returns the value of each leaf of a tree from nested dictionaries with exactly its keys.

    Raises:
        KeyError: an entry is missing.
        TypeError: a value is not a dictionary where the tree has one.
        ValueError: there are entries that the tree lacks.
    """
    if type(tree) is Leaf:
        return [values]
    branches: dict[str, Tree] = tree  # type: ignore[assignment]
    # An isinstance check against Mapping takes longer than the reading.
    if type(values) is not dict or len(values) != len(branches):
        _check_names([*branches], values, argument)
    found = []
    try:
        for name, branch in branches.items():
            if type(branch) is Leaf:
                found.append(values[name])
            else:
                found += read_tree(branch, values[name], argument)
    except KeyError:
        _check_names([*branches], values, argument)
        raise
    return found


def leaves_of(tree: Tree) -> list[Leaf]:
    """Returns the leaves of a tree in the order in which values are read."""
    return [leaf for _, leaf in leaves(tree, "")]


def _check_names(names: list[str], values: Any, argument: str) -> None:
    """Raises the error for values that are not a mapping with exactly these keys."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{argument} must be a dictionary of {sorted(names)}, got {type(values).__name__}"
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
    observations: Tree
    actions: Tree
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


def plan(
    given: Mapping[NestedKey, Field] | None,
    observations: Any,
    actions: Any,
    infos: Mapping[NestedKey, Any],
    num_envs: int,
    is_vector: bool,
) -> StepLayout:
    """Returns the layout of the given fields, or of those of a first step.

    Args:
        given: the fields; None takes them from the step.
        observations: of the step.
        actions: of the step.
        infos: the entries of its infos to keep.
        num_envs: E.
        is_vector: whether values have the leading dimension.

    Raises:
        TypeError: a value is not numeric, or a name is not a string.
        ValueError: two entries have the same key.
    """
    if given is None:
        fields = _learn_fields(observations, actions, is_vector)
    else:
        fields = {**OUTCOME_FIELDS, **given}
    for key, value in infos.items():
        if given is None or key not in fields:
            _add_field(fields, key, value, f"infos[{key!r}]", is_vector)
    return _layout_of(fields, infos, num_envs)


def _layout_of(
    fields: Mapping[NestedKey, Field], info_keys: Collection[NestedKey], num_envs: int
) -> StepLayout:
    # Keys that also exist under `next` are observations; the rest, infos aside, are actions.
    at_root = [key for key in fields if key_path(key)[0] != "next" and key not in info_keys]
    seen = tree_of(key for key in at_root if next_key(key) in fields)
    actions = [key for key in at_root if next_key(key) not in fields]
    # "action" is the argument itself; a TorchRL spec may name its actions otherwise.
    is_plain = all(key_path(key)[0] == "action" for key in actions)
    columns = {key: Column(*field, num_envs, lossy=key == REWARD) for key, field in fields.items()}
    acted = tree_of(actions, skip=1)["action"] if is_plain else tree_of(actions)
    places = [
        (TERMINATED, columns[TERMINATED], "terminateds", ""),
        (TRUNCATED, columns[TRUNCATED], "truncateds", ""),
        (REWARD, columns[REWARD], "rewards", ""),
        *((leaf.key, columns[leaf.key], "observations", leaf.label) for leaf in leaves_of(seen)),
        *((leaf.key, columns[leaf.key], "actions", leaf.label) for leaf in leaves_of(acted)),
        *(
            (leaf.next_key, columns[leaf.key], "next_observations", leaf.label)
            for leaf in leaves_of(seen)
        ),
    ]
    return StepLayout(fields, columns, seen, acted, places)


def _learn_fields(observations: Any, actions: Any, is_vector: bool) -> dict[NestedKey, Field]:
    """Returns the fields of a first step without its infos, with the dtypes of its values."""
    fields, what = dict(OUTCOME_FIELDS), "observations and actions"
    for path, value in leaves(observations, what):
        key = unravel_key(path)
        _add_field(fields, key, value, f"observations{_label(path)}", is_vector)
        check_free(next_key(key), fields)
        fields[next_key(key)] = fields[key]
    for path, value in leaves(actions, what, key_path(ACTION)):
        _add_field(fields, unravel_key(path), value, f"actions{_label(path[1:])}", is_vector)
    return fields


def _add_field(
    fields: dict[NestedKey, Field], key: NestedKey, value: Any, name: str, is_vector: bool
) -> None:
    tensor = as_tensor(value, name)
    check_free(key, fields)
    fields[key] = (tensor.dtype, tensor.shape[1:] if is_vector else tensor.shape)
