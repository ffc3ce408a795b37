"""A model whose weights several processes (ranks) share, FSDP2's way, and rows dealt out between them.

Each rank keeps a part of every parameter, of its gradient and of the optimizer's state; a layer's weights are gathered
when it computes.  Everything that touches weights runs inside ``FsdpRoot``, the root whose hooks gather the ends of the
model.  Gradients are added up over ranks, not averaged: losses are already parts of the global batch's mean.
One mesh is all ranks of the process group, over Gloo on processors and NCCL on GPUs.
Does not cover: rows cut across ranks (every rank computes whole rows), copies of the mesh, weights on the processor
of a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cuda_agent.training.packing import PackedRow, empty_row

Result = TypeVar("Result")


class FsdpRoot(nn.Module):
    """Computes anything with its model's weights gathered as needed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, job: Callable[[], Result]) -> Result:
        return job()


def shard(model: nn.Module, trunk: nn.Module, mesh: DeviceMesh) -> FsdpRoot:
    """Shares the weights of ``model``, in place; its parameters are others afterwards.  Layers are gathered one at a
    time, the rest with the root."""
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
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    return root


def rows_of_rank(rows: Sequence[PackedRow], ranks: int, rank: int) -> list[PackedRow]:
    """The rows of one rank, as many for each: rows that are about as long are computed at the same time, and who got
    the longer one of a round is given the shorter one of the next.  Rows of no tokens fill up the last round."""
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].ids), number))
    mine = []
    for turn, start in enumerate(range(0, len(order), ranks)):
        place = start + (rank if turn % 2 == 0 else ranks - 1 - rank)
        mine.append(rows[order[place]] if place < len(order) else empty_row())
    return mine


def added_up(flat: Tensor) -> Tensor:
    """The sum over ranks of a tensor on the processor; every rank gets it."""
    dist.all_reduce(flat)
    return flat


def from_all(thing: Any) -> list[Any]:
    """What each rank has, in their order, on every rank."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, thing)
    return box


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter; called by all ranks."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def wait() -> None:
    """Until all ranks are here.  By Gloo, so that no GPU has to."""
    dist.all_reduce(torch.zeros(1))
