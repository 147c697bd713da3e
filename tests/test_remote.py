"""A storage in a Ray actor: other processes write, sample and report priorities, and nothing mixes."""

import gc
import os
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from mktestdocs import check_md_file
from ray_workers import Worker, priority_of
from tally_env import TallyEnv, check_batch, check_rows, reward
from tensordict import TensorDict
from torchrl.data import RayReplayBuffer
from torchrl.envs.transforms import RenameTransform

import trl_storages
from trl_storages import (
    EpisodeWriter,
    GoalRelabel,
    HERReplayStorage,
    HERSampler,
    PackedStorage,
    ReplayStorage,
)
from trl_storages.replay.remote import in_actor

ray = pytest.importorskip("ray", reason="holds storages that several machines share")

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "tutorials" / "several_machines.md"
SPACES = TallyEnv.observation_space, TallyEnv.action_space
RECIPES = [name for name in trl_storages.__all__ if name.endswith("ReplayStorage")]


def steps(number: int, num_steps: int, first: int = 0, *, is_end: bool = False) -> TensorDict:
    """[T] steps of one episode of the environment of that number."""
    step = torch.arange(first, first + num_steps)
    here = torch.stack([torch.full_like(step, number), torch.zeros_like(step), step], 1)
    there, flag = here + torch.tensor([0, 0, 1]), torch.zeros(num_steps, 1, dtype=torch.bool)
    done = flag.clone()
    done[-1] = is_end
    goal = torch.zeros_like(here)
    names = "observation", "achieved_goal", "desired_goal"
    after = dict(zip(names, (there, there, goal), strict=True))
    flags = {"done": done, "terminated": done, "truncated": flag}
    return TensorDict(
        {
            **dict(zip(names, (here, here, goal), strict=True)),
            "action": torch.zeros(num_steps, dtype=torch.int64),
            "next": {**after, **flags, "reward": -torch.ones(num_steps, 1)},
            # As collectors of several processes number theirs: all from zero.
            "collector": {"traj_ids": torch.zeros(num_steps, dtype=torch.int64)},
        },
        [num_steps],
    )


def actor(name: str = "HERReplayStorage", **options) -> ReplayStorage:
    """What Ray makes in the actor's process."""
    if name == "HERReplayStorage":
        options["reward_fn"] = reward
    if name == "ReplayStorage":
        parts = {"storage": PackedStorage(60), "writer": EpisodeWriter(options.get("num_envs", 1))}
        return in_actor(ReplayStorage)(**parts, batch_size=32, delayed_init=False)
    options = {"storage_size": 60, "batch_size": 32, "seed": 0, **options}
    return in_actor(getattr(trl_storages, name))(*SPACES, delayed_init=False, **options)


def sent(value):
    return pickle.loads(pickle.dumps(value))


class TestInTheActor:
    """What an actor does, in this process."""

    @pytest.mark.parametrize("name", RECIPES)
    def test_each_storage_is_taken_and_sends_its_batches(self, name):
        storage = actor(name)
        storage.extend(steps(1, 5, is_end=True))

        batch = sent(storage.sample(3))

        assert type(storage).__name__ == name
        assert isinstance(batch, TensorDict)
        assert batch.batch_size[0] == 3
        assert (sent(storage[:])["observation"] == steps(1, 5)["observation"]).all()
        assert sent(storage.sample_episodes(2)).shape == (2, 5)
        sampled, info = sent(storage.sample(3, return_info=True))
        assert torch.equal(sampled["index"], info["index"])
        # As TorchRL's handle asks for each batch of a `for` loop.
        assert len(sent(storage.next())) == len(sent(storage.sample()))
        storage.validate()

    def test_a_batch_is_sent_once_and_comes_back_alone(self):
        storage = actor(alpha=0.6)
        storage.extend(steps(1, 40))
        batch = storage.sample(32)
        message = pickle.dumps(batch)

        here = pickle.loads(message)
        data = sum(leaf.nbytes for leaf in here.values(True, True))
        here["td_error"] = torch.rand(32)
        back = here.select("index", "priority_stamp", "td_error")

        assert len(message) < data + 2000
        assert len(pickle.dumps(back)) < sum(leaf.nbytes for leaf in back.values()) + 2000
        # What a learner adds is sent with the rest.
        assert torch.equal(sent(here)["td_error"], here["td_error"])
        storage.update_tensordict_priority(sent(back))
        drawn = storage.sampler.base.priorities[here["index"]]
        assert torch.equal(drawn.sort().values.unique(), drawn.unique())
        assert (drawn < 1).all()

    def test_batches_of_unknown_origin_are_stretches_of_their_own(self):
        storage = actor()
        for number in (1, 2):
            storage.extend(steps(number, 4))
        storage.extend(steps(1, 3, first=4))

        check_rows(storage)
        assert storage.episodes.episodes()["length"].tolist() == [4, 4, 3]

    @pytest.mark.parametrize("share_next", [False, True])
    def test_processes_with_lanes_of_their_own_go_on(self, share_next):
        storage = actor(num_envs=2, share_next=share_next)
        for first in (0, 3, 6):
            for lane in (0, 1):
                storage.extend(steps(lane + 1, 3, first), lanes=[lane])

        check_rows(storage)
        assert storage.episodes.episodes()["length"].tolist() == [9, 9]
        # And those that have none do not go on with theirs.
        storage.extend(torch.stack([steps(1, 2, 9), steps(2, 2, 9)]))
        storage.extend(steps(1, 1, 11), lanes=[0])
        assert storage.episodes.episodes()["length"].tolist() == [9, 2, 1, 9, 2]

    @pytest.mark.parametrize("method", ["add", "record"])
    def test_single_steps_do_not_say_whose_they_are(self, method):
        storage = actor()
        with pytest.raises(
            RuntimeError, match=rf"{method}\(\) must know whose step.*extend\(steps"
        ):
            getattr(storage, method)(steps(1, 1)[0])
        assert not len(storage)

    def test_storages_are_made_at_once(self):
        made = ReplayStorage(
            storage=PackedStorage(10), transform_factory=partial(GoalRelabel, reward)
        )
        assert isinstance(made.transform[0], GoalRelabel)


