"""Makes tasks from single layers of ``transformers``: activations, norms, MLPs, attention, blocks.

Each task imports a layer from transformers and gives it a small random configuration. The tasks use no whole models,
caches or masks. Dropout has no effect, because the sandbox runs models in ``eval`` mode by default."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

ROW = "torch.randn({batch}, {length}, {hidden})"
WIDE_ROW = "torch.randn({batch}, {length}, {inner})"
IMAGE = "torch.randn({batch}, {channels}, {side}, {side})"


def render(
    arguments: Sequence[tuple[str, int]],
    init: Sequence[str],
    forward: Sequence[str],
    inputs: Sequence[tuple[str, str]],
    imports: Sequence[str] = (),
) -> str:
    """Returns the source of a task. ``init`` and ``forward`` hold the statements of the methods ``__init__`` and
    ``forward``, except ``super().__init__()`` and ``return x``. ``arguments`` holds (name, value) for each
    argument of ``__init__``. ``inputs`` holds (name, expression) for each argument of ``forward``."""
    names = "".join(f", {name}" for name, _ in arguments)
    body = "".join(f"        {line}\n" for line in ("super().__init__()", *init))
    uses_functional = any("F." in line for line in (*init, *forward))
    head = ["import torch", "import torch.nn as nn"]
    head += ["import torch.nn.functional as F"] if uses_functional else []
    lines = "".join(f"        {line}\n" for line in forward)
    sources = ", ".join(source for _, source in inputs)
    parameters = ", ".join(name for name, _ in inputs)
    values = ", ".join(str(value) for _, value in arguments)
    return (
        "\n".join((*head, *imports))
        + f"\n\n\nclass Model(nn.Module):\n    def __init__(self{names}):\n{body}\n"
        + f"    def forward(self, {parameters}):\n{lines}        return x\n\n\n"
        + f"def get_inputs():\n    return [{sources}]\n\n\ndef get_init_inputs():\n    return [{values}]\n"
    )


@dataclass(frozen=True)
class Layer:
    """A layer of ``transformers``, with templates for the source of a task that runs the layer. In the templates, words
    such as ``hidden`` are names of sizes. In ``forward`` and ``inputs`` these words are in braces and are replaced by
    numbers."""

    name: str  # name of the class
    module: str  # its module, a path below transformers
    init: str  # constructor of ``self.layer``, which may use the variable ``config``
    config: str = ""  # constructor of the configuration, if there is one
    arguments: tuple[str, ...] = ("hidden",)  # sizes that are arguments of ``Model.__init__``
    forward: tuple[str, ...] = ("x = self.layer(x)",)  # lines of ``forward``
    inputs: tuple[tuple[str, str], ...] = (("x", ROW),)  # name and expression of each input
    more: tuple[str, ...] = ()  # further classes to import from the module
    more_init: tuple[str, ...] = ()  # lines of __init__ that use these classes
    flops: str = "20 * rows * hidden"  # number of operations; ``rows`` is batch * length

    def code(self, batch: int, wide: bool, rng: Random) -> str:
        sizes = _sizes(batch, wide, rng)
        imports = [f"from transformers import {self.config.split('(')[0]}"] if self.config else []
        imports.append(f"from transformers.{self.module} import {', '.join(sorted((self.name, *self.more)))}")
        init = ([f"config = {self.config}"] if self.config else []) + [f"self.layer = {self.init}", *self.more_init]
        inputs = [(name, source.format(**sizes)) for name, source in self.inputs]
        arguments = [(name, sizes[name]) for name in self.arguments]
        return render(arguments, init, [line.format(**sizes) for line in self.forward], inputs, imports)

    def cost(self, batch: int, wide: bool, rng: Random) -> tuple[float, float]:
        """Estimates the cost of one call. Returns (elements read and written, arithmetic operations). Draws the layer's
        sizes from ``rng`` in the same way as ``code``. If ``wide`` is true, the sizes are large, as suits a GPU."""
        sizes = _sizes(batch, wide, rng)
        names = sizes | {"rows": sizes["batch"] * sizes["length"]}
        factors = [[names.get(word) or float(word) for word in term.split(" * ")] for term in self.flops.split(" + ")]
        image = self.inputs[0][1] == IMAGE
        elements = batch * sizes["channels"] * sizes["side"] ** 2 if image else names["rows"] * sizes["hidden"]
        return 6.0 * elements, sum(map(math.prod, factors))


def _sizes(batch: int, wide: bool, rng: Random) -> dict[str, int]:
    heads = rng.choice((2, 4, 8))
    hidden = heads * rng.choice((64, 128) if wide else (16, 32))
    side = rng.choice((28, 56) if wide else (8, 14, 16))
    return {
        "batch": batch,
        "length": rng.choice((256, 512, 1024) if wide else (16, 32, 64)),
        "hidden": hidden,
        "inner": hidden * rng.choice((2, 3, 4)),
        "heads": heads,
        "channels": rng.choice((64, 128) if wide else (8, 16, 32)),
        "side": side,
        "area": side * side,
    }


def _activation(name: str, work: int = 150, init: str = "") -> Layer:
    return Layer(name, "activations", init or f"{name}()", arguments=(), flops=f"{work} * rows * hidden")


def _module(model: str) -> str:
    return f"models.{model}.modeling_{model}"


def _norm(name: str, model: str) -> Layer:
    return Layer(name, _module(model), f"{name}(hidden)", flops="60 * rows * hidden")


def _mlp(name: str, model: str, config: str, init: str = "{}(config)", gated: bool = False, **more: Any) -> Layer:
    flops = f"{6 if gated else 4} * rows * hidden * inner + 60 * rows * inner"
    return Layer(name, _module(model), init.format(name), config, ("hidden", "inner"), flops=flops, **more)


_SIZES = "hidden_size=hidden, intermediate_size=inner"
_SDPA = 'attn_implementation="sdpa"'
_HEADS = f"hidden_size=hidden, num_attention_heads=heads, {_SDPA}"
_FIRST_OUTPUT = ("x = self.layer(x)[0]",)


def _attention(
    name: str, model: str, config: str, init: str = "{}(config)", forward: tuple[str, ...] = _FIRST_OUTPUT, **more: Any
) -> Layer:
    flops = "8 * rows * hidden * hidden + 6 * rows * length * hidden"
    return Layer(name, _module(model), init.format(name), config, ("hidden", "heads"), forward, flops=flops, **more)


def _rotary(name: str, model: str, config: str) -> Layer:
    forward = (
        "position = torch.arange(x.shape[1], device=x.device)[None]",
        "cos_sin = self.rotary(x, position)",
        "x = self.layer(x, cos_sin, attention_mask=None)[0]",
    )
    more = {"more": (f"{name}RotaryEmbedding",), "more_init": (f"self.rotary = {name}RotaryEmbedding(config)",)}
    return _attention(f"{name}Attention", model, config, "{}(config, layer_idx=0)", forward, **more)


def _image(name: str, model: str, init: str, work: tuple[str, ...], config: str = "") -> Layer:
    flops = " + ".join(f"{term} * batch * area * channels" for term in work)
    return Layer(name, _module(model), init, config, ("channels",), inputs=(("x", IMAGE),), flops=flops)


# fmt: off
LAYERS: tuple[Layer, ...] = (
    _activation("NewGELUActivation", 250),
    _activation("GELUTanh", 60),
    _activation("FastGELUActivation", 250),
    _activation("QuickGELUActivation", 100),
    _activation("AccurateGELUActivation", 250),
    _activation("LaplaceActivation", 150),
    _activation("ReLUSquaredActivation", 30),
    _activation("MishActivation", 150),
    _activation("ClippedGELUActivation", 60, "ClippedGELUActivation(-10, 10)"),
    _norm("LlamaRMSNorm", "llama"),
    _norm("GemmaRMSNorm", "gemma"),
    _norm("T5LayerNorm", "t5"),
    _norm("Olmo2RMSNorm", "olmo2"),
    _norm("OlmoLayerNorm", "olmo"),
    _norm("NemotronLayerNorm1P", "nemotron"),
    Layer("MambaRMSNormGated", _module("mamba2"), "MambaRMSNormGated(hidden, hidden)", flops="120 * rows * hidden",
          forward=("x = self.layer(x, gate)",), inputs=(("x", ROW), ("gate", ROW))),
    _image("ConvNextLayerNorm", "convnext", 'ConvNextLayerNorm(channels, data_format="channels_first")', ("60",)),
    _mlp("LlamaMLP", "llama", f"LlamaConfig({_SIZES})", gated=True),
    _mlp("Qwen3MLP", "qwen3", f"Qwen3Config({_SIZES})", gated=True),
    _mlp("GemmaMLP", "gemma", f"GemmaConfig({_SIZES})", gated=True),
    _mlp("Phi3MLP", "phi3", f"Phi3Config({_SIZES}, pad_token_id=0)", gated=True),
    _mlp("PhiMLP", "phi", f"PhiConfig({_SIZES})"),
    _mlp("GPT2MLP", "gpt2", "GPT2Config(n_embd=hidden)", "{}(inner, config)"),
    _mlp("GPTNeoXMLP", "gpt_neox", f"GPTNeoXConfig({_SIZES}, num_attention_heads=2)"),
    _mlp("CLIPMLP", "clip", f"CLIPVisionConfig({_SIZES}, num_attention_heads=2)"),
    _mlp("SiglipMLP", "siglip", f"SiglipVisionConfig({_SIZES}, num_attention_heads=2)"),
    _mlp("Starcoder2MLP", "starcoder2", f"Starcoder2Config({_SIZES})"),
    _mlp("ModernBertMLP", "modernbert", f"ModernBertConfig({_SIZES})", gated=True),
    _mlp("FalconMLP", "falcon", "FalconConfig(hidden_size=hidden, ffn_hidden_size=inner)"),
    _mlp("T5LayerFF", "t5", "T5Config(d_model=hidden, d_ff=inner)"),
    _mlp("BertIntermediate", "bert", f"BertConfig({_SIZES})"),
    _mlp("BertOutput", "bert", f"BertConfig({_SIZES})", forward=("x = self.layer(x, residual)",),
         inputs=(("x", WIDE_ROW), ("residual", ROW))),
    _rotary("Llama", "llama", f"LlamaConfig({_HEADS}, num_key_value_heads=heads)"),
    _rotary("Qwen3", "qwen3", f"Qwen3Config({_HEADS}, num_key_value_heads=heads // 2, head_dim=hidden // heads)"),
    _attention("GPT2Attention", "gpt2", f"GPT2Config(n_embd=hidden, n_head=heads, {_SDPA})", "{}(config, layer_idx=0)"),
    _attention("BertSelfAttention", "bert", f"BertConfig({_HEADS})"),
    _attention("CLIPAttention", "clip", f"CLIPVisionConfig({_HEADS})"),
    _image("ResNetConvLayer", "resnet", "ResNetConvLayer(channels, channels)", ("30 * channels",)),
    _image("ResNetBasicLayer", "resnet", "ResNetBasicLayer(channels, channels)", ("60 * channels",)),
    _image("ConvNextLayer", "convnext", "ConvNextLayer(config, channels)", ("20 * channels", "300"),
           "ConvNextConfig()"),
)
# fmt: on
