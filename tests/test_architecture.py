"""The page on how the package is built: its drawing is that of today, and it names what there is."""

import re

from tests.layers_drawing import PACKAGE, PAGE, arrows, layers, written


def test_the_drawing_is_that_of_today():
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.layers_drawing"


def test_every_part_is_in_a_layer():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    # Importing the environments registers them; nobody imports from there.
    assert parts - {"__init__", "__pycache__", "envs"} == {
        part for layer in layers() for part in layer
    }


def test_arrows_point_down():
    rank = {part: number for number, layer in enumerate(layers()) for part in layer}
    drawn = arrows({*rank})
    assert len(drawn) > len(layers())
    assert [(part, other) for part, other in drawn if rank[part] > rank[other]] == []


def test_parts_that_the_page_names_are_there():
    names = {name for name in re.findall(r"`([a-z_]+)`", PAGE.read_text()) if "_" not in name}
    parts = {path.stem for path in PACKAGE.rglob("*") if path.is_dir() or path.suffix == ".py"}
    others = {"next", "recipes", "sample", "lint-imports", "compiled"}
    kernels = {path.stem for path in (PACKAGE / "kernels").iterdir()}
    modules = {part for layer in layers() for part in layer}
    assert names - parts - others - kernels - modules == set()
