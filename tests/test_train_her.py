"""The tutorial runs as readers will run it: every algorithm, every wrong option; and it learns."""

from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def train_her(tutorial):
    return tutorial("train_her")


@pytest.fixture
def run(train_her, tmp_path, monkeypatch):
    """Runs the script in an empty directory, on small batches and tests, and returns its curves."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"BATCH_SIZE": 16, "CURVE_POINTS": 5, "LAST_TEST_ROUNDS": 2}.items():
        monkeypatch.setattr(train_her, name, value)
    return lambda *options: train_her.main([str(option) for option in options])


# One batch past the random ones, so that every kind of update is made.
SHORT = ("--bits", 3, "--steps", 576)


@pytest.mark.parametrize("algo", ["dqn", "ddpg", "td3", "sac"])
def test_each_algorithm_runs_with_and_without_hindsight_and_draws_both(run, algo, capsys):
    curves = run(*SHORT, "--algo", algo, "--output", "pictures/both.png")
    assert [curve.name for curve in curves] == ["with hindsight", "without hindsight"]
    for curve in curves:
        assert curve.steps == sorted(curve.steps)
        assert curve.steps[-1] == 576
        assert all(0.0 <= success <= 1.0 for success in curve.success)
    assert Path("pictures/both.png").read_bytes().startswith(PNG)
    printed = capsys.readouterr()
    assert "pictures/both.png" in printed.out
    assert "samples/s" in printed.err
    assert "success" in printed.err


def test_a_robot_arm_is_trained(run):
    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'tutorials'")
    (curve,) = run("--env", "FetchReach-v4", "--algo", "sac", "--steps", 128, "--no-her")
    assert curve.steps[-1] == 128


def test_the_same_seed_gives_the_same_curve(run):
    first, second, other = (run(*SHORT, "--seed", seed)[0].success for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_path_keeps_transitions_and_is_never_overwritten(run, capsys):
    run(*SHORT, "--path", "rows", "--no-her")
    assert sum(file.stat().st_size for file in Path("rows").rglob("*") if file.is_file()) > 576 * 40
    capsys.readouterr()
    with pytest.raises(SystemExit, match="already holds transitions"):
        run(*SHORT, "--path", "rows", "--no-her")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--algo ppo", "invalid choice: 'ppo'"),
        ("--strategy past", "invalid choice: 'past'"),
        ("--bits 0", "--bits: must be an integer >= 1, got '0'"),
        ("--num-envs 0", "--num-envs: must be an integer >= 1, got '0'"),
        ("--num-goals -1", "--num-goals: must be an integer >= 0, got '-1'"),
        ("--env CartPole-v1", "--env CartPole-v1 has no goals"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_a_wrong_option_is_one_line_and_leaves_nothing_behind(run, capsys, options, message):
    with pytest.raises(SystemExit) as exit_:
        run(*options.split())
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(Path().iterdir()) == []


class Flip(torch.nn.Module):
    """Flips the first wrong bit, or always the first bit."""

    def __init__(self, is_perfect: bool) -> None:
        super().__init__()
        self.is_perfect = is_perfect

    def forward(self, observation: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        first_wrong = (observation != goal).int().argmax(dim=-1)
        return first_wrong if self.is_perfect else torch.zeros_like(first_wrong)


@pytest.mark.parametrize(("is_perfect", "expected"), [(True, 1.0), (False, 1 / 7)])
def test_the_success_rate_counts_each_episode_once(train_her, is_perfect, expected):
    # Of the 7 goals that differ from 3 bits, flipping the first bit alone reaches one. Those
    # episodes end at once: counting all that end within 3 steps would give 3 / (6 + 3).
    args = train_her.parse(["--bits", "3"])
    env = train_her.make_env(args, 50, seed=0)
    policy = TensorDictModule(Flip(is_perfect), ["observation", "desired_goal"], ["action"])
    success = train_her.success_rate(env, policy, max_steps=3, rounds=20)
    assert success == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 1000) ** 0.5)


# Learning, as in the tutorial's own bounds but on fewer bits. The 15 bits of its default take a
# minute; that run prints its bounds beside its results.


@pytest.mark.slow
@pytest.mark.requirement("bit-flip")
def test_only_with_hindsight_does_dqn_learn_to_flip_eight_bits(train_her, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_her, "CURVE_POINTS", 2)
    with_hindsight, without = train_her.main(["--bits", "8", "--steps", "1800"])
    assert with_hindsight.success[-1] >= 0.95
    assert without.success[-1] <= 0.10


@pytest.mark.slow
@pytest.mark.requirement("bit-flip")
@pytest.mark.parametrize(("algo", "steps"), [("ddpg", 1400), ("td3", 2000), ("sac", 1400)])
def test_continuous_actions_learn_to_flip_four_bits_in_hindsight(
    train_her, monkeypatch, algo, steps
):
    monkeypatch.setattr(train_her, "CURVE_POINTS", 2)
    args = train_her.parse(["--algo", algo, "--bits", "4", "--steps", str(steps)])
    storage = train_her.make_storage(args, train_her.WITH, args.num_goals)
    assert train_her.train(args, storage, train_her.WITH).success[-1] >= 0.90
