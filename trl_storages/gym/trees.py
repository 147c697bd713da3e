"""Nested dictionaries of observations and actions, read against the keys they must have."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tensordict import NestedKey, unravel_key

from trl_storages.gym.fields import key_path
from trl_storages.keys import OBSERVATION, next_key

__all__ = ["Leaf", "Tree", "TreeReader", "leaves", "nested_keys", "tree_of"]


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
    tree: dict[str, Any] = {}
    for key in keys:
        path = key_path(key)
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = Leaf(key, next_key(key), "".join(f"[{name!r}]" for name in path[skip:]))
    return tree


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


def leaves(tree: Tree, value: Any, argument: str) -> list[tuple[Leaf, Any]]:
    """Returns each leaf of the tree with its value.

    Raises:
        KeyError: an entry is missing.
        TypeError: a value is not a dictionary where the tree has one.
        ValueError: there are entries that the tree does not have.
    """
    found: list[tuple[Leaf, Any]] = []
    _gather(tree, value, argument, found)
    return found


def _gather(tree: Tree, value: Any, argument: str, found: list[tuple[Leaf, Any]]) -> None:
    if isinstance(tree, Leaf):
        found.append((tree, value))
        return
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{argument} must be a dictionary with the keys {sorted(tree)}, "
            f"got {type(value).__name__}"
        )
    for name, branch in tree.items():
        if name not in value:
            raise KeyError(
                f"{argument} must have the key {name!r}; there are {sorted(map(str, value))}"
            )
        _gather(branch, value[name], argument, found)
    if len(value) > len(tree):
        extra = sorted(str(name) for name in value if name not in tree)
        raise ValueError(
            f"{argument} must have the keys {sorted(tree)} only, got {extra} too; "
            "leave them out, or make the storage for a space that has them"
        )


class TreeReader:
    """Reads nested dictionaries as `leaves` does, in a fraction of the time.

    Args:
        tree: the keys that there must be.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        #: The leaves, in the order of what is read.
        self.leaves: list[Leaf] = [tree] if isinstance(tree, Leaf) else []
        self._is_leaf = isinstance(tree, Leaf)
        if isinstance(tree, Leaf):
            return
        self._names, self._size = tuple(tree), len(tree)
        # Of one name it would return the value, and not a tuple.
        self._pick = itemgetter(*tree) if self._size > 1 else None
        branches = [
            None if isinstance(below, Leaf) else TreeReader(below) for below in tree.values()
        ]
        self._branches = branches if any(branches) else []
        for below, branch in zip(tree.values(), branches, strict=True):
            self.leaves += [below] if branch is None else branch.leaves

    def read(self, values: Any, argument: str) -> Sequence[Any]:
        """Returns the value of each leaf.

        Raises:
            KeyError, TypeError, ValueError: as `leaves`.
        """
        if self._is_leaf:
            return (values,)
        try:
            if len(values) != self._size:
                raise LookupError
            found = self._pick(values) if self._pick else [values[name] for name in self._names]
        except (LookupError, TypeError, ValueError):
            # Says what is wrong.
            return [value for _, value in leaves(self._tree, values, argument)]
        if not self._branches:
            return found
        flat: list[Any] = []
        for branch, value in zip(self._branches, found, strict=True):
            flat += [value] if branch is None else branch.read(value, argument)
        return flat
