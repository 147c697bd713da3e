"""Rows whose every field says which step of which lane they are, and a checksum of them."""

import torch
from tensordict import TensorDict

from trl_storages import EpisodeWriter, PackedStorage, PERSampler, ReplayStorage

NOISE = 5


def transitions(lanes, steps):
    """Transitions of these lanes and steps, int64 [...]; an episode ends every few steps."""
    noise = (steps[..., None] * 7919 + lanes[..., None] * 104729 + torch.arange(NOISE)) * 40503
    done = (steps + lanes) % 11 == 10
    return TensorDict(
        {
            "observation": torch.stack([steps, lanes], -1).double(),
            "noise": noise,
            "pixels": (noise % 251).to(torch.uint8),
            "sum": noise.sum(-1) + steps * 31 + lanes,
            "next": {
                "observation": torch.stack([steps + 1, lanes], -1).double(),
                "reward": steps[..., None].float() / 8,
                "done": done[..., None],
            },
        },
        batch_size=steps.shape,
    )


def is_torn(batch):
    """Whether each row of a batch mixes two transitions."""
    step, lane = batch["observation"].long().unbind(-1)
    whole = transitions(lane, step)
    fields = list(whole.keys(True, True))
    torn = torch.zeros(batch.batch_size, dtype=torch.bool)
    for key in fields:
        torn |= (batch[key] != whole[key]).reshape(len(torn), -1).any(1)
    return torn


def block(cursors, num_steps, lanes=None):
    """The next steps of the lanes, `[L, S]`."""
    lanes = torch.arange(len(cursors)) if lanes is None else lanes
    steps = cursors[lanes].unsqueeze(1) + torch.arange(num_steps)
    return transitions(lanes.unsqueeze(1).expand_as(steps), steps)


def write(storage, num_steps, lanes=None):
    """Writes the next steps of the lanes."""
    data = block(storage.episodes.num_steps_written.clone(), num_steps, lanes)
    if lanes is not None:
        storage.writer.extend(data, lanes=lanes)
    else:
        storage.extend(data if storage.episodes.num_envs > 1 else data[0])


def priority_of(slots, storage):
    """The priority that the tests give to a row."""
    step = storage.episodes.steps(slots)
    return (step * 13 + slots % storage.episodes.num_envs * 7) % 97 / 16.0


def make(path, num_envs=1, size=24, batch_size=8, sampler=None, **options):
    """A storage of rows in `path`, new or as it was left."""
    rows = PackedStorage(size, scratch_dir=path, **options)
    with rows.released_on_error():
        return ReplayStorage(
            storage=rows,
            writer=EpisodeWriter(num_envs),
            sampler=PERSampler(size) if sampler is None else sampler,
            batch_size=batch_size,
        )


def check(storage):
    """Raises if a live row is not, bit for bit, the transition of its lane and step."""
    storage.validate()
    size = len(storage)
    if not size:
        return
    slots = storage.episodes.slots_by_age(torch.arange(size))
    steps, lanes = storage.episodes.steps(slots), slots % storage.episodes.num_envs
    got, want = storage.storage.get(slots), transitions(lanes, steps)
    for key in want.keys(True, True):
        if not torch.equal(got[key], want[key]):
            raise AssertionError(
                f"{key} of {steps[(got[key] != want[key]).reshape(size, -1).any(1)]}"
            )
    ends = storage.episodes.is_finished(slots) & (storage.episodes.ahead(slots) == 0)
    assert torch.equal(ends, want["next", "done"].squeeze(-1))
    # Episodes begin where one ended before, and nowhere else (but at the oldest row).
    begins = (steps == 0) | ((steps - 1 + lanes) % 11 == 10)
    first = (storage.episodes.behind(slots) == 0) & storage.episodes.is_whole(slots)
    assert torch.equal(first, begins), "episodes"
    sampler = storage.sampler
    if isinstance(sampler, PERSampler):
        sampler.validate()
        priorities, given = sampler.priorities[slots], priority_of(slots, storage)
        new = torch.tensor(sampler.default_priority)
        assert ((priorities == given) | (priorities <= new)).all()
