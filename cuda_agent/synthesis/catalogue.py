"""The operator catalogue: which operators can be stacked, their source, their effect on shapes, their cost.

One table, in sections.  Each operator has its text in ``forward`` and ``__init__``, the shapes that it takes and gives,
and the values that it needs and gives (a logarithm needs positive ones), so that a composer can chain operators that
make sense together.  ``available`` leaves out operators that the installed torch lacks.

What it does not cover: dropout and other random operators (a task must be deterministic), operators with jumps
(``floor``, ``argmax``: a correct kernel's rounding error would count as wrong), in-place and backward operators, and
layers of ``transformers`` (``layers.py``).
"""

import math
from functools import cache

from cuda_agent.synthesis.rules import (
    ANY,
    NORMAL,
    POSITIVE,
    Interval,
    Operator,
    Use,
    adaptive,
    addmm,
    attention,
    bias,
    bilinear,
    bmm,
    cdist,
    class_loss,
    convolution,
    embedding,
    embedding_loss,
    encoder,
    gather,
    group_norm,
    halved,
    index_select,
    joined,
    linear,
    loss,
    masked,
    matmul,
    norm_channels,
    norm_last,
    pairs,
    pool,
    prelu,
    reduce,
    resized,
    same,
    sdpa,
    shaped,
    size,
    topk,
)

_ALL = (1, 2, 3, 4, 5)
_BATCHED = (2, 3, 4)
_LIKE = "torch.randn({})"
_ABOVE = "torch.rand({}) + 0.5"
_UNIT: Interval = (0.0, 1.0)
_SIGNED_UNIT: Interval = (-1.0, 1.0)
_NOT_NEGATIVE: Interval = (0.0, math.inf)


def _unary(name: str, work: float, needs: Interval = ANY, gives: Interval | None = ANY, *more: str) -> Operator:
    return Operator(name, "elementwise", _ALL, same(f"{name}({{x}})", *more, work=work), needs, gives)


