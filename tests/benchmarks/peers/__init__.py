"""One file a library: how it is filled, written to and sampled from, doing the same work.

A file has `WORKS`, which maps the name of a work to a `Buffer`, as far as the library does it. The
libraries are optional; one that is not installed is left out with a line of advice.
"""

import importlib
from collections.abc import Iterable
from types import ModuleType

from tests.benchmarks.peers.base import Buffer

__all__ = ["ON_CUDA", "PEERS", "Buffer", "load_peer", "missing_peers"]

PEERS = (
    "ours",
    "torchrl",
    "sb3",
    "cpprb",
    "tianshou",
    "flashbax",
    "rlox",
    "ring",
    "raw",
)
# Whose batches arrive on a GPU if one is asked for.
ON_CUDA = ("ours", "torchrl", "sb3", "ring")


def load_peer(name: str) -> ModuleType | str:
    """Imports an adapter, or says what is missing for it."""
    try:
        return importlib.import_module(f"tests.benchmarks.peers.{name}")
    except ModuleNotFoundError as error:
        return f'{name}: left out, {error}; pip install -e ".[bench]"'


def missing_peers(names: Iterable[str]) -> list[str]:
    """Returns a line of advice for each library that is not installed."""
    return [advice for advice in map(load_peer, names) if isinstance(advice, str)]
