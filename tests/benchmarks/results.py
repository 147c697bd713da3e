"""What was measured, and the file that it is kept in."""

import json
import os
import platform
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import trl_storages

__all__ = ["Report", "Result", "describe_machine", "pick", "ratio"]

DISTRIBUTIONS = (
    *("torch", "torchrl", "tensordict", "numpy", "numba"),
    *("stable_baselines3", "cpprb", "tianshou", "flashbax", "jax", "rlox"),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How long one library took for one piece of work.

    Attributes:
        section: the part of the benchmark, such as "sampling".
        work: what was done, such as "her".
        peer: who did it, such as "torchrl".
        rows: how many transitions were stored.
        batch_size: how many were drawn, or written, by a call.
        threads: how many the libraries may use.
        row_nbytes: memory that a stored transition takes; 0 where it was not measured.
        rounds: the median of each round, in microseconds a call. Results of one section, size and
            batch took turns, so that their rounds are of the same moments; "loop" and "alone" did too.
    """

    section: str
    work: str
    peer: str
    rows: int
    batch_size: int
    threads: int = 1
    row_nbytes: float = 0.0
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Microseconds a call."""
        return statistics.median(self.rounds)


def ratio(over: Result, under: Result) -> float:
    """Says how many times as long `over` took, as the median over rounds.

    Whatever else the machine did slowed both sides of a round, so this is steadier than the quotient
    of two medians.
    """
    return statistics.median(a / b for a, b in zip(over.rounds, under.rounds, strict=True))


def pick(results: Iterable[Result], **wanted: Any) -> Result | None:
    """Returns the result whose attributes are those wanted; None where nobody measured it."""
    for result in results:
        if all(getattr(result, name) == value for name, value in wanted.items()):
            return result
    return None


@dataclass(kw_only=True)
class Report:
    """A run: the machine, the times, and what else was found out.

    Attributes:
        machine: processor, operating system, versions, backend and device.
        results: the times.
        memory: of the section "memory"; see `tests.benchmarks.memory`.
        counts: of the run for a GPU: peer -> work -> operations that a call starts on the GPU, and waits.
        left_out: lines about libraries or sections that could not run.
    """

    machine: dict[str, str | int] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    counts: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes JSON, a line for each result."""
        fields = asdict(self)
        results = ",\n".join(json.dumps(result) for result in fields.pop("results"))
        others = json.dumps(fields, indent=1).removesuffix("\n}")
        path.write_text(f'{others},\n "results": [\n{results}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Reads what `save` wrote."""
        found = json.loads(path.read_text())
        found["results"] = [Result(**result) for result in found["results"]]
        return cls(**found)


def describe_machine() -> dict[str, str | int]:
    """Names processor, cores, memory and versions; nothing that tells whose machine it is."""
    machine: dict[str, str | int] = {
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    versions = {}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return machine | {"trl_storages": trl_storages.__version__} | versions


def processor() -> str:
    """Names the processor; `platform` does not know it on Linux."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