_ELEMENTWISE = [
    _unary("torch.relu", 1, ANY, _NOT_NEGATIVE),
    _unary("torch.abs", 1, ANY, _NOT_NEGATIVE),
    _unary("torch.neg", 1),
    _unary("torch.square", 1, ANY, _NOT_NEGATIVE),
    _unary("torch.sign", 1, ANY, _SIGNED_UNIT),
    _unary("torch.exp", 20, NORMAL, (0.0, 3000.0)),
    _unary("torch.exp2", 30, NORMAL, (0.0, 300.0)),
    _unary("torch.expm1", 60, NORMAL, (-1.0, 3000.0)),
    _unary("torch.log", 60, POSITIVE, ANY),
    _unary("torch.log2", 60, POSITIVE, ANY),
    _unary("torch.log10", 60, POSITIVE, ANY),
    _unary("torch.log1p", 90, _NOT_NEGATIVE, _NOT_NEGATIVE),
    _unary("torch.sqrt", 5, _NOT_NEGATIVE, _NOT_NEGATIVE),
    _unary("torch.rsqrt", 8, POSITIVE, (0.0, 5.0)),
    _unary("torch.reciprocal", 5, POSITIVE, (0.0, 20.0)),
    _unary("torch.sin", 60, (-1e4, 1e4), _SIGNED_UNIT),
    _unary("torch.cos", 60, (-1e4, 1e4), _SIGNED_UNIT),
    _unary("torch.tan", 150, (-1.2, 1.2), (-3.0, 3.0)),
    _unary("torch.asin", 150, _SIGNED_UNIT, (-1.6, 1.6)),
    _unary("torch.acos", 150, _SIGNED_UNIT, (0.0, 3.2)),
    _unary("torch.atan", 150, ANY, (-1.6, 1.6)),
    _unary("torch.sinh", 150, NORMAL, ANY),
    _unary("torch.cosh", 150, NORMAL, (1.0, 3000.0)),
    _unary("torch.tanh", 200, ANY, _SIGNED_UNIT),
    _unary("torch.asinh", 200, ANY, ANY),
    _unary("torch.acosh", 200, (1.1, math.inf), _NOT_NEGATIVE),
    _unary("torch.atanh", 200, (-0.95, 0.95), (-2.0, 2.0)),
    _unary("torch.erf", 60, ANY, _SIGNED_UNIT),
    _unary("torch.erfc", 150, ANY, (0.0, 2.0)),
    _unary("torch.erfinv", 500, (-0.95, 0.95), (-2.0, 2.0)),
    _unary("torch.sigmoid", 60, ANY, _UNIT),
    _unary("torch.logit", 100, (0.05, 0.95), (-3.0, 3.0)),
    _unary("torch.lgamma", 500, POSITIVE, ANY),
    _unary("torch.sinc", 300, NORMAL, _SIGNED_UNIT),
    _unary("torch.deg2rad", 1, ANY, ANY),
    _unary("F.gelu", 30, ANY, ANY, "F.gelu({x}, approximate='tanh')"),
    _unary("F.silu", 30),
    _unary("F.mish", 150),
    _unary("F.elu", 60),
    _unary("F.selu", 60),
    _unary("F.celu", 60),
    _unary("F.leaky_relu", 2, ANY, ANY, "F.leaky_relu({x}, negative_slope=0.2)"),
    _unary("F.softplus", 150, ANY, _NOT_NEGATIVE),
    _unary("F.softsign", 10, ANY, _SIGNED_UNIT),
    _unary("F.hardtanh", 2, ANY, _SIGNED_UNIT),
    _unary("F.hardswish", 3),
    _unary("F.hardsigmoid", 3, ANY, _UNIT),
    _unary("F.relu6", 2, ANY, (0.0, 6.0)),
    _unary("F.logsigmoid", 150),
    _unary("F.tanhshrink", 200),
    _unary("F.softshrink", 3, ANY, ANY, "F.softshrink({x}, lambd=0.3)"),
    Operator("nn.PReLU", "elementwise", _BATCHED, prelu, gives=ANY),
    Operator("torch.clamp", "elementwise", _ALL, same("torch.clamp({x}, -1.5, 1.5)", work=2), gives=(-1.5, 1.5)),
    Operator("torch.pow", "elementwise", _ALL, same("torch.pow({x}, 3)", "torch.pow({x}, 2)", work=8), gives=ANY),
    Operator(
        "torch.add",
        "elementwise",
        _ALL,
        same("torch.add({x}, {y})", "torch.add({x}, {y}, alpha=0.5)", other=_LIKE),
        gives=ANY,
    ),
    Operator("torch.sub", "elementwise", _ALL, same("torch.sub({x}, {y})", other=_LIKE), gives=ANY),
    Operator("torch.mul", "elementwise", _ALL, same("torch.mul({x}, {y})", other=_LIKE), gives=ANY),
    Operator("torch.div", "elementwise", _ALL, same("torch.div({x}, {y})", other=_ABOVE), gives=ANY),
    Operator("torch.maximum", "elementwise", _ALL, same("torch.maximum({x}, {y})", other=_LIKE), gives=ANY),
    Operator("torch.minimum", "elementwise", _ALL, same("torch.minimum({x}, {y})", other=_LIKE), gives=ANY),
    Operator(
        "torch.atan2", "elementwise", _ALL, same("torch.atan2({x}, {y})", other=_ABOVE, work=200), gives=(-1.6, 1.6)
    ),
    Operator(
        "torch.hypot", "elementwise", _ALL, same("torch.hypot({x}, {y})", other=_LIKE, work=30), gives=_NOT_NEGATIVE
    ),
    Operator(
        "torch.logaddexp", "elementwise", _ALL, same("torch.logaddexp({x}, {y})", other=_LIKE, work=400), gives=ANY
    ),
    Operator("torch.lerp", "elementwise", _ALL, same("torch.lerp({x}, {y}, 0.3)", other=_LIKE), gives=ANY),
    Operator("torch.where", "elementwise", _ALL, masked("torch.where({mask}, {x}, {y})", other=True), gives=ANY),
    Operator("torch.addcmul", "elementwise", _BATCHED, bias("torch.addcmul({x}, {x}, self.{m}, value=0.5)"), gives=ANY),
    Operator("torch.copysign", "elementwise", _ALL, same("torch.copysign({x}, {y})", other=_LIKE, work=10), gives=ANY),
]

