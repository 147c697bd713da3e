"""A checkout compared with itself."""

from pathlib import Path

from tests.benchmarks.compare import main


def test_a_line_for_each_row_that_is_asked_for(capsys):
    root = str(Path(__file__).parents[2])
    main([root, "--rounds", "2", "--stored", "2000", "record", "bytes", "all-four"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["us", "a", "call", "old", "new", "ratio", "middle", "half"]
    assert [line.split()[0] for line in lines] == ["bytes", "all-four", "record"]
    assert all(float(number) > 0 for line in lines for number in line.split()[1:4])
