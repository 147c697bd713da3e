"""The words of docstrings, comments, messages and guides: the patterns of `words.txt` do not occur."""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = (Path(__file__).parent / "words.txt").read_text().splitlines()
PATTERNS = [line.split(": ", 1) for line in LINES if not line.startswith("#")]
PAGES = [path for kind in ("md", "ipynb", "py") for path in (ROOT / "tutorials").glob(f"*.{kind}")]
SOURCES = [ROOT / "README.md", *sorted(PAGES), *sorted((ROOT / "trl_storages").rglob("*.py"))]


def texts_of_code(source):
    """Yields the comments (neighbouring lines together) and the string constants of a module."""
    comments, last = [], -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#: ")
            is_next = token.start[0] == last + 1 and comments
            comments[-1:] = [f"{comments[-1]} {text}"] if is_next else [*comments[-1:], text]
            last = token.start[0]
    yield from comments
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [it.value if isinstance(it, ast.Constant) else "X" for it in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.split(r"\n\s*\n", node.value)


def texts_of(path):
    if path.suffix == ".py":
        return [*texts_of_code(path.read_text())]
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        return [*prose, *(text for cell in code for text in texts_of_code(cell))]
    return re.split(r"\n\s*\n|\n(?=\s*[-*|#])", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_use_the_words_of_the_field(path):
    found = [
        f"{instead!r}, not {match[0]!r}: {text[max(match.start() - 40, 0) : match.end() + 40]}"
        for text in texts_of(path)
        for text in [" ".join(text.split())]
        for instead, pattern in PATTERNS
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]
    assert not found, "\n".join(found)
