"""The benchmark of streams prints what it says."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.benchmarks import streams

pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_prints_all_figures(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["streams", "--rows", "400", "--rounds", "1"])
    monkeypatch.setattr(streams, "LANES", (2,))
    # Fresh processes take seconds each.
    monkeypatch.setattr(streams, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    streams.main()
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split(" of ")[0] for line in lines if not line.startswith("  ")]
    assert titles == [
        *["gather"] * 2,
        "hindsight",
        "writes",
        "resident bytes a row, with its index,",
    ]
