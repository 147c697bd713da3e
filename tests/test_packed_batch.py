"""Batches that are sent to other processes arrive as they are, whatever a transform has put in."""

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from trl_storages.buffer.loader import pack_tensordicts

DTYPES = torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int16


def batch_of(num_rows):
    """[num_rows] with an entry of each kind that a transform may set."""
    rows = torch.arange(num_rows * 3).reshape(num_rows, 3)
    values = {str(dtype): (rows % 2).to(dtype) for dtype in DTYPES}
    agents = TensorDict({"observation": torch.rand(num_rows, 2, 5)}, [num_rows, 2])
    further = {
        "empty": torch.zeros(num_rows, 0),
        "transposed": torch.rand(3, num_rows).T,
        "expanded": torch.rand(1, 7).expand(num_rows, 7),
        "needs gradients": torch.rand(num_rows, 2, requires_grad=True),
        "sparse": torch.eye(num_rows, 4).to_sparse(),
        "name": NonTensorData("cart", batch_size=[num_rows]),
        "nothing": TensorDict({}, [num_rows]),
        "agents": agents,
        "lazy": LazyStackedTensorDict(*(TensorDict({"a": torch.rand(i)}) for i in range(num_rows))),
    }
    return TensorDict({**values, "index": rows[:, 0], "next": {**values, **further}}, [num_rows])


@pytest.mark.parametrize("num_rows", [1, 5])
def test_packed_batch_arrives_as_it_was_sent(num_rows):
    batch = batch_of(num_rows)
    here = pickle.loads(pickle.dumps(pack_tensordicts(batch)))
    assert type(here) is TensorDict
    assert here.batch_size == batch.batch_size
    assert here.device == batch.device
    assert {*here.keys(True, True)} == {*batch.keys(True, True)}
    for key in batch.exclude(("next", "lazy")).keys(True, True):
        mine, theirs = here.get(key), batch.get(key)
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype is theirs.dtype
            assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert here["next", "name"] == "cart"
    assert here["next", "agents"].batch_size == (num_rows, 2)
    assert here["next", "nothing"].is_empty()
    assert here["next", "lazy"][-1]["a"].shape == (num_rows - 1,)


def test_packed_batch_may_be_changed_while_autograd_needs_another_entry():
    sent = TensorDict({"observation": torch.rand(4, 3), "td_error": torch.rand(4)}, [4])
    # Ray hands out memory that can't be written to.
    buffers = []
    message = pickle.dumps(pack_tensordicts(sent), 5, buffer_callback=buffers.append)
    here = pickle.loads(message, buffers=[bytes(buffer) for buffer in buffers])
    loss = torch.nn.Linear(3, 1)(here["observation"]).sum()
    here["td_error"].zero_()
    loss.backward()
    assert sent["td_error"].any()


def test_packed_view_is_sent_without_what_it_is_a_view_of():
    every = torch.zeros(1000, 100)
    assert len(pickle.dumps(pack_tensordicts((every[3], {"slots": 4})))) < 2000
    assert len(pickle.dumps(pack_tensordicts(TensorDict({"row": every[3:5]}, [2])))) < 2000
