"""Steps that are like the last ones, and steps that only look like them."""

import copy

import pytest
import torch
from tensordict import TensorDict

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage, Structure
from trl_storages.writing import EpisodeWriter


def steps(first=0):
    """Three steps whose values are all their own."""
    number = torch.arange(first, first + 3.0)
    seen = number[:, None] + torch.tensor([0.0, 0.25])
    flag = torch.zeros(3, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": seen,
            "action": number[:, None] * 10,
            "spectrum": torch.complex(seen, seen + 5),
            "next": {"observation": seen + 1, "done": flag, "terminated": flag.clone()},
        },
        [3],
    )


def in_other_order(data):
    names = [*data.keys()][::-1]
    return TensorDict({name: data[name] for name in names}, data.batch_size)


def with_entry(key, change):
    def changed(data):
        return data.set(key, change(data[key]))

    return changed


MASK = ("collector", "mask")

#: Steps that fit, and are of another structure than those before.
FITTING = {
    "another order": in_other_order,
    "fewer": lambda data: data[:2],
    "parts of a wider table": with_entry("observation", lambda it: it.repeat(1, 2)[:, :2]),
    "the last dimension first": with_entry("observation", lambda it: it.T.contiguous().T),
    "negated": with_entry("observation", lambda it: torch.complex(-it, -it).conj().imag),
    "conjugated": with_entry("spectrum", torch.conj),
    "that need gradients": with_entry("action", lambda it: it.requires_grad_()),
    "parameters": with_entry("action", torch.nn.Parameter),
    "one tensor twice": lambda data: data.set(("next", "terminated"), data["next", "done"]),
    "stacked lazily": lambda data: TensorDict.lazy_stack([*data.unbind(0)]),
    "with more entries": lambda data: data.set("more", torch.zeros(3)),
    "without padding": lambda data: data.set(MASK, torch.ones(3, dtype=torch.bool)),
}

#: Steps that do not fit, and why.
REFUSED = {
    "another dtype": (with_entry("action", torch.Tensor.double), TypeError, "must be float32"),
    "another shape": (with_entry("action", lambda it: it.repeat(1, 2)), ValueError, "shape"),
    "an entry too few": (lambda data: data.exclude("action"), KeyError, "lacks 'action'"),
    "an end that is none": (
        with_entry(("next", "terminated"), torch.logical_not),
        ValueError,
        "must be true wherever",
    ),
    "padding": (
        lambda data: data.set(MASK, torch.tensor([True, True, False])),
        ValueError,
        "padded",
    ),
}


def storage_of_steps():
    keys = [*steps().keys(include_nested=True, leaves_only=True)]
    writer = EpisodeWriter(keys=keys, on_gap="ignore")
    return ReplayStorage(storage=PackedStorage(20), writer=writer)


def check_stored(storage, slots, data):
    stored = storage.storage.get(slots)
    for key, value in stored.items(include_nested=True, leaves_only=True):
        assert torch.equal(value, data[key].detach()), key


@pytest.mark.parametrize("name", FITTING)
def test_steps_of_another_structure(name):
    storage = storage_of_steps()
    for first, change in enumerate([steps, FITTING[name], FITTING[name], steps]):
        data = steps(10 * first) if change is steps else change(steps(10 * first))
        check_stored(storage, storage.extend(data.copy()), data)


def test_a_tensor_under_two_keys_is_known_again():
    """So that batches whose `terminated` is their `done` need not be looked at each time."""
    data, ends = steps(), [("next", "done"), ("next", "terminated"), "action"]
    twice = FITTING["one tensor twice"](steps())
    known = Structure.of(twice, [twice[key] for key in ends])
    again = FITTING["one tensor twice"](steps(10))
    assert [it is again[key] for it, key in zip(known.tensors(again), ends, strict=True)] == [
        True
    ] * 3
    assert known.tensors(data) is None
    assert Structure.of(data, [data[key] for key in ends]).tensors(again) is None


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_do_not_fit(name):
    change, error, message = REFUSED[name]
    storage = storage_of_steps()
    storage.extend(steps())
    for _ in range(2):
        with pytest.raises(error, match=message):
            storage.extend(change(steps(10)))
    assert len(storage) == 3
    data = steps(20)
    check_stored(storage, storage.extend(data.copy()), data)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda storage: storage])
def test_other_entries_are_wanted(copied):
    """Of copies, and where the writer's attributes are set: what was known of steps is of no use."""
    storage = storage_of_steps()
    storage.extend(steps())
    storage = copied(storage)
    data = steps(10).set("ends", torch.tensor([True, False, True]))
    storage.writer.done_key = "ends"
    assert storage.episodes.is_end(storage.extend(data)).tolist() == [True, False, True]
