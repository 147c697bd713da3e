"""What a clone, a wheel and a source distribution consist of, and what stands in more than one place."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import trl_storages

ROOT = Path(__file__).parents[1]
#: A small part of the tests, of each kind: numbers, the container, files, documents.
PART = [
    "tests/test_functional_returns.py",
    "tests/contract/test_rows.py",
    "tests/test_package.py",
    "tests/test_architecture.py",
    "tests/test_project.py",
]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == trl_storages.__version__
    assert {"message", "title", "authors", "license"} <= {*citation}
    assert f"## {trl_storages.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_workflows_run_what_a_clone_is_checked_by():
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    linux, macos = checks["jobs"]["linux"], checks["jobs"]["macos"]
    assert [step["run"] for step in linux["steps"] if "run" in step][-1] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'requires-python = ">=(3\.\d+)"', project)[1]
    assert oldest == linux["strategy"]["matrix"]["python"][0]
    # Contributors are told the same, without the cores to use.
    told = (ROOT / "CONTRIBUTING.md").read_text()
    for job, chosen in (
        (macos, '-m "not slow and not search"'),
        (checks["jobs"]["searches"], "-m search"),
    ):
        assert job["steps"][-1]["run"] == f"python -m pytest -n 2 --dist worksteal {chosen}"
        assert f"`pytest {chosen}`" in told


def test_the_guide_for_contributors_names_files_that_are_there():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"\.ci/run|(?:tests|tutorials)/[\w/.]+(?![\w/.<])", guide)
    named += re.findall(r"\]\(([\w/.]+)\)", guide)
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_wheel_and_source_distribution_work_outside_of_the_checkout(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-d"]
    run(*build, str(tmp_path / "dist"), cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (source,) = (tmp_path / "dist").glob("*.tar.gz")

    # What is built from the source distribution is the same.
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    run(*build, str(tmp_path / "again"), "-t", "wheel", cwd=unpacked)
    (again,) = (tmp_path / "again").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert names == zipfile.ZipFile(again).namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_storages").rglob("*.py")}
    assert modules | {"trl_storages/py.typed"} <= {*names}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"trl_storages"}

    # The installed package passes the tests that came with the sources, which are without a package.
    (unpacked / "trl_storages").rename(tmp_path / "not_this_one")
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    run(*pip, "--target", str(installed), str(wheel), cwd=tmp_path)
    # A new installation would compile its loops.
    environment = {"PYTHONPATH": str(installed), "NUMBA_DISABLE_JIT": "1"}
    program = (
        "import pytest, sys, trl_storages; print(trl_storages.__file__); sys.exit(pytest.main())"
    )
    arguments = ["-x", "-m", "not slow", *PART]
    told = run(sys.executable, "-c", program, *arguments, cwd=unpacked, **environment)
    assert told.startswith(f"{installed / 'trl_storages/__init__.py'}\n")
    assert "100%" in told
