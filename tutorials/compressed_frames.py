"""Measures what steps of Atari take with compressed frames, and with other replay buffers.

    python tutorials/compressed_frames.py                          # makes the runs that are missing
    python tutorials/compressed_frames.py --table                  # only prints the table
    python tutorials/compressed_frames.py --envs Pong HalfCheetah-v5

A random policy plays each game of ale-py, whose wheel holds the games; frames are 84 x 84 and gray, the
maximum of the last two of four, in stacks of four. Environments of MuJoCo are rendered as 84 x 84 x 3,
where the machine can render. Each run is a process of its own that stores all steps, one by one, and
draws 256 of them: what the process grows by, and its processor time (the median of a step, the least of
60 draws), are a line of compressed_frames.jsonl.
"""

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from guide_results import make_missing, of_run
from gymnasium.spaces import Box, Discrete
from learning_results import versions
from options import OneLineParser, integer_from, need
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from trl_storages import FrameStack, UniformReplayStorage

RESULTS = Path(__file__).with_name("compressed_frames.jsonl")
GAMES = "MsPacman", "Breakout", "Qbert", "Pong", "Seaquest"
SIDE, STACK, BATCH, ACTIONS = 84, 4, 256, 18
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_NO_HUGE_PAGES = 41  # of Linux's prctl
Step = tuple[np.ndarray, int, float, bool, np.ndarray]


class Game(gymnasium.Wrapper):
    """Repeats each action four times, and shows the maximum of the last two screens."""

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        screen, info = self.env.reset(**options)
        return smaller(screen), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Plays four screens, or up to the end of the episode."""
        screens, total = [], 0.0
        for _ in range(4):
            screen, reward, terminated, truncated, info = self.env.step(action)
            screens, total = [*screens[-1:], screen], total + float(reward)
            if terminated or truncated:
                break
        return smaller(np.maximum.reduce(screens)), total, terminated, truncated, info


def make_env(name: str) -> gymnasium.Env:
    """Makes an environment whose observations are frames."""
    if name in GAMES:
        gymnasium.register_envs(need("ale_py"))
        options = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}
        return Game(gymnasium.make(f"ALE/{name}-v5", **options))
    env = gymnasium.make(name, render_mode="rgb_array", width=SIDE, height=SIDE)
    return gymnasium.wrappers.AddRenderObservation(env)


def play(name: str, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns frames `[N, 84, 84(, 3)]` of a random policy, and where episodes end `[N]`."""
    env, frames, ends = make_env(name), [], []
    env.action_space.seed(0)
    frame, _ = env.reset(seed=0)
    for _ in range(num_steps):
        frames.append(frame)
        frame, _, terminated, truncated, _ = env.step(env.action_space.sample())
        ends.append(terminated or truncated)
        if ends[-1]:
            frame, _ = env.reset()
    return np.stack(frames), np.array(ends)


def smaller(screen: np.ndarray) -> np.ndarray:
    """Returns a screen `[210, 160]` as `[84, 84]`, each pixel the mean of the area that it covers."""
    rows, columns = (weights(size) for size in screen.shape)
    return np.rint(rows @ screen.astype(np.float32) @ columns.T).astype(np.uint8)


def weights(size: int) -> np.ndarray:
    """Returns how much each of `size` pixels adds to each of 84, `[84, size]`."""
    edges, pixels = np.arange(SIDE + 1)[:, None] * size / SIDE, np.arange(size)
    overlap = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    return (overlap.clip(0) * SIDE / size).astype(np.float32)


# Storages: each returns what stores a step, and what draws a batch.

Storage = tuple[Callable[[Step], Any], Callable[[], Any]]


def ours(shape: tuple[int, ...], num_steps: int, **options: Any) -> Storage:
    box, sizes = Box(0, 255, shape, np.uint8), {"storage_size": num_steps, "batch_size": BATCH}
    options |= {"frame_stack": {"observation": FrameStack(STACK)}, **sizes}
    storage = UniformReplayStorage(box, Discrete(ACTIONS), **options)

    def store(step: Step) -> None:
        seen, action, reward, done, after = step
        storage.record(seen, action, reward, done, False, {}, after)

    return store, storage.sample


def compressed(shape: tuple[int, ...], num_steps: int) -> Storage:
    return ours(shape, num_steps, compress=True)


def torchrl(shape: tuple[int, ...], num_steps: int) -> Storage:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(num_steps), batch_size=BATCH)

    def store(step: Step) -> None:
        seen, action, reward, done, after = step
        flag = torch.tensor([done])
        outcome = {"reward": torch.tensor([reward]), "done": flag, "terminated": flag}
        following = {"observation": torch.from_numpy(after), **outcome, "truncated": ~flag & flag}
        row = {"observation": torch.from_numpy(seen), "action": torch.tensor(action)}
        buffer.add(TensorDict({**row, "next": following}, []))

    return store, buffer.sample


def stable_baselines3(shape: tuple[int, ...], num_steps: int, halved: bool = False) -> Storage:
    buffers = need("stable_baselines3.common.buffers")
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False} if halved else {}
    box = Box(0, 255, shape, np.uint8)
    buffer = buffers.ReplayBuffer(num_steps, box, Discrete(ACTIONS), "cpu", **options)

    def store(step: Step) -> None:
        seen, action, reward, done, after = step
        buffer.add(seen, after, np.array([action]), np.array([reward]), np.array([done]), [{}])

    return store, lambda: buffer.sample(BATCH)


def stable_baselines3_halved(shape: tuple[int, ...], num_steps: int) -> Storage:
    return stable_baselines3(shape, num_steps, halved=True)


