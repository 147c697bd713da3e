"""States as JSON."""

import json
import math

import numpy as np
import pytest
import torch

from trl_storages.serialization import array, entries_of, from_json, to_json


def test_states_survive_json():
    tensors = [torch.arange(2), torch.zeros(0, 3), torch.tensor(True), -torch.zeros(2).bfloat16()]
    state = {"numbers": [1, 2.5, -math.inf, 2**60, None, True], "key": ("next", ("a", 3))}
    found = from_json(json.loads(json.dumps(to_json({**state, "nested": {"of": tensors}}))))
    nested = found.pop("nested")["of"]
    assert all(map(torch.equal, nested, tensors))
    assert str(nested) == str(tensors)  # dtypes, and the sign of 0
    assert found == state
    with pytest.raises(TypeError, match="float32"):
        to_json({**state, "nested": [np.float32(2)]})


@pytest.mark.parametrize(
    "content",
    [
        {".tensor": "!", "dtype": "torch.int64", "shape": []},
        {".tensor": "AAAA", "dtype": "torch.int64", "shape": [1]},
        {".tensor": "AAAA", "dtype": "os.system", "shape": [3]},
        {".tensor": "AAAA", "dtype": "torch.uint8", "shape": [2]},
        {".tensor": 5, "dtype": "torch.uint8", "shape": [2]},
        {".tuple": 5},
    ],
)
def test_damaged_json_raises(content):
    with pytest.raises(ValueError, match="damaged"):
        from_json([content])


def test_entries_and_tensors_of_a_state_are_checked():
    assert entries_of("a part", {"b": 1, "a": 2}, ("a", "b")) == [2, 1]
    for state in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, None, [1, 2]):
        with pytest.raises(ValueError, match="a part"):
            entries_of("a part", state, ("a", "b"))
    assert array("it", torch.ones(2, 3).T, torch.float32, None, 2).shape == (3, 2)
    for value in (torch.ones(2), torch.ones(2, 2).long(), torch.ones(2, 2).to_sparse(), [[1.0]]):
        with pytest.raises(ValueError, match="it must be"):
            array("it", value, torch.float32, 2, 2)
