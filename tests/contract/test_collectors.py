"""TorchRL's collectors and rollouts write, in one piece or flat, and nothing crosses an episode."""

import inspect
import multiprocessing
import warnings

import pytest
import torch
from contract.make import assemble, make, make_for
from contract.steps import Player, assert_same, ids_of, rows
from tally_env import LENGTHS, TallyEnv, tally
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate
from torchrl.trainers import ReplayBufferTrainer
from torchrl.trainers.algorithms.dqn import DQNTrainer
from torchrl.trainers.algorithms.sac import SACTrainer

from trl_storages import NStep, UniformReplayStorage

pytestmark = [
    pytest.mark.requirement("nothing-crosses"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def structure(storage):
    """{step: (how many of its episode follow, itself included, and where they lead)}."""
    found = {}
    while len(found) < len(storage):
        batch = storage.sample(256)
        keys = batch["observation"].tolist()
        after = map(tuple, batch["next", "observation"].tolist())
        lengths = batch["steps_to_next_obs"][:, 0].tolist()
        found |= zip(map(tuple, keys), zip(lengths, after, strict=True), strict=True)
    return found


def assert_nothing_crosses(storage):
    """As many steps on as the batch says, in the same episode of the same environment."""
    for (number, episode, step), (length, after) in structure(storage).items():
        assert after == (number, episode, step + length)


def tally_storage(num_envs, size=120, **options):
    """A storage whose batches lead to the ends of episodes."""
    options = {"n_step": 1000, "discount": 1.0, "num_envs": num_envs, **options}
    if num_envs > 1:
        options["autoreset_mode"] = "SameStep"
    return make_for(TallyEnv(), "n-step", size=size, **options)


def collected(num_envs, num_batches=10, **options):
    env = SerialEnv(num_envs, tally) if num_envs > 1 else tally()
    frames = 8 * num_envs
    options = {"frames_per_batch": frames, "total_frames": num_batches * frames, **options}
    collector = Collector(env, env.rand_action, **options)
    yield from collector
    collector.shutdown()


class TestCollector:
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_batches_that_the_loop_writes(self, place, num_envs):
        storage = tally_storage(num_envs, 40 * num_envs, place=place)
        for data in collected(num_envs):
            storage.extend(data)
            assert_nothing_crosses(storage)
        assert storage.is_full
        assert storage.write_count == 80 * num_envs

    @pytest.mark.parametrize("extend_buffer", [True, False])
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_a_collector_that_writes(self, num_envs, extend_buffer):
        storage = tally_storage(num_envs)
        for _ in collected(num_envs, replay_buffer=storage, extend_buffer=extend_buffer):
            assert_nothing_crosses(storage)
        assert storage.write_count == 80 * num_envs

    @pytest.mark.parametrize("is_flat", [False, True])
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_batches_that_a_trainer_writes(self, place, num_envs, is_flat):
        storage, plain = (tally_storage(num_envs, 40 * num_envs, place=place) for _ in range(2))
        hook = ReplayBufferTrainer(storage, batch_size=8, flatten_tensordicts=is_flat)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for data in collected(num_envs, 4):
                plain.extend(data.clone())
                hook.extend(data)
                assert_nothing_crosses(storage)
        assert len([it for it in caught if "trainers" in str(it.message)]) == is_flat
        assert_same(*(each[:].exclude("collector") for each in (storage, plain)))

    def test_some_truncated_rows_that_are_not_done_raise(self):
        for truncated in ([True, True, False], [False, False, True]):
            steps = rows(Player().play([], 3))
            steps["next", "truncated"] = torch.tensor(truncated).unsqueeze(1)
            with pytest.raises(ValueError, match=r"set it to terminated \| truncated"):
                make().extend(steps)
        with pytest.raises(ValueError, match="terminated"):
            make().extend(steps[2:])

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_n_step_returns_without_next_observations_raise(self, place, num_envs):
        """As collectors with compact_obs=True leave them out; other batches do not need them."""
        plain = assemble(99, num_envs, place=place, transform=NStep(1))
        for data in collected(num_envs, 3, compact_obs=True):
            storage = assemble(99, num_envs, place=place, transform=NStep(3))
            with pytest.raises(ValueError, match="compact_obs"):
                storage.extend(data)
            assert len(storage) == 0
            plain.extend(data)
        assert plain.sample()["next", "reward"].shape == (32, 1)
        plain.n_step = 2
        for use in (plain.sample, lambda: plain.extend(data)):
            with pytest.raises(ValueError, match="compact_obs"):
                use()
        assert len(plain) == 24 * num_envs

    @pytest.mark.parametrize("num_envs", [1, 2])
    @pytest.mark.parametrize("mode", [{"trajs_per_batch": 2}, {"replay_write_mode": "trajectory"}])
    def test_whole_trajectories(self, num_envs, mode):
        if not {*mode} <= {*inspect.signature(Collector).parameters}:
            pytest.skip("an option of TorchRL 0.15")
        storage = tally_storage(1)
        for _ in collected(num_envs, replay_buffer=storage, **mode):
            if len(storage):
                assert_nothing_crosses(storage)
        # The last row of each is an end.
        last = {after for _, after in structure(storage).values()}
        assert all(step == LENGTHS[episode % 4] for _, episode, step in last)

    @pytest.mark.requirement("flat-batches")
    @pytest.mark.parametrize("num_envs", [2, 3])
    @pytest.mark.parametrize("num_steps", [40, 200])
    def test_flat_batches_store_the_same_episodes(self, place, num_envs, num_steps):
        square, flat, by_time = (
            tally_storage(num_envs, num_steps * num_envs, place=place) for _ in range(3)
        )
        for data in collected(num_envs):
            square.extend(data)
            flat.extend(data.reshape(-1))
            by_time.extend(data.transpose(0, 1).reshape(-1))
        assert structure(flat) == structure(square)
        # Trajectories that come time first may go to other lanes, and be evicted at other times.
        if not square.is_full:
            assert structure(by_time) == structure(square)

    @pytest.mark.requirement("flat-batches")
    @pytest.mark.parametrize("num_lanes", [1, 2])
    def test_more_open_trajectories_than_lanes_raise(self, num_lanes):
        data, storage = next(collected(3)), tally_storage(num_lanes)
        with pytest.raises(ValueError, match="num_envs=3"):
            storage.extend(data.reshape(-1))
        assert len(storage) == 0
        del data["collector"]
        if num_lanes > 1:
            with pytest.raises(ValueError, match="traj"):
                storage.extend(data.reshape(-1))

    def test_a_trajectory_beside_an_open_one_needs_a_lane(self):
        storage = make(lanes=1)
        data = rows(Player(0).play([], 4) + Player(1).play([3]))
        data["collector", "traj_ids"] = torch.tensor([0] * 4 + [1] * 3)
        storage.extend(data[:2])
        with pytest.raises(ValueError, match="num_envs=2"):
            storage.extend(data[2:])


def two_tallies():
    return SerialEnv(2, tally)


class TestProcesses:
    """Worker processes that write to one storage, or send what the loop writes."""

    @pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
    @pytest.mark.parametrize("trajs_per_batch", [None, 2])
    def test_workers_that_write(self, kind, trajs_per_batch, start_processes_by):
        start_processes_by("fork")
        storage, environments = tally_storage(1 if trajs_per_batch else 2, 160), set()
        collector = kind(
            [two_tallies, two_tallies],
            None,
            frames_per_batch=40,
            total_frames=600,
            replay_buffer=storage,
            trajs_per_batch=trajs_per_batch,
        )
        for _ in collector:
            if len(storage):
                batch = storage.sample(64)
                assert torch.equal(batch["next", "observation"][:, :2], batch["observation"][:, :2])
                environments |= set(storage[:]["observation"][:, 0].tolist())
        collector.shutdown()
        assert_nothing_crosses(storage)
        assert storage.write_count > 450
        assert len(environments | set(storage[:]["observation"][:, 0].tolist())) == 4

    @pytest.mark.requirement("flat-batches")
    @pytest.mark.parametrize(
        ("kind", "cat_results"),
        [(MultiSyncCollector, 0), (MultiSyncCollector, "stack"), (MultiAsyncCollector, None)],
    )
    def test_batches_that_the_loop_writes(self, kind, cat_results, start_processes_by):
        start_processes_by("fork")
        storage = tally_storage(4, 120)
        collector = kind(
            [two_tallies] * 2, None, frames_per_batch=40, total_frames=400, cat_results=cat_results
        )
        for data in collector:
            storage.extend(data.clone() if cat_results == 0 else data.reshape(-1).clone())
        collector.shutdown()
        assert_nothing_crosses(storage)
        assert storage.write_count == 400

    def in_child(self, function, *args):
        """Runs it in a child that is cheap to start."""
        child = multiprocessing.get_context("fork").Process(target=function, args=args)
        child.start()
        child.join(60)
        assert child.exitcode == 0

    def test_a_shared_storage_is_written_by_turns(self):
        storage, players = make("n-step", n_step=100, discount=1.0).share(), [Player(0), Player(1)]
        blocks = [rows(players[number % 2].play([], 3 + number)) for number in range(4)]
        for number, block in enumerate(blocks):
            if number % 2:
                self.in_child(storage.extend, block)
            else:
                storage.extend(block)
        assert len(storage) == storage.write_count == 18
        # Where the process changes, so does the episode.
        expected = [count for block in blocks for count in range(len(block), 0, -1)]
        numbers = torch.cat([ids_of(block) for block in blocks]).tolist()
        assert lengths(storage) == dict(zip(numbers, expected, strict=True))

    @pytest.mark.parametrize(
        ("method", "kind"), [("forkserver", "uniform"), ("spawn", "prioritized")]
    )
    def test_a_process_that_is_spawned_counts_on(self, method, kind, start_processes_by):
        start_processes_by(method)
        storage, players = make(kind).share(), [Player(0), Player(1)]
        storage.extend(rows(players[0].play([], 3)))
        blocks = rows(players[1].play([], 4)), rows(players[0].play([], 2))
        context = multiprocessing.get_context(method)
        child = context.Process(target=storage.extend, args=blocks[:1])
        child.start()
        storage.extend(blocks[1])  # before the child has begun, which takes longer
        child.join(300)
        assert child.exitcode == 0
        assert len(storage) == storage.write_count == 9
        assert_same(storage[5:], blocks[0])
        storage.validate()

    def test_priorities_and_emptying_in_a_shared_storage(self):
        storage, player = make("prioritized", size=12, beta=1.0, alpha=1.0), Player()
        index = storage.extend(rows(player.play([4])))
        storage.update_priority(index, torch.tensor([8.0, 0.5, 0.5, 0.5]))
        storage.share().sample()
        assert storage.write_count == 4
        self.in_child(storage.update_priority, index[:1], torch.tensor([16.0]))
        self.in_child(storage.extend, rows(player.play([4])))
        ids = ids_of(batch := storage.sample(4000)).tolist()
        assert len({*ids}) == 8
        expected = torch.tensor([1.0 if 0 < number < 4 else 0.5 / 16 for number in ids])
        torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-4, atol=1e-6)
        self.in_child(lambda: storage.empty(keep_steps=6))
        assert {*storage.sample(4000)["priority_weight"].tolist()} == {1.0}
        self.in_child(storage.empty)
        self.in_child(storage.extend, rows(player.play([2])))
        assert len(set(ids_of(storage.sample(50)).tolist())) == 2


# Gaps


WAYS = {
    "[E, T]": lambda storage, data: storage.extend(data),
    "lazily": lambda storage, data: storage.extend(
        LazyStackedTensorDict.lazy_stack(list(data.unbind(1)), 1)
    ),
    "[E] by [E]": lambda storage, data: [storage.add(step) for step in data.unbind(1)],
    "some lanes": lambda storage, data: [
        storage.extend(row.unsqueeze(0), lanes=[lane]) for lane, row in enumerate(data.unbind(0))
    ],
}


class TestTrainers:
    """TorchRL's algorithm trainers, which flatten what they write."""

    def test_dqn(self):
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        env = TransformedEnv(env, Compose(RewardSum(["reward"], ["reward_sum"]), StepCounter(20)))
        network = QValueActor(
            MLP(4, 2, num_cells=[8]), in_keys=["observation"], spec=env.action_spec
        )
        loss = DQNLoss(network, action_space=env.action_spec, delay_value=True)
        storage = self.trained(DQNTrainer, env, network, loss, alpha=0.6)
        batch = storage.sample(500)
        assert batch["priority_weight"].std() > 0
        ends = batch["next", "observation"][:, 2].rad2deg().abs() > 12  # the pole falls
        assert torch.equal(batch["next", "terminated"].flatten(), ends)

    def test_sac(self):
        env = GymEnv("Pendulum-v1")
        env = TransformedEnv(env, Compose(RewardSum(["reward"], ["reward_sum"]), StepCounter(20)))
        net = TensorDictModule(
            torch.nn.Sequential(MLP(3, 2, num_cells=[8]), NormalParamExtractor()),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        )
        keys = {"in_keys": ["loc", "scale"], "spec": env.action_spec, "return_log_prob": True}
        limits = {"low": -2.0, "high": 2.0}
        actor = ProbabilisticActor(
            net, distribution_class=TanhNormal, distribution_kwargs=limits, **keys
        )
        q_value = ValueOperator(MLP(4, 1, num_cells=[8]), in_keys=["observation", "action"])
        self.trained(SACTrainer, env, actor, SACLoss(actor, q_value))

    def trained(self, trainer, env, policy, loss, **options):
        """Trains for 160 steps; what is stored is what was collected, but for the trainer's flags."""
        storage = UniformReplayStorage.from_env(env, storage_size=200, batch_size=32, **options)
        collector = Collector(env, policy, frames_per_batch=40, total_frames=160)
        collected = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = trainer(
                collector=collector,
                total_frames=160,
                frame_skip=1,
                optim_steps_per_batch=3,
                loss_module=loss,
                optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
                replay_buffer=storage,
                target_net_updater=SoftUpdate(loss, tau=0.05),
                progress_bar=False,
                save_trainer_interval=10**9,
            )
            before = [parameter.clone() for parameter in loss.parameters()]
            training.register_op("batch_process", lambda batch: collected.append(batch.clone()))
            training.train()
        assert any(
            (one != other).any() for one, other in zip(before, loss.parameters(), strict=True)
        )
        ends, steps = storage[:]["next"], torch.cat(collected)["next"]
        for name in ("reward", "done", "terminated", "truncated"):
            assert torch.equal(ends[name], steps[name]), name
        assert 0 < int(ends["done"].sum()) == int(storage.episodes.table()["finished"].sum()) < 40
        return storage


class TestGaps:
    """Streams that start again though nobody ended their episodes."""

    def make(self, place="memory", lanes=2, **options):
        options = {"n_step": 100, "discount": 1.0, "lanes": lanes, **options}
        return make("n-step", place=place, **options)

    def streams(self, players, num_steps=3):
        return torch.stack([rows(player.play([], num_steps)) for player in players])

    @pytest.mark.parametrize("way", WAYS)
    def test_they_are_cut_with_one_warning(self, place, way):
        storage, players = self.make(place), [Player(0), Player(1)]
        blocks = []
        for _ in range(3):
            blocks.append(self.streams(players))
            for player in players:
                player.jump()
        WAYS[way](storage, blocks[0])
        with pytest.warns(UserWarning, match="end_episodes") as warned:
            WAYS[way](storage, blocks[1])
        assert len(warned) == 1
        WAYS[way](storage, blocks[2])
        numbers = torch.cat([ids_of(block).flatten() for block in blocks]).tolist()
        assert lengths(storage) == dict(zip(numbers, [3, 2, 1] * 6, strict=True))

    @pytest.mark.parametrize("num_steps", [8, 60])
    def test_flat_blocks_of_several_environments_without_ids_raise(self, place, num_steps):
        storage = self.make(place, lanes=1, size=40)
        storage.extend(rows(Player(9).play([30, 10])))
        before = storage[:]
        flat = (
            self.streams([Player(lane) for lane in range(4)], num_steps).transpose(0, 1).flatten()
        )
        with pytest.raises(ValueError, match=r"(31 of 32|239 of 240) .*num_envs.*traj_ids"):
            storage.extend(flat)
        assert_same(storage[:], before)
        assert storage.write_count == 40
        # A whole block is counted, not its parts.
        half = torch.cat([flat, *[rows(Player(9).play([], len(flat) + 9))]])
        with pytest.warns(UserWarning, match="end_episodes"):
            storage.extend(half)

    def test_short_blocks_ends_and_ignored_gaps_do_not_raise(self):
        def flat(end):
            steps = [player.step(end) for _ in range(10) for player in players]
            return rows(steps)

        players = [Player(lane) for lane in range(4)]
        storage = self.make(lanes=1)
        storage.extend(flat("truncated"))
        with pytest.warns(UserWarning, match="end_episodes"):
            storage.extend(flat("")[:31])
        self.make(lanes=1, on_gap="ignore").extend(flat(""))
        ids = torch.arange(40) % 4
        self.make(lanes=4).extend(flat("").set(("collector", "traj_ids"), ids))

    @pytest.mark.requirement("flat-batches")
    @pytest.mark.parametrize("flat", [False, True])
    def test_a_second_collector_counts_its_trajectories_from_0_again(self, flat):
        storage = tally_storage(2)

        def collect():
            for data in collected(2, 3):
                storage.extend(data.reshape(-1) if flat else data)

        collect()
        collect()
        assert len(storage) == 96
        assert_nothing_crosses(storage)


# Flat batches and entries without a field


@pytest.mark.requirement("flat-batches")
def test_new_trajectories_go_where_episodes_are_over_or_were_left_longest_ago():
    storage, player = make(lanes=2, size=40, on_gap="ignore"), Player()
    # The lane that trajectory 9 gets is cut; 5 and 6 come after both are over.
    turns = [([7, 8], "", [0, 1]), ([7], "", [0]), ([9], "", [1]), ([9], "terminated", [1])]
    turns += [([7], "terminated", [0]), ([5, 6], "", [0, 1])]
    for numbers, end, lanes in turns:
        data = rows([player.step(end) for _ in numbers])
        data["collector", "traj_ids"] = torch.tensor(numbers)
        assert storage.episodes.lanes_of(storage.extend(data)).tolist() == lanes


def lengths(storage):
    """{id: how many steps of its episode follow, itself included}, of all rows."""
    found = {}
    while len(found) < len(storage):
        batch = storage.sample(256)
        following = batch["steps_to_next_obs"][:, 0].tolist()
        found |= zip(ids_of(batch).tolist(), following, strict=True)
    return found


@pytest.mark.parametrize("is_lazy", [False, True])
def test_entries_without_a_field_are_told_of_once(is_lazy):
    """Such as recurrent states and costs; what the policy computed on its way is not missed."""
    storage, player = make(), Player()
    for number in range(3):
        data = rows(player.play([], 3 + number))
        data["hidden"] = data["next", "hidden"] = torch.zeros(len(data), 8)
        data["next", "cost"] = data["loc"] = torch.zeros(len(data), 1)
        if is_lazy:
            data = LazyStackedTensorDict(*data.unbind(0))
        if number:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                storage.extend(data)
        else:
            with pytest.warns(UserWarning, match=r"\['cost', 'hidden'\][\s\S]*extra_fields"):
                storage.extend(data)
    assert "hidden" not in [*storage[:].keys()]


def test_a_later_entry_is_told_of_where_the_first_write_named_the_fields():
    storage, player = assemble(20), Player()
    storage.extend(rows(player.play([4])))
    with pytest.warns(UserWarning, match=r"\['logp'\]"):
        storage.extend(rows(player.play([4])).set("logp", torch.zeros(4)))
