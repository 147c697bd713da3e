"""What the README and the guides show runs, and their links and tables are right."""

import re
from pathlib import Path

import gymnasium
import pytest
from mktestdocs import check_md_file

from tests.benchmarks.readme import updated
from tests.benchmarks.results import Report
from trl_storages import EpisodeSequence, HERReplayStorage, gym_reward

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "tutorials").glob("*.md"))
#: These guides need more than a process of their own, which their tests give them.
ELSEWHERE = {"several_machines.md"}
LINK = r"\]\(([^)]+)\)"


# Collectors, losses and environments of the examples warn about their own options, Minari about metadata.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*( is set to None|env_spec is None)")
@pytest.mark.parametrize(
    "page",
    [README, *(guide for guide in GUIDES if guide.name not in ELSEWHERE)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_blocks_run_one_after_another(page, tmp_path, monkeypatch, start_processes_by):
    monkeypatch.chdir(tmp_path)
    start_processes_by("forkserver")
    check_md_file(page, memory=True)


def test_the_readme_shows_what_its_block_prints(capsys):
    blocks = r"```python\n([^`]*explain\([^`]*)```.*?```text\n(.*?)```"
    block, shown = re.search(blocks, README.read_text(), re.DOTALL).groups()
    exec(block, {})
    assert capsys.readouterr().out == shown


def test_stochastic_actors_explore_where_no_collector_calls_them():
    """TorchRL's actors act deterministically outside of collectors, which does not learn."""
    blocks = []
    for page in (README, *GUIDES):
        blocks += re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if "ProbabilisticActor(" in block]
    assert blocks
    assert all("Collector(" in block or "ExplorationType.RANDOM" in block for block in blocks)


def test_the_readme_has_few_links_and_the_guides_are_listed():
    assert len(re.findall(LINK, README.read_text())) <= 24
    listed = set(re.findall(LINK, (ROOT / "tutorials/README.md").read_text()))
    guides = [*GUIDES, *(ROOT / "tutorials").glob("*.ipynb")]
    assert {guide.name for guide in guides} - listed == {"README.md"}


@pytest.mark.parametrize(
    "page",
    [README, ROOT / "CONTRIBUTING.md", ROOT / "tests/benchmarks/README.md", *GUIDES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files_and_headings_that_are_there(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(LINK, prose):
        if link.startswith("http"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert heading in anchors, link


def test_there_are_exactly_two_commands():
    commands = "".join(re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.M))
    train, test = commands.strip().splitlines()
    assert train.startswith(begin := "python3 -m venv .venv && .venv/bin/pip install")
    assert train.endswith(".venv/bin/python tutorials/train_her.py")
    assert test.startswith(begin)
    assert test.endswith(".venv/bin/python -m pytest -n 2 --dist worksteal")


@pytest.mark.parametrize("run", ["results", "lanes", "gpu"])
def test_speed_is_that_of_the_run_that_is_kept(run):
    kept = f"tests/benchmarks/{run}.json"
    for path, text in updated(Report.load(ROOT / kept), ROOT):
        assert path.read_text() == text, f"run python -m tests.benchmarks --readme {kept}"


def test_what_a_batch_holds_is_listed():
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    options = {"n_step": 2, "alpha": 0.5, "sample_unit": EpisodeSequence(2), "batch_size": 6}
    storage = HERReplayStorage.from_env(env, reward_fn=gym_reward(env), **options)
    observation, _ = env.reset(seed=0)
    after, *outcome = env.step(0)
    storage.record(observation, 0, *outcome, after)
    page = (ROOT / "tutorials/batches.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| `(\[.*\])` \|", page, re.MULTILINE)
    listed = {name: "1" in of for names, of in rows for name in re.findall("`(.*?)`", names)}
    batch, stored = storage.sample(), storage[:]
    added = {
        key: batch[key].ndim == 2
        for key in list(batch.keys())
        if key not in stored.keys()  # noqa: SIM118
    }
    assert listed == added
