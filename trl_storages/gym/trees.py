"""Nested dictionaries of observations and actions, read against the keys they must have."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tensordict import NestedKey, unravel_key

from trl_storages.gym.fields import key_path
from trl_storages.keys import OBSERVATION, nested, next_key

__all__ = ["Leaf", "Tree", "TreeReader", "nested_keys", "tree_of"]


class Leaf(NamedTuple):
    """Where a value goes, now and one step later, and what messages call it."""

    key: NestedKey
    next_key: NestedKey
    label: str


Tree = Leaf | dict[str, Any]


def tree_of(keys: Iterable[NestedKey], *, skip: int = 0) -> dict[str, Any]:
    """Returns the tree of the keys: dictionaries, with a `Leaf` for each key.

    Args:
        keys: those of the leaves, none the beginning of another one.
        skip: how many names the labels leave out.

    >>> tree_of(["speed", ("goals", "last")])["goals"]["last"].label
    "['goals']['last']"
    """
    keys = list(keys)
    # A mere array may stand for a dictionary with an observation only.
    skip = 1 if keys == [OBSERVATION] else skip
    paths = [(key, key_path(key)) for key in keys]
    return nested(
        (path, Leaf(key, next_key(key), "".join(f"[{name!r}]" for name in path[skip:])))
        for key, path in paths
    )


def nested_keys(value: Any, prefix: tuple[str, ...] = ()) -> list[NestedKey]:
    """Returns the keys of all values in nested dictionaries; of another value, the prefix.

    Raises:
        TypeError: a name is not a string.
    """
    if not isinstance(value, Mapping):
        return [unravel_key(prefix)]
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"the keys of observations and actions must be strings, got {name!r}")
    return [key for name in value for key in nested_keys(value[name], (*prefix, name))]


class TreeReader:
    """Reads nested dictionaries that must have just the keys of a tree.

    Args:
        tree: the keys that there must be.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        #: The leaves, in the order of what is read.
        self.leaves: list[Leaf] = [*_leaves(tree)]

    def read(self, values: Any, argument: str) -> list[Any]:
        """Returns the value of each leaf.

        Raises:
            KeyError: an entry is missing.
            TypeError: a value is not a dictionary where the tree has one.
            ValueError: there are entries that the tree does not have.
        """
        if isinstance(self._tree, Leaf):
            return [values]
        found: list[Any] = []
        _gather(self._tree, values, argument, found)
        return found


def _leaves(tree: Tree) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
        return
    for branch in tree.values():
        yield from _leaves(branch)


def _gather(tree: dict[str, Any], value: Any, argument: str, found: list[Any]) -> None:
    # To ask for a mapping takes longer than to read one.
    if type(value) is not dict and not isinstance(value, Mapping):
        raise TypeError(
            f"{argument} must be a dictionary with the keys {sorted(tree)}, "
            f"got {type(value).__name__}"
        )
    for name, branch in tree.items():
        if name not in value:
            raise KeyError(
                f"{argument} must have the key {name!r}; there are {sorted(map(str, value))}"
            )
        if type(branch) is Leaf:
            found.append(value[name])
        else:
            _gather(branch, value[name], argument, found)
    if len(value) > len(tree):
        extra = sorted(str(name) for name in value if name not in tree)
        raise ValueError(
            f"{argument} must have the keys {sorted(tree)} only, got {extra} too; "
            "leave them out, or make the storage for a space that has them"
        )
