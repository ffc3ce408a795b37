"""Defines the rules by which operators are put into a chain. In a chain, each operator takes the output of the previous
one.

Each operator has a rule. A ``Rule`` is a function of a random generator and of the shape of the operator's incoming
tensor. It returns a ``Use``, which holds the source text, the output shape and the cost of the operator for this shape.
If the operator does not accept the shape, the rule returns None. The module ``catalogue`` lists the operators with
their rules. All tensors are float32, except indices, labels and masks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

Shape = tuple[int, ...]
Interval = tuple[float, float]

ANY: Interval = (-math.inf, math.inf)
NORMAL: Interval = (-8.0, 8.0)  # the values of torch.randn
POSITIVE: Interval = (0.05, math.inf)
RANDN = "torch.randn({shape})"  # template of an input (see ``fixed``)


@dataclass(frozen=True)
class Use:
    """An operator at one position of a chain. ``forward`` and ``init`` are templates of source text. In a template,
    ``{x}`` stands for the incoming tensor, and ``{m}`` for the name of the model's attribute that holds the operator's
    layer or weight. Other words in braces stand for the names in ``arguments`` and ``inputs``."""

    forward: str  # expression in ``forward``
    shape: Shape  # shape of the output
    init: str = ""  # expression in ``__init__`` that makes the layer
    arguments: tuple[tuple[str, int], ...] = ()  # of ``__init__``: names and values
    inputs: tuple[tuple[str, str], ...] = ()  # of ``forward``: names and expressions in ``get_inputs``
    flops: float = 0.0  # number of operations
    moved: float | None = None  # elements read and written; None: input, output and further inputs once each
    source: str = ""  # expression in ``get_inputs`` for the incoming tensor; only if the operator takes indices


Rule = Callable[[Random, Shape], Use | None]  # None: the operator does not fit this incoming shape


@dataclass(frozen=True)
class Operator:
    kind: str  # such as "reduction"
    name: str  # as in ``Task.ops``
    ranks: tuple[int, ...]  # numbers of dimensions that it accepts
    use: Rule
    needs: Interval = ANY  # values that it accepts
    gives: Interval | None = None  # values of its output; None: those of the incoming tensor
    last: bool = False  # may only end a chain
    first: bool = False  # may only begin a chain


def size(shape: Shape) -> int:
    return math.prod(shape)


def _text(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def fixed(
    form: str,
    shape: Callable[[Shape], Shape | None] = lambda x: x,
    work: float | Callable[[Shape], float] = 0.0,
    moved: float | None = None,
    **inputs: str,
) -> Rule:
    """Returns a rule for an operator whose source text is always ``form``.

    Args:
        form: Template of the expression in ``forward``. {x} stands for the incoming tensor, and the name of a further
            input in braces stands for this input.
        shape: Maps the incoming tensor's shape to the output's shape, or to None if the operator does not fit.
        work: Number of operations per element of the incoming tensor, or a function that maps its shape to the total.
        moved: Elements read and written per element of the output; 0 for views. None: the elements of the incoming
            tensor, of the output and of the further inputs count once each.
        inputs: Names of further inputs, and templates of the expressions that make them. {shape} stands for the
            incoming tensor's shape, {batch} for its first size, {last} for its last size, {half} for half of {last}."""

    def use(rng: Random, x: Shape) -> Use | None:
        out = shape(x)
        if out is None or min(out, default=1) < 1:
            return None
        flops = work(x) if callable(work) else size(x) * work
        sizes = {"shape": _text(x), "batch": x[0], "last": x[-1], "half": max(1, x[-1] // 2)}
        sources = tuple((name, source.format(**sizes)) for name, source in inputs.items())
        return Use(form, out, inputs=sources, flops=flops, moved=None if moved is None else moved * size(out))

    return use


def same(*forms: str, work: float = 0.0, **inputs: str) -> Rule:
    """Returns a rule for an operator whose output has the shape of the incoming tensor. The rule draws the operator's
    source text from ``forms`` at random. ``fixed`` explains ``work`` and ``inputs``."""
    return lambda rng, x: fixed(rng.choice(forms), lambda x: x, work, None, **inputs)(rng, x)


def loss(function: str, target: str = RANDN, work: float = 2.0) -> Rule:
    return same(f"{function}({{x}}, {{y}}, reduction='none')", work=work, y=target)


def layer(
    init: str,
    sizes: Callable[[Random, Shape], dict[str, int | None]],
    work: float | Callable[[Shape], float],
    form: str = "self.{m}({x})",
) -> Rule:
    """Returns a rule for an operator that needs a module or a parameter, and whose output has the shape of the incoming
    tensor.

    Args:
        init: Template of the expression in ``__init__`` that makes the module or parameter.
        sizes: Draws the arguments of this expression: name -> value. If a value is None, the operator does not fit.
        work: Number of operations per element of the incoming tensor, or a function that maps its shape to the total.
        form: Template of the expression in ``forward``."""

    def use(rng: Random, x: Shape) -> Use | None:
        wanted = sizes(rng, x)
        arguments = tuple((name, value) for name, value in wanted.items() if value is not None)
        if len(arguments) < len(wanted):
            return None
        return Use(form, x, init, arguments, flops=work(x) if callable(work) else size(x) * work)

    return use


def features(rng: Random, x: Shape) -> dict[str, int | None]:
    return {"features": x[-1]}


def channels(rng: Random, x: Shape) -> dict[str, int | None]:
    return {"channels": x[1]}


def groups(rng: Random, x: Shape) -> dict[str, int | None]:
    return {"groups": _divisor(rng, x[1], (2, 4, 8)), "channels": x[1]}


def _divisor(rng: Random, number: int, choices: tuple[int, ...]) -> int | None:
    fitting = [choice for choice in choices if number % choice == 0]
    return rng.choice(fitting) if fitting else None


def reduce(function: str, work: float = 1.0, tail: str = "") -> Rule:
    """Returns a rule for the reduction ``function`` over the last dimension. The rule decides at random whether to pass
    ``keepdim=True``. ``tail`` is source text after the call, such as ``[0]``."""

    def use(rng: Random, x: Shape) -> Use:
        keep = rng.random() < 0.4
        arguments = "dim=-1, keepdim=True" if keep else "dim=-1"
        return Use(f"{function}({{x}}, {arguments}){tail}", (*x[:-1], 1) if keep else x[:-1], flops=size(x) * work)

    return use


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
        out = (length,) * (len(x) - 2)
        if min(x[2:]) < length:
            return None
        return Use(f"{function}({{x}}, {out if len(x) > 3 else length})", (*x[:2], *out), flops=size(x) * 100)

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
        steps = size(x[2:]) if transposed else size(out)
        slow = 3 if transposed or len(out) == 3 else 1.5
        flops = slow * 2 * x[0] * steps * kernel ** len(out) * x[1] * channels
        return Use("self.{m}({x})", (x[0], channels, *out), init, arguments, flops=flops)

    return use


def _product(rng: Random, x: Shape, form: str, init: str, name: str = "features") -> Use:
    """Returns the ``Use`` of an operator that multiplies a tensor of shape ``x`` by a weight matrix.

    Args:
        form: Template of the product's expression in ``forward``.
        init: Template of the expression in ``__init__`` that makes the weight matrix.
        name: Name of the argument of ``__init__`` for the last size of the tensor."""
    out = rng.choice((x[-1], 2 * x[-1], max(8, x[-1] // 2)))
    return Use(form, (*x[:-1], out), init, ((name, x[-1]), ("out_features", out)), flops=2.0 * size(x) * out)


def linear(rng: Random, x: Shape) -> Use:
    use = _product(rng, x, "self.{m}({x})", "nn.Linear({in_features}, {out_features}", "in_features")
    return replace(use, init=use.init + rng.choice((")", ", bias=False)")))


def matmul(form: str, weight: str = "{features}, {out_features}") -> Rule:
    """Returns a rule for an operator that multiplies the incoming tensor by a weight matrix. ``form`` is the template
    of the product's expression, and ``weight`` the template of the matrix's shape."""
    init = f"nn.Parameter(torch.randn({weight}) / {{features}} ** 0.5)"
    return lambda rng, x: _product(rng, x, form, init)


def addmm(rng: Random, x: Shape) -> Use | None:
    use = matmul("torch.addmm({y}, {x}, self.{m})")(rng, x)
    return use and replace(use, inputs=(("y", f"torch.randn({use.shape[-1]})"),))


def bilinear(rng: Random, x: Shape) -> Use | None:
    if x[-1] > 64:
        return None
    arguments = (("features", x[-1]), ("out_features", x[-1]))
    inputs = (("y", f"torch.randn({_text(x)})"),)
    init = "nn.Bilinear({features}, {features}, {out_features})"
    return Use("self.{m}({x}, {y})", x, init, arguments, inputs, flops=4.0 * size(x) * x[-1] * x[-1])


def bmm(form: str, added: bool = False) -> Rule:
    def use(rng: Random, x: Shape) -> Use:
        out = rng.choice((x[-1], x[1]))
        shape = (*x[:-1], out)
        inputs: tuple[tuple[str, str], ...] = (("y", f"torch.randn({_text((*x[:-2], x[-1], out))})"),)
        if added:
            inputs += (("z", f"torch.randn({_text(shape)})"),)
        return Use(form, shape, inputs=inputs, flops=3.0 * size(x) * out)

    return use


def attend(rng: Random, x: Shape) -> Use | None:
    causal = rng.choice(("", ", is_causal=True"))
    form = f"F.scaled_dot_product_attention({{x}}, {{k}}, {{v}}{causal})"
    return fixed(form, work=lambda x: 8.0 * size(x) * x[-2], k=RANDN, v=RANDN)(rng, x)


multihead = layer(
    "nn.MultiheadAttention({embed_dim}, {num_heads}, batch_first=True)",
    lambda rng, x: {"embed_dim": x[-1], "num_heads": _divisor(rng, x[-1], (2, 4, 8))},
    lambda x: 10.0 * size(x) * x[-1] + 8.0 * size(x) * x[-2],
    "self.{m}({x}, {x}, {x}, need_weights=False)[0]",
)
encoder = layer(
    "nn.TransformerEncoderLayer({d_model}, {heads}, {feedforward}, dropout=0.0, batch_first=True)",
    lambda rng, x: {"d_model": x[-1], "heads": _divisor(rng, x[-1], (2, 4)), "feedforward": 2 * x[-1]},
    lambda x: 18.0 * size(x) * x[-1] + 8.0 * size(x) * x[-2],
)


def cdist(rng: Random, x: Shape) -> Use:
    other = rng.choice((16, 32, 64))
    inputs = (("y", f"torch.randn({_text((*x[:-2], other, x[-1]))})"),)
    return Use("torch.cdist({x}, {y})", (*x[:-1], other), inputs=inputs, flops=4.0 * size(x) * other)


def topk(rng: Random, x: Shape) -> Use | None:
    k = rng.choice((2, 4, 8))
    return Use(f"torch.topk({{x}}, {k}, dim=-1)[0]", (*x[:-1], k), flops=size(x) * 500) if x[-1] >= k else None


def embedding(rng: Random, x: Shape) -> Use:
    vocabulary, width = rng.choice((256, 1024, 4096)), rng.choice((32, 64, 128))
    arguments = (("num_embeddings", vocabulary), ("embedding_dim", width))
    source = f"torch.randint(0, {vocabulary}, ({_text(x)},))"
    init = "nn.Embedding({num_embeddings}, {embedding_dim})"
    return Use("self.{m}({x})", (*x, width), init, arguments, source=source, moved=3.0 * size(x) * width)
