"""Draws figure 1 of Andrychowicz et al. 2017: flipping n bits, with HER and without.

    python tutorials/bits_figure.py           # makes the missing runs, then draws
    python tutorials/bits_figure.py --draw    # draws the finished ones

Each agent learns with DQN for 1,024 steps per bit, with one update on 128 transitions every four steps;
the budget was chosen on a seed that is not shown. Each finished run is a line of
`tutorials/bits_figure.jsonl`; only runs that were interrupted are repeated.

Reference: Andrychowicz et al. 2017, arXiv:1707.01495, figure 1.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import learning_results
import train_her
from learning_results import Run
from options import OneLineParser, integer_from, need

BITS = (5, 10, 15, 20, 25, 30, 35, 40)
SEEDS = (0, 1, 2)
STEPS_PER_BIT = 1024
# The batch size is the paper's. With more environments each step is faster.
OPTIONS = ("--batch-size=128", "--num-envs=16")
ROW = ("BitFlipping-v0", "dqn")
RESULTS = Path(__file__).with_suffix(".jsonl")
PICTURE = Path(__file__).parent / "images" / "bits_figure.png"


def planned(bits: Sequence[int], seeds: Sequence[int]) -> list[Run]:
    """Returns the runs, seed by seed, so that a first curve is complete early."""
    task = train_her.TASKS[ROW]
    return [
        Run(
            *ROW,
            hindsight=hindsight,
            seed=seed,
            steps=STEPS_PER_BIT * num,
            steps_per_update=task.steps_per_update,
            discount=task.discount,
            bits=num,
            bound=None,
        )
        for seed in seeds
        for num in bits
        for hindsight in (True, False)
    ]


def draw(finished: Mapping[Run, Mapping[str, Any]], path: Path) -> None:
    """Draws the mean over the seeds, and each run as a point, to a PNG file."""
    pyplot = need("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for hindsight, name, style in ((True, train_her.WITH, "o-"), (False, train_her.WITHOUT, "s--")):
        rates: dict[int, list[float]] = {}
        for run, record in finished.items():
            if run.hindsight == hindsight and run.bits is not None:
                rates.setdefault(run.bits, []).append(record["success"])
        bits = sorted(rates)
        (line,) = axes.plot(bits, [statistics.mean(rates[num]) for num in bits], style, label=name)
        points = [(num, rate) for num in bits for rate in rates[num]]
        axes.scatter(*zip(*points, strict=True), s=12, alpha=0.5, color=line.get_color())
    axes.set(xlabel="number of bits n", ylabel="success rate", ylim=(-0.04, 1.04))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="bits_figure.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, integer_from(1)
    add(
        "--bits",
        nargs="+",
        default=[*BITS],
        type=count,
        help="numbers of bits (5 10 15 20 25 30 40)",
    )
    add("--seeds", nargs="+", default=[*SEEDS], type=integer_from(0), help="(0 1 2)")
    add("--jobs", default=1, type=count, help="concurrent runs (%(default)s)")
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--output", default=PICTURE, type=Path, help="picture (%(default)s)")
    add("--draw", action="store_true", help="only draw the runs that are finished")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    need("tqdm"), need("matplotlib")
    runs, finished = planned(args.bits, args.seeds), learning_results.read(args.results)
    missing = [] if args.draw else [run for run in runs if run not in finished]
    made = learning_results.make_all(missing, args.results, args.jobs, OPTIONS)
    for number, record in enumerate(made, 1):
        summary = f"{record['bits']} bits, {learning_results.summary(record)}"
        print(f"{number}/{len(missing)}: {summary}", file=sys.stderr, flush=True)
    finished = learning_results.read(args.results)
    if not set(runs) & finished.keys():
        raise SystemExit(
            f"bits_figure.py: {args.results} holds none of these runs: leave --draw out"
        )
    draw({run: finished[run] for run in runs if run in finished}, args.output)
    print(f"success over bits: {args.output}")


if __name__ == "__main__":
    main()
