"""A storage that stores every observation once, beside one that does not, and beside lists of rows.

Both are made with the same seed and told the same. Whatever a user sees of them must be equal, to the
last bit.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles import RingOracle, Row
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.envs.transforms import Compose, RewardScaling

from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    FlattenGoal,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)
from trl_storages.kernels.sharing import NUM_TIPS
from trl_storages.keys import next_key

__all__ = [
    "FLAT",
    "GOALS",
    "BesidePlain",
    "Stream",
    "as_bits",
    "assert_same",
    "byte_patterns",
    "seeds",
]

#: Hypothesis chooses what is done, and the seed of how.
seeds = st.integers(0, 2**16).map(random.Random)

Fields = dict[NestedKey, tuple[torch.dtype, tuple[int, ...]]]
Transition = dict[NestedKey, torch.Tensor]


def as_bits(value: torch.Tensor) -> bytes:
    """The bytes of a tensor: NaN equals itself, and -0.0 is not 0.0."""
    return (
        value.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def assert_same(first: TensorDictBase, second: TensorDictBase) -> None:
    """Equal keys, shapes, dtypes and bits."""
    assert first.batch_size == second.batch_size
    found = dict(first.items(True, True))
    others = dict(second.items(True, True))
    assert found.keys() == others.keys()
    for key, value in found.items():
        assert (value.dtype, value.shape) == (others[key].dtype, others[key].shape), key
        assert as_bits(value) == as_bits(others[key]), (key, value, others[key])


def num_kept_apart(storage: PackedStorage) -> int:
    """Returns how many next observations are stored besides the rows."""
    if not storage.side_nbytes:
        return 0
    # Of each lane that of the newest row; its other tips are spare.
    spare = (NUM_TIPS - 1) * storage.episodes.num_envs
    return storage.side_nbytes // storage._side.entry_nbytes - spare


def byte_patterns(size: int) -> list[bytes]:
    """Elements of so many bytes: 0, -0, 1 or so, infinity and NaNs of two payloads, if floating."""
    high = {2: b"\x7e", 4: b"\xc0\x7f", 8: b"\xf8\x7f", 16: b"\xf8\x7f"}.get(size, b"\x7f")
    rest = bytes(size - len(high))
    return [
        bytes(size),
        bytes(size - 1) + b"\x80",
        bytes(size - 1) + b"\x3f",
        rest + high,
        (b"\x01" + rest)[: len(rest)] + high,
    ]


def element_patterns(dtype: torch.dtype, luck: random.Random) -> list[bytes]:
    """Few, so that observations are often equal by chance."""
    patterns = [b"\0", b"\1"] if dtype is torch.bool else byte_patterns(dtype.itemsize)
    return luck.sample(patterns, min(len(patterns), luck.choice([2, 3, 5])))


class Stream:
    """An observation key: what is seen first, next, and where the lane does not go on.

    Args:
        dtype: of the observation.
        shape: of the observation.
        luck: chooses which values there are.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], luck: random.Random) -> None:
        self.dtype, self.shape = dtype, torch.Size(shape)
        self._patterns = element_patterns(dtype, luck)

    def first(self, luck: random.Random) -> torch.Tensor:
        """Returns what is seen after a reset."""
        if not self.shape.numel():
            return torch.zeros(self.shape, dtype=self.dtype)
        elements = [luck.choice(self._patterns) for _ in range(self.shape.numel())]
        return torch.frombuffer(bytearray(b"".join(elements)), dtype=self.dtype).view(self.shape)

    def again(self, seen: torch.Tensor) -> torch.Tensor:
        """Returns what is seen after a reset to where `seen` was seen."""
        return seen

    def after(self, seen: torch.Tensor, luck: random.Random) -> torch.Tensor:
        """Returns what is seen after `seen`."""
        return seen if luck.random() < 0.2 else self.first(luck)


class Kind(NamedTuple):
    """What the rows of a storage hold.

    Attributes:
        observations: key -> (dtype, shape) of what has a twin under `next`, and is stored once.
        others: of what else rows hold.
        combinations: names of `COMBINATIONS`.
    """

    observations: Fields
    others: Fields
    combinations: Sequence[str]


Parts = tuple[Any, Any, Any]


def reward_fn(achieved_goal, desired_goal, transition):
    """Of the bits, so that a goal of other bits is a reward of another size."""
    achieved, desired = (
        goal.reshape(len(goal), -1).contiguous().view(torch.uint8).float()
        for goal in (achieved_goal, desired_goal)
    )
    return (achieved * 3 - desired).mean(-1) + transition["effort"][:, 0]