_REDUCTIONS = [
    Operator("torch.sum", "reduction", _BATCHED, reduce("torch.sum"), gives=ANY),
    Operator("torch.mean", "reduction", _BATCHED, reduce("torch.mean")),
    Operator("torch.amax", "reduction", _BATCHED, reduce("torch.amax")),
    Operator("torch.amin", "reduction", _BATCHED, reduce("torch.amin")),
    Operator("torch.max", "reduction", _BATCHED, reduce("torch.max", 60, "[0]")),
    Operator("torch.var", "reduction", _BATCHED, reduce("torch.var", 100), gives=_NOT_NEGATIVE),
    Operator("torch.std", "reduction", _BATCHED, reduce("torch.std", 100), gives=_NOT_NEGATIVE),
    Operator("torch.logsumexp", "reduction", _BATCHED, reduce("torch.logsumexp", 60), gives=ANY),
    Operator("torch.median", "reduction", _BATCHED, reduce("torch.median", 2000, "[0]")),
    Operator(
        "torch.linalg.vector_norm", "reduction", _BATCHED, reduce("torch.linalg.vector_norm", 10), gives=_NOT_NEGATIVE
    ),
    Operator("torch.cumsum", "scan", _BATCHED, same("torch.cumsum({x}, dim=-1)", work=70), gives=ANY),
    Operator("torch.cummax", "scan", _BATCHED, same("torch.cummax({x}, dim=-1)[0]", work=500)),
    Operator("torch.logcumsumexp", "scan", _BATCHED, same("torch.logcumsumexp({x}, dim=-1)", work=3000), gives=ANY),
    Operator(
        "torch.diff", "scan", _BATCHED, shaped("torch.diff({x}, dim=-1)", lambda x: (*x[:-1], x[-1] - 1)), gives=ANY
    ),
    Operator("torch.sort", "scan", _BATCHED, same("torch.sort({x}, dim=-1)[0]", work=3800)),
    Operator("torch.topk", "scan", _BATCHED, topk),
]

_NORMALISATIONS = [
    Operator("torch.softmax", "normalisation", _BATCHED, same("torch.softmax({x}, dim=-1)", work=30), gives=_UNIT),
    Operator("F.softmin", "normalisation", _BATCHED, same("F.softmin({x}, dim=-1)", work=40), gives=_UNIT),
    Operator(
        "torch.log_softmax", "normalisation", _BATCHED, same("torch.log_softmax({x}, dim=-1)", work=30), gives=ANY
    ),
    Operator("F.normalize", "normalisation", _BATCHED, same("F.normalize({x}, dim=-1)", work=10), gives=_SIGNED_UNIT),
    Operator("nn.LayerNorm", "normalisation", _BATCHED, norm_last("nn.LayerNorm"), gives=NORMAL),
    Operator("nn.RMSNorm", "normalisation", _BATCHED, norm_last("nn.RMSNorm"), gives=NORMAL),
    Operator("nn.GroupNorm", "normalisation", (3, 4), group_norm, gives=NORMAL),
    Operator("nn.BatchNorm1d", "normalisation", (2, 3), norm_channels("nn.BatchNorm1d")),
    Operator("nn.BatchNorm2d", "normalisation", (4,), norm_channels("nn.BatchNorm2d")),
    Operator("nn.BatchNorm3d", "normalisation", (5,), norm_channels("nn.BatchNorm3d")),
    Operator("nn.InstanceNorm1d", "normalisation", (3,), norm_channels("nn.InstanceNorm1d"), gives=NORMAL),
    Operator("nn.InstanceNorm2d", "normalisation", (4,), norm_channels("nn.InstanceNorm2d"), gives=NORMAL),
    Operator("nn.InstanceNorm3d", "normalisation", (5,), norm_channels("nn.InstanceNorm3d"), gives=NORMAL),
    Operator("F.local_response_norm", "normalisation", (4,), same("F.local_response_norm({x}, 5)", work=500)),
]

