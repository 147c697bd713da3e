"""Draws the layers of the package from the contract of import-linter and from the imports.

    python -m tests.layers_drawing

writes the drawing and the table into `tutorials/architecture.md`.
"""

import ast
import re
from pathlib import Path

import trl_storages

ROOT = Path(__file__).parents[1]
PACKAGE = Path(trl_storages.__file__).parent
PAGE = ROOT / "tutorials" / "architecture.md"
BEGIN, END = "<!-- layers: begin -->\n", "<!-- layers: end -->\n"


def layers() -> list[list[str]]:
    """Returns the modules of the package by layer, from top to bottom."""
    project = (ROOT / "pyproject.toml").read_text()
    contract = project.split('name = "Arrows point down only"')[1]
    listed = ast.literal_eval(re.search(r"^layers = (\[.*?^\])", contract, re.M | re.S)[1])
    names = [re.split(r" [|:] ", layer) for layer in listed]
    return [[name.removeprefix("trl_storages.") for name in layer] for layer in names]


def summary(module: str) -> str:
    """Returns the first line of the docstring of a module."""
    path = PACKAGE / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text())).split("\n")[0]


def imports(modules: set[str]) -> dict[str, set[str]]:
    """Returns the modules that each module imports."""
    imported: dict[str, set[str]] = {module: set() for module in modules}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if module not in modules:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_storages"):
                names = [*(node.module or "").split(".")[1:2]] or [each.name for each in node.names]
                imported[module] |= {*names} & modules - {module}
    return imported


def arrows(modules: set[str]) -> list[tuple[str, str]]:
    """Returns the imports that no longer path of imports implies."""
    direct = imports(modules)

    reached = {module: {*others} for module, others in direct.items()}
    for _ in modules:
        for others in reached.values():
            others |= {further for other in others for further in reached[other]}
    # Modules of one layer may import each other: a cycle implies nothing.
    return sorted(
        (module, other)
        for module in modules
        for other in direct[module]
        if not any(
            other in reached[between] and module not in reached[between]
            for between in direct[module] - {other}
        )
    )


def drawing() -> str:
    """Returns the drawing as a mermaid block, and the table below it."""
    *above, below = layers()
    lines = ["```mermaid", "flowchart TD"]
    for number, layer in enumerate(above, 1):
        lines.append(f'  subgraph layer_{number}[" "]')
        lines += [f"    {module}" for module in layer]
        lines.append("  end")
    lines += [
        f"  {module} --> {other}"
        for module, other in arrows({module for layer in above for module in layer})
    ]
    lines += ["```", "", "| module | contents |", "|---|---|"]
    lines += [
        f"| `{module}` | {summary(module)} |" for layer in [*above, below] for module in layer
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Returns the page with the current drawing."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + drawing() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
