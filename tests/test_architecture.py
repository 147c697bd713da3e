"""The page on how the package is built: its drawing is current, and the modules that it names exist."""

import re

from tests.layers_drawing import PACKAGE, PAGE, layers, written


def test_drawing_of_layers_is_current():
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.layers_drawing"
    assert page.count("  subgraph") <= 8


def test_every_module_is_in_a_layer():
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    # Importing `envs` registers the environments; no module imports from it.
    assert modules - {"__init__", "__pycache__", "envs"} == {
        module for layer in layers() for module in layer
    }


def test_modules_named_by_the_page_exist():
    named = set(re.findall(r"^\| .* \| `(\w+)`, ", PAGE.read_text(), re.MULTILINE))
    assert named
    assert named <= {path.stem for path in PACKAGE.iterdir()}
