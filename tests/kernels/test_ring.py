"""Draws of both backends: below any bound, and uniform."""

import numpy as np
import pytest
import torch
from oracles import RingOracle
from scipy import stats

from trl_storages.kernels import device, host
from trl_storages.kernels.tables import GOAL_KINDS, Block

BACKENDS = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
CPU = torch.device("cpu")
HIGHEST = 2**63 - 1


def append(ring, done, cut, lanes=None):
    """Takes steps of which nothing is stored; returns their slots as `[L, S]`."""
    kernels = host if isinstance(ring, host.Ring) else device
    places = np.zeros((0, 2), np.int64)
    done = done.contiguous()
    rows = kernels.NewRows([], places, done.numel(), 0, done, done.device)
    cut = None if cut is None else cut.contiguous()
    return ring.append(rows, Block(done.shape[1], lanes, cut=cut)).view(done.shape)


def flags(rows):
    return torch.tensor(rows, dtype=torch.bool)


def noise_of(seed, size):
    return torch.empty(size, dtype=torch.int64).random_(
        generator=torch.Generator().manual_seed(seed)
    )


def below(noise, bound):
    return noise * bound >> 63


def kinds_of(names):
    """How goals are drawn, as numbers; None stands for a row without a drawn goal."""
    return torch.tensor([GOAL_KINDS.get(name, 0) for name in names], dtype=torch.uint8)


@BACKENDS
@pytest.mark.parametrize("num_rows", [2**31 - 1, 2**31, 2**40 + 7])
def test_draws_below_any_bound(kernels, num_rows):
    """Scaled below 2^31, by remainder beyond; never through floats, which would miss most rows."""
    ring = kernels.Ring(8, 1, CPU)
    # As large as no machine's memory: draws look at cursors only.
    ring.capacity = ring.steps_per_lane = ring.ring_steps = num_rows
    ring.lanes[0, 0] = num_rows
    noise = noise_of(3, 50)
    noise[:2] = torch.tensor([0, HIGHEST])
    draw = (lambda x: below(x, num_rows)) if num_rows < 2**31 else (lambda x: x % num_rows)
    expected = [num_rows - 1 - draw(number) for number in noise.tolist()]
    assert ring.draw(noise).tolist() == expected


@BACKENDS
@pytest.mark.parametrize("strategy", [None, "future", "final", "episode", "random"])
def test_draws_are_uniform(kernels, strategy):
    """Over lanes of unequal fill, one of which has wrapped, with 20,000 draws."""
    ring, oracle = kernels.Ring(36, 3, CPU), RingOracle(36, 3)
    for done, lane in (([0, 0, 1] * 7, 2), ([0] * 7, 0), ([1], 1)):
        append(ring, flags([done]), None, torch.tensor([lane]))
        oracle.append([done], None, [lane])
    anchor = oracle.by_age()[9]
    drawn = ring.draw(noise_of(1, 20_000))
    candidates = [*oracle.live()]
    if strategy is not None:
        anchors = torch.full_like(drawn, oracle.slot(anchor))
        kinds = kinds_of([strategy] * 20_000)
        drawn, _ = ring.goals(anchors, noise_of(2, 20_000), kinds, (strategy,))
        candidates = [oracle.slot(row) for row in oracle.goals(anchor, strategy)]
    counts = torch.bincount(drawn, minlength=36)
    assert counts.nonzero().squeeze(1).tolist() == sorted(candidates)
    if len(candidates) > 1:
        assert stats.chisquare(counts[candidates]).pvalue > 1e-4
