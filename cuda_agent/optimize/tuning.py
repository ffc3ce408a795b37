"""Tunes the parameters of a solution: judges variants of it with other values, and finds the fastest one.

A line ``// tune: BLOCK 64 128 256`` (in Python ``# tune: ...``) in a file of the solution declares the values of the
parameter BLOCK. The parameter is a constant of plan.json, or one line of the same file gives its value:

    #define BLOCK 128                  constexpr int BLOCK = 128;                  BLOCK = 128

A variant replaces this one number. Variants are raced: all of them are built side by side and judged in quick mode. The
fastest ones are then judged in strict mode, with new inputs and weights, and with more careful times. The given
solution is judged in strict mode, too, during the race."""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cuda_agent.agent.loop import run_many
from cuda_agent.errors import TaskError
from cuda_agent.pages.charts import factor
from cuda_agent.sandbox.client import Sandbox
from cuda_agent.sandbox.wire import Solution, Verdict, printable
from cuda_agent.tasks.task import Task

PLAN = "plan.json"
FINALISTS = 4  # variants that are judged in strict mode
IN_FLIGHT = 32  # variants that are built and judged at once; the sandbox orders them
_DECLARED = re.compile(r"(?:^|\s)(?://|#)\s*tune:(.*)$", re.M)
_DEFINED = (r"^[ \t]*#[ \t]*define[ \t]+{name}[ \t]+", r"\b{name}[ \t]*(?::[ \t]*\w+[ \t]*)?=[ \t]*")
_NUMBER = r"(-?\d+)\b(?![.\w])"


@dataclass(frozen=True)
class Parameter:
    """A number of a solution for which other values may be tried."""

    name: str
    values: tuple[int, ...]  # without repetitions; the solution's own value is the first
    file: str  # the file that holds the number
    span: tuple[int, int] | None  # where the number is in the file's text; None: a constant of plan.json


