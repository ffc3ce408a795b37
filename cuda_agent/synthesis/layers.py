"""Stand-alone layers of ``transformers`` as self-contained tasks: activations, norms, MLPs, attention, blocks.

Each is a small random configuration of the layer, which the task imports from transformers.  ``available`` searches the
installed package's source files for the classes and imports nothing.  What it does not cover: whole models, caches,
masks, training-time dropout (layers run in ``eval``).
"""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from cuda_agent.synthesis.render import render

ROW = "torch.randn({batch}, {length}, {hidden})"
WIDE_ROW = "torch.randn({batch}, {length}, {inner})"
IMAGE = "torch.randn({batch}, {channels}, {side}, {side})"


@dataclass(frozen=True)
class Layer:
    """Templates over the sizes of ``_sizes``.  ``arguments``: parameters of ``__init__``, by name."""

    name: str  # class
    module: str  # below transformers
    init: str  # of ``self.layer``; ``config`` is the configuration
    config: str = ""  # its constructor, when there is one
    arguments: tuple[str, ...] = ("hidden",)
    forward: tuple[str, ...] = ("x = self.layer(x)",)
    inputs: tuple[tuple[str, str], ...] = (("x", ROW),)
    more: tuple[str, ...] = ()  # further classes of the module, and lines of __init__ that use them
    more_init: tuple[str, ...] = ()
    flops: str = "20 * rows * hidden"  # over the sizes and ``rows`` = batch * length

    def code(self, batch: int, wide: bool, rng: Random) -> str:
        sizes = _sizes(batch, wide, rng)
        imports = [f"from transformers import {self.config.split('(')[0]}"] if self.config else []
        imports.append(f"from transformers.{self.module} import {', '.join(sorted((self.name, *self.more)))}")
        init = ([f"config = {self.config}"] if self.config else []) + [f"self.layer = {self.init}", *self.more_init]
        inputs = [(name, source.format(**sizes)) for name, source in self.inputs]
        arguments = [(name, sizes[name]) for name in self.arguments]
        return render(arguments, init, [line.format(**sizes) for line in self.forward], inputs, imports)

    def cost(self, batch: int, wide: bool, rng: Random) -> tuple[float, float]:
        """(elements moved, operations) of one call."""
        sizes = _sizes(batch, wide, rng)
        names = sizes | {"rows": sizes["batch"] * sizes["length"]}
        factors = [[names.get(word) or float(word) for word in term.split(" * ")] for term in self.flops.split(" + ")]
        flops = sum(_product(term) for term in factors)
        image = self.inputs[0][1] == IMAGE
        elements = batch * sizes["channels"] * sizes["side"] ** 2 if image else names["rows"] * sizes["hidden"]
        return 6.0 * elements, flops


@cache
def available() -> tuple[Layer, ...]:
    """The layers whose module and class the installed transformers has."""
    return tuple(layer for layer in LAYERS if {layer.name, *layer.more} <= _classes(layer.module))


@cache
def _classes(module: str) -> frozenset[str]:
    try:
        found = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return frozenset()
    if found is None or not found.origin:
        return frozenset()
    path = Path(found.origin).parent.joinpath(*module.split(".")).with_suffix(".py")
    return frozenset(re.findall(r"^class (\w+)", path.read_text(), re.M)) if path.is_file() else frozenset()


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


def _product(factors: list[float]) -> float:
    product = 1.0
    for factor in factors:
        product *= factor
    return product


def _activation(name: str, work: int = 150, init: str = "") -> Layer:
    return Layer(name, "activations", init or f"{name}()", arguments=(), flops=f"{work} * rows * hidden")


def _norm(name: str, module: str, init: str = "{}(hidden)") -> Layer:
    return Layer(name, module, init.format(name), flops="60 * rows * hidden")


def _mlp(name: str, module: str, config: str, init: str = "{}(config)", gated: bool = False, **more) -> Layer:
    products = 6 if gated else 4
    return Layer(
        name,
        module,
        init.format(name),
        config,
        ("hidden", "inner"),
        flops=f"{products} * rows * hidden * inner + 60 * rows * inner",
        **more,
    )


_ATTENTION = "8 * rows * hidden * hidden + 6 * rows * length * hidden"
_SIZES = "hidden_size=hidden, intermediate_size=inner"
_HEADS = 'hidden_size=hidden, num_attention_heads=heads, attn_implementation="sdpa"'
_ROTARY = ("position = torch.arange(x.shape[1], device=x.device)[None]", "cos_sin = self.rotary(x, position)")


