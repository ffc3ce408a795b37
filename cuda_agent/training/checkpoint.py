"""Stores a trainer's state as one flat table of tensors in a folder.

The table maps names to tensors: the trained parameters (such as ``weight/model.norm.weight``) and their optimizer state
(such as ``exp_avg/model.norm.weight``). A trainer in a single process writes the file ``state.safetensors``. If the
trainer runs in several processes (ranks), each rank writes its part of the tensors with torch's distributed checkpoint.
Both forms can be read with any number of ranks."""

from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

WHOLE = "state.safetensors"
Table = dict[str, Tensor]


class CorruptCheckpoint(ValueError):
    """A checkpoint is incomplete, damaged or made from another model; nothing was loaded from it."""


def table_of(trained: Iterable[tuple[str, Tensor]], optimizers: Iterable[torch.optim.Optimizer]) -> Table:
    """Returns a table (a dict from names to tensors) of the ``trained`` parameters and the optimizers' state."""
    names = {id(parameter): name for name, parameter in trained}
    table = {f"weight/{name}": parameter.detach() for name, parameter in trained}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            table |= {f"{key}/{names[id(parameter)]}": value for key, value in state.items()}
    return table


def restore(table: Table, trained: Iterable[tuple[str, Tensor]], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Copies ``table`` into the ``trained`` parameters and the state of the ``optimizers``. If the table was made from
    another model, changes nothing and raises ``CorruptCheckpoint``."""
    trained = list(trained)
    shapes = {name.removeprefix("weight/"): t.shape for name, t in table.items() if name.startswith("weight/")}
    if shapes != {name: tensor.shape for name, tensor in trained}:
        raise CorruptCheckpoint("it is of another model: names or shapes of what is trained differ")
    known: dict[str, dict[str, Tensor]] = {}
    for name, value in table.items():
        key, _, of = name.partition("/")
        if key != "weight" and of in shapes:
            known.setdefault(of, {})[key] = value
    with torch.no_grad():
        for name, parameter in trained:
            parameter.copy_(_like(table[f"weight/{name}"], parameter))
    names = {id(parameter): name for name, parameter in trained}
    for optimizer in optimizers:
        optimizer.state.clear()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if state := known.get(names[id(parameter)]):
                optimizer.state[parameter] = {
                    key: _like(value, parameter) if value.ndim else value.to(parameter.device)
                    for key, value in state.items()
                }


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        local = value.to(parameter.device)
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value.to(parameter.device)


def write(table: Table, folder: Path) -> None:
    """Writes the table into the existing, empty ``folder``. All ranks call this function, and each writes its part.
    Ranks on different machines write into different folders; the caller must merge the files of these folders."""
    if dist.is_initialized():
        import torch.distributed.checkpoint as dcp

        dcp.save(table, checkpoint_id=folder)
    else:
        save_file({name: tensor.cpu().contiguous() for name, tensor in table.items()}, folder / WHOLE)


def read(folder: Path, like: Iterable[tuple[str, Tensor]]) -> Table:
    """Reads a checkpoint that any number of ranks wrote. All ranks call this function, and ``folder`` must hold the
    files of all ranks on each machine. ``like`` are the names and tensors of the parameters to restore. The returned
    tensors are whole, or sharded like the parameters in ``like``. Raises ``CorruptCheckpoint`` on all ranks if files
    are missing or damaged, or if several ranks wrote the checkpoint from another model. If a single process wrote it,
    only ``restore`` checks the model."""
    try:
        return load_file(folder / WHOLE) if (folder / WHOLE).exists() else _read_parts(folder, dict(like))
    except CorruptCheckpoint:
        raise
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, UnpicklingError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{folder} cannot be read: {error}") from error


def _read_parts(folder: Path, like: Table) -> Table:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    table: dict[str, Any] = {}
    for name, facts in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        parameter = like.get(name.partition("/")[2])
        if not isinstance(facts, TensorStorageMetadata):
            raise CorruptCheckpoint(f"{folder}: {name} is no tensor")
        shape = facts.size
        if parameter is not None and parameter.shape == shape:
            table[name] = torch.zeros_like(parameter)
        elif name.startswith("weight/"):
            raise CorruptCheckpoint("it is of another model: names or shapes of what is trained differ")
        else:
            table[name] = torch.zeros(shape, dtype=facts.properties.dtype)
    try:
        dcp.load(table, checkpoint_id=folder)
    except dcp.CheckpointException as error:  # a BaseException
        raise CorruptCheckpoint(f"{folder} cannot be read: {error}") from error
    return table
