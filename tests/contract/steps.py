"""Deterministic episodes in which every number tells which transition it is from.

An observation has an id that its lane never gives again. A transition is known by the id of its
observation, and its next observation has the id after it: so a row is recognised, and every entry of
it checked, wherever it is found.

Letters: N transitions, E lanes, T steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

_LANE = 1 << 20
# NaN with a payload, -0.0, infinity, the smallest number, 1.0: as int32.
_ODD = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 1, 0x3F800000], dtype=torch.int64)


class Transition(NamedTuple):
    """One step of a lane."""

    #: Of its observation.
    id: int
    #: The id of the first observation of the episode, which is its desired goal.
    first: int
    #: "terminated", "truncated" or "", if the episode goes on.
    end: str = ""

    @property
    def lane(self) -> int:
        """The lane that it is from."""
        return self.id // _LANE


class Player:
    """Plays one lane: hands out its transitions in order."""

    def __init__(self, lane: int = 0) -> None:
        self._id = self._first = lane * _LANE

    def reset(self, *, is_seen_again: bool = False) -> None:
        """Begins an episode, with another observation unless the last one is seen again."""
        self._id += not is_seen_again
        self._first = self._id

    def jump(self) -> None:
        """Loses a step, so that the next one does not continue the last."""
        self._id += 1

    def step(self, end: str = "", *, is_seen_again: bool = False) -> Transition:
        """Plays one step; after an end, the next one begins an episode."""
        step = Transition(self._id, self._first, end)
        self._id += 1
        if end:
            self.reset(is_seen_again=is_seen_again)
        return step

    def play(self, lengths: Iterable[int], unfinished: int = 0) -> list[Transition]:
        """Plays episodes of these lengths, every other one cut by a time limit, and further steps."""
        steps = []
        for number, length in enumerate(lengths):
            end = ("terminated", "truncated")[number % 2]
            steps += [self.step(end if step == length - 1 else "") for step in range(length)]
        return steps + [self.step() for _ in range(unfinished)]


def rows(steps: Sequence[Transition], layout: str = "goals") -> TensorDict:
    """Returns the rows [N] of transitions, as they must read back."""
    ids, firsts = (
        torch.tensor(numbers, dtype=torch.int64)
        for numbers in ([step.id for step in steps], [step.first for step in steps])
    )
    terminated, truncated = (
        torch.tensor([step.end == end for step in steps], dtype=torch.bool).reshape(-1, 1)
        for end in ("terminated", "truncated")
    )
    effort = ids.double().unsqueeze(1) / 3
    goals = _goals(ids + 1, 1), _goals(firsts, -1)
    return TensorDict(
        {
            **_observations(ids, firsts, layout),
            "action": torch.stack([ids, -ids], 1).float(),
            "next": {
                **_observations(ids + 1, firsts, layout),
                "effort": effort,
                "reward": reward_fn(*goals, {"effort": effort}).unsqueeze(1),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        [len(steps)],
    )


def _observations(ids: Tensor, firsts: Tensor, layout: str) -> dict[str, Any]:
    odd = _ODD[ids % len(_ODD)].int().view(torch.float32)
    if layout.endswith("frames"):
        # The first frame of an episode is repeated.
        frames = (ids.unsqueeze(1) + torch.arange(-2, 1)).maximum(firsts.unsqueeze(1))
        return {"observation": torch.stack([frames.float(), -frames.float()], 2)}
    found = {"observation": torch.stack([ids.float(), firsts.float(), odd], 1)}
    if layout == "vector":
        return found
    found |= {"achieved_goal": _goals(ids, 1), "desired_goal": _goals(firsts, -1)}
    if layout in ("mixed", "compressed"):
        shades = (ids.unsqueeze(1) * torch.arange(1, 13)).to(torch.uint8)
        deep = {"x": torch.stack([ids / 3, odd.double()], 1), "n": ids}
        found |= {"pixels": shades.reshape(-1, 2, 2, 3), "deep": deep}
    return found


def _goals(ids: Tensor, kind: int) -> Tensor:
    """[N, 2]: achieved goals are of kind 1, those of the environment of kind -1."""
    return torch.stack([ids, torch.full_like(ids, kind)], 1).float()


def reward_fn(achieved_goal: Tensor, desired_goal: Tensor, infos: Any) -> Tensor:
    """[N]: eighths that tell both goals and the transition."""
    goals = achieved_goal.long() * 3 + desired_goal.long() * 7
    return ((goals.sum(-1) + infos["effort"][..., 0].long()) % 1021).float() / 8


def terminated_fn(achieved_goal: Tensor, desired_goal: Tensor, infos: Any) -> Tensor:
    """[N]: at every fourth pair of goals."""
    return (achieved_goal.long() + desired_goal.long()).sum(-1) % 4 == 0


def ids_of(batch: TensorDictBase) -> Tensor:
    """Returns the ids of the observations of rows."""
    observation = batch["observation"]
    is_stacked = observation.ndim == batch.ndim + 2
    return (observation[..., -1, 0] if is_stacked else observation[..., 0]).long()


def without_slots(batch: TensorDictBase) -> TensorDictBase:
    """Returns a batch without the numbers of slots, which may differ where all else is the same."""
    generations = "index_generation", "anchor_generation"
    return batch.exclude("index", "anchor_index", "goal_index", *generations)


def as_bits(value: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself, and -0.0 is not 0.0."""
    return value.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(found: TensorDictBase, expected: TensorDictBase) -> None:
    """Each expected entry is found, with its shape, dtype and bits."""
    assert found.batch_size == expected.batch_size
    for key, value in expected.items(True, True):
        other = found[key]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), key
        assert torch.equal(as_bits(other), as_bits(value)), (key, other, value)


