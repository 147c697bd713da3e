"""What goes wrong in loops is said, with what to pass instead, and nothing is written."""

import shutil

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from trl_storages import (
    ReplayStorage,
    UniformReplayStorage,
)


def loop(storage, env, num_steps: int = 12) -> None:
    env.action_space.seed(0)
    observations, _ = env.reset(seed=0)
    for _ in range(num_steps):
        actions = env.action_space.sample()
        after, rewards, terminateds, truncateds, infos = env.step(actions)
        storage.record(observations, actions, rewards, terminateds, truncateds, infos, after)
        observations = after


CART = Box(-9, 9, (4,), np.float32), Discrete(2)


def refused(error: type[Exception], message: str):
    return pytest.raises(error, match=message)


class TestOtherFields:
    """Of rows that are saved, only the fields that differ are named."""

    @staticmethod
    def made(size: int = 3, action=None, **options) -> UniformReplayStorage:
        spaces = Box(-1, 1, (size,)), action or Discrete(2)
        return UniformReplayStorage(*spaces, storage_size=20, **options)

    def test_reopened(self, tmp_path):
        self.made(path=tmp_path / "rows").close()
        with pytest.raises(
            ValueError, match=r"'observation' is float32 \[3\], got float32 \[4\];"
        ) as error:
            self.made(4, path=tmp_path / "rows")
        assert "action" not in str(error.value)
        with pytest.raises(
            ValueError, match=r"fields: 'action' is int64 \[\], got float32 \[2\]\."
        ):
            self.made(action=Box(-1, 1, (2,)), path=tmp_path / "rows")
        assert len(self.made(path=tmp_path / "rows")) == 0

    def test_loaded(self):
        with pytest.raises(ValueError, match=r"'observation' is float32 \[3\], got float32 \[5\];"):
            self.made(5).load_state_dict(self.made().state_dict())


class TestRemovedDirectories:
    """A directory that is removed, or replaced, while a process writes it."""

    @pytest.mark.parametrize("replaced", [False, True])
    @pytest.mark.parametrize("method", ["flush", "close", "empty"])
    def test_it_is_said_and_the_rows_can_be_saved(self, tmp_path, method, replaced):
        path, options = tmp_path / "rows", {"storage_size": 8}
        storage = UniformReplayStorage(*CART, path=path, **options)
        loop(storage, gymnasium.make("CartPole-v1"), 3)
        shutil.rmtree(path)
        other = UniformReplayStorage(*CART, path=path, **options) if replaced else None
        before = sorted(file.read_bytes() for file in path.glob("*")) if other else []
        with refused(FileNotFoundError, r"rows was removed while .*dumps\(another path\)"):
            getattr(storage, method)()
        assert storage.storage.directory.is_writer == (method != "close")
        # Who has closed a directory reads what there is.
        if method == "close" and replaced:
            for read in (len, ReplayStorage.sample):
                with refused(RuntimeError, "rows was deleted, and made anew, .*: open it again"):
                    read(storage)
        else:
            assert len(storage) == 3
            storage.dumps(tmp_path / "dump")
            loaded = UniformReplayStorage(*CART, path=tmp_path / "new", **options)
            loaded.loads(tmp_path / "dump")
            assert (loaded[:] == storage[:]).all()
        if other:
            assert sorted(file.read_bytes() for file in path.glob("*")) == before
            loop(other, gymnasium.make("CartPole-v1"), 3)
            other.close()

    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_write_that_needs_space_says_so(self, tmp_path, replaced):
        path, options = tmp_path / "rows", {"storage_size": 4000, "share_next": True}
        storage = UniformReplayStorage(*CART, path=path, **options)
        still = np.zeros(4, np.float32)
        storage.record(still, 0, 1.0, False, True, {}, still + 1)
        shutil.rmtree(path)
        other = UniformReplayStorage(*CART, path=path, **options) if replaced else None
        flags = np.zeros((3000, 1), bool)
        block = TensorDict(
            {
                "observation": np.zeros((3000, 4), np.float32),
                "action": np.zeros(3000, int),
                "next": {
                    "observation": np.ones((3000, 4), np.float32),
                    "reward": np.zeros((3000, 1), np.float32),
                    "terminated": flags,
                    "truncated": ~flags,
                    "done": ~flags,
                },
            },
            [3000],
        )
        with refused(FileNotFoundError, r"rows was removed while .*dumps\(another path\)"):
            storage.extend(block)
        assert len(storage) == 1
        if other:
            other.extend(block)
            other.close()

    def test_it_is_deleted_already(self, tmp_path):
        storage = UniformReplayStorage(*CART, storage_size=8, path=tmp_path / "rows")
        shutil.rmtree(tmp_path / "rows")
        other = UniformReplayStorage(*CART, storage_size=8, path=tmp_path / "rows")
        storage.close(keep=False)
        assert not storage.storage.directory.is_writer
        loop(other, gymnasium.make("CartPole-v1"), 3)
        other.close()


@pytest.mark.parametrize("named", ["~", "~/rows", "~nobody-of-this-name/rows"])
def test_a_directory_of_a_user(tmp_path, monkeypatch, named):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    storage = UniformReplayStorage(*CART, storage_size=8, path=named)
    loop(storage, gymnasium.make("CartPole-v1"), 3)
    storage.close()
    there = str(tmp_path / "home") if named[1:2] in ("", "/") else "~nobody-of-this-name"
    assert (tmp_path / there / named.partition("/")[2]).is_dir()
    assert len(ReplayStorage.open(named, mode="r")) == 3
    storage.dumps(named + "/dump")
    UniformReplayStorage(*CART, storage_size=8).loads(named + "/dump")


class TestServices:
    """What is said where the storage is made, before a process is started for it."""

    @pytest.mark.parametrize("kind", [UniformReplayStorage, ReplayStorage])
    def test_that_storages_do_not_support(self, kind):
        with pytest.raises(ValueError, match=r"service_backend must be one of \('direct', 'ray'\)"):
            kind(service_backend="thread")


def test_a_directory_of_stacks_is_reopened_with_frame_stack(tmp_path):
    spaces, options = (Box(0, 255, (4, 8, 8), np.uint8), Discrete(2)), {"storage_size": 20}
    storage = UniformReplayStorage(*spaces, **options, frame_stack=4, path=tmp_path)
    storage.record(np.zeros((4, 8, 8), "u1"), 0, 0.0, True, False, {}, np.zeros((4, 8, 8), "u1"))
    storage.close()
    with refused(
        ValueError, r"as FrameStack\(num_frames=4.*got uint8 \[4, 8, 8\];.*frame_stack they"
    ):
        UniformReplayStorage(*spaces, **options, path=tmp_path)
    assert len(UniformReplayStorage(*spaces, **options, frame_stack=4, path=tmp_path)) == 1
