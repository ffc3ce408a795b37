"""Rules of operators in a chain: their text, the shape that they give, their cost.

``Use`` is one operator at one position; a ``Rule`` makes it from the incoming shape.  The rules serve the table in
``catalogue.py``; tests run each against torch.  What it does not cover: gradients, and dtypes other than float32
(except indices and masks).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Shape = tuple[int, ...]
Interval = tuple[float, float]

ANY: Interval = (-math.inf, math.inf)
NORMAL: Interval = (-8.0, 8.0)  # what torch.randn gives
POSITIVE: Interval = (0.05, math.inf)


@dataclass(frozen=True)
class Use:
    """An operator at one position of a chain.  Texts are templates: ``{x}`` is the incoming tensor, ``{m}`` the
    layer's attribute, every other name one of ``arguments`` (of ``__init__``) or ``inputs`` (of ``get_inputs``)."""

    forward: str
    shape: Shape  # of what it gives
    init: str = ""
    arguments: tuple[tuple[str, int], ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    flops: float = 0.0
    moved: float | None = None  # elements read and written; none: input, output and further inputs once each
    source: str = ""  # of the incoming tensor, for operators that must stand first (indices)


Rule = Callable[[Random, Shape], Use | None]  # None: cannot stand behind this shape


@dataclass(frozen=True)
class Operator:
    name: str  # as in the ``ops`` column
    kind: str
    ranks: tuple[int, ...]
    use: Rule
    needs: Interval = ANY
    gives: Interval | None = None  # none: the interval that came in
    last: bool = False  # may only end a chain
    first: bool = False  # may only begin one


def size(shape: Shape) -> int:
    return math.prod(shape)


def _text(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def same(*forms: str, work: float = 0.0, other: str = "", arguments: tuple[str, ...] = (), init: str = "") -> Rule:
    """Keeps the shape.  ``other`` makes a second input of the same shape, ``arguments`` are sizes of dimension 1."""

    def use(rng: Random, x: Shape) -> Use:
        inputs = (("y", other.format(_text(x))),) if other else ()
        sizes = tuple((name, x[1]) for name in arguments)
        return Use(rng.choice(forms), x, init, sizes, inputs, flops=size(x) * work)

    return use


def reduce(function: str, work: float = 1.0, tail: str = "") -> Rule:
    """Over the last dimension, sometimes keeping it."""

    def use(rng: Random, x: Shape) -> Use:
        keep = rng.random() < 0.4
        arguments = "dim=-1, keepdim=True" if keep else "dim=-1"
        return Use(f"{function}({{x}}, {arguments}){tail}", (*x[:-1], 1) if keep else x[:-1], flops=size(x) * work)

    return use


def norm_last(constructor: str) -> Rule:
    def use(rng: Random, x: Shape) -> Use:
        return Use("self.{m}({x})", x, f"{constructor}({{features}})", (("features", x[-1]),), flops=size(x) * 15)

    return use


def norm_channels(constructor: str) -> Rule:
    def use(rng: Random, x: Shape) -> Use:
        return Use("self.{m}({x})", x, f"{constructor}({{channels}})", (("channels", x[1]),), flops=size(x) * 40)

    return use


def group_norm(rng: Random, x: Shape) -> Use | None:
    groups = [g for g in (2, 4, 8) if x[1] % g == 0]
    if not groups:
        return None
    arguments = (("groups", rng.choice(groups)), ("channels", x[1]))
    return Use("self.{m}({x})", x, "nn.GroupNorm({groups}, {channels})", arguments, flops=size(x) * 20)


def _window(length: int, kernel: int, stride: int, padding: int = 0) -> int:
    return (length + 2 * padding - kernel) // stride + 1


def pool(constructor: str, work: float, extra: str = "") -> Rule:
    def use(rng: Random, x: Shape) -> Use | None:
        kernel = rng.choice((2, 2, 3))
        out = tuple(_window(length, kernel, kernel) for length in x[2:])
        if min(out) < 1:
            return None
        init = f"{constructor}({extra}{{kernel_size}})"
        return Use("self.{m}({x})", (*x[:2], *out), init, (("kernel_size", kernel),), flops=size(x) * work)

    return use


def adaptive(function: str) -> Rule:
    def use(rng: Random, x: Shape) -> Use | None:
        length = rng.choice((1, 2, 4))
        if min(x[2:]) < length:
            return None
        target = length if len(x) == 3 else (length,) * (len(x) - 2)
        return Use(f"{function}({{x}}, {target})", (*x[:2], *(length,) * (len(x) - 2)), flops=size(x) * 100)

    return use


def convolution(constructor: str, transposed: bool = False) -> Rule:
    def use(rng: Random, x: Shape) -> Use | None:
        kernel = rng.choice((1, 3, 3, 5) if not transposed else (2, 3, 4))
        stride = rng.choice((1, 1, 2))
        channels = rng.choice((x[1], 2 * x[1], max(4, x[1] // 2)))
        padding = kernel // 2 if not transposed else 0
        if transposed:
            out = tuple((length - 1) * stride + kernel for length in x[2:])
        else:
            out = tuple(_window(length, kernel, stride, padding) for length in x[2:])
        if min(out) < 1:
            return None
        arguments = (("in_channels", x[1]), ("out_channels", channels), ("kernel_size", kernel))
        init = f"{constructor}({{in_channels}}, {{out_channels}}, {{kernel_size}}, stride={stride}"
        init += f", padding={padding})" if padding else ")"
        taps = kernel ** len(out)
        steps = size(x[2:]) if transposed else size(out)
        slow = 3 if transposed or len(out) == 3 else 1.5
        return Use(
            "self.{m}({x})",
            (x[0], channels, *out),
            init,
            arguments,
            flops=slow * 2 * x[0] * steps * taps * x[1] * channels,
        )

    return use


def linear(rng: Random, x: Shape) -> Use:
    out = rng.choice((x[-1], 2 * x[-1], max(8, x[-1] // 2)))
    arguments = (("in_features", x[-1]), ("out_features", out))
    init = "nn.Linear({in_features}, {out_features}" + rng.choice((")", ", bias=False)"))
    return Use("self.{m}({x})", (*x[:-1], out), init, arguments, flops=2.0 * size(x) * out)


def bilinear(rng: Random, x: Shape) -> Use | None:
    if x[-1] > 64:
        return None
    arguments = (("features", x[-1]), ("out_features", x[-1]))
    return Use(
        "self.{m}({x}, {y})",
        x,
        "nn.Bilinear({features}, {features}, {out_features})",
        arguments,
        (("y", f"torch.randn({_text(x)})"),),
        flops=4.0 * size(x) * x[-1] * x[-1],
    )


def matmul(form: str, weight: str) -> Rule:
    """With a parameter; ``weight`` is its shape as text over ``{features}`` and ``{out_features}``."""

    def use(rng: Random, x: Shape) -> Use:
        out = rng.choice((x[-1], 2 * x[-1], max(8, x[-1] // 2)))
        arguments = (("features", x[-1]), ("out_features", out))
        init = f"nn.Parameter(torch.randn({weight}) / {{features}} ** 0.5)"
        return Use(form, (*x[:-1], out), init, arguments, flops=2.0 * size(x) * out)

    return use


def addmm(rng: Random, x: Shape) -> Use:
    use = matmul("torch.addmm({y}, {x}, self.{m})", "{features}, {out_features}")(rng, x)
    assert use is not None
    return Use(use.forward, use.shape, use.init, use.arguments, (("y", f"torch.randn({use.shape[-1]})"),), use.flops)


def bmm(form: str, added: bool = False) -> Rule:
    def use(rng: Random, x: Shape) -> Use:
        out = rng.choice((x[-1], x[1]))
        shape = (*x[:-1], out)
        inputs: tuple[tuple[str, str], ...] = (("y", f"torch.randn({_text((*x[:-2], x[-1], out))})"),)
        if added:
            inputs += (("z", f"torch.randn({_text(shape)})"),)
        return Use(form, shape, inputs=inputs, flops=3.0 * size(x) * out)

    return use


def sdpa(rng: Random, x: Shape) -> Use:
    text = f"torch.randn({_text(x)})"
    causal = rng.choice(("", ", is_causal=True"))
    form = f"F.scaled_dot_product_attention({{x}}, {{k}}, {{v}}{causal})"
    return Use(form, x, inputs=(("k", text), ("v", text)), flops=8.0 * size(x) * x[-2])


def attention(rng: Random, x: Shape) -> Use | None:
    heads = [h for h in (2, 4, 8) if x[-1] % h == 0]
    if not heads:
        return None
    arguments = (("embed_dim", x[-1]), ("num_heads", rng.choice(heads)))
    init = "nn.MultiheadAttention({embed_dim}, {num_heads}, batch_first=True)"
    flops = 10.0 * size(x) * x[-1] + 8.0 * size(x) * x[-2]
    return Use("self.{m}({x}, {x}, {x}, need_weights=False)[0]", x, init, arguments, flops=flops)


def encoder(rng: Random, x: Shape) -> Use | None:
    heads = [h for h in (2, 4) if x[-1] % h == 0]
    if not heads:
        return None
    arguments = (("d_model", x[-1]), ("heads", rng.choice(heads)), ("feedforward", 2 * x[-1]))
    init = "nn.TransformerEncoderLayer({d_model}, {heads}, {feedforward}, dropout=0.0, batch_first=True)"
    return Use("self.{m}({x})", x, init, arguments, flops=18.0 * size(x) * x[-1] + 8.0 * size(x) * x[-2])


def loss(function: str, target: str = "torch.randn({})", work: float = 2.0) -> Rule:
    return same(f"{function}({{x}}, {{y}}, reduction='none')", other=target, work=work)


def class_loss(form: str) -> Rule:
    """Class targets; one value a row."""

    def use(rng: Random, x: Shape) -> Use:
        target = f"torch.randint(0, {x[-1]}, ({x[0]},))"
        return Use(form, x[:1], inputs=(("target", target),), flops=size(x) * 60)

    return use


def pairs(form: str, other: str = "torch.randn({})", triple: bool = False) -> Rule:
    """Row-wise comparisons: (..., n) with (..., n) -> (...)."""

    def use(rng: Random, x: Shape) -> Use:
        text = other.format(_text(x))
        inputs = (("y", text), ("z", text)) if triple else (("y", text),)
        return Use(form, x[:-1], inputs=inputs, flops=size(x) * 40)

    return use


def embedding_loss(rng: Random, x: Shape) -> Use:
    inputs = (("y", f"torch.randn({_text(x)})"), ("target", f"torch.randint(0, 2, ({x[0]},)) * 2 - 1"))
    form = "F.cosine_embedding_loss({x}, {y}, {target}, reduction='none')"
    return Use(form, x[:1], inputs=inputs, flops=size(x) * 40)


def cdist(rng: Random, x: Shape) -> Use:
    other = rng.choice((16, 32, 64))
    inputs = (("y", f"torch.randn({_text((*x[:-2], other, x[-1]))})"),)
    return Use("torch.cdist({x}, {y})", (*x[:-1], other), inputs=inputs, flops=4.0 * size(x) * other)


def shaped(form: str, shape: Callable[[Shape], Shape | None], moved: bool = True, work: float = 0.0) -> Rule:
    """A fixed text and a shape function; ``moved=False`` for views, which cost nothing; ``work`` an output element."""

    def use(rng: Random, x: Shape) -> Use | None:
        out = shape(x)
        if out is None or min(out, default=1) < 1:
            return None
        return Use(form, out, flops=size(out) * work, moved=None if moved else 0.0)

    return use


def masked(form: str, other: bool = False) -> Rule:
    def use(rng: Random, x: Shape) -> Use:
        mask = ("mask", f"torch.rand({_text(x)}) > 0.5")
        inputs = (mask, ("y", f"torch.randn({_text(x)})")) if other else (mask,)
        return Use(form, x, inputs=inputs, flops=size(x))

    return use


def joined(form: str, dim: int | None) -> Rule:
    """With a second tensor of the same shape, along the last dimension or a new one."""

    def use(rng: Random, x: Shape) -> Use:
        out = (x[0], 2, *x[1:]) if dim is None else (*x[:-1], 2 * x[-1])
        return Use(form, out, inputs=(("y", f"torch.randn({_text(x)})"),))

    return use


def index_select(rng: Random, x: Shape) -> Use:
    count = max(1, x[-1] // 2)
    inputs = (("index", f"torch.randint(0, {x[-1]}, ({count},))"),)
    return Use("torch.index_select({x}, -1, {index})", (*x[:-1], count), inputs=inputs, flops=size(x) * 100)


def gather(form: str) -> Rule:
    def use(rng: Random, x: Shape) -> Use:
        inputs = (("index", f"torch.randint(0, {x[-1]}, ({_text(x)},))"),)
        return Use(form, x, inputs=inputs, flops=size(x) * 300, moved=4.0 * size(x))

    return use


def topk(rng: Random, x: Shape) -> Use | None:
    k = rng.choice((2, 4, 8))
    return Use(f"torch.topk({{x}}, {k}, dim=-1)[0]", (*x[:-1], k), flops=size(x) * 500) if x[-1] >= k else None


def embedding(rng: Random, x: Shape) -> Use:
    vocabulary, width = rng.choice((256, 1024, 4096)), rng.choice((32, 64, 128))
    arguments = (("num_embeddings", vocabulary), ("embedding_dim", width))
    source = f"torch.randint(0, {vocabulary}, ({_text(x)},))"
    init = "nn.Embedding({num_embeddings}, {embedding_dim})"
    return Use("self.{m}({x})", (*x, width), init, arguments, source=source, moved=3.0 * size(x) * width)


def prelu(rng: Random, x: Shape) -> Use:
    return Use("self.{m}({x})", x, "nn.PReLU({channels})", (("channels", x[1]),), flops=size(x) * 10)


def bias(form: str, init: str = "torch.randn({features})") -> Rule:
    """With a parameter of the last dimension."""

    def use(rng: Random, x: Shape) -> Use:
        return Use(form, x, f"nn.Parameter({init})", (("features", x[-1]),), flops=size(x))

    return use


def halved(x: Shape) -> Shape | None:
    return (*x[:-1], x[-1] // 2) if x[-1] % 2 == 0 else None


def resized(factor: int) -> Callable[[Shape], Shape]:
    return lambda x: (*x[:2], *(length * factor for length in x[2:]))
