"""Times this package next to other libraries: `python -m tests.benchmarks --help`.

The libraries run in one process for each number of threads, and take turns. Prints tables of medians
and ratios, then where another library is ahead. Absolute figures move between machines and with
what else a machine does; both sides of a ratio are of the same moments.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.benchmarks.contest import Plan
from tests.benchmarks.measure import Effort
from tests.benchmarks.peers import PEERS, missing_peers
from tests.benchmarks.readme import updated
from tests.benchmarks.results import Report, describe_machine
from tests.benchmarks.sections import SECTIONS, prepare_process, run_section
from tests.benchmarks.tables import format_all, format_missed

ROOT = Path(__file__).parents[2]
# Sections that are of one number of threads, the first that is asked for.
ONCE = ("stored_once", "mapped", "lanes", "growth", "memory")
# One that measures memory, for which a process must not have had any that it can take again.
FRESH = ("stored_once",)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    names = list(dict.fromkeys([*SECTIONS, *ONCE]))
    parser.add_argument("--only", nargs="+", choices=names, default=None, metavar="SECTION",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=int, default=None,
                        help="stored transitions; 10^4, 10^5 and 10^6 otherwise")  # fmt: skip
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 4096])
    parser.add_argument("--threads", nargs="+", type=int, default=None)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=None, help="turns of each library")
    parser.add_argument("--quick", action="store_true", help="fewer rows, rounds and threads")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall",
                        help="processor time is steadier on a busy machine")  # fmt: skip
    parser.add_argument("--json", type=Path, help="file to keep the results in")
    parser.add_argument("--readme", type=Path, metavar="JSON",
                        help="only write the tables of such a file into the pages")  # fmt: skip
    parsed = parser.parse_args(arguments)
    parsed.only = parsed.only or names
    if min(parsed.batches) < 1 or (parsed.rows and min(parsed.rows) < max(parsed.batches)):
        parser.error(
            f"--rows must be at least as many as are drawn, {max(parsed.batches)}; got {parsed.rows}"
        )
    return parsed


def worker(threads: int, peers: list[str]) -> ProcessPoolExecutor:
    """Starts a fresh process: JAX reads its flags, and torch its threads, only once."""
    for name in ("OMP_NUM_THREADS", "NPROC", "RAYON_NUM_THREADS"):  # of torch, JAX and rlox
        os.environ[name] = str(threads)
    multi_threaded = "true" if threads > 1 else "false"
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={multi_threaded}"
    return ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=prepare_process, initargs=(threads, peers)
    )


def plan_of(arguments: argparse.Namespace, threads: int) -> Plan:
    """Fills in what was not asked for otherwise."""
    quick = arguments.quick
    rows = arguments.rows or ([10**4, 10**5] if quick else [10**4, 10**5, 10**6])
    effort = Effort(
        rounds=arguments.rounds or (4 if quick else 10),
        calls=10 if quick else 20,
        seconds=0.05 if quick else 0.1,
        processor_time=arguments.clock == "processor",
    )
    return Plan(
        rows=tuple(sorted(rows)),
        batch_sizes=tuple(sorted(arguments.batches)),
        threads=threads,
        peers=tuple(arguments.peers),
        effort=effort,
    )


def measure_all(arguments: argparse.Namespace) -> Report:
    """Runs the sections that were asked for, for each number of threads."""
    threads = arguments.threads or ([1] if arguments.quick else [1, 2])
    report = Report(machine=describe_machine(), left_out=missing_peers(arguments.peers))
    report.machine |= {"device": "cpu", "clock": arguments.clock}
    print(*report.left_out, sep="\n", end="", file=sys.stderr)
    for number in threads:
        plan = plan_of(arguments, number)
        with worker(number, arguments.peers) as pool, worker(number, arguments.peers) as fresh:
            for section in arguments.only:
                if section in ONCE and number != threads[0]:
                    continue
                begin = time.perf_counter()
                where = fresh if section in FRESH else pool
                found = where.submit(run_section, section, plan).result()
                report.results += found.results
                report.memory |= found.memory
                took = time.perf_counter() - begin
                print(f"{section:>12}: {took:.0f} s", file=sys.stderr, flush=True)
                if arguments.json is not None:
                    report.save(arguments.json)
    return report


def main() -> None:
    """Measures, or reads what was measured, and prints it."""
    arguments = parse_arguments()
    if arguments.readme is not None:
        report = Report.load(arguments.readme)
        for path, text in updated(report, ROOT):
            path.write_text(text)
            print(f"The tables of {path} are those of {arguments.readme}.")
        return
    report = measure_all(arguments)
    print(*format_all(report), *format_missed(report), sep="\n")


if __name__ == "__main__":
    main()
