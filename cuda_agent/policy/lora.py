"""Adds low-rank adapters (LoRA, arXiv 2106.09685) to linear layers of a frozen model.

A layer with an adapter computes W x + scale B A x, where A is ``down``, B is ``up``, and scale is alpha / rank. The
layer's attribute ``weight`` returns W + scale B A. Code that reads this attribute, such as ``engines/decoder.py``,
therefore gets the merged weights. Adapters are saved in peft's format."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuda_agent.errors import PolicyError

ADAPTER = "adapter"  # sub-folder of a merged model's folder
_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"


class Adapted(nn.Module):
    """The linear layer ``base`` with an adapter. At first the matrix ``up`` is zero, so the adapter changes nothing."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.rank, self.alpha = base, rank, alpha
        bound = 1 / math.sqrt(base.in_features)
        self.down = nn.Parameter(torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.alpha / self.rank * F.linear(F.linear(states, self.down), self.up)

    @property
    def weight(self) -> Tensor:
        """Returns the merged weight [out features, in features], without gradients."""
        with torch.no_grad():
            return self.base.weight + self.alpha / self.rank * self.up @ self.down

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


def attach(model: Any, rank: int, alpha: float, targets: Sequence[str], seed: int = 0) -> None:
    """Freezes ``model`` and adds an adapter to every linear layer whose name is in ``targets``. A layer's name is the
    last part of its path in the model, such as ``q_proj``. ``seed`` determines the initial adapters. Raises
    ``PolicyError`` if a target matches no linear layer."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in found if name.rsplit(".", 1)[-1] in targets]
    if absent := set(targets) - {name.rsplit(".", 1)[-1] for name in chosen}:
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in found}))
        raise PolicyError(f"this model has no linear layers called {', '.join(sorted(absent))}, but {known}")
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name in chosen:
        parent, _, leaf = name.rpartition(".")
        adapted = Adapted(model.get_submodule(name), rank, alpha, generator)
        setattr(model.get_submodule(parent), leaf, adapted.to(adapted.base.weight.device))


def adapters(model: Any) -> dict[str, Adapted]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def merged_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields names and values of the model's parameters, with adapters merged in. A shared parameter appears once."""
    layers = adapters(model)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner.removesuffix(".base"))
        if layer is None:
            yield name, parameter
        elif owner.endswith(".base"):
            yield f"{owner.removesuffix('.base')}.{leaf}", layer.weight if leaf == "weight" else parameter


def save_merged(model: Any, folder: Path | str) -> None:
    """Saves the model as a Hugging Face folder, with adapters merged into the weights. If the model has adapters, also
    saves them alone in the sub-folder ``adapter``."""
    if not adapters(model):
        model.save_pretrained(folder)
        return
    own = {id(parameter) for layer in adapters(model).values() for parameter in layer.parameters()}
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in own}
    model.save_pretrained(folder, state_dict=state | dict(merged_parameters(model)))
    save_adapter(model, Path(folder) / ADAPTER)


def save_adapter(model: Any, folder: Path) -> None:
    """Saves only the model's adapters, in peft's format. Raises ``PolicyError`` if the model has none."""
    from safetensors.torch import save_file

    if not (layers := adapters(model)):
        raise PolicyError("this model has no adapters, which policy.vllm.sync=lora needs: set lora.rank")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, layer in layers.items():
        for part, tensor in (("lora_A", layer.down), ("lora_B", layer.up)):
            weights[f"base_model.model.{name}.{part}.weight"] = tensor.detach().cpu().contiguous()
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    first, *_ = layers.values()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}),
    }
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=1))
