"""Draws the layers of the package, out of what keeps them: the contract of import-linter and the imports.

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
    """Returns the parts of the package by layer, the top first."""
    project = (ROOT / "pyproject.toml").read_text()
    contract = project.split('name = "Arrows point down only"')[1]
    listed = ast.literal_eval(re.search(r"^layers = (\[.*?^\])", contract, re.M | re.S)[1])
    names = [re.split(r" [|:] ", layer) for layer in listed]
    return [[name.removeprefix("trl_storages.") for name in layer] for layer in names]


def summary(part: str) -> str:
    """Returns the first sentence of what a part says of itself."""
    path = PACKAGE / part
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text())).split("\n")[0]


def imports(parts: set[str]) -> dict[str, set[str]]:
    """Returns which parts each part imports."""
    found: dict[str, set[str]] = {part: set() for part in parts}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part not in parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_storages"):
                names = [*(node.module or "").split(".")[1:2]] or [each.name for each in node.names]
                found[part] |= {*names} & parts - {part}
    return found


def arrows(parts: set[str]) -> list[tuple[str, str]]:
    """Returns the imports that don't follow from others, by which a part is reached on a longer way."""
    direct = imports(parts)

    reached = {part: {*others} for part, others in direct.items()}
    for _ in parts:
        for others in reached.values():
            others |= {further for other in others for further in reached[other]}
    # Parts of one layer may know each other: what leads back says nothing.
    return sorted(
        (part, other)
        for part in parts
        for other in direct[part]
        if not any(
            other in reached[between] and part not in reached[between]
            for between in direct[part] - {other}
        )
    )


def drawing() -> str:
    """Returns the drawing as a mermaid block, and the table below it."""
    *above, below = layers()
    lines = ["```mermaid", "flowchart TD"]
    for number, layer in enumerate(above, 1):
        lines.append(f'  subgraph layer_{number}[" "]')
        lines += [f"    {part}" for part in layer]
        lines.append("  end")
    lines += [
        f"  {part} --> {other}"
        for part, other in arrows({part for layer in above for part in layer})
    ]
    lines += ["```", "", "| part | what it is |", "|---|---|"]
    lines += [f"| `{part}` | {summary(part)} |" for layer in [*above, below] for part in layer]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Returns the page with the drawing as it is today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + drawing() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
