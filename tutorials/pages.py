"""MkDocs makes these pages: the first one from the README, and one for each public name."""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Module -> prefix of its pages.
MODULES = {
    "trl_storages": "",
    "trl_storages.datasets": "datasets.",
    "trl_storages.functional": "functional.",
    "trl_storages.plotting": "plotting.",
    "trl_storages.sb3": "sb3.",
}


def public_names(module: str) -> list[str]:
    """Returns the names in `__all__` of a module, without importing it."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    raise ValueError(f"{module} must define __all__.")


def on_page_markdown(markdown: str, **_) -> str:
    """Returns a page without links to files that are not pages, such as the licence."""
    return re.sub(
        r"\[([^]]+)\]\((?:\.\./|README|CONTRIBUTING|CITATION|LICENSE)[^)]*\)", r"\1", markdown
    )


def on_files(files: Files, config) -> Files:
    """Adds the generated pages."""
    readme = (ROOT / "README.md").read_text().replace("](tutorials/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    listed = []
    for module, prefix in MODULES.items():
        for name in public_names(module):
            page = f"reference/{prefix}{name}.md"
            content = (
                f"# {name}\n\n::: {module}.{name}\n    options:\n      show_root_heading: false\n"
            )
            files.append(File.generated(config, page, content=content))
            listed.append(f"- [{prefix}{name}]({prefix}{name}.md)")
    reference = "# Reference\n\n" + "\n".join(listed) + "\n"
    files.append(File.generated(config, "reference/index.md", content=reference))
    return files
