"""Times samples with one write before each: `python -m tests.benchmarks.sampling --help`.

Prints the medians in microseconds at 10^4, 10^5 and 10^6 stored rows, and how many times as long
each other library takes. Absolute figures move between machines and with what else a machine
does; the ratios within one run are what to look at.
"""

import argparse
import itertools
import logging
import os
import warnings

import torch

from tests.benchmarks.data import flat_columns, goal_columns
from tests.benchmarks.measure import SPARE_ROWS, measure_sampling
from tests.benchmarks.peers import PEERS, load_peer
from tests.benchmarks.tables import format_header, format_line, format_machine

WORKS = {
    "uniform": "uniform draws",
    "her": "hindsight (future), 4 of 5 rows relabelled",
    "n_step": "3-step returns of flat observations",
    "priorities": "draws by priority and the update of the priorities, flat observations",
    "recent": "draws that emphasise recent experience, flat observations",
    "everything": "hindsight x 3-step x priorities x recency, with update; others: hindsight alone",
}
FLAT = ("n_step", "priorities", "recent")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sampling")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rows", nargs="+", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--unequal", action="store_true", help="episodes of 1 to 99 steps, not 50")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each library")
    parser.add_argument("--calls", type=int, default=20, help="samples in a turn")
    return parser.parse_args()


def limit_threads(num_threads: int) -> None:
    """NumPy gathers in one thread anyway; JAX reads its flags when it is imported."""
    torch.set_num_threads(num_threads)
    if num_threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


def main() -> None:
    arguments = parse_arguments()
    limit_threads(arguments.threads)
    warnings.simplefilter("ignore")  # the other libraries' own
    found = {name: load_peer(name) for name in arguments.peers}
    peers = {name: peer for name, peer in found.items() if not isinstance(peer, str)}
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    print(format_machine())
    print(*(line for line in found.values() if isinstance(line, str)), sep="\n")
    for work in arguments.works:
        taking_part = {name: peer for name, peer in peers.items() if work in peer.WORKS}
        print(
            f"{WORKS[work]}: microseconds a sample, medians of {arguments.rounds * arguments.calls}"
            f", one write before each, threads: {arguments.threads}"
        )
        print(format_header([peer.TITLE for peer in taking_part.values()]))
        for rows in arguments.rows:
            columns = goal_columns(rows + SPARE_ROWS, unequal=arguments.unequal)
            columns = flat_columns(columns) if work in FLAT else columns
            results = measure_sampling(
                work,
                columns,
                arguments.batch_sizes,
                taking_part,
                rounds=arguments.rounds,
                calls=arguments.calls,
            )
            for _, of_case in itertools.groupby(results, key=lambda result: result.case):
                print(format_line(list(of_case)), flush=True)
        print()


if __name__ == "__main__":
    main()
