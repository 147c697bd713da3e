"""Everything that may be done to a storage, one after another, beside a model in plain Python."""

from __future__ import annotations

import copy
import random
import shutil
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from contract.make import DISCOUNT, library, make, new_folder
from contract.model import Model, assert_folded
from contract.steps import (
    Player,
    Transition,
    assert_same,
    ids_of,
    record,
    rows,
    terminated_fn,
    without_slots,
)
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

STRATEGIES = ["future", "final", "episode", "random", "geometric", "current"]
TRAJECTORIES = ("collector", "traj_ids")

#: The fewest entries of a lane, which depend on stacks and keyframes.
LEAST_ENTRIES = {"frames": 17, "compressed": 22, "compressed frames": 32}

#: A smaller counterexample is looked for by the long search, as it takes minutes.
QUICK = [Phase.explicit, Phase.generate]

# Hypothesis chooses what is done, and the seed of how.
seeds = st.integers(0, 2**16).map(random.Random)


class Variant(NamedTuple):
    """A kind of storage, and how its batches are checked."""

    kind: str
    n_step: int = 1
    strategy: str | None = None
    ends_at_goal: bool = False
    #: Of sequences.
    boundary: str | None = None


VARIANTS = [
    Variant("uniform"),
    Variant("n-step", 3),
    *(Variant("hindsight", strategy=strategy) for strategy in STRATEGIES),
    *(Variant("all", 3, strategy, ends_at_goal=True) for strategy in STRATEGIES),
    Variant("all", 2, "future"),
    *(Variant("uniform", boundary=boundary) for boundary in ("pad", "fit", "cross")),
    *(
        Variant("hindsight", 1, "episode", boundary=boundary)
        for boundary in ("pad", "fit", "cross")
    ),
    Variant("prioritized", boundary="cross"),
    Variant("n-step", 3, boundary="pad"),
]

#: Steps of a sequence to learn from, to warm up with, and to bootstrap.
SIZES = [(2, 1, 1), (5, 0, 0), (3, 2, 1), (1, 9, 9)]


