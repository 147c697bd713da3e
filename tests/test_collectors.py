"""TorchRL's collectors write, in one process and in several, and no trajectory is ever mixed."""

import multiprocessing
from collections.abc import Iterator

import pytest
import torch
from tally_env import TallyEnv, check_batch, check_rows, goal_storage, tally
from tensordict import TensorDict
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import SerialEnv

from trl_storages import EpisodeWriter, PackedStorage

# Collectors warn about options of their own that are to change, and about sharing a storage.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def make_env(num_envs: int):
    return tally() if num_envs == 1 else SerialEnv(num_envs, tally)


def steps(lane: int, num_steps: int, *, number: int = 0) -> TensorDict:
    """[T] transitions of one trajectory that does not end."""
    step = torch.arange(num_steps)
    before = torch.stack([torch.full_like(step, number), torch.full_like(step, lane), step], 1)
    after, flag = before + torch.tensor([0, 0, 1]), torch.zeros(num_steps, 1, dtype=torch.bool)
    goal = torch.zeros_like(before)
    return TensorDict(
        {
            "observation": before,
            "achieved_goal": before,
            "desired_goal": goal,
            "action": torch.zeros(num_steps, dtype=torch.int64),
            "next": {
                "observation": after,
                "achieved_goal": after,
                "desired_goal": goal,
                "reward": torch.zeros(num_steps, 1),
                "done": flag,
                "terminated": flag,
                "truncated": flag,
            },
        },
        [num_steps],
    )


class TestManyProcesses:
    """Worker processes that write to one storage."""

    @pytest.mark.parametrize(
        ("collector_type", "trajs_per_batch"),
        [
            (MultiSyncCollector, None),
            (MultiSyncCollector, 2),
            (MultiAsyncCollector, None),
            (MultiAsyncCollector, 3),
        ],
    )
    def test_several_environments_each(self, collector_type, trajs_per_batch, start_processes_by):
        # TorchRL's own way, anew, is that of `test_collectors_soak.py`.
        start_processes_by("fork")
        storage = goal_storage(num_envs=1 if trajs_per_batch else 2, storage_size=160)
        collector = collector_type(
            [two_tallies, two_tallies],
            None,
            frames_per_batch=40,
            total_frames=600,
            replay_buffer=storage,
            trajs_per_batch=trajs_per_batch,
        )

        written_by = set()
        for _ in collector:
            if len(storage):
                check_rows(storage)
                check_batch(storage.sample())
                written_by |= set(storage[:]["observation"][:, 0].tolist())
        collector.shutdown()

        assert storage.write_count > 450
        # A worker that lags behind need not have rows among the newest.
        assert len(written_by | set(storage[:]["observation"][:, 0].tolist())) == 4
        if trajs_per_batch:
            assert storage.episodes.episodes()["finished"].all()

    @pytest.mark.parametrize(
        ("collector_type", "num_envs", "cat_results", "lanes"),
        [
            (MultiSyncCollector, 1, 0, 1),
            (MultiSyncCollector, 1, "stack", 2),
            (MultiSyncCollector, 2, 0, 4),
            (MultiAsyncCollector, 1, None, 1),
            (MultiAsyncCollector, 2, None, 2),
        ],
    )
    @pytest.mark.filterwarnings("ignore:trajectories that go on side by side")
    def test_batches_that_the_loop_writes(
        self, collector_type, num_envs, cat_results, lanes, start_processes_by
    ):
        start_processes_by("fork")
        storage = goal_storage(num_envs=lanes, storage_size=120)
        collector = collector_type(
            [tally if num_envs == 1 else two_tallies] * 2,
            None,
            frames_per_batch=40,
            total_frames=400,
            cat_results=cat_results,
        )

        environments = set()
        for data in collector:
            storage.extend(data.clone())
            check_rows(storage)
            check_batch(storage.sample())
            # The newest rows may all be of one worker, if the other one lags behind.
            environments |= {*storage[:]["observation"][:, 0].tolist()}
        collector.shutdown()

        assert storage.write_count == 400
        assert len(environments) == 2 * num_envs


def two_tallies() -> SerialEnv:
    return SerialEnv(2, tally)


@pytest.fixture
def in_child() -> Iterator[object]:
    """Runs functions in a child that is cheap to start, since it has not to import anything."""
    context = multiprocessing.get_context("fork")

    def run(function, *args) -> None:
        child = context.Process(target=function, args=args)
        child.start()
        child.join(60)
        assert child.exitcode == 0

    return run


