"""Chooses the parts of a model that are worth a search: submodules that can be tasks alone, by share of the time.

A trace (``tracing.trace``, which runs in the sandbox) lists the submodules.  It comes from untrusted code, so it is
checked here like any input.  Equal submodules, such as the blocks of a transformer, are one part with several names."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.wire import Tensor, printable

LEAST_SHARE = 0.05  # of the time: a smaller part cannot make the model 5 % faster
_SPLIT = 0.5  # a submodule with a larger share is split, if its own submodules have at least this much of its time
_LONGEST_NAME = 200  # bytes of a file's name are limited, too
_NAME = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True)
class Module:
    """The record of one submodule in a trace."""

    name: str  #: dotted path in the model, such as "layers.0"
    kind: str  #: name of its class
    why: str  #: why it cannot be a task alone; empty if it can
    seconds: float  #: of one call
    text: str  #: what ``print(module)`` shows
    inputs: tuple[Tensor, ...]
    state: tuple[tuple[str, Tensor], ...]  #: its first parameters and buffers, by name in its ``state_dict``
    same: str  #: equal for submodules of equal form


@dataclass(frozen=True)
class Part:
    """One or more equal submodules that one solution replaces."""

    module: Module  #: the first of them
    names: tuple[str, ...]
    share: float  #: part of the model's time, of all of them together

    @property
    def title(self) -> str:
        others = len(self.names) - 1
        return self.names[0] + (f" and {others} equal" if others else "")

    @property
    def left_out(self) -> str:
        """Why the part is not worth a search; empty if it is."""
        return "" if self.share >= LEAST_SHARE else f"less than {LEAST_SHARE:.0%} of the time"

    @property
    def bound(self) -> float:
        """The model's speed-up if the part took no time at all (Amdahl's law)."""
        return 1 / max(1 - self.share, 1e-3)

    def expected(self, factor: float) -> float:
        """Returns the model's speed-up if the part alone gets ``factor`` times as fast (Amdahl's law)."""
        return 1 / (1 - self.share + self.share / factor)


def parts_of(trace: Any) -> list[Part]:
    """Returns the parts of a traced model, those with the largest share of the time first.

    A part is a submodule that is called once, with tensors.  The highest submodules of the tree are taken.  One that
    has more than half of the model's time is split into its own submodules, if these have at least half of its time.

    Raises:
        TaskError: ``trace`` is not a trace."""
    try:
        whole = float(trace["seconds"])
        modules = {module.name: module for module in map(_module, trace["modules"])}
        if not whole > 0:
            raise ValueError("a model that takes no time")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskError(f"the trace of the model cannot be read: {printable(str(error))[:200]}") from None
    children: dict[str, list[Module]] = {}
    for module in modules.values():
        children.setdefault(module.name.rpartition(".")[0], []).append(module)
    groups: dict[str, list[Module]] = {}
    for module in _separate(children, "", whole):
        groups.setdefault(module.same, []).append(module)
    parts = [
        Part(group[0], tuple(module.name for module in group), min(1.0, sum(m.seconds for m in group) / whole))
        for group in groups.values()
    ]
    return sorted(parts, key=lambda part: -part.share)


def _separate(children: dict[str, list[Module]], name: str, whole: float) -> Iterator[Module]:
    for module in children.get(name, ()):
        below = list(_separate(children, module.name, whole))
        covered = sum(inner.seconds for inner in below)
        if module.why or (module.seconds > _SPLIT * whole and covered >= _SPLIT * module.seconds):
            yield from below
        else:
            yield module


def _module(item: Any) -> Module:
    name, seconds = item["name"], float(item["seconds"])
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not all(map(_NAME.fullmatch, name.split("."))):
        raise ValueError(f"the submodule {name!r}")
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the submodule {name} takes {seconds} s")
    words = {key: printable(str(item[key])) for key in ("kind", "why", "same")}
    text = "\n".join(map(printable, str(item["text"]).splitlines()))
    inputs = tuple(_tensor(*one) for one in item["inputs"])
    state = tuple((printable(str(key)), _tensor(*rest)) for key, *rest in item["state"])
    return Module(name=name, seconds=seconds, text=text, inputs=inputs, state=state, **words)


def _tensor(shape: Sequence[Any], dtype: Any) -> Tensor:
    return Tensor(tuple(int(extent) for extent in shape), printable(str(dtype)))