_POOLING = [
    Operator("nn.MaxPool1d", "pooling", (3,), pool("nn.MaxPool1d", 400)),
    Operator("nn.MaxPool2d", "pooling", (4,), pool("nn.MaxPool2d", 400)),
    Operator("nn.MaxPool3d", "pooling", (5,), pool("nn.MaxPool3d", 400)),
    Operator("nn.AvgPool1d", "pooling", (3,), pool("nn.AvgPool1d", 150)),
    Operator("nn.AvgPool2d", "pooling", (4,), pool("nn.AvgPool2d", 150)),
    Operator("nn.AvgPool3d", "pooling", (5,), pool("nn.AvgPool3d", 150)),
    Operator("nn.LPPool2d", "pooling", (4,), pool("nn.LPPool2d", 300, "2, "), gives=_NOT_NEGATIVE),
    Operator("F.adaptive_avg_pool1d", "pooling", (3,), adaptive("F.adaptive_avg_pool1d")),
    Operator("F.adaptive_avg_pool2d", "pooling", (4,), adaptive("F.adaptive_avg_pool2d")),
    Operator("F.adaptive_avg_pool3d", "pooling", (5,), adaptive("F.adaptive_avg_pool3d")),
    Operator("F.adaptive_max_pool1d", "pooling", (3,), adaptive("F.adaptive_max_pool1d")),
    Operator("F.adaptive_max_pool2d", "pooling", (4,), adaptive("F.adaptive_max_pool2d")),
]

_MATMULS = [
    Operator("nn.Conv1d", "convolution", (3,), convolution("nn.Conv1d"), gives=ANY),
    Operator("nn.Conv2d", "convolution", (4,), convolution("nn.Conv2d"), gives=ANY),
    Operator("nn.Conv3d", "convolution", (5,), convolution("nn.Conv3d"), gives=ANY),
    Operator("nn.ConvTranspose1d", "convolution", (3,), convolution("nn.ConvTranspose1d", True), gives=ANY),
    Operator("nn.ConvTranspose2d", "convolution", (4,), convolution("nn.ConvTranspose2d", True), gives=ANY),
    Operator("nn.ConvTranspose3d", "convolution", (5,), convolution("nn.ConvTranspose3d", True), gives=ANY),
    Operator("nn.Linear", "matmul", _BATCHED, linear, gives=ANY),
    Operator("nn.Bilinear", "matmul", (2, 3), bilinear, gives=ANY),
    Operator(
        "torch.matmul",
        "matmul",
        _BATCHED,
        matmul("torch.matmul({x}, self.{m})", "{features}, {out_features}"),
        gives=ANY,
    ),
    Operator("torch.mm", "matmul", (2,), matmul("torch.mm({x}, self.{m})", "{features}, {out_features}"), gives=ANY),
    Operator(
        "torch.einsum",
        "matmul",
        (3,),
        matmul("torch.einsum('bsi,io->bso', {x}, self.{m})", "{features}, {out_features}"),
        gives=ANY,
    ),
    Operator(
        "F.linear", "matmul", _BATCHED, matmul("F.linear({x}, self.{m})", "{out_features}, {features}"), gives=ANY
    ),
    Operator("torch.addmm", "matmul", (2,), addmm, gives=ANY),
    Operator("torch.bmm", "matmul", (3,), bmm("torch.bmm({x}, {y})"), gives=ANY),
    Operator("torch.baddbmm", "matmul", (3,), bmm("torch.baddbmm({z}, {x}, {y})", added=True), gives=ANY),
    Operator("torch.cdist", "matmul", (3,), cdist, gives=_NOT_NEGATIVE),
    Operator("F.scaled_dot_product_attention", "attention", (4,), sdpa),
    Operator("nn.MultiheadAttention", "attention", (3,), attention, gives=ANY),
    Operator("nn.TransformerEncoderLayer", "attention", (3,), encoder, gives=NORMAL),
]

