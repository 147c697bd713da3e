"""Draws the learning curves of `dqn.py` and `sac.py`: mean returns over a run, one line for each seed.

    python tutorials/dqn.py --seed 3 --results tutorials/agent_curves.jsonl   # another seed
    python tutorials/agent_curves.py                                          # draws them all

The two scripts write the lines of agent_curves.jsonl.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from options import OneLineParser, integer_from, need

RESULTS = Path(__file__).with_suffix(".jsonl")
PICTURE = Path(__file__).parent / "images" / "agent_curves.png"

Curve = list[tuple[int, float]]


def run(
    train: Callable[[str, int, int], Curve],
    argv: Sequence[str] | None,
    description: str | None,
    *,
    agent: str,
    env: str,
    steps: int,
) -> Curve:
    """Trains an agent with the options of the command line; `--results` appends its curve to a file.

    Args:
        train: maps environment, steps and seed to pairs of a step count and a mean return.
        argv: command line; None reads that of the process.
        description: the docstring of the program.
        agent: its name in the file.
        env: default environment.
        steps: default number of environment steps.
    """
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default=env, help="(%(default)s)")
    parser.add_argument("--steps", default=steps, type=integer_from(8), help="(%(default)s)")
    parser.add_argument("--seed", default=0, type=integer_from(0), help="(%(default)s)")
    parser.add_argument("--results", type=Path, help="file to which a line is appended")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # Networks this small gain nothing from more threads.
    curve = train(args.env, args.steps, args.seed)
    if args.results is not None:
        record = {"agent": agent, "env": args.env, "seed": args.seed, "steps": args.steps}
        with args.results.open("a") as file:
            file.write(json.dumps({**record, "curve": curve}) + "\n")
    return curve


def draw(results: Path, path: Path) -> None:
    """Draws a panel for each agent, a line for each seed, into a PNG file."""
    kept = [json.loads(line) for line in results.read_text().splitlines()]
    titles = list(dict.fromkeys(f"{record['agent']}, {record['env']}" for record in kept))
    pyplot = need("matplotlib.pyplot")
    figure, panels = pyplot.subplots(
        1, len(titles), figsize=(7.2, 3.0), layout="constrained", squeeze=False
    )
    for title, axes in zip(titles, panels[0], strict=True):
        for record in kept:
            if title == f"{record['agent']}, {record['env']}":
                steps, returns = zip(*record["curve"], strict=True)
                axes.plot(steps, returns, "o-", markersize=3, label=f"seed {record['seed']}")
        axes.set(xlabel="environment steps", ylabel="mean return", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--output", default=PICTURE, type=Path, help="picture (%(default)s)")
    args = parser.parse_args(argv)
    draw(args.results, args.output)


if __name__ == "__main__":
    main()
