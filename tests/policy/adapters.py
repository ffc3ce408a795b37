"""Merges adapters in peft's format into a model, as a server does."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cuda_agent.errors import PolicyError


def merge_adapter(model: Any, folder: Path) -> None:
    """Adds the adapters in ``folder`` to the weights of ``model``, which has no adapters.

    Raises:
        PolicyError: The folder holds anything other than plain LoRA of linear layers."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    odd = [name for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern") if settings.get(name)]
    if odd or settings.get("bias", "none") != "none":
        raise PolicyError(f"{folder}: {', '.join(odd) or 'bias'} of an adapter is not supported")
    rank, alpha = settings["r"], settings["lora_alpha"]
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    weights = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in weights.items():
            if not name.endswith(".lora_A.weight"):
                continue
            up = weights[name.replace(".lora_A.", ".lora_B.")]
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight += scale * (up.float() @ down.float()).to(module.weight.device)
