"""Runs decoding steps as CUDA graphs: one launch replaces the launches of hundreds of small kernels.

A graph holds one step: the forward pass, the draw of the next tokens, and the update of the buffers for the step after
it. So several steps follow each other on the GPU, and the host reads their tokens once. Each graph has a fixed number
of rows and of cache positions. A step uses the smallest graph size that is large enough, so about a dozen graphs
suffice for all steps of a batch. The results of the extra rows are dropped."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_agent.policy.engines.sampling import draw

SHORTEST = 128  # fewest cache positions of a graph
MOST_STEPS = 8  # most steps without a look at their tokens; steps after a sequence's end are computed in vain

Step = Callable[[Tensor, Tensor, int], Tensor]


class StepGraphs:
    """Records the function ``step`` and the draw of the next tokens as CUDA graphs, and replays them. ``step`` gets
    token ids (int64 [n]), their positions (int64 [n]) and the number of cache positions to read. It returns logits [n,
    vocab]. n is at most ``rows``. ``step`` may run twice with the same arguments; it must then return the same
    logits."""

    def __init__(self, step: Step, rows: int, device: torch.device) -> None:
        self._step, self._rows = step, rows
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(rows, dtype=torch.float64, device=device)
        self._noise = torch.zeros(rows, MOST_STEPS, dtype=torch.float64, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)  # the step's number, from 0
        self._drawn = torch.zeros(rows, MOST_STEPS, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows, MOST_STEPS, dtype=torch.float32, device=device)
        self.forget()

    def __call__(
        self, ids: Tensor, positions: Tensor, noise: Tensor, temperatures: Tensor, length: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Draws the next k tokens of n rows. Returns their ids (int64) and log-probabilities (float32), both [n, k].

        ``ids`` and ``positions``, int64 [n], are each row's last token and its position. ``noise`` is float64 [n, k],
        with k at most ``MOST_STEPS``; ``temperatures`` are float64 [n]. The steps read the first ``length`` cache
        positions. ``padded_length`` rounds ``length`` up, to at most ``longest``, the length of the cache."""
        n, steps = noise.shape
        size = min(1 << (n - 1).bit_length(), self._rows), padded_length(length, longest)

        def begin() -> None:
            self._ids[:n], self._positions[:n], self._temperatures[:n] = ids, positions, temperatures
            self._noise[:n, :steps] = noise
            self._positions[n : size[0]].zero_()
            self._column.zero_()

        if size not in self._recorded:
            begin()
            self._recorded[size] = self._record(*size)
        begin()
        for _ in range(steps):
            self._recorded[size].replay()
        return self._drawn[:n, :steps].clone(), self._logprobs[:n, :steps].clone()

    def forget(self) -> None:
        """Drops all graphs. Call it when ``step`` reads or writes other tensors than before."""
        self._recorded: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again

    def _advance(self, rows: int, length: int) -> None:
        """Takes one step of the first ``rows`` rows, and leaves the buffers ready for the next step."""
        ids, positions = self._ids[:rows], self._positions[:rows]
        logits = self._step(ids, positions, length)
        noise = self._noise[:rows].index_select(1, self._column)[:, 0]
        drawn, logprobs = draw(logits, noise, self._temperatures[:rows])
        self._drawn[:rows].index_copy_(1, self._column, drawn[:, None])
        self._logprobs[:rows].index_copy_(1, self._column, logprobs[:, None])
        ids.copy_(drawn)
        positions.add_(1)
        self._column.add_(1)

    def _record(self, rows: int, length: int) -> torch.cuda.CUDAGraph:
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance(rows, length)  # libraries allocate and select algorithms at the first call
        torch.cuda.current_stream().wait_stream(side)
        # thread_local: other threads may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._advance(rows, length)
        return graph


def padded_length(length: int, most: int) -> int:
    """Returns ``length`` rounded up to one of 128, 192, 256, 384, 512, 768, ..., but to at most ``most``."""
    power = SHORTEST
    while power < length:
        if length <= (middle := power * 3 // 2):
            return min(middle, most)
        power *= 2
    return min(power, most)