def terminated_fn(achieved_goal, desired_goal, transition):
    return (achieved_goal == desired_goal).reshape(len(achieved_goal), -1).all(-1)


def relabel(**options: Any) -> GoalRelabel:
    return GoalRelabel(reward_fn, info_keys=["effort"], **options)


def hindsight(size: int, strategy: Any, **options: Any) -> HERSampler:
    return HERSampler(strategy, options.pop("num_goals", 4), **options)


def all_samplers(size: int, strategy: Any = "future", num_goals: float = 4) -> HERSampler:
    return HERSampler(strategy, num_goals, base=ERESampler(0.99, c_min=3, base=PERSampler(size)))


MIXTURE = dict.fromkeys(["future", "final", "episode", "random", "geometric", "current"], 1 / 6)

#: Name -> sampler, transforms and sample unit of a storage of so many rows.
COMBINATIONS: dict[str, Callable[[int], Parts]] = {
    "uniform": lambda size: (None, [], None),
    "n-step": lambda size: (None, [NStep(3, 0.9)], None),
    "recent": lambda size: (ERESampler(0.99, c_min=3), [], None),
    "priorities": lambda size: (PERSampler(size), [NStep(2, 0.5)], None),
    "recent priorities": lambda size: (
        ERESampler(0.99, c_min=3, base=PERSampler(size)),
        [NStep(3, 0.9)],
        None,
    ),
    "TorchRL's": lambda size: (
        None,
        [NStep(2, 0.9), RewardScaling(0.5, 2.0, in_keys=[("next", "reward")])],
        None,
    ),
    "padded": lambda size: (None, [], EpisodeSequence(3, burn_in=1, bootstrap=1)),
    "fitted": lambda size: (
        PERSampler(size),
        [],
        EpisodeSequence(3, burn_in=2, bootstrap=1, boundary="fit"),
    ),
    "crossing": lambda size: (None, [], EpisodeSequence(5, burn_in=1, boundary="cross")),
    "n-step sequences": lambda size: (None, [NStep(2, 0.9)], EpisodeSequence(3)),
}
WITH_GOALS: dict[str, Callable[[int], Parts]] = {
    "future": lambda size: (HERSampler("future"), [relabel()], None),
    "final": lambda size: (HERSampler("final", 1), [relabel(terminated_fn=terminated_fn)], None),
    "episode": lambda size: (HERSampler("episode", math.inf), [relabel()], None),
    "random": lambda size: (HERSampler("random"), [relabel(), NStep(2, 0.9)], None),
    "geometric": lambda size: (HERSampler("geometric", discount=0.7), [relabel()], None),
    "current": lambda size: (HERSampler("current"), [relabel()], None),
    "mixture": lambda size: (
        all_samplers(size, MIXTURE),
        [relabel(terminated_fn=terminated_fn), NStep(3, 0.9)],
        None,
    ),
    "two goals": lambda size: (
        HERSampler(
            "geometric", math.inf, goal_key="actor_goal", base=all_samplers(size, "future", 1)
        ),
        [GoalRelabel(None, goal_key="actor_goal"), relabel(), NStep(2, 0.9)],
        None,
    ),
    "goals of sequences": lambda size: (
        HERSampler(MIXTURE, base=PERSampler(size)),
        [relabel(), NStep(2, 0.9)],
        EpisodeSequence(2, burn_in=1, bootstrap=1, boundary="fit"),
    ),
    "goals across episodes": lambda size: (
        HERSampler(),
        [relabel()],
        EpisodeSequence(4, boundary="cross"),
    ),
}
WITH_VECTORS: dict[str, Callable[[int], Parts]] = {
    "flat": lambda size: (all_samplers(size), [relabel(), NStep(2, 0.9), FlattenGoal()], None),
    "only flat": lambda size: (
        HERSampler(),
        [relabel(), FlattenGoal(out_key="observation", del_keys=True)],
        None,
    ),
}
ALL = COMBINATIONS | WITH_GOALS | WITH_VECTORS

