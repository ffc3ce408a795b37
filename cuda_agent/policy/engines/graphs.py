"""Runs decoding steps as CUDA graphs: one launch replaces the launches of hundreds of small kernels.

Each graph has a fixed number of rows and of cache positions. A step uses the smallest graph size that is large enough,
so about a dozen graphs suffice for all steps of a batch. The results of the extra rows are dropped."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHORTEST = 128  # fewest cache positions of a graph

Step = Callable[[Tensor, Tensor, int], Tensor]


class StepGraphs:
    """Records the function ``step`` as CUDA graphs and replays them. ``step`` gets token ids (int64 [n]), their
    positions (int64 [n]) and the number of cache positions to read. It returns logits [n, vocab]. n is at most
    ``rows``. ``step`` may run twice with the same arguments; it must then return the same logits."""

    def __init__(self, step: Step, rows: int, device: torch.device) -> None:
        self._step, self._rows = step, rows
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.forget()

    def __call__(self, ids: Tensor, positions: Tensor, length: int, longest: int) -> Tensor:
        """Returns the logits of one decoding step, which reads the first ``length`` cache positions. ``padded_length``
        rounds ``length`` up, to at most ``longest``, the length of the cache."""
        n = len(ids)
        rows, length = min(1 << (n - 1).bit_length(), self._rows), padded_length(length, longest)
        self._ids[:n], self._positions[:n] = ids, positions
        self._positions[n:rows].zero_()
        if (rows, length) not in self._recorded:
            self._recorded[rows, length] = self._record(rows, length)
        graph, logits = self._recorded[rows, length]
        graph.replay()
        return logits[:n].clone()  # the next replay overwrites the buffer

    def forget(self) -> None:
        """Drops all graphs. Call it when ``step`` reads or writes other tensors than before."""
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again

    def _record(self, rows: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        arguments = self._ids[:rows], self._positions[:rows], length
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(*arguments)  # libraries allocate and select algorithms at the first call
        torch.cuda.current_stream().wait_stream(side)
        # thread_local: other threads may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(*arguments)
        return graph, logits


def padded_length(length: int, most: int) -> int:
    """Returns ``length`` rounded up to one of 128, 192, 256, 384, 512, 768, ..., but to at most ``most``."""
    power = SHORTEST
    while power < length:
        if length <= (middle := power * 3 // 2):
            return min(middle, most)
        power *= 2
    return min(power, most)