def cpprb(shape: tuple[int, ...], num_steps: int) -> Storage:
    # Its stacks are along the last dimension.
    frame = shape[0] // STACK, *shape[1:]
    fields = {"obs": {"shape": (*frame, STACK), "dtype": np.uint8}}
    fields |= {"act": {"dtype": np.int64}, "rew": {}, "done": {}}
    options = {"next_of": "obs", "stack_compress": "obs"}
    buffer = need("cpprb").ReplayBuffer(num_steps, fields, **options)

    def store(step: Step) -> None:
        seen, action, reward, done, after = step
        seen, after = (np.moveaxis(it.reshape(STACK, *frame), 0, -1) for it in (seen, after))
        buffer.add(obs=seen, act=action, rew=reward, done=done, next_obs=after)
        if done:
            buffer.on_episode_end()

    return store, lambda: buffer.sample(BATCH)


STORAGES: dict[str, Callable[[tuple[int, ...], int], Storage]] = {
    "compress=True": compressed,
    "frames once": ours,
    "TorchRL": torchrl,
    "Stable-Baselines3": stable_baselines3,
    "Stable-Baselines3, optimize_memory_usage": stable_baselines3_halved,
    "cpprb, next_of and stack_compress": cpprb,
}


def planned(envs: Sequence[str], num_steps: int) -> list[dict[str, Any]]:
    """Returns all that decides the runs."""
    names = [(env, storage) for env in envs for storage in STORAGES]
    return [{"env": env, "storage": storage, "steps": num_steps} for env, storage in names]


def make(run: Mapping[str, Any], frames_of: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Measures a storage in a process of its own."""
    if (env := run["env"]) not in frames_of:
        frames, ends = play(env, run["steps"])
        np.savez(folder / env, frames=frames, ends=ends)
        frames_of[env] = folder / f"{env}.npz"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(measure, run["storage"], frames_of[env]).result()
    return {**run, **found, "versions": versions()}


def measure(storage: str, file: Path) -> dict[str, float]:
    """Stores and draws the steps of a file; returns bytes a step, and microseconds."""
    torch.set_num_threads(1)
    with np.load(file) as held:
        frames, ends = held["frames"], held["ends"]
    if frames.ndim == 4:  # channels first, as networks have them
        frames = np.moveaxis(frames, -1, 1)
    channels = 1 if frames.ndim == 3 else frames.shape[1]
    shape = (STACK * channels, SIDE, SIDE)
    kept, num_bytes = [], []  # the first one warms up, and all stay
    # A short run fills its huge pages only in part: memory is measured without them, and time with them.
    for num_steps, has_huge_pages in (
        (300, True),
        (len(frames) - 1, False),
        (len(frames) - 1, True),
    ):
        ctypes.CDLL(None).prctl(_NO_HUGE_PAGES, not has_huge_pages, 0, 0, 0)
        before, times = resident_bytes(), []
        store, draw = STORAGES[storage](shape, num_steps)
        kept.append((store, draw))
        stack = np.repeat(frames[:1], STACK, 0)
        for step in range(num_steps):
            after = np.concatenate([stack[1:], frames[step + 1 : step + 2]])
            row = stack.reshape(shape), step % ACTIONS, 0.0, bool(ends[step]), after.reshape(shape)
            start = time.process_time()
            store(row)
            times.append(time.process_time() - start)
            stack = np.repeat(frames[step + 1 : step + 2], STACK, 0) if ends[step] else after
        num_bytes.append(resident_bytes() - before)
        draws = []
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):  # batches use their memory again
            ctypes.CDLL(None).mallopt(option, 1 << 25)
        for _ in range(60):
            start = time.process_time()
            draw()
            draws.append(time.process_time() - start)
    # The system may have to provide the memory of a batch first, which takes longer than all else.
    microseconds = {"step": median(times) * 1e6, "draw": min(draws) * 1e6}
    return {
        "bytes": round(num_bytes[1] / num_steps),
        **{name: round(it) for name, it in microseconds.items()},
    }


def resident_bytes() -> int:
    """Returns the bytes that this process has in memory, on Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def table(runs: Sequence[dict[str, Any]], finished: Sequence[dict[str, Any]]) -> str:
    """Returns bytes a step, and time of a step and of a draw, as Markdown."""
    envs = list(dict.fromkeys(run["env"] for run in runs))
    lines = ["| | " + " | ".join(envs) + " |", "|---|" + "---|" * len(envs)]
    for storage in STORAGES:
        cells = [cell(of_run(run, finished)) for run in runs if run["storage"] == storage]
        lines.append(f"| {storage} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    return f"{record['bytes']:,} B, {record['step']} us, {record['draw'] / 1000:.1f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the missing runs, and prints the table."""
    parser = OneLineParser(
        prog="compressed_frames.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--envs", nargs="+", default=[*GAMES], help="games, or environments of MuJoCo")
    add("--steps", default=5_000, type=integer_from(300), help="of a run (%(default)s)")
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--table", action="store_true", help="only print the table, of the runs that are finished")
    args = parser.parse_args(argv)
    runs = planned(args.envs, args.steps)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    finished, frames_of = [json.loads(line) for line in lines], {}
    with tempfile.TemporaryDirectory() as folder:
        missing = [] if args.table else runs
        made = make_missing(
            missing, finished, lambda run: make(run, frames_of, Path(folder)), args.results
        )
        for record in made:
            print(
                f"{record['env']}, {record['storage']}: {cell(record)}", file=sys.stderr, flush=True
            )
    print(table(runs, finished))
    return 0


if __name__ == "__main__":
    sys.exit(main())