_LOSSES = [
    Operator("F.mse_loss", "loss", _BATCHED, loss("F.mse_loss"), last=True),
    Operator("F.l1_loss", "loss", _BATCHED, loss("F.l1_loss"), last=True),
    Operator("F.smooth_l1_loss", "loss", _BATCHED, loss("F.smooth_l1_loss"), last=True),
    Operator("F.huber_loss", "loss", _BATCHED, loss("F.huber_loss"), last=True),
    Operator("F.soft_margin_loss", "loss", _BATCHED, loss("F.soft_margin_loss", work=200), last=True),
    Operator("F.poisson_nll_loss", "loss", _BATCHED, loss("F.poisson_nll_loss", _ABOVE, 30), NORMAL, last=True),
    Operator("F.kl_div", "loss", _BATCHED, loss("F.kl_div", "torch.rand({})", 200), last=True),
    Operator(
        "F.binary_cross_entropy_with_logits",
        "loss",
        _BATCHED,
        loss("F.binary_cross_entropy_with_logits", "torch.rand({})", 200),
        last=True,
    ),
    Operator(
        "F.binary_cross_entropy",
        "loss",
        _BATCHED,
        loss("F.binary_cross_entropy", "torch.rand({})", 200),
        (0.02, 0.98),
        last=True,
    ),
    Operator(
        "F.cross_entropy", "loss", (2,), class_loss("F.cross_entropy({x}, {target}, reduction='none')"), last=True
    ),
    Operator(
        "F.multi_margin_loss",
        "loss",
        (2,),
        class_loss("F.multi_margin_loss({x}, {target}, reduction='none')"),
        last=True,
    ),
    Operator("F.cosine_similarity", "loss", _BATCHED, pairs("F.cosine_similarity({x}, {y}, dim=-1)"), last=True),
    Operator("F.pairwise_distance", "loss", _BATCHED, pairs("F.pairwise_distance({x}, {y})"), last=True),
    Operator(
        "F.triplet_margin_loss",
        "loss",
        (2,),
        pairs("F.triplet_margin_loss({x}, {y}, {z}, reduction='none')", triple=True),
        last=True,
    ),
    Operator("F.cosine_embedding_loss", "loss", (2,), embedding_loss, last=True),
]