class Machine(RuleBasedStateMachine):
    """A storage, those who play its lanes, and the model."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.backend, self.folder = place, new_folder()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(luck=seeds)
    def make(self, luck: random.Random) -> None:
        self.variant, self.sizes = luck.choice(VARIANTS), luck.choice(SIZES)
        has_goals = self.variant.strategy is not None
        layouts = ["goals", "mixed"] + ["vector", "frames"] * (not has_goals)
        if self.backend != "device":
            layouts += ["compressed"] + ["compressed frames"] * (not has_goals)
        self.layout = luck.choice(layouts)
        self.num_lanes, num_steps = luck.choice([1, 1, 2, 3]), luck.choice([2, 3, 5, 9, 14])
        #: Room for all steps, or so little that discontinuities and short episodes evict some early.
        self.max_entries = None
        if luck.random() < 0.3:
            least = LEAST_ENTRIES.get(self.layout, 7)
            self.max_entries = self.num_lanes * luck.randint(least, least + num_steps)
        self.on_gap = luck.choice(["cut", "ignore"])
        self.has_trajectories = luck.random() < 0.5
        self.model = Model(self.num_lanes, num_steps, self.on_gap)
        #: As they were handed back, and the largest so far.
        self.priorities: dict[Transition, float] = {}
        self.largest = 0.0
        self.players = [Player(lane) for lane in range(self.num_lanes)]
        self.trajectories = [*range(self.num_lanes)]
        self.num_folders = 0
        self.seed = luck.randrange(100)
        self.path = self.new_path()
        self.storage = self.new_storage()
        self.look()
        self.write(luck.choice([1, 4, 11]), luck)

    def new_path(self) -> Any:
        self.num_folders += 1
        return self.folder / str(self.num_folders)

    def new_storage(self) -> Any:
        options: dict[str, Any] = {}
        if self.variant.strategy:
            options = {"strategy": self.variant.strategy, "num_goals": 2}
            if self.variant.strategy == "geometric":
                options["discount"] = DISCOUNT
        if self.variant.ends_at_goal:
            options["terminated_fn"] = terminated_fn
        if self.variant.boundary:
            unit = library.EpisodeSequence(*self.sizes, boundary=self.variant.boundary)
            options["sample_unit"] = unit
        return make(
            self.variant.kind,
            place=self.backend,
            layout=self.layout,
            lanes=self.num_lanes,
            size=self.num_lanes * self.model.num_steps,
            path=self.path,
            max_entries=self.max_entries,
            on_gap=self.on_gap,
            seed=self.seed,
            batch_size=4,
            **options,
        )

    # Writing

    def play(self, lane: int, num_steps: int, luck: random.Random) -> list[tuple[Transition, int]]:
        """Plays some steps of a lane, with the number of each one's trajectory."""
        player, steps = self.players[lane], []
        share = luck.choice([0.0, 0.1, 0.5])
        for _ in range(num_steps):
            event = luck.random()
            if event < 0.05:
                self.reset(lane)
            elif event < 0.1:
                player.jump()
            elif event < 0.12:  # another trajectory begins, although observations continue
                self.trajectories[lane] += self.num_lanes
            end = luck.choice(["terminated", "truncated"]) if luck.random() < share else ""
            step = player.step(end, is_seen_again=luck.random() < 0.2)
            steps.append((step, self.trajectories[lane]))
            if end:
                self.trajectories[lane] += self.num_lanes
        return steps

    def reset(self, lane: int) -> None:
        """The environment of a lane is reset though its episode has not ended."""
        self.players[lane].reset()
        self.trajectories[lane] += self.num_lanes

    def as_written(self, steps: list[tuple[Transition, int]]) -> Any:
        data = rows([step for step, _ in steps], self.layout)
        if self.has_trajectories:
            data[TRAJECTORIES] = torch.tensor([trajectory for _, trajectory in steps])
        return data

    def note(self, steps: list[tuple[Transition, int]]) -> None:
        for step, trajectory in steps:
            self.model.add(step, trajectory if self.has_trajectories else None)

    @rule(num_steps=st.integers(1, 30), luck=seeds)
    def write(self, num_steps: int, luck: random.Random) -> None:
        steps = [self.play(lane, num_steps, luck) for lane in range(self.num_lanes)]
        data = torch.stack([self.as_written(lane) for lane in steps])
        # Rows [T] with the numbers of their trajectories are those of flat batches.
        is_plain = self.num_lanes == 1 and not self.has_trajectories
        slots = self.storage.extend(data[0] if is_plain else data)
        for of_lane in steps:
            self.note(of_lane)
        self.look()
        self.check_slots(slots, [step.id for lane in steps for step, _ in lane])

    @rule(num_steps=st.integers(1, 12), luck=seeds)
    def write_some_lanes(self, num_steps: int, luck: random.Random) -> None:
        lanes = luck.sample(range(self.num_lanes), luck.randint(1, self.num_lanes))
        steps = [self.play(lane, num_steps, luck) for lane in lanes]
        self.storage.extend(torch.stack([self.as_written(lane) for lane in steps]), lanes=lanes)
        for of_lane in steps:
            self.note(of_lane)
        self.look()

    @rule(num_steps=st.integers(1, 4), luck=seeds)
    @precondition(lambda self: not self.has_trajectories)
    def record(self, num_steps: int, luck: random.Random) -> None:
        for _ in range(num_steps):
            steps = [self.play(lane, 1, luck) for lane in range(self.num_lanes)]
            record(self.storage, [step for ((step, _),) in steps], self.layout)
            for of_lane in steps:
                self.note(of_lane)
        self.look()

    @rule(num_steps=st.integers(1, 12), luck=seeds)
    @precondition(lambda self: self.has_trajectories)
    def write_flat(self, num_steps: int, luck: random.Random) -> None:
        """Rows of all lanes in one batch: each trajectory stays in its lane."""
        over = [lane for lane in range(self.num_lanes) if not self.model.is_open(lane)]
        if len(over) > 1:
            return  # It is not said which of them gets a new one.
        ending = luck.choice(over or range(self.num_lanes))
        steps: list[list[tuple[Transition, int]]] = []
        for lane, player in enumerate(self.players):
            steps.append([])
            for number in range(num_steps):
                ends = lane == ending and number < num_steps - 1 and luck.random() < 0.2
                step = player.step("terminated" if ends else "")
                steps[-1].append((step, self.trajectories[lane]))
                self.trajectories[lane] += self.num_lanes * ends
        order = [lane for lane, of_lane in enumerate(steps) for _ in of_lane]
        luck.shuffle(order)
        onward = [iter(of_lane) for of_lane in steps]
        self.storage.extend(self.as_written([next(onward[lane]) for lane in order]))
        for of_lane in steps:
            self.note(of_lane)
        self.look()

    @rule(luck=seeds)
    def end_episodes(self, luck: random.Random) -> None:
        lanes = luck.sample(range(self.num_lanes), luck.randint(1, self.num_lanes))
        mask = [lane in lanes for lane in range(self.num_lanes)]
        self.storage.end_episodes(luck.choice([lanes, mask] + [None] * all(mask)))
        self.model.cut(lanes)
        for lane in lanes:
            if luck.random() < 0.5:
                self.reset(lane)
        self.look()

    @rule(keep_steps=st.sampled_from([0, 1, 3, 20]))
    def empty(self, keep_steps: int) -> None:
        self.storage.empty(keep_steps=keep_steps)
        self.model.empty(keep_steps)
        self.priorities, self.largest = {}, 0.0
        self.look()

    # Saving

    @rule(way=st.sampled_from(["dump", "state", "reopened", "extend_from"]), luck=seeds)
    def resume(self, way: str, luck: random.Random) -> None:
        """What goes on is the same storage, and draws the same batch."""
        before, self.seed = self.storage, self.seed + 1
        if way == "dump":
            before.dumps(dump := self.new_path())
        elif way == "state":
            state = copy.deepcopy(before.state_dict())
        elif way == "reopened" and self.backend == "directory":
            before.close()
        elif way == "reopened":
            return
        if way != "reopened":
            self.path = self.new_path()
        self.storage = self.new_storage()
        if way == "dump":
            self.storage.loads(dump)
        elif way == "state":
            self.storage.load_state_dict(state)
        elif way == "extend_from":
            self.storage.extend_from(before)
        elif self.variant.n_step > 1:
            self.storage.n_step = before.n_step  # Parameters are those that it is made with.
        self.look()
        # Rows that are loaded may need more of few entries than those that were saved.
        if len(before) and len(before) == len(self.storage) and way != "extend_from":
            draws = [without_slots(storage.sample(3)) for storage in (self.storage, before)]
            assert_same(*draws)
            assert_same(*reversed(draws))
        if way != "reopened":
            before.close()

    # Reading

    def look(self) -> None:
        """The storage holds what the model holds."""
        storage, model = self.storage, self.model
        if self.max_entries is not None:
            for lane, fill in enumerate(storage.episodes.fill.tolist()):
                assert fill > 0 or not model.live_of(lane)
                model.evict(lane, fill)
        live = model.live()
        lanes = [model.live_of(lane) for lane in range(self.num_lanes)]
        storage.validate()
        assert len(storage) == len(live)
        assert storage.can_sample(3) == bool(live)
        assert storage.is_full == all(len(lane) == model.num_steps for lane in lanes)
        if not live:
            with pytest.raises(RuntimeError, match=r"empty[\s\S]*write"):
                storage.sample()
            with pytest.raises(RuntimeError, match="episode: write"):
                storage.sample_episodes(1)
            return
        history = storage[:]
        found = model.of(history)
        assert sorted(found) == sorted(live)
        assert_same(history, rows(found, self.layout))
        for lane, its in enumerate(lanes):
            assert [step for step in found if step.lane == lane] == its

    def check_slots(self, slots: torch.Tensor, ids: list[int]) -> None:
        """Slots that a write returned read what it wrote, unless it was evicted."""
        live = {step.id for step in self.model.live()}
        found = zip(ids, slots.flatten().tolist(), strict=True)
        found = {number: slot for number, slot in found if number in live}
        assert len({*found.values()}) == len(found)
        read = self.storage[torch.tensor([*found.values()])]
        assert_same(read, rows(self.model.named([*found]), self.layout))

    @rule(luck=seeds)
    @precondition(lambda self: self.model.live())
    def read_a_slice(self, luck: random.Random) -> None:
        places = range(-len(self.storage) - 2, len(self.storage) + 3)
        chosen = slice(luck.choice([None, *places]), luck.choice([None, *places]))
        expected = self.model.of(self.storage[:])[chosen]
        assert_same(self.storage[chosen], rows(expected, self.layout))

    @rule(n=st.integers(1, 4))
    @precondition(lambda self: self.model.live())
    def sample_episodes(self, n: int) -> None:
        whole = self.model.whole_episodes()
        if not whole:
            with pytest.raises(RuntimeError, match="episode"):
                self.storage.sample_episodes(n)
            return
        batch = self.storage.sample_episodes(n)
        lengths = []
        for found in batch:
            mask = found["collector", "mask"]
            episode = whole[int(ids_of(found)[0])]
            lengths.append(len(episode))
            assert mask.tolist() == [True] * len(episode) + [False] * (len(mask) - len(episode))
            assert_same(found[mask], rows(episode, self.layout))
        assert max(lengths) == batch.shape[1]

    @rule(batch_size=st.sampled_from([1, 3, 8]), luck=seeds)
    @precondition(lambda self: self.model.live())
    def sample(self, batch_size: int, luck: random.Random) -> None:
        n_step = self.variant.n_step
        if n_step > 1:
            n_step = self.storage.n_step = luck.choice([2, 3, 5])
        batch = self.storage.sample(batch_size)
        drawn, index = self.model.of(batch), batch["index"]
        pairs = zip(index.tolist(), drawn, strict=True)
        assert len({*pairs}) == len({*index.tolist()}) == len({*drawn})
        assert self.model.of(self.storage[index]) == drawn
        assert {*drawn} <= {*self.model.live()}
        behind, ahead = (
            self.storage.episodes.num_before(index),
            self.storage.episodes.num_after(index),
        )
        assert behind.tolist() == [self.model.episode(step).index(step) for step in drawn]
        assert ahead.tolist() == [len(self.model.onward(step)) - 1 for step in drawn]
        if self.variant.boundary:
            self.check_sequences(batch, drawn)
        if self.variant.strategy:
            self.check_goals(batch, drawn)
        ends = terminated_fn if self.variant.ends_at_goal else None
        assert_folded(batch, self.model, n_step, DISCOUNT, ends, self.layout)
        if self.variant.kind in ("all", "prioritized"):
            self.check_priorities(batch, luck)

    def check_priorities(self, batch: Any, luck: random.Random) -> None:
        """Weights are of the priorities that were handed back, the last one of each row."""
        anchors = self.anchors(batch)
        raw = torch.tensor([self.priorities.get(step, self.largest or 1.0) for step in anchors])
        weight = (raw / raw.min()) ** -(self.storage.alpha * self.storage.beta)
        torch.testing.assert_close(batch["priority_weight"], weight, rtol=1e-4, atol=1e-5)
        error = torch.tensor([luck.random() + 0.1 for _ in range(len(batch) // self.num_rows)])
        self.storage.update_tensordict_priority(batch, error)
        # New rows get the largest so far, when they are first seen.
        self.priorities = {
            step: self.priorities.get(step, self.largest or 1.0) for step in self.model.live()
        }
        self.priorities |= zip(anchors[:: self.num_rows], error.tolist(), strict=True)
        self.largest = max(self.largest, error.max().item())

    def anchors(self, batch: Any) -> list[Transition]:
        """The steps that were drawn, of each row of a batch."""
        has_anchors = self.variant.boundary is not None
        return self.model.of(self.storage[batch["anchor_index"]] if has_anchors else batch)

    @property
    def num_rows(self) -> int:
        """Of a sample."""
        return sum(self.sizes) if self.variant.boundary else 1

    def check_goals(self, batch: Any, drawn: list[Transition]) -> None:
        """Each goal is one that the strategy allows, as many as there have to be, one for a sequence."""
        mask, n = batch["her_mask"], self.num_rows
        assert len(drawn) == n or int(mask.sum()) == len(drawn) // n * 2 // 3 * n
        samples = batch[mask]["desired_goal"].reshape(-1, n, 2)
        assert (samples == samples[:, :1]).all()
        lenders = self.model.reaching(batch["desired_goal"][mask])
        for step, lender in zip(self.anchors(batch[mask]), lenders, strict=True):
            assert lender in self.model.goals(step, str(self.variant.strategy))

    def check_sequences(self, batch: Any, drawn: list[Transition]) -> None:
        anchors, n = self.anchors(batch), self.num_rows
        length, burn_in, bootstrap = self.sizes
        for at in range(0, len(drawn), n):
            part = slice(at, at + n)
            assert len({*anchors[part]}) == 1
            window = anchors[at], burn_in, length + bootstrap, str(self.variant.boundary)
            wanted, valid = self.model.window(*window)
            assert drawn[part] == wanted
            assert batch["validity_mask"][part].tolist() == valid
            assert batch["is_init"][part].tolist() == [[self.model.begins(it)] for it in wanted]
            learning = [burn_in <= step < burn_in + length for step in range(n)]
            assert batch["learning_mask"][part].tolist() == learning
            assert batch["step_in_sequence"][part].tolist() == [*range(n)]
            assert batch["sequence_id"][part].tolist() == [at // n] * n


REQUIREMENTS = [
    *("uniform-ring", "nested-dtypes", "stored-once", "slices", "clear", "can-sample", "episodes"),
    *("her-future", "her-final", "her-episode", "her-random", "goal-current", "her-rewrite"),
    *("her-terminated", "her-unfinished", "her-overwrite", "her-vector", "her-info", "her-n-step"),
    *("n-step", "per-update", "hpne", "sequences", "sequence-boundaries", "nothing-crosses"),
    *("persistence",),
]


def requirements(test: Any) -> Any:
    for name in REQUIREMENTS:
        test = pytest.mark.requirement(name)(test)
    return test


@requirements
@pytest.mark.filterwarnings("ignore:a transition does not begin with", "ignore:.*transitions fit")
def test_everything_after_everything(place):
    run_state_machine_as_test(
        partial(Machine, place),
        settings=settings(max_examples=100, stateful_step_count=20, phases=QUICK),
    )


@pytest.mark.search
@pytest.mark.filterwarnings("ignore:a transition does not begin with", "ignore:.*transitions fit")
def test_everything_after_everything_for_long(place):
    run_state_machine_as_test(
        partial(Machine, place),
        settings=settings(max_examples=2000, stateful_step_count=40, derandomize=False),
    )