@dataclass
class Variant:
    """A solution with chosen values of its parameters, and its verdicts."""

    values: dict[str, int]
    solution: Solution
    quick: Verdict | None = None
    strict: Verdict | None = None

    @property
    def said(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass
class Tuning:
    """The result of ``tune``."""

    variants: list[Variant]  # the given solution first
    best: Variant | None  # the fastest by strict verdicts; None: no variant is correct
    possible: int  # number of variants of the declared values

    @property
    def faulty(self) -> bool:
        """Whether the sandbox failed on a variant."""
        verdicts = [verdict for one in self.variants for verdict in (one.quick, one.strict) if verdict]
        return any(verdict.status == "infra" for verdict in verdicts)

    def to_json(self) -> dict[str, Any]:
        def row(variant: Variant) -> dict[str, Any]:
            quick, strict = variant.quick, variant.strict
            return {
                "values": variant.values,
                "status": quick.status if quick else None,
                "seconds": quick.seconds if quick else None,
                "strict": strict.to_json() if strict else None,
            }

        return {
            "possible": self.possible, "tried": len(self.variants), "best": row(self.best) if self.best else None,
            "variants": [row(variant) for variant in self.variants],
        }  # fmt: skip


def declared(files: Mapping[str, str]) -> list[Parameter]:
    """Returns the parameters that ``files`` (text by path) declare, in the order of files and lines.

    Raises:
        TaskError: A declaration is incomplete, a parameter is declared twice, or its number cannot be found."""
    try:
        constants = json.loads(files.get(PLAN, "{}")).get("constants", {})
    except (ValueError, AttributeError):
        constants = {}
    found: dict[str, Parameter] = {}
    for path, text in files.items():
        for match in _DECLARED.finditer(text):
            name, *words = match[1].split() or [""]
            line = f"{path}, line {text.count(chr(10), 0, match.start(1)) + 1}"
            if not name.isidentifier() or not words or not all(re.fullmatch(r"-?\d+", word) for word in words):
                raise TaskError(f"{line}: expected a name and integers, as in `tune: BLOCK 64 128 256`")
            if name in found:
                raise TaskError(f"{line}: {name} is declared twice")
            values = [int(word) for word in words]
            if isinstance(constants.get(name), int):
                found[name] = Parameter(name, tuple(dict.fromkeys([constants[name], *values])), PLAN, None)
            else:
                span = _definition(text, name, line)
                found[name] = Parameter(name, tuple(dict.fromkeys([int(text[slice(*span)]), *values])), path, span)
    return list(found.values())


def _definition(text: str, name: str, line: str) -> tuple[int, int]:
    """Returns the span of the number in the one line of ``text`` that gives ``name`` a value."""
    code = _DECLARED.sub(lambda match: " " * len(match[0]), text)
    patterns = [re.compile(form.format(name=name) + _NUMBER, re.M) for form in _DEFINED]
    spots = [match.span(1) for pattern in patterns for match in pattern.finditer(code)]
    if len(spots) != 1:
        many = "several lines give" if spots else "no line gives"
        raise TaskError(
            f"{line}: {many} {name} a number in this file, and it is no constant of plan.json; expected one line such "
            f"as `#define {name} 128`, `constexpr int {name} = 128;` or `{name} = 128`"
        )
    return spots[0]


def with_values(files: Mapping[str, str], parameters: Sequence[Parameter], values: Mapping[str, int]) -> dict[str, str]:
    """Returns ``files`` with the parameters' numbers replaced by ``values``."""
    changed = dict(files)
    spans = [(one.span, one) for one in parameters if one.span]
    for span, one in sorted(spans, key=lambda item: item[0], reverse=True):  # later ones first: earlier spans stay
        text = changed[one.file]
        changed[one.file] = text[: span[0]] + str(values[one.name]) + text[span[1] :]
    if inside := [one for one in parameters if one.span is None]:
        plan = json.loads(changed[PLAN])
        plan["constants"] |= {one.name: values[one.name] for one in inside}
        changed[PLAN] = json.dumps(plan, indent=1)
    return changed


def variants_of(solution: Solution, parameters: Sequence[Parameter], most: int, seed: int = 0) -> list[Variant]:
    """Returns the variants of ``solution``, the given one first. If there are more than ``most``, draws ``most`` of
    them at random; ``seed`` decides which."""
    names = [one.name for one in parameters]
    count = math.prod(len(one.values) for one in parameters)
    numbers = range(count) if count <= most else [0, *sorted(random.Random(seed).sample(range(1, count), most - 1))]
    chosen: list[Variant] = []
    for number in numbers:
        picked = []
        for one in reversed(parameters):
            number, index = divmod(number, len(one.values))
            picked.append(one.values[index])
        values = dict(zip(names, reversed(picked), strict=True))
        files = dict(solution.files) if not chosen else with_values(solution.files, parameters, values)
        chosen.append(Variant(values, replace(solution, files=files)))
    return chosen


async def tune(task: Task, solution: Solution, sandbox: Sandbox, most: int, say: Callable[[str], None]) -> Tuning:
    """Judges at most ``most`` variants of ``solution`` and returns them with the fastest one. ``say`` receives a line
    for each verdict.

    Raises:
        TaskError: The solution declares no parameter, a declaration is invalid, or the task cannot be run.
        SandboxUnready: The sandbox does not work."""
    parameters = declared(solution.files)
    if not parameters:
        raise TaskError("the solution declares no parameter: expected a line such as `// tune: BLOCK 64 128 256`")
    variants = variants_of(solution, parameters, most)

    async def judge_strictly(variant: Variant) -> None:
        variant.strict = await sandbox.evaluate(task, variant.solution, "strict")
        say(f"{variant.said}, strict: {_in_short(variant.strict)}")

    async def judge(variant: Variant) -> None:
        variant.quick = await sandbox.evaluate(task, variant.solution)
        say(f"{variant.said}: {_in_short(variant.quick)}")
        if variant is variants[0] and _quick_seconds(variant) < math.inf:  # to say how much is gained in the end
            await judge_strictly(variant)  # the baselines of strict mode are measured beside the other variants

    await run_many([partial(judge, variant) for variant in variants], IN_FLIGHT)
    for variant in _by_time(variants)[:FINALISTS]:
        if variant.strict is None:
            await judge_strictly(variant)
    finalists = [variant for variant in variants if variant.strict]
    best = max((one for one in finalists if _strict_factor(one)), key=_strict_factor, default=None)
    return Tuning(variants, best, math.prod(len(one.values) for one in parameters))


def _quick_seconds(variant: Variant) -> float:
    """Returns the time of a correct variant in quick mode, else infinity."""
    quick = variant.quick
    return quick.seconds or math.inf if quick and quick.status == "ok" else math.inf


def _by_time(variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants that are correct and timed in quick mode, the fastest first."""
    return sorted((one for one in variants if _quick_seconds(one) < math.inf), key=_quick_seconds)


def _strict_factor(variant: Variant) -> float:
    """Returns the speed-up over eager in strict mode, or 0 without one. Each strict verdict times eager in turn with
    the variant, so these ratios can be compared although the machine's speed changes."""
    strict = variant.strict
    return strict.speedup_eager or 0.0 if strict and strict.status == "ok" else 0.0


def _in_short(verdict: Verdict) -> str:
    if verdict.status != "ok":
        return f"{verdict.status.replace('_', ' ')}: {printable(verdict.message)[:120]}"
    return "ok" if verdict.seconds is None else f"{verdict.seconds * 1e6:.2f} us, {factor(verdict.speedup_eager)} eager"


def tuning_lines(tuning: Tuning, shown: int = 8) -> list[str]:
    """Returns the result as lines for a terminal: the fastest variants, the number of variants by outcome, and how much
    was gained."""
    outcomes = Counter(variant.quick.status for variant in tuning.variants if variant.quick)
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in outcomes.most_common())
    part = "" if len(tuning.variants) == tuning.possible else f" of {tuning.possible}, drawn at random"
    lines = [f"{len(tuning.variants)} variants{part}: {counts}"]
    for variant in _by_time(tuning.variants)[:shown]:
        strict = f"; strict: {_in_short(variant.strict)}" if variant.strict else ""
        lines.append(f"  {variant.said}: {_quick_seconds(variant) * 1e6:.2f} us{strict}")
    first, best = tuning.variants[0], tuning.best
    if best is None:
        lines.append("no variant is correct and timed in strict mode")
    elif best is first:
        lines.append(f"the given values are the fastest: {best.said}")
    elif given := _strict_factor(first):
        ratio = _strict_factor(best) / given
        lines.append(f"{best.said} is the fastest, {ratio:.2f} times as fast as the given values ({first.said})")
    else:
        lines.append(f"{best.said} is the fastest; with the given values ({first.said}) the solution is not correct")
    return lines
