"""Where the arguments of a step hold the fields of a transition."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import NestedKey

from trl_storages.gym.columns import Column, as_tensor
from trl_storages.gym.fields import OUTCOME_FIELDS, Field, check_free, key_path
from trl_storages.gym.trees import TreeReader, nested_keys, tree_of
from trl_storages.keys import ACTION, OBSERVATION, REWARD, TERMINATED, TRUNCATED, next_key

__all__ = ["Layout", "add_field", "entries", "layout_of", "learn_fields"]


class Layout(NamedTuple):
    """The fields of a transition, how each is read, and how the arguments are nested."""

    fields: Mapping[NestedKey, Field]
    columns: Mapping[NestedKey, Column]
    observations: TreeReader
    actions: TreeReader
    pairs: Sequence[tuple[NestedKey, NestedKey]]
    """The keys of each observation, now and one step later."""
    places: Sequence[tuple[NestedKey, Column, str, str]]
    """Where each value of a step goes, in the order of reading, and what messages call it."""


def entries(observations: Any) -> Any:
    """Returns the observations as a dictionary, named as TorchRL's environments name them."""
    # To ask for a mapping takes longer than to read one.
    if type(observations) is not dict and not isinstance(observations, Mapping):
        return {"observation": observations}
    if "state" in observations and "observation" not in observations:
        return {
            OBSERVATION if name == "state" else name: value for name, value in observations.items()
        }
    return observations


def layout_of(
    fields: Mapping[NestedKey, Field], info_keys: Sequence[NestedKey], num_envs: int
) -> Layout:
    """Returns the layout of known fields.

    An observation is what is there now and one step later; the rest, infos aside, is the action.
    """
    at_root = [key for key in fields if key_path(key)[0] != "next" and key not in info_keys]
    pairs = [(key, next_key(key)) for key in at_root if next_key(key) in fields]
    actions = [key for key in at_root if next_key(key) not in fields]
    # "action" itself is the argument; a TorchRL spec may have actions of other names.
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
    return Layout(fields, columns, seen, done, pairs, places)


def learn_fields(observations: Any, actions: Any, *, is_vector: bool) -> dict[NestedKey, Field]:
    """Returns the fields of a first step, without its infos, with the dtypes it came with.

    Raises:
        TypeError: a value is not made of numbers.
        ValueError: two entries have the same key.
    """
    fields = dict(OUTCOME_FIELDS)
    seen = TreeReader(tree_of(nested_keys(observations)))
    values = seen.read(observations, "observations")
    for leaf, value in zip(seen.leaves, values, strict=True):
        add_field(fields, leaf.key, value, "observations" + leaf.label, is_vector=is_vector)
        check_free(leaf.next_key, fields)
        fields[leaf.next_key] = fields[leaf.key]
    done = TreeReader(tree_of(nested_keys(actions, key_path(ACTION)), skip=1)["action"])
    for leaf, value in zip(done.leaves, done.read(actions, "actions"), strict=True):
        add_field(fields, leaf.key, value, "actions" + leaf.label, is_vector=is_vector)
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