def _rotary(model: str, folder: str, config: str) -> Layer:
    return Layer(
        f"{model}Attention",
        f"models.{folder}.modeling_{folder}",
        f"{model}Attention(config, layer_idx=0)",
        config,
        ("hidden", "heads"),
        (*_ROTARY, "x = self.layer(x, cos_sin, attention_mask=None)[0]"),
        more=(f"{model}RotaryEmbedding",),
        more_init=(f"self.rotary = {model}RotaryEmbedding(config)",),
        flops=_ATTENTION,
    )


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
    _norm("LlamaRMSNorm", "models.llama.modeling_llama"),
    _norm("GemmaRMSNorm", "models.gemma.modeling_gemma"),
    _norm("T5LayerNorm", "models.t5.modeling_t5"),
    _norm("Olmo2RMSNorm", "models.olmo2.modeling_olmo2"),
    _norm("OlmoLayerNorm", "models.olmo.modeling_olmo"),
    _norm("NemotronLayerNorm1P", "models.nemotron.modeling_nemotron"),
    Layer(
        "MambaRMSNormGated",
        "models.mamba2.modeling_mamba2",
        "MambaRMSNormGated(hidden, hidden)",
        forward=("x = self.layer(x, gate)",),
        inputs=(("x", ROW), ("gate", ROW)),
        flops="120 * rows * hidden",
    ),
    Layer(
        "ConvNextLayerNorm",
        "models.convnext.modeling_convnext",
        'ConvNextLayerNorm(channels, data_format="channels_first")',
        arguments=("channels",),
        inputs=(("x", IMAGE),),
        flops="60 * batch * channels * area",
    ),
    _mlp("LlamaMLP", "models.llama.modeling_llama", f"LlamaConfig({_SIZES})", gated=True),
    _mlp("Qwen3MLP", "models.qwen3.modeling_qwen3", f"Qwen3Config({_SIZES})", gated=True),
    _mlp("GemmaMLP", "models.gemma.modeling_gemma", f"GemmaConfig({_SIZES})", gated=True),
    _mlp("Phi3MLP", "models.phi3.modeling_phi3", f"Phi3Config({_SIZES}, pad_token_id=0)", gated=True),
    _mlp("PhiMLP", "models.phi.modeling_phi", f"PhiConfig({_SIZES})"),
    _mlp("GPT2MLP", "models.gpt2.modeling_gpt2", "GPT2Config(n_embd=hidden)", "{}(inner, config)"),
    _mlp("GPTNeoXMLP", "models.gpt_neox.modeling_gpt_neox", f"GPTNeoXConfig({_SIZES}, num_attention_heads=2)"),
    _mlp("CLIPMLP", "models.clip.modeling_clip", f"CLIPVisionConfig({_SIZES}, num_attention_heads=2)"),
    _mlp("SiglipMLP", "models.siglip.modeling_siglip", f"SiglipVisionConfig({_SIZES}, num_attention_heads=2)"),
    _mlp("Starcoder2MLP", "models.starcoder2.modeling_starcoder2", f"Starcoder2Config({_SIZES})"),
    _mlp("ModernBertMLP", "models.modernbert.modeling_modernbert", f"ModernBertConfig({_SIZES})", gated=True),
    _mlp("FalconMLP", "models.falcon.modeling_falcon", "FalconConfig(hidden_size=hidden, ffn_hidden_size=inner)"),
    _mlp("T5LayerFF", "models.t5.modeling_t5", "T5Config(d_model=hidden, d_ff=inner)"),
    _mlp("BertIntermediate", "models.bert.modeling_bert", f"BertConfig({_SIZES})"),
    _mlp(
        "BertOutput",
        "models.bert.modeling_bert",
        f"BertConfig({_SIZES})",
        forward=("x = self.layer(x, residual)",),
        inputs=(("x", WIDE_ROW), ("residual", ROW)),
    ),
    _rotary("Llama", "llama", f"LlamaConfig({_HEADS}, num_key_value_heads=heads)"),
    _rotary("Qwen3", "qwen3", f"Qwen3Config({_HEADS}, num_key_value_heads=heads // 2, head_dim=hidden // heads)"),
    Layer(
        "GPT2Attention",
        "models.gpt2.modeling_gpt2",
        "GPT2Attention(config, layer_idx=0)",
        'GPT2Config(n_embd=hidden, n_head=heads, attn_implementation="sdpa")',
        ("hidden", "heads"),
        ("x = self.layer(x)[0]",),
        flops=_ATTENTION,
    ),
    Layer(
        "BertSelfAttention",
        "models.bert.modeling_bert",
        "BertSelfAttention(config)",
        f"BertConfig({_HEADS})",
        ("hidden", "heads"),
        ("x = self.layer(x)[0]",),
        flops=_ATTENTION,
    ),
    Layer(
        "CLIPAttention",
        "models.clip.modeling_clip",
        "CLIPAttention(config)",
        f"CLIPVisionConfig({_HEADS})",
        ("hidden", "heads"),
        ("x = self.layer(x)[0]",),
        flops=_ATTENTION,
    ),
    Layer(
        "ResNetConvLayer",
        "models.resnet.modeling_resnet",
        "ResNetConvLayer(channels, channels)",
        arguments=("channels",),
        inputs=(("x", IMAGE),),
        flops="30 * batch * area * channels * channels",
    ),
    Layer(
        "ResNetBasicLayer",
        "models.resnet.modeling_resnet",
        "ResNetBasicLayer(channels, channels)",
        arguments=("channels",),
        inputs=(("x", IMAGE),),
        flops="60 * batch * area * channels * channels",
    ),
    Layer(
        "ConvNextLayer",
        "models.convnext.modeling_convnext",
        "ConvNextLayer(config, channels)",
        "ConvNextConfig()",
        ("channels",),
        inputs=(("x", IMAGE),),
        flops="20 * batch * area * channels * channels + 300 * batch * area * channels",
    ),
)
