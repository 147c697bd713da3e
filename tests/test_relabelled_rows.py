"""Both ways of putting relabelled samples among the others come to the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.transforms.relabelled_rows import RelabelledRows


def choose(mask, new, stored, batch_dims):
    """Sample by sample, as the definition says."""
    result = stored.clone()
    for sample in range(len(mask)):
        if mask[sample]:
            at = (slice(None), sample) if batch_dims == 2 else sample
            result[at] = new[at].to(stored.dtype)
    return result


@given(data=st.data(), is_prefix=st.booleans(), batch_dims=st.integers(1, 2))
def test_any_mask_equals_a_plain_loop(data, is_prefix, batch_dims):
    mask = data.draw(st.lists(st.booleans(), min_size=1, max_size=6))
    mask = torch.tensor(sorted(mask, reverse=True) if is_prefix else mask)
    shape = [3, len(mask)][-batch_dims:] + data.draw(st.sampled_from([[1], [2], [2, 3]]))
    stored, new = torch.rand(2, *shape)
    relabelled = RelabelledRows(mask, batch_dims)
    before = stored.clone()
    result = relabelled.put(new.double(), stored)
    assert result.dtype == torch.float32
    assert torch.equal(result, choose(mask, new, stored, batch_dims))
    assert torch.equal(stored, before)
    result.fill_(2)
    assert torch.equal(stored, before)


def test_a_prefix_is_joined_and_any_other_mask_chosen():
    stored, new = torch.zeros(4, 1), torch.ones(4, 1)
    for flags in ([1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]):
        mask = torch.tensor(flags, dtype=torch.bool)
        assert RelabelledRows(mask).put(new, stored).squeeze(1).tolist() == flags