_SHAPES = [
    Operator(
        "torch.transpose",
        "shape",
        (3, 4),
        shaped("torch.transpose({x}, 1, 2)", lambda x: (x[0], x[2], x[1], *x[3:]), False),
    ),
    Operator(
        "torch.permute",
        "shape",
        (4,),
        shaped("torch.permute({x}, (0, 2, 3, 1))", lambda x: (x[0], x[2], x[3], x[1]), False),
    ),
    Operator(
        "torch.flatten", "shape", (3, 4, 5), shaped("torch.flatten({x}, 1)", lambda x: (x[0], size(x[1:])), False)
    ),
    Operator("torch.unsqueeze", "shape", (2, 3), shaped("torch.unsqueeze({x}, 1)", lambda x: (x[0], 1, *x[1:]), False)),
    Operator(
        "torch.narrow",
        "shape",
        _BATCHED,
        shaped("torch.narrow({x}, -1, 1, 4)", lambda x: (*x[:-1], 4) if x[-1] > 4 else None, False),
    ),
    Operator("torch.chunk", "shape", _BATCHED, shaped("torch.chunk({x}, 2, dim=-1)[1]", halved, False)),
    Operator(
        "torch.unflatten",
        "shape",
        (2, 3),
        shaped(
            "torch.unflatten({x}, -1, (4, -1))", lambda x: (*x[:-1], 4, x[-1] // 4) if x[-1] % 4 == 0 else None, False
        ),
    ),
    Operator("torch.flip", "shape", _BATCHED, shaped("torch.flip({x}, (-1,))", lambda x: x)),
    Operator("torch.roll", "shape", _BATCHED, shaped("torch.roll({x}, 3, dims=-1)", lambda x: x)),
    Operator("torch.cat", "shape", _BATCHED, joined("torch.cat([{x}, {y}], dim=-1)", -1), gives=ANY),
    Operator("torch.stack", "shape", (2, 3), joined("torch.stack([{x}, {y}], dim=1)", None), gives=ANY),
    Operator("torch.tile", "shape", (2, 3), shaped("torch.tile({x}, (2,))", lambda x: (*x[:-1], 2 * x[-1]))),
    Operator(
        "torch.repeat_interleave",
        "shape",
        _BATCHED,
        shaped("torch.repeat_interleave({x}, 2, dim=-1)", lambda x: (*x[:-1], 2 * x[-1])),
    ),
    Operator("torch.tril", "shape", (3, 4), same("torch.tril({x})", "torch.tril({x}, diagonal=-1)"), gives=ANY),
    Operator("torch.triu", "shape", (3, 4), same("torch.triu({x})", "torch.triu({x}, diagonal=1)"), gives=ANY),
    Operator(
        "torch.diagonal",
        "shape",
        (3,),
        shaped("torch.diagonal({x}, dim1=-2, dim2=-1)", lambda x: (x[0], min(x[1], x[2])), False),
    ),
    Operator("torch.index_select", "shape", _BATCHED, index_select),
    Operator("torch.gather", "shape", _BATCHED, gather("torch.gather({x}, -1, {index})")),
    Operator("torch.take_along_dim", "shape", _BATCHED, gather("torch.take_along_dim({x}, {index}, dim=-1)")),
    Operator("torch.masked_fill", "shape", _ALL, masked("torch.masked_fill({x}, {mask}, 0.0)"), gives=ANY),
    Operator("F.pad", "shape", _BATCHED, shaped("F.pad({x}, (1, 2))", lambda x: (*x[:-1], x[-1] + 3)), gives=ANY),
    Operator("F.glu", "shape", _BATCHED, shaped("F.glu({x}, dim=-1)", halved), gives=ANY),
    Operator("F.interpolate", "shape", (4,), shaped("F.interpolate({x}, scale_factor=2, mode='bilinear')", resized(2))),
    Operator(
        "nn.Upsample",
        "shape",
        (3, 4),
        lambda rng, x: Use("self.{m}({x})", resized(2)(x), "nn.Upsample(scale_factor={scale})", (("scale", 2),)),
    ),
    Operator(
        "F.pixel_shuffle",
        "shape",
        (4,),
        shaped("F.pixel_shuffle({x}, 2)", lambda x: (x[0], x[1] // 4, 2 * x[2], 2 * x[3]) if x[1] % 4 == 0 else None),
    ),
    Operator(
        "F.pixel_unshuffle",
        "shape",
        (4,),
        shaped(
            "F.pixel_unshuffle({x}, 2)",
            lambda x: (x[0], 4 * x[1], x[2] // 2, x[3] // 2) if x[2] % 2 == x[3] % 2 == 0 else None,
        ),
    ),
    Operator(
        "F.channel_shuffle", "shape", (4,), shaped("F.channel_shuffle({x}, 2)", lambda x: x if x[1] % 2 == 0 else None)
    ),
    Operator(
        "F.unfold",
        "shape",
        (4,),
        shaped(
            "F.unfold({x}, 3)",
            lambda x: (x[0], 9 * x[1], (x[2] - 2) * (x[3] - 2)) if min(x[2:]) > 2 else None,
            work=1000,
        ),
    ),
    Operator("nn.Embedding", "shape", (2,), embedding, gives=NORMAL, first=True),
]

CATALOGUE: tuple[Operator, ...] = (
    *_ELEMENTWISE, *_REDUCTIONS, *_NORMALISATIONS, *_POOLING, *_MATMULS, *_LOSSES, *_SHAPES,
)  # fmt: skip


def path_of(name: str) -> str:
    """``F.gelu`` -> ``torch.nn.functional.gelu``: the import path of an operator."""
    head, _, rest = name.partition(".")
    return {"F": "torch.nn.functional.", "nn": "torch.nn.", "torch": "torch.", "Tensor": "torch.Tensor."}[head] + rest


@cache
def available() -> tuple[Operator, ...]:
    """The operators that the installed torch has.  Imports torch."""
    import torch

    def exists(path: str) -> bool:
        here: object = torch
        for part in path.split(".")[1:]:
            here = getattr(here, part, None)
        return here is not None

    return tuple(operator for operator in CATALOGUE if exists(path_of(operator.name)))