class TestSharing:
    def test_rows_of_another_process_are_seen(self, in_child):
        storage = goal_storage().share()
        storage.extend(steps(0, 5))

        in_child(storage.extend, steps(1, 4))

        assert len(storage) == 9
        assert storage.write_count == 9
        check_rows(storage)

    def test_a_trajectory_is_cut_where_the_process_changes(self, in_child):
        storage = goal_storage().share()
        for _ in range(2):
            # The same steps, without trajectory ids to tell them apart.
            storage.extend(steps(0, 5))
            in_child(storage.extend, steps(0, 5))

        assert storage.episodes.episodes()["length"].tolist() == [5, 5, 5, 5]

    def test_one_process_goes_on_where_it_stopped(self, in_child):
        def write(storage):
            whole = steps(0, 6)
            storage.extend(whole[:4])
            storage.extend(whole[4:])

        storage = goal_storage().share()
        in_child(write, storage)

        assert storage.episodes.episodes()["length"].tolist() == [6]

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_priorities_are_given_to_rows_of_another_process(self, in_child, num_envs):
        storage = goal_storage(num_envs=num_envs, storage_size=12, alpha=1.0)
        storage.extend(torch.stack([steps(lane, 2) for lane in range(num_envs)]).squeeze(0))
        per = storage.sampler.base
        per.update_priority(torch.arange(2 * num_envs), torch.full((2 * num_envs,), 0.5))
        per.update_priority(torch.tensor([0]), torch.tensor([8.0]))
        storage.share()
        drawn = storage.sample(4)

        def write(storage):
            storage.writer.extend(steps(0, 2).unsqueeze(0), lanes=[0])

        in_child(write, storage)
        storage.sample(4)

        priorities = per.priorities
        new = torch.arange(2, 4) * num_envs
        assert (priorities[new] == 8).all()
        assert priorities[0] == 8
        assert (priorities[1 : 2 * num_envs] == 0.5).all()
        assert (priorities < torch.inf).sum() == 2 * num_envs + 2
        per.validate()

        # Late priorities of rows that another process has overwritten are left alone.
        drawn["td_error"] = torch.full((4,), 3.0)
        in_child(overwrite, storage)
        storage.update_tensordict_priority(drawn)
        assert (per.priorities == 8).all()

    def test_emptying_is_heard_of(self, in_child):
        storage = goal_storage(alpha=0.6).share()
        storage.extend(steps(0, 10))
        storage.sample()

        in_child(storage.empty)
        in_child(storage.extend, steps(1, 3))
        batch = storage.sample()

        assert set(batch["index"].tolist()) == {0, 1, 2}

    def test_phases_of_recency_begin_with_writes_of_another_process(self, in_child):
        storage = goal_storage(eta=0.99, c_min=2).share()
        ere = storage.sampler.base
        ere.updates_per_phase = 3
        storage.extend(steps(0, 5))
        for _ in range(4):
            storage.sample()
        assert ere.update > ere.num_updates

        in_child(storage.extend, steps(1, 5))
        storage.sample()

        assert ere.update == 1

    def test_a_layout_that_is_not_fixed(self, in_child):
        buffer = TensorDictReplayBuffer(
            storage=PackedStorage(10), writer=EpisodeWriter(on_gap="ignore"), batch_size=4
        )
        buffer.storage.share_memory_()

        def write(buffer):
            with pytest.raises(RuntimeError, match="before other processes write"):
                buffer.extend(steps(0, 2))

        in_child(write, buffer)
        buffer.extend(steps(0, 2))
        in_child(buffer.extend, steps(1, 2))
        assert len(buffer) == 4

    def test_what_cannot_be_shared(self, tmp_path):
        with pytest.raises(RuntimeError, match="leave path and device out"):
            goal_storage(path=tmp_path).share()
        with pytest.raises(ValueError, match="can't draw ahead"):
            goal_storage(prefetch=2).share()


def overwrite(storage) -> None:
    num_envs = storage.episodes.num_envs
    storage.extend(
        torch.stack([steps(lane, 12 // num_envs) for lane in range(num_envs)]).squeeze(0)
    )


def test_the_tally_s_spaces_hold_what_it_observes():
    env = TallyEnv()
    observation, _ = env.reset()
    assert env.observation_space.contains(observation)
