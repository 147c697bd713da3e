"""States as JSON."""

import json
import math

import pytest
import torch

from trl_storages.states import array, entries_of, from_json, to_json


def test_json_has_all_that_states_hold():
    state = {
        "numbers": [1, 2.5, -math.inf, 2**60, None, True],
        "key": ("next", ("a", 3)),
        "tensors": [
            torch.tensor([[1, 2]]),
            torch.zeros(0, 3),
            torch.tensor(True),
            torch.ones(2).bfloat16(),
        ],
    }
    state["nested"] = {"raw": torch.tensor([0.1, -0.0])}
    found = from_json(json.loads(json.dumps(to_json(state))))
    assert (found["numbers"], found["key"]) == (state["numbers"], state["key"])
    for one, other in zip(found["tensors"], state["tensors"], strict=True):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        assert one.shape == other.shape
    assert found["nested"]["raw"].view(torch.int32).tolist() == [1036831949, -(2**31)]


@pytest.mark.parametrize(
    "words",
    [
        {".tensor": "!", "dtype": "torch.int64", "shape": []},
        {".tensor": "AAAA", "dtype": "torch.int64", "shape": [1]},
        {".tensor": "AAAA", "dtype": "os.system", "shape": [3]},
        {".tensor": "AAAA", "dtype": "torch.uint8", "shape": [2]},
        {".tensor": 5, "dtype": "torch.uint8", "shape": [2]},
        {".tuple": 5},
    ],
)
def test_other_json_is_refused(words):
    with pytest.raises(ValueError, match="whole"):
        from_json([words])


def test_entries_and_tensors_are_checked():
    assert entries_of("a part", {"b": 1, "a": 2}, ("a", "b")) == [2, 1]
    for state in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, None, [1, 2]):
        with pytest.raises(ValueError, match="a part"):
            entries_of("a part", state, ("a", "b"))
    assert array("it", torch.ones(2, 3).T, torch.float32, None, 2).shape == (3, 2)
    for value in (torch.ones(2), torch.ones(2, 2).long(), torch.ones(2, 2).to_sparse(), [[1.0]]):
        with pytest.raises(ValueError, match="it must be"):
            array("it", value, torch.float32, 2, 2)