def start_ray(attempts: int = 3) -> None:
    """Starts a small Ray of this machine, which gives up after 30 s where the machine is busy."""
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=2**27,
        )
    except Exception as error:
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start_ray(attempts - 1)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Actors are other processes, which the package need not be installed for.
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        # Tasks go on in processes that have imported everything.
        patch.setenv("RAY_idle_worker_killing_time_threshold_ms", "600000")
        start_ray()
        yield
        with warnings.catch_warnings():
            # Ray does not wait for the processes that it ends, and Python complains when it forgets them.
            warnings.simplefilter("ignore", ResourceWarning)
            ray.shutdown()
            gc.collect()


@pytest.fixture(scope="module")
def workers(local_ray) -> list:
    """Two processes, each of which may write and sample at once."""
    return [ray.remote(num_cpus=0, max_concurrency=2)(Worker).remote() for _ in range(2)]


def made_on_ray(kind: type[ReplayStorage], *args, **options) -> RayReplayBuffer:
    where = {"remote_config": {"num_cpus": 0}}
    return kind(*args, service_backend="ray", service_backend_options=where, **options)


@pytest.fixture
def on_ray(local_ray):
    made = []

    def make(*args, **options) -> RayReplayBuffer:
        made.append(made_on_ray(*args, **options))
        return made[-1]

    yield make
    for replay in made:
        replay.shutdown()


# Processes take seconds to start, so that tests share storages whose rows are theirs alone.
WITH_GOALS = {"reward_fn": reward, "storage_size": 60, "alpha": 0.6, "batch_size": 8}


@pytest.fixture(scope="module")
def with_goals(local_ray) -> Iterator[RayReplayBuffer]:
    replay = made_on_ray(HERReplayStorage, *SPACES, **WITH_GOALS)
    yield replay
    replay.shutdown()


@pytest.fixture(scope="module")
def by_distributed(local_ray) -> Iterator[RayReplayBuffer]:
    replay = made_on_ray(HERReplayStorage, *SPACES, transport="distributed", **WITH_GOALS)
    yield replay
    replay.shutdown()


@pytest.fixture(params=["ray", "distributed"])
def by_transport(with_goals, by_distributed, request) -> tuple[RayReplayBuffer, str]:
    return {"ray": with_goals, "distributed": by_distributed}[request.param], request.param


