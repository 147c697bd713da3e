"""The tutorial that learns from pictures on disk runs, keeps its files when told to, and goes on."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "tutorials"
WORKERS = ["--workers", "2", "--start", "fork"]

pytestmark = [
    pytest.mark.requirement("disk-workers"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    # TorchRL's losses warn about options of their own that are to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def tutorial(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS))
    import pixels_on_disk

    yield pixels_on_disk
    for name in ("pixels_on_disk", "options"):
        sys.modules.pop(name, None)


def test_acts_learns_keeps_and_goes_on(tutorial, tmp_path, capsys):
    path = tmp_path / "replay"
    rate = tutorial.main([*WORKERS, "--steps", "520", "--path", str(path), "--keep"])
    assert 0 <= rate <= 1
    # A frame, a header, action, reward and flags; not two stacks of four frames.
    assert "0 steps were there already, 88 bytes each" in capsys.readouterr().out
    tutorial.main([*WORKERS, "--steps", "60", "--path", str(path)])
    said = capsys.readouterr().out
    assert "520 steps were there already" in said
    assert "580 steps are stored" in said
    assert not path.exists()


def test_the_bat_catches_what_lands_on_it(tutorial):
    env = tutorial.Catch()
    for seed in range(20):
        picture, _ = env.reset(seed=seed)
        assert picture.dtype == np.uint8
        done = False
        while not done:
            ball, bat = np.argmax(picture[:-1].max(0)), np.flatnonzero(picture[-1] == 160)
            picture, reward, done, _, info = env.step(1 + np.sign(ball - bat.mean()))
        assert reward == 1
        assert info["caught"]


def test_shifts_are_by_a_pixel_at_most(tutorial):
    shape = (200, tutorial.FRAMES, tutorial.SIDE, tutorial.SIDE)
    stacks = torch.randint(0, 256, shape, dtype=torch.uint8)
    moved = tutorial.shifted(stacks)
    assert moved.shape == stacks.shape
    padded = torch.nn.functional.pad(stacks.float() / 255, [1] * 4)
    seen = set()
    for one, stack in zip(moved, padded, strict=True):
        places = [
            (row, column)
            for row in range(3)
            for column in range(3)
            if torch.equal(
                one, stack[:, row : row + tutorial.SIDE, column : column + tutorial.SIDE]
            )
        ]
        assert places
        seen.update(places)
    assert len(seen) == 9
