"""Lists the operators that a task can apply one after the other, in a chain. The list is the operator catalogue.

Each row has the operator's source text, its cost, the shapes of its input and output, and the ranges of their values.
For example, a logarithm takes positive values. There are no random, in-place or backward operators. Operators such as
``floor`` and ``argmax`` are left out, because a rounding error can change their results so much that a correct kernel
fails."""

import math
from functools import partial
from typing import Any

from cuda_agent.synthesis import rules
from cuda_agent.synthesis.rules import ANY, NORMAL, POSITIVE, RANDN, Interval, Operator, Shape, Use, fixed, same, size

_ALL = (1, 2, 3, 4, 5)
_BATCHED = (2, 3, 4)
_ABOVE = "torch.rand({shape}) + 0.5"
_SHARE = "torch.rand({shape})"
_ENTROPY = "F.binary_cross_entropy"
_MASK = "torch.rand({shape}) > 0.5"
_UNIT: Interval = (0.0, 1.0)
_SIGNED_UNIT: Interval = (-1.0, 1.0)
_NOT_NEGATIVE: Interval = (0.0, math.inf)


def _halved(x: Shape) -> Shape | None:
    return (*x[:-1], x[-1] // 2) if x[-1] % 2 == 0 else None


def _doubled(x: Shape) -> Shape:
    return (*x[:-1], 2 * x[-1])


def _resized(x: Shape) -> Shape:
    return (*x[:2], *(2 * length for length in x[2:]))


def _unfolded(x: Shape) -> Shape:
    return (x[0], 9 * x[1], max(0, x[2] - 2) * max(0, x[3] - 2))


_elementwise = partial(Operator, "elementwise")


def _unary(name: str, work: float, needs: Interval = ANY, gives: Interval | None = ANY, *more: str) -> Operator:
    return _elementwise(name, _ALL, same(f"{name}({{x}})", *more, work=work), needs, gives)


# fmt: off
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
    _elementwise("nn.PReLU", _BATCHED, rules.layer("nn.PReLU({channels})", rules.channels, 10), gives=ANY),
    _elementwise("torch.clamp", _ALL, same("torch.clamp({x}, -1.5, 1.5)", work=2), gives=(-1.5, 1.5)),
    _elementwise("torch.pow", _ALL, same("torch.pow({x}, 3)", "torch.pow({x}, 2)", work=8), gives=ANY),
    _elementwise("torch.add", _ALL, same("torch.add({x}, {y})", "torch.add({x}, {y}, alpha=0.5)", y=RANDN), gives=ANY),
    _elementwise("torch.sub", _ALL, same("torch.sub({x}, {y})", y=RANDN), gives=ANY),
    _elementwise("torch.mul", _ALL, same("torch.mul({x}, {y})", y=RANDN), gives=ANY),
    _elementwise("torch.div", _ALL, same("torch.div({x}, {y})", y=_ABOVE), gives=ANY),
    _elementwise("torch.maximum", _ALL, same("torch.maximum({x}, {y})", y=RANDN), gives=ANY),
    _elementwise("torch.minimum", _ALL, same("torch.minimum({x}, {y})", y=RANDN), gives=ANY),
    _elementwise("torch.atan2", _ALL, same("torch.atan2({x}, {y})", work=200, y=_ABOVE), gives=(-1.6, 1.6)),
    _elementwise("torch.hypot", _ALL, same("torch.hypot({x}, {y})", work=30, y=RANDN), gives=_NOT_NEGATIVE),
    _elementwise("torch.logaddexp", _ALL, same("torch.logaddexp({x}, {y})", work=400, y=RANDN), gives=ANY),
    _elementwise("torch.lerp", _ALL, same("torch.lerp({x}, {y}, 0.3)", y=RANDN), gives=ANY),
    _elementwise("torch.where", _ALL, fixed("torch.where({mask}, {x}, {y})", work=1, mask=_MASK, y=RANDN), gives=ANY),
    _elementwise("torch.addcmul", _BATCHED, rules.layer(
        "nn.Parameter(torch.randn({features}))", rules.features, 1, "torch.addcmul({x}, {x}, self.{m}, value=0.5)"
    ), gives=ANY),
    _elementwise("torch.copysign", _ALL, same("torch.copysign({x}, {y})", work=10, y=RANDN), gives=ANY),
]

