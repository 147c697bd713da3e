"""What the page on directories shows runs."""

from pathlib import Path

from mktestdocs import check_md_file

GUIDE = Path(__file__).parents[1] / "tutorials" / "on_disk.md"


def test_python_blocks_run_one_after_another():
    check_md_file(GUIDE, memory=True)
