"""This package on a GPU with its draws captured in CUDA graphs; see tutorials/on_gpu.md."""

from typing import Any

import torch

from tests.benchmarks.peers import ours
from tests.benchmarks.peers.base import Buffer

__all__ = ["WORKS"]

WARM_UPS = 3


class Captured:
    """Draws, with the update of priorities, as one graph for each size of batch."""

    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]]

    def sample(self, batch_size: int) -> Any:
        if batch_size not in self.__dict__.setdefault("graphs", {}):
            self.graphs[batch_size] = self.captured(batch_size)
        graph, batch = self.graphs[batch_size]
        graph.replay()
        return batch

    def captured(self, batch_size: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                super().sample(batch_size)  # type: ignore[misc]
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            batch = super().sample(batch_size)  # type: ignore[misc]
        return graph, batch


DRAWS = (
    "uniform",
    "her",
    "her_n_step",
    "everything",
    "n_step",
    "priorities",
    "recent",
    "sequences",
)
WORKS: dict[str, type[Buffer]] = {
    work: type(kind.__name__, (Captured, kind), {})
    for work, kind in ours.WORKS.items()
    if work in DRAWS
}