_reduction, _scan = partial(Operator, "reduction"), partial(Operator, "scan")
_REDUCTIONS = [
    _reduction("torch.sum", _BATCHED, rules.reduce("torch.sum"), gives=ANY),
    _reduction("torch.mean", _BATCHED, rules.reduce("torch.mean")),
    _reduction("torch.amax", _BATCHED, rules.reduce("torch.amax")),
    _reduction("torch.amin", _BATCHED, rules.reduce("torch.amin")),
    _reduction("torch.max", _BATCHED, rules.reduce("torch.max", 60, "[0]")),
    _reduction("torch.var", _BATCHED, rules.reduce("torch.var", 100), gives=_NOT_NEGATIVE),
    _reduction("torch.std", _BATCHED, rules.reduce("torch.std", 100), gives=_NOT_NEGATIVE),
    _reduction("torch.logsumexp", _BATCHED, rules.reduce("torch.logsumexp", 60), gives=ANY),
    _reduction("torch.median", _BATCHED, rules.reduce("torch.median", 2000, "[0]")),
    _reduction("torch.linalg.vector_norm", _BATCHED, rules.reduce("torch.linalg.vector_norm", 10), gives=_NOT_NEGATIVE),
    _scan("torch.cumsum", _BATCHED, same("torch.cumsum({x}, dim=-1)", work=70), gives=ANY),
    _scan("torch.cummax", _BATCHED, same("torch.cummax({x}, dim=-1)[0]", work=500)),
    _scan("torch.logcumsumexp", _BATCHED, same("torch.logcumsumexp({x}, dim=-1)", work=3000), gives=ANY),
    _scan("torch.diff", _BATCHED, fixed("torch.diff({x}, dim=-1)", lambda x: (*x[:-1], x[-1] - 1)), gives=ANY),
    _scan("torch.sort", _BATCHED, same("torch.sort({x}, dim=-1)[0]", work=3800)),
    _scan("torch.topk", _BATCHED, rules.topk),
]


_normalisation = partial(Operator, "normalisation")
_NORMALISATIONS = [
    _normalisation("torch.softmax", _BATCHED, same("torch.softmax({x}, dim=-1)", work=30), gives=_UNIT),
    _normalisation("F.softmin", _BATCHED, same("F.softmin({x}, dim=-1)", work=40), gives=_UNIT),
    _normalisation("torch.log_softmax", _BATCHED, same("torch.log_softmax({x}, dim=-1)", work=30), gives=ANY),
    _normalisation("F.normalize", _BATCHED, same("F.normalize({x}, dim=-1)", work=10), gives=_SIGNED_UNIT),
    _normalisation("nn.LayerNorm", _BATCHED, rules.layer("nn.LayerNorm({features})", rules.features, 15), gives=NORMAL),
    _normalisation("nn.RMSNorm", _BATCHED, rules.layer("nn.RMSNorm({features})", rules.features, 15), gives=NORMAL),
    _normalisation("nn.GroupNorm", (3, 4), rules.layer("nn.GroupNorm({groups}, {channels})", rules.groups, 20),
                   gives=NORMAL),
    *(
        _normalisation(name, ranks, rules.layer(f"{name}({{channels}})", rules.channels, 40), gives=gives)
        for name, ranks, gives in (
            ("nn.BatchNorm1d", (2, 3), None), ("nn.BatchNorm2d", (4,), None), ("nn.BatchNorm3d", (5,), None),
            ("nn.InstanceNorm1d", (3,), NORMAL), ("nn.InstanceNorm2d", (4,), NORMAL),
            ("nn.InstanceNorm3d", (5,), NORMAL),
        )
    ),
    _normalisation("F.local_response_norm", (4,), same("F.local_response_norm({x}, 5)", work=500)),
]

_pooling = partial(Operator, "pooling")
_POOLING = [
    *(_pooling(f"nn.MaxPool{d}d", (d + 2,), rules.pool(f"nn.MaxPool{d}d", 400)) for d in (1, 2, 3)),
    *(_pooling(f"nn.AvgPool{d}d", (d + 2,), rules.pool(f"nn.AvgPool{d}d", 150)) for d in (1, 2, 3)),
    _pooling("nn.LPPool2d", (4,), rules.pool("nn.LPPool2d", 300, "2, "), gives=_NOT_NEGATIVE),
    *(_pooling(f"F.adaptive_avg_pool{d}d", (d + 2,), rules.adaptive(f"F.adaptive_avg_pool{d}d")) for d in (1, 2, 3)),
    *(_pooling(f"F.adaptive_max_pool{d}d", (d + 2,), rules.adaptive(f"F.adaptive_max_pool{d}d")) for d in (1, 2)),
]

