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


@given(data=st.data(), in_place=st.booleans(), batch_dims=st.integers(1, 2))
def test_any_mask_equals_a_plain_loop(data, in_place, batch_dims):
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=1, max_size=6)))
    shape = [3, len(mask)][-batch_dims:] + data.draw(st.sampled_from([[1], [2], [2, 3]]))
    stored, new = torch.rand(2, *shape)
    relabelled = RelabelledRows(mask, in_place=in_place)
    assert relabelled.is_none == (in_place and not mask.any())
    before = stored.clone()
    picked = relabelled.pick(new.double(), batch_dims)
    assert picked.shape[batch_dims - 1] == (mask.sum() if in_place else len(mask))
    result = relabelled.put(picked, stored, batch_dims)
    assert result.dtype == torch.float32
    assert torch.equal(result, choose(mask, new, before, batch_dims))
    if not in_place:
        result.fill_(2)
        assert torch.equal(stored, before)
