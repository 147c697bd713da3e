"""The page on how the package is built: its drawing is that of today, and it names what there is."""

import re

from tests.layers_drawing import PACKAGE, PAGE, layers, written


def test_the_drawing_is_that_of_today():
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.layers_drawing"
    assert page.count("  subgraph") <= 8


def test_every_part_is_in_a_layer():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    # Importing the environments registers them; nobody imports from there.
    assert parts - {"__init__", "__pycache__", "envs"} == {
        part for layer in layers() for part in layer
    }


def test_folders_that_the_page_names_are_there():
    named = set(re.findall(r"^\| .* \| `(\w+)`, ", PAGE.read_text(), re.MULTILINE))
    assert named
    assert named <= {path.name for path in PACKAGE.iterdir()}