_convolution, _matmul = partial(Operator, "convolution", gives=ANY), partial(Operator, "matmul", gives=ANY)
_attention = partial(Operator, "attention")
_MATMULS = [
    *(_convolution(f"nn.Conv{d}d", (d + 2,), rules.convolution(f"nn.Conv{d}d")) for d in (1, 2, 3)),
    *(
        _convolution(f"nn.ConvTranspose{d}d", (d + 2,), rules.convolution(f"nn.ConvTranspose{d}d", transposed=True))
        for d in (1, 2, 3)
    ),
    _matmul("nn.Linear", _BATCHED, rules.linear),
    _matmul("nn.Bilinear", (2, 3), rules.bilinear),
    _matmul("torch.matmul", _BATCHED, rules.matmul("torch.matmul({x}, self.{m})")),
    _matmul("torch.mm", (2,), rules.matmul("torch.mm({x}, self.{m})")),
    _matmul("torch.einsum", (3,), rules.matmul("torch.einsum('bsi,io->bso', {x}, self.{m})")),
    _matmul("F.linear", _BATCHED, rules.matmul("F.linear({x}, self.{m})", "{out_features}, {features}")),
    _matmul("torch.addmm", (2,), rules.addmm),
    _matmul("torch.bmm", (3,), rules.bmm("torch.bmm({x}, {y})")),
    _matmul("torch.baddbmm", (3,), rules.bmm("torch.baddbmm({z}, {x}, {y})", added=True)),
    Operator("matmul", "torch.cdist", (3,), rules.cdist, gives=_NOT_NEGATIVE),
    _attention("F.scaled_dot_product_attention", (4,), rules.attend),
    _attention("nn.MultiheadAttention", (3,), rules.multihead, gives=ANY),
    _attention("nn.TransformerEncoderLayer", (3,), rules.encoder, gives=NORMAL),
]

_loss = partial(Operator, "loss", last=True)
_CLASS = "torch.randint(0, {last}, ({batch},))"
_SIGN = "torch.randint(0, 2, ({batch},)) * 2 - 1"


def _row_loss(name: str, ranks: tuple[int, ...], arguments: str, **inputs: str) -> Operator:
    return _loss(name, ranks, fixed(f"{name}({arguments})", lambda x: x[:-1], 40, None, **inputs))


_LOSSES = [
    *(_loss(f"F.{name}_loss", _BATCHED, rules.loss(f"F.{name}_loss")) for name in ("mse", "l1", "smooth_l1", "huber")),
    _loss("F.soft_margin_loss", _BATCHED, rules.loss("F.soft_margin_loss", work=200)),
    _loss("F.poisson_nll_loss", _BATCHED, rules.loss("F.poisson_nll_loss", _ABOVE, 30), NORMAL),
    *(_loss(name, _BATCHED, rules.loss(name, _SHARE, 200)) for name in ("F.kl_div", f"{_ENTROPY}_with_logits")),
    _loss(_ENTROPY, _BATCHED, rules.loss(_ENTROPY, _SHARE, 200), (0.02, 0.98)),
    *(
        _loss(name, (2,), fixed(f"{name}({{x}}, {{target}}, reduction='none')", lambda x: x[:1], 60, target=_CLASS))
        for name in ("F.cross_entropy", "F.multi_margin_loss")
    ),
    _row_loss("F.cosine_similarity", _BATCHED, "{x}, {y}, dim=-1", y=RANDN),
    _row_loss("F.pairwise_distance", _BATCHED, "{x}, {y}", y=RANDN),
    _row_loss("F.triplet_margin_loss", (2,), "{x}, {y}, {z}, reduction='none'", y=RANDN, z=RANDN),
    _row_loss("F.cosine_embedding_loss", (2,), "{x}, {y}, {target}, reduction='none'", y=RANDN, target=_SIGN),
]

_INDEX = "torch.randint(0, {last}, ({shape},))"


def _shape(
    name: str, ranks: tuple[int, ...], form: str, *shape: Any, gives: Interval | None = None, **more: Any
) -> Operator:
    return Operator("shape", name, ranks, fixed(form, *shape, **more), gives=gives)