def assert_batches(one: TensorDictBase, other: TensorDictBase) -> None:
    """The same entries, bit for bit, but for those that say where rows lie."""
    one, other = (without_slots(batch) for batch in (one, other))
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    assert_same(one, other)


def write(storage: Any, steps: Sequence[Sequence[Transition]], layout: str = "goals") -> Any:
    """Writes the steps of each lane with `extend`, which may have different numbers of them."""
    if len(steps) == 1:
        return storage.extend(rows(steps[0], layout))
    if len({len(of_lane) for of_lane in steps}) == 1:
        return storage.extend(torch.stack([rows(of_lane, layout) for of_lane in steps]))
    return [
        storage.extend(rows(of_lane, layout).unsqueeze(0), lanes=[lane])
        for lane, of_lane in enumerate(steps)
        if of_lane
    ]


def record(storage: Any, steps: Sequence[Transition], layout: str = "goals") -> Any:
    """Writes one step of each lane with `record`, as a loop over environments would."""
    step = rows(steps, layout)
    if len(steps) == 1:
        step = step[0]
    after = step["next"]
    seen, next_seen = (
        part.select(*_keys(layout)).apply(lambda value: value.clone()) for part in (step, after)
    )
    flags = [after[name].squeeze(-1).numpy() for name in ("reward", "terminated", "truncated")]
    infos = {"effort": after["effort"].numpy()}
    return storage.record(_arrays(seen), step["action"].numpy(), *flags, infos, _arrays(next_seen))


def _keys(layout: str) -> list[str]:
    is_mixed = layout in ("mixed", "compressed")
    goals = ["achieved_goal", "desired_goal"] if layout == "goals" or is_mixed else []
    return ["observation", *goals, *(["pixels", "deep"] if is_mixed else [])]


def _arrays(seen: TensorDictBase) -> Any:
    """An observation as gymnasium hands it out."""
    if set(seen.keys()) == {"observation"}:
        return seen["observation"].numpy()
    return {
        key: _arrays(value) if isinstance(value, TensorDictBase) else value.numpy()
        for key, value in seen.items()
    }