ONE_STEP: Fields = {
    ("next", "reward"): (torch.float32, (1,)),
    ("next", "done"): (torch.bool, (1,)),
    ("next", "terminated"): (torch.bool, (1,)),
    ("next", "truncated"): (torch.bool, (1,)),
    "effort": (torch.float32, (1,)),
}
# Of a step, as rollouts hold them at the root too; without a twin; twins of another dtype or shape.
FURTHER: list[Fields] = [
    {},
    {"done": (torch.bool, (1,)), "terminated": (torch.bool, (1,)), "truncated": (torch.bool, (1,))},
    {"reward": (torch.float32, (1,)), "hidden": (torch.float16, (3,))},
    {
        "odd": (torch.float32, (2,)),
        ("next", "odd"): (torch.float64, (2,)),
        "short": (torch.int8, (1,)),
        ("next", "short"): (torch.int8, (3,)),
        ("next", "cost"): (torch.int16, ()),
    },
]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64),
    *(torch.bool, torch.complex64, torch.complex128, torch.int16),
]
SHAPES = [(1,), (3,), (), (2, 3), (5,), (1, 2, 2), (0,), (9,)]


def flat_kind(luck: random.Random) -> Kind:
    """Rows of one or several observations, under any names."""
    names: list[list[NestedKey]] = [
        ["observation"],
        ["pixels"],
        ["observation", "pixels"],
        [("state", "joints"), ("state", "goals", "last"), "touch"],
        ["observation", ("agents", "observation")],
    ]
    chosen = luck.choice(names)
    observations = {key: (luck.choice(DTYPES), luck.choice(SHAPES)) for key in chosen}
    if all(torch.Size(shape).numel() == 0 for _, shape in observations.values()):
        observations[chosen[0]] = (luck.choice(DTYPES), (2,))
    return Kind(observations, ONE_STEP | luck.choice(FURTHER), [*COMBINATIONS])


def goal_kind(luck: random.Random) -> Kind:
    """Rows of a goal environment; flat vectors where the parts are of one kind."""
    is_flat = luck.random() < 0.4
    dtype = torch.float32 if is_flat else luck.choice(DTYPES)
    goal = (luck.choice([1, 3]),) if is_flat else luck.choice(SHAPES[1:6])
    goals = torch.float32 if is_flat else luck.choice(DTYPES[:6])
    observations: Fields = {
        "observation": (dtype, (4,) if is_flat else luck.choice(SHAPES[:6])),
        "achieved_goal": (goals, goal),
        "desired_goal": (goals, goal),
    }
    names = [*WITH_GOALS, *WITH_VECTORS] if is_flat else [*COMBINATIONS, *WITH_GOALS]
    return Kind(observations, ONE_STEP | luck.choice(FURTHER), names)


FLAT, GOALS = flat_kind, goal_kind
ON_GAP = ["ignore", "cut"]