_SHAPES = [
    _shape("torch.transpose", (3, 4), "torch.transpose({x}, 1, 2)", lambda x: (x[0], x[2], x[1], *x[3:]), moved=0),
    _shape("torch.permute", (4,), "torch.permute({x}, (0, 2, 3, 1))", lambda x: (x[0], x[2], x[3], x[1]), moved=0),
    _shape("torch.flatten", (3, 4, 5), "torch.flatten({x}, 1)", lambda x: (x[0], size(x[1:])), moved=0),
    _shape("torch.unsqueeze", (2, 3), "torch.unsqueeze({x}, 1)", lambda x: (x[0], 1, *x[1:]), moved=0),
    _shape("torch.narrow", _BATCHED, "torch.narrow({x}, -1, 1, 4)",
           lambda x: (*x[:-1], 4) if x[-1] > 4 else None, moved=0),
    _shape("torch.chunk", _BATCHED, "torch.chunk({x}, 2, dim=-1)[1]", _halved, moved=0),
    _shape("torch.unflatten", (2, 3), "torch.unflatten({x}, -1, (4, -1))",
           lambda x: (*x[:-1], 4, x[-1] // 4) if x[-1] % 4 == 0 else None, moved=0),
    _shape("torch.flip", _BATCHED, "torch.flip({x}, (-1,))"),
    _shape("torch.roll", _BATCHED, "torch.roll({x}, 3, dims=-1)"),
    _shape("torch.cat", _BATCHED, "torch.cat([{x}, {y}], dim=-1)", _doubled, y=RANDN, gives=ANY),
    _shape("torch.stack", (2, 3), "torch.stack([{x}, {y}], dim=1)", lambda x: (x[0], 2, *x[1:]), y=RANDN, gives=ANY),
    _shape("torch.tile", (2, 3), "torch.tile({x}, (2,))", _doubled),
    _shape("torch.repeat_interleave", _BATCHED, "torch.repeat_interleave({x}, 2, dim=-1)", _doubled),
    Operator("shape", "torch.tril", (3, 4), same("torch.tril({x})", "torch.tril({x}, diagonal=-1)"), gives=ANY),
    Operator("shape", "torch.triu", (3, 4), same("torch.triu({x})", "torch.triu({x}, diagonal=1)"), gives=ANY),
    _shape("torch.diagonal", (3,), "torch.diagonal({x}, dim1=-2, dim2=-1)", lambda x: (x[0], min(x[1:])), moved=0),
    _shape("torch.index_select", _BATCHED, "torch.index_select({x}, -1, {index})",
           lambda x: (*x[:-1], max(1, x[-1] // 2)), 100, index="torch.randint(0, {last}, ({half},))"),
    _shape("torch.gather", _BATCHED, "torch.gather({x}, -1, {index})", work=300, moved=4.0, index=_INDEX),
    _shape("torch.take_along_dim", _BATCHED, "torch.take_along_dim({x}, {index}, dim=-1)",
           work=300, moved=4.0, index=_INDEX),
    _shape("torch.masked_fill", _ALL, "torch.masked_fill({x}, {mask}, 0.0)", work=1, mask=_MASK, gives=ANY),
    _shape("F.pad", _BATCHED, "F.pad({x}, (1, 2))", lambda x: (*x[:-1], x[-1] + 3), gives=ANY),
    _shape("F.glu", _BATCHED, "F.glu({x}, dim=-1)", _halved, gives=ANY),
    _shape("F.interpolate", (4,), "F.interpolate({x}, scale_factor=2, mode='bilinear')", _resized),
    Operator("shape", "nn.Upsample", (3, 4),
             lambda rng, x: Use("self.{m}({x})", _resized(x), "nn.Upsample(scale_factor={scale})", (("scale", 2),))),
    _shape("F.pixel_shuffle", (4,), "F.pixel_shuffle({x}, 2)",
           lambda x: (x[0], x[1] // 4, 2 * x[2], 2 * x[3]) if x[1] % 4 == 0 else None),
    _shape("F.pixel_unshuffle", (4,), "F.pixel_unshuffle({x}, 2)",
           lambda x: (x[0], 4 * x[1], x[2] // 2, x[3] // 2) if x[2] % 2 == x[3] % 2 == 0 else None),
    _shape("F.channel_shuffle", (4,), "F.channel_shuffle({x}, 2)", lambda x: x if x[1] % 2 == 0 else None),
    _shape("F.unfold", (4,), "F.unfold({x}, 3)", _unfolded, lambda x: 1000 * size(_unfolded(x))),
    Operator("shape", "nn.Embedding", (2,), rules.embedding, gives=NORMAL, first=True),
]

CATALOGUE: tuple[Operator, ...] = (
    *_ELEMENTWISE, *_REDUCTIONS, *_NORMALISATIONS, *_POOLING, *_MATMULS, *_LOSSES, *_SHAPES,
)
