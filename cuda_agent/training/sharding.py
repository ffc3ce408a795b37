"""Shards a model's weights over several processes (ranks) with FSDP2, and distributes rows of sequences over the ranks.

Each rank keeps a part of every parameter, of its gradient and of the optimizer's state. A layer's weights are gathered
from all ranks when the layer computes. All other weights, such as the embeddings, are gathered when an ``FsdpRoot`` is
called. Code that reads them must therefore run inside such a call. Gradients are summed over the ranks, not averaged,
because the losses of the ranks add up to the mean over the batch."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cuda_agent.training.packing import PackedRow, empty_row

Result = TypeVar("Result")


class FsdpRoot(nn.Module):
    """The root module of a sharded ``model``. It is called with a function without arguments. The call gathers the
    weights outside the model's layers, runs the function, and returns its result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, job: Callable[[], Result]) -> Result:
        return job()


def shard(model: nn.Module, trunk: nn.Module, mesh: DeviceMesh) -> FsdpRoot:
    """Shards ``model`` in place and returns its root module. The model's parameters become new objects. During a call
    of the root, the weights of each layer of ``trunk`` are gathered while this layer computes, and all other weights
    are gathered together. Raises ``ValueError`` if ``trunk`` has no list ``layers``."""
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(trunk).__name__} has no list of layers, by which its weights could be shared")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    root = FsdpRoot(model)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot average
    return root


def rows_of_rank(rows: Sequence[PackedRow], ranks: int, rank: int) -> list[PackedRow]:
    """Returns the rows that rank number ``rank`` of ``ranks`` computes. Rows are dealt out from the longest to the
    shortest, one to each rank per round. Every second round begins with the last rank. If rows run out in the last
    round, the remaining ranks get empty rows, so that all ranks have the same number of rows."""
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].ids), number))
    mine = []
    for turn, start in enumerate(range(0, len(order), ranks)):
        place = start + (rank if turn % 2 == 0 else ranks - 1 - rank)
        mine.append(rows[order[place]] if place < len(order) else empty_row())
    return mine


def whole(tensor: Tensor) -> Tensor:
    """Returns a sharded parameter as one whole tensor. All ranks must call this function."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def wait() -> None:
    """Blocks until all ranks call this function. Ranks wait on the CPU (by Gloo), so waiting does not occupy a GPU."""
    dist.all_reduce(torch.zeros(1))
