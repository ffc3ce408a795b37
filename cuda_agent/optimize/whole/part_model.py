"""Part of the task that ``tasks`` writes for a part of a larger model: makes the part and its inputs."""

from types import ModuleType
from typing import Any

import torch

from cuda_agent.optimize.whole.larger_model import leaves, placed


class _Reached(BaseException):
    """The larger model has reached the part, and its remaining layers need not run."""


def built(task: ModuleType) -> torch.nn.Module:
    """Returns the larger model, with weights from the current random state."""
    model: torch.nn.Module = task.Model(*task.get_init_inputs()).eval()
    return model


def before_the_part(task: ModuleType) -> torch.nn.Module:
    """Returns the larger model, with the same weights each time.  It makes the inputs of the part."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return built(task)


def inputs_of_the_part(task: ModuleType, model: torch.nn.Module, name: str) -> list[Any]:
    """Draws inputs of the larger model ``model``, runs it up to its submodule ``name``, and returns the arguments of
    this submodule."""
    given = task.get_inputs()
    device = next((leaf.device.type for leaf in leaves(given) if isinstance(leaf, torch.Tensor)), "cpu")
    found: list[Any] = []

    def take(_: Any, args: Any) -> None:
        found.extend(args)
        raise _Reached

    hook = model.to(device).get_submodule(name).register_forward_pre_hook(take)
    try:
        with torch.no_grad():
            model(*placed(device, given))
    except _Reached:
        pass
    finally:
        hook.remove()
    return found