class BesidePlain(RuleBasedStateMachine):
    """Random acts on a plain storage, on one that stores observations once, and on lists of rows."""

    kind: Callable[[random.Random], Kind]
    backend: str | None = None
    #: Whether either make of storage loads what the other one saved.
    loads_crosswise = True

    # What a subclass says

    def new_storage(self, capacity: int, *, once: bool) -> PackedStorage:
        """Returns the rows, plain or stored once."""
        raise NotImplementedError

    def new_stream(
        self, key: NestedKey, dtype: torch.dtype, shape: Sequence[int], luck: random.Random
    ) -> Stream:
        """Returns what an observation looks like."""
        return Stream(dtype, shape, luck)

    # Both

    @initialize(luck=seeds)
    def make(self, luck: random.Random) -> None:
        self._environment = os.environ.get("TRL_STORAGES_BACKEND")
        if self.backend is not None:
            os.environ["TRL_STORAGES_BACKEND"] = self.backend
        self.num_envs = luck.choice([1, 1, 2, 3])
        self.capacity = self.num_envs * luck.choice([1, 2, 5, 9, 14]) + luck.randrange(
            self.num_envs
        )
        self.kind_of_rows = kind = type(self).kind(luck)
        self.combination = ALL[luck.choice(kind.combinations)]
        self.on_gap = luck.choice(ON_GAP)
        self.streams = {
            key: self.new_stream(key, *described, luck)
            for key, described in kind.observations.items()
        }
        self.seed = luck.randrange(100)
        self.both = [self.new_buffer(once=once) for once in (False, True)]
        self.oracle = RingOracle(self.capacity, self.num_envs)
        self.transitions: list[Transition] = []
        self.bits: list[dict[NestedKey, bytes]] = []
        # What each lane has seen last, and whether its next row begins an episode in any case.
        self.seen: list[Transition | None] = [None] * self.num_envs
        self.begins = [True] * self.num_envs
        # Lanes whose episodes were ended without a flag.
        self.ended: set[int] = set()
        # Lanes that were not written since they were loaded.
        self.loaded_lanes: set[int] = set()
        # Rows that were changed in place, each of which may be kept apart from its neighbours.
        self.write(luck.choice([1, 7, 20]), luck)

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        os.environ.pop("TRL_STORAGES_BACKEND", None)
        if self._environment is not None:
            os.environ["TRL_STORAGES_BACKEND"] = self._environment

    def new_buffer(self, *, once: bool) -> ReplayStorage:
        sampler, transforms, unit = self.combination(self.capacity)
        return ReplayStorage(
            storage=self.new_storage(self.capacity, once=once),
            writer=EpisodeWriter(self.num_envs, on_gap=self.on_gap),
            sampler=sampler,
            transform=Compose(*transforms) if transforms else None,
            sample_unit=unit,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def ask(self, question: Callable[[ReplayStorage], Any]) -> list[Any]:
        """Asks both, who answer, warn and raise alike; returns the answers."""
        answers, noises = [], []
        for buffer in self.both:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                raised = None
                try:
                    answers.append(question(buffer))
                except RuntimeError as error:
                    # There is nothing to be drawn.
                    raised = str(error)
            noises.append((raised, [str(warning.message) for warning in heard]))
        assert noises[0] == noises[1]
        return answers

    def assert_alike(self, question: Callable[[ReplayStorage], Any]) -> Any:
        """Both answer with the same TensorDict, tensor or value; returns it."""
        answers = self.ask(question)
        if not answers:
            return None
        plain, once = (
            answer if isinstance(answer, TensorDictBase) else TensorDict({"answer": answer})
            for answer in answers
        )
        assert_same(plain, once)
        return answers[0]

    # Writing

    def next_transition(self, lane: int, share: float, gaps: float, luck: random.Random) -> bool:
        """Lives one step of a lane; returns whether its row is no continuation, and nobody says so."""
        seen, begins = self.seen[lane], self.begins[lane]
        if seen is None or (begins and luck.random() < 0.7):
            now = {key: stream.first(luck) for key, stream in self.streams.items()}
        elif begins:
            now = {key: stream.again(seen[key]) for key, stream in self.streams.items()}
        elif luck.random() < gaps:
            now = self.after_gap(lane, seen, luck)
        else:
            now = seen
        after = {key: stream.after(now[key], luck) for key, stream in self.streams.items()}
        done = luck.random() < share
        terminated = done and luck.random() < 0.5
        row: Transition = dict(now)
        for key, value in after.items():
            row[next_key(key)] = value
        for key, (dtype, shape) in self.kind_of_rows.others.items():
            row[key] = torch.tensor(
                [luck.randrange(2) for _ in range(torch.Size(shape).numel())], dtype=dtype
            ).reshape(shape)
        for name, flag in (
            ("done", done),
            ("terminated", terminated),
            ("truncated", done and not terminated),
        ):
            row["next", name] = torch.tensor([flag])
        is_gap = not begins and any(
            as_bits(now[key]) != as_bits(seen[key])  # type: ignore[index]
            for key in self.compared()
        )
        self.transitions.append(row)
        self.bits.append({key: as_bits(value) for key, value in row.items()})
        self.seen[lane], self.begins[lane] = after, done
        return is_gap

    def after_gap(self, lane: int, seen: Transition, luck: random.Random) -> Transition:
        """Returns what is seen within an episode that does not go on where it was."""
        # All of it, or only a part, such as a goal that is drawn anew.
        parts = [*self.streams] if luck.random() < 0.5 else [luck.choice([*self.streams])]
        return seen | {key: self.streams[key].first(luck) for key in parts}

    def compared(self) -> list[NestedKey]:
        """Which entries the writer compares, by its documentation."""
        keys = [*self.streams]
        if "observation" in keys:
            return ["observation"]
        return [key for key in keys if key != "desired_goal"]

    def some_lanes(self, luck: random.Random) -> list[int] | None:
        """All lanes as None, or at least one of them in any order."""
        some = luck.sample(range(self.num_envs), luck.randint(1, self.num_envs))
        return luck.choice([None, some])

    def lived(self, lanes: Sequence[int], num_steps: int, luck: random.Random) -> TensorDict:
        """Lets the lanes live, tells the model, and returns the steps `[L, T]`."""
        share, gaps = luck.choice([0.0, 0.1, 0.5]), luck.choice([0.0, 0.2])
        serials, cut = [], []
        for lane in lanes:
            first = len(self.transitions)
            found = [self.next_transition(lane, share, gaps, luck)]
            is_new = found[0] and self.begins_at_gap(lane)
            self.loaded_lanes.discard(lane)
            found += [self.next_transition(lane, share, gaps, luck) for _ in range(num_steps - 1)]
            serials.append([*range(first, first + num_steps)])
            cut.append([gap and self.on_gap == "cut" for gap in found])
            cut[-1][0] = cut[-1][0] or lane in self.ended or is_new
            self.ended.discard(lane)
        rows = [[self.transitions[serial] for serial in line] for line in serials]
        done = [[bool(row["next", "done"]) for row in line] for line in rows]
        self.oracle.append(done, cut, lanes, serials)
        stacked = {
            key: torch.stack([torch.stack([row[key] for row in line]) for line in rows])
            for key in rows[0][0]
        }
        data = TensorDict({}, batch_size=[len(rows), num_steps])
        for key, value in stacked.items():
            data[key] = value
        return data

    @rule(num_steps=st.integers(1, 12), luck=seeds)
    def write(self, num_steps: int, luck: random.Random) -> None:
        lanes = self.some_lanes(luck)
        data = self.lived([*range(self.num_envs)] if lanes is None else lanes, num_steps, luck)
        if lanes is not None:
            self.assert_alike(lambda buffer: buffer.extend(data.clone(), lanes=lanes))
        else:
            data = data if self.num_envs > 1 else data[0]
            self.assert_alike(lambda buffer: buffer.extend(data.clone()))

    @rule(num_steps=st.integers(1, 5), luck=seeds)
    def write_step_by_step(self, num_steps: int, luck: random.Random) -> None:
        data = self.lived([*range(self.num_envs)], num_steps, luck)
        for step in range(num_steps):
            one = data[:, step] if self.num_envs > 1 else data[0, step]
            self.assert_alike(lambda buffer, one=one: buffer.add(one.clone()))

    @rule(luck=seeds)
    def write_more_than_all(self, luck: random.Random) -> None:
        self.write(self.capacity // self.num_envs * 2 + luck.randrange(3), luck)

    @rule(luck=seeds)
    def end_episodes(self, luck: random.Random) -> None:
        lanes = self.some_lanes(luck)
        self.ask(lambda buffer: buffer.end_episodes(lanes))
        for lane in range(self.num_envs) if lanes is None else lanes:
            self.ended.add(lane)
            self.begins[lane] = True

    @rule(keep=st.sampled_from([0, 1, 3, 20]))
    def clear(self, keep: int) -> None:
        self.ask(lambda buffer: buffer.empty(keep_steps=keep))
        self.oracle.clear(keep)
        for lane in range(self.num_envs):
            if not self.oracle.surviving(lane):
                self.begins[lane] = True
                self.ended.discard(lane)

    @rule(luck=seeds)
    def refuse(self, luck: random.Random) -> None:
        """What can't be written changes nothing."""
        slots = [len(buffer) for buffer in self.both]
        key = luck.choice([*self.transitions[-1]])
        rows = TensorDict({}, batch_size=[self.num_envs, 2])
        for name, value in self.transitions[-1].items():
            rows[name] = value.expand(self.num_envs, 2, *value.shape).clone()
        rows[key] = torch.zeros(*rows[key].shape, 7, dtype=rows[key].dtype)
        rows = rows if self.num_envs > 1 else rows[0]
        with pytest.raises(ValueError, match="must"):
            self.both[1].extend(rows)
        assert [len(buffer) for buffer in self.both] == slots

    # Saving

    @rule(
        way=st.sampled_from(["dumps", "state_dict", "pickle", "deepcopy"]), crosswise=st.booleans()
    )
    def save_and_load(self, way: str, crosswise: bool) -> None:
        """Crosswise, what one of them saved is loaded into one of the other make."""
        crosswise = crosswise and self.loads_crosswise and way != "pickle"
        saved = self.both[::-1] if crosswise else self.both
        with tempfile.TemporaryDirectory() as folder:
            self.both = [
                self.loaded(buffer, way, once, Path(folder) / str(once))
                for once, buffer in enumerate(saved)
            ]
        self.loaded_lanes = {*range(self.num_envs)}

    def begins_at_gap(self, lane: int) -> bool:
        """Whether a gap in the next row of a lane begins an episode."""
        return self.on_gap == "cut" or (self.on_gap != "ignore" and lane in self.loaded_lanes)

    def loaded(self, buffer: ReplayStorage, way: str, once: int, folder: Path) -> ReplayStorage:
        if way == "pickle":
            return pickle.loads(pickle.dumps(buffer))
        fresh = self.new_buffer(once=bool(once))
        if way == "dumps":
            buffer.dumps(folder)
            fresh.loads(folder)
        elif way == "state_dict":
            fresh.load_state_dict(buffer.state_dict())
        else:
            fresh.load_state_dict(copy.deepcopy(buffer.state_dict()))
        # What is no part of the state.
        fresh.writer.gaps.has_warned = buffer.writer.gaps.has_warned
        return fresh

    # Reading

    @rule(luck=seeds)
    def sample(self, luck: random.Random) -> None:
        size = luck.choice([1, 2, 9, 16])
        batches = self.ask(lambda buffer: buffer.sample(size))
        if not batches:
            return
        assert_same(*batches)
        self.assert_alike(lambda buffer: str(buffer.explain(batches[0])))
        errors = [luck.choice([0.0, luck.uniform(0, 1), luck.uniform(0, 100)]) for _ in batches[0]]
        for buffer, batch in zip(self.both, batches, strict=True):
            batch["td_error"] = torch.tensor(errors)
            buffer.update_tensordict_priority(batch)

    @rule(luck=seeds)
    def sample_episodes(self, luck: random.Random) -> None:
        size = luck.choice([1, 3])
        self.assert_alike(lambda buffer: buffer.sample_episodes(size))

    @rule(luck=seeds)
    def read(self, luck: random.Random) -> None:
        live = [*self.oracle.live()]
        if not live:
            return
        shape = luck.choice([(1,), (2, 3), (5,), (0,), (2, 1, 2)])
        size = torch.Size(shape).numel()
        slots = torch.tensor([luck.choice(live) for _ in range(size)], dtype=torch.int64)
        slots = slots.view(shape)
        keys = luck.sample([*self.transitions[-1]], 3)
        self.assert_alike(lambda buffer: buffer.storage.get(slots))
        self.assert_alike(
            lambda buffer: TensorDict(dict(enumerate_keys(buffer.storage.read(slots, keys))))
        )
        self.assert_alike(lambda buffer: buffer[slots])
        one = luck.choice(live)
        self.assert_alike(lambda buffer: buffer[one])
        if {*range(one + 1)} <= {*live} and one < len(live):
            # TorchRL looks for a single slot below the length.
            self.assert_alike(lambda buffer: buffer.storage.get(one))
            self.assert_alike(lambda buffer: buffer.storage[: one + 1])
        key = luck.choice(keys)
        self.assert_alike(lambda buffer: buffer[key])
        first = luck.randrange(len(live))
        self.assert_alike(lambda buffer: buffer[first:])
        self.assert_alike(
            lambda buffer: (
                torch.cat([it.data["effort"] for it in buffer.query()])
                if buffer.query()
                else torch.zeros(0)
            )
        )

    # What must hold

    @invariant()
    def holds_what_was_written(self) -> None:
        if not hasattr(self, "both"):
            return
        live = self.oracle.live()
        for buffer in self.both:
            buffer.validate()
            assert len(buffer) == len(live)
            if not live:
                continue
            self.assert_rows(buffer.storage.get(torch.tensor([*live])), [*live.values()])
            oldest_first = self.oracle.by_age()[::-1]
            self.assert_rows(buffer[:], oldest_first)
        once = self.both[1].storage
        most = self.num_segments() + self.num_envs
        assert num_kept_apart(once) <= most

    def assert_rows(self, found: TensorDictBase, rows: Sequence[Row]) -> None:
        """What was read are these rows, bit for bit."""
        there = dict(found.items(True, True))
        written = [self.bits[row.payload] for row in rows]
        assert there.keys() == written[0].keys()
        for key, value in there.items():
            assert as_bits(value) == b"".join(row[key] for row in written), key
            assert value.dtype is self.transitions[0][key].dtype

    def num_segments(self) -> int:
        """How many runs of live rows there are that continue each other."""
        segments = 0
        for lane in range(self.num_envs):
            rows = self.oracle.surviving(lane)
            segments += bool(rows)
            for row, follower in pairwise(rows):
                before, behind = self.bits[row.payload], self.bits[follower.payload]
                segments += row.episode != follower.episode or any(
                    before[next_key(key)] != behind[key] for key in self.streams
                )
        return segments


def enumerate_keys(found: Mapping[NestedKey, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(str(key), value) for key, value in found.items()]