@pytest.mark.slow
class TestActors:
    def test_parameters_are_set_through_clients(self, with_goals):
        client = with_goals.client()
        assert client.parameters()["num_goals"] == 4
        assert client.parameters(beta=0.9, num_goals=2)["beta"] == 0.9
        assert client.parameters()["num_goals"] == 2
        with pytest.raises(AttributeError, match=r"the parameters \['alpha', .*, got \['eta'\]"):
            client.parameters(beta=0.5, eta=0.9)
        with pytest.raises(ValueError, match="beta must be"):
            client.parameters(beta=-1)
        assert client.parameters()["beta"] == 0.9

    def test_a_handle_has_the_methods_and_parameters_and_is_passed_on_as_a_client(
        self, with_goals, workers
    ):
        replay = with_goals
        with pytest.raises(RuntimeError, match="write transitions"):
            replay.sample()
        replay.extend(steps(1, 5, is_end=True))
        replay.beta = 0.9
        assert replay.beta == replay.client().parameters()["beta"] == 0.9
        batch = replay.sample()
        replay.update_tensordict_priority(batch, torch.full((8,), 0.5))
        replay.update_tensordict_priority(batch.set("td_error", torch.full((8, 1), 0.5)))
        assert replay.sample_episodes(2).shape == (2, 5)
        replay.validate()
        with pytest.raises(ValueError, match="beta must be"):
            replay.beta = -1
        for changed in (
            replay.append_transform(lambda batch: batch.set("late", batch["index"])),
            replay.insert_transform(1, RenameTransform(["index"], ["early"], create_copy=True)),
        ):
            assert changed is replay
        assert replay.can_sample()
        assert {"late", "early"} <= {*replay.sample().keys()}
        with pytest.raises(AttributeError, match="no part with n_step"):
            replay.n_step  # noqa: B018
        with pytest.raises(AttributeError, match="no part with n_step"):
            replay.n_step = 3
        with pytest.raises(AttributeError, match="no attribute 'nstep' to set"):
            replay.nstep = 3
        for name in ("episodes", "clear"):
            with pytest.raises(AttributeError, match=f"no method or parameter '{name}'"):
                getattr(replay, name)

        def look(passed):
            return len(passed), hasattr(passed, "close")

        assert ray.get(workers[0].call.remote(look, replay)) == (5, False)

    def test_a_client_reads_and_sets_parameters(self, by_transport, workers):
        replay, _ = by_transport

        def why_not(client, name):
            try:
                setattr(client, name, 3)
            except AttributeError as error:
                return str(error)

        def use(client):
            client.beta = 0.8
            told = [why_not(client, name) for name in ("n_step", "nstep")]
            return client.beta, hasattr(client, "n_step"), told

        beta, is_there, told = ray.get(workers[0].call.remote(use, replay))
        assert (beta, is_there, replay.beta) == (0.8, False, 0.8)
        assert "no part with n_step" in told[0]
        assert "the client of a storage has no attribute 'nstep' to set" in told[1]

    def test_a_client_answers_what_the_storage_lacks(self, by_transport):
        replay, transport = by_transport
        client = replay.client()
        for name in ("is_full", "clear", "nothing"):
            with pytest.raises(AttributeError, match=f"client .* no method .* {name!r}"):
                getattr(client, name)
        if transport == "ray":
            assert client.validate() is None
        else:
            with pytest.raises(AttributeError, match="validate"):
                client.validate()

    def test_two_write_and_two_sample(self, on_ray, workers):
        options = {"reward_fn": reward, "storage_size": 300, "num_envs": 2, "batch_size": 64}
        options |= {"alpha": 0.6, "eta": 0.99, "c_min": 50, "share_next": True}
        replay = on_ray(HERReplayStorage, *SPACES, **options)
        assert isinstance(replay, RayReplayBuffer)
        client = replay.client()

        ray.get([worker.write.remote(client, lane, 1) for lane, worker in enumerate(workers)])
        busy = [worker.write.remote(client, lane, 40) for lane, worker in enumerate(workers)]
        busy += [worker.sample.remote(client, 30) for worker in workers]
        ray.get(busy)
        prioritised = torch.cat(ray.get([worker.sample.remote(client, 10) for worker in workers]))

        assert len(replay) == 300
        assert replay.write_count == 2 * 41 * 7
        # What is there is loaded here, to look at all of it.
        here = HERReplayStorage(*SPACES, **options)
        here.load_state_dict(replay.state_dict())
        check_rows(here)
        episodes = here.episodes.episodes()["length"]
        assert len(episodes) < 300 / 3.5  # Their mean length is 4: none was cut by a batch.
        slots = prioritised.unique()
        assert len(slots) > 100
        assert torch.equal(here.sampler.base.base.priorities[slots], priority_of(here[slots]))

    def test_collectors_write_whole_trajectories_to_parts_that_are_made_there(
        self, on_ray, workers
    ):
        parts = {
            "sampler": partial(HERSampler, "final", num_goals=4),
            "writer": partial(EpisodeWriter, 1),
            "transform_factory": partial(GoalRelabel, reward),
        }
        replay = on_ray(ReplayStorage, storage=partial(PackedStorage, 100), batch_size=64, **parts)

        ray.get([worker.collect.remote(replay.client(), 100, 2) for worker in workers])

        assert replay.write_count > 150
        with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
            replay.sample(0)
        check_batch(replay.sample())
        parts["transform"] = parts.pop("transform_factory")()
        here = ReplayStorage(storage=PackedStorage(100), **parts)
        here.load_state_dict(replay.state_dict())
        check_rows(here)
        assert here.episodes.episodes()["finished"].all()

    def test_batches_of_one_layout_cross_by_torch_distributed(self, by_distributed):
        client = by_distributed.client()

        for number in (1, 2, 1):
            client.extend(steps(number, 10))
        for _ in range(3):
            batch = client.sample()
            check_batch(batch)
            batch["td_error"] = torch.full((8,), 0.5)
            client.update_tensordict_priority(batch.select("index", "priority_stamp", "td_error"))

        here = HERReplayStorage(*SPACES, **WITH_GOALS)
        here.load_state_dict(by_distributed.state_dict())
        check_rows(here)
        assert here.episodes.episodes()["length"].tolist() == [10, 10, 10]
        assert (here.sampler.base.priorities[batch["index"]] == 0.5).all()


# TorchRL's collectors and losses warn about options of their own that are to change.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_guide_runs(local_ray):
    check_md_file(GUIDE, memory=True)
