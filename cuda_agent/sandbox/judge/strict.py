"""Measures a solution in strict mode, for a report. Quick mode (``trial``) measures a solution for a training reward.

Strict mode checks inputs of many kinds. It measures the errors of the solution and of eager PyTorch against the task's
model in float64. It times calls until the confidence interval of the speed-up is narrow. It reports the times of the
task's model in eager PyTorch and with ``torch.compile`` (default mode and max-autotune) in fp32. On a GPU, it also
reports these times in tf32, and the time of eager PyTorch in bf16. Strict mode tests neither non-contiguous inputs nor
gradients."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.judge.decisions import CandidateRefused, quotient, share_of
from cuda_agent.sandbox.judge.prepared import PoolEntry, PreparedTask
from cuda_agent.sandbox.judge.reference_client import at_precision
from cuda_agent.sandbox.messages import JudgeSettings
from cuda_agent.sandbox.wire import KINDS, Verdict, baseline, baseline_parts

_INPUTS = 10  # fewest inputs; normal ones replace the kinds that a task does not allow
_PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "tf32", "bf16")}
_MODES = {"compile": "", "max_autotune": "max-autotune-no-cudagraphs"}
_TIMED = ("fp32", "tf32")  # precisions for which compiled baselines are measured
_AS_GOOD = 4.0  # error allowed as a multiple of eager's, where eager itself exceeds the tolerance
_ROUNDING = 1e-2  # error allowed as a share of the tolerance of usual outputs, where outputs are unusually small
_PAIRS, _SECONDS = (12, 400), (1.0, 5.0)  # fewest and most timed pairs of calls, and fewest and most seconds for all
_NARROW = 0.02  # relative width of the speed-up's interval at which timing ends
_RESAMPLES = 400


def strict_baselines(prepared: PreparedTask) -> dict[str, dict[str, Any]]:
    """Returns the baselines of strict mode (times of the task's own model), measured once per task. Skips a precision
    at which eager PyTorch has the same error as in fp32. The result holds four dictionaries:

    - ``errors``: eager's relative error by precision. Empty if there are no finite outputs in float64.
    - ``seconds``: the time per call by label of the baseline, such as ``compile_tf32``.
    - ``shares``: by label, a compiled baseline's time divided by eager's at the same precision, as (lower end, middle,
      upper end).
    - ``failed``: the error message by label, for baselines that could not be measured."""
    if prepared.baselines.strict:
        return prepared.baselines.strict
    found: dict[str, dict[str, Any]] = {"seconds": {}, "shares": {}, "errors": {}, "failed": {}}
    entry = prepared.fresh("normal")
    assert entry
    for precision in _PRECISIONS[prepared.settings.device]:
        with at_precision(prepared.oracle, precision):  # also restores the default after an error
            _measure_at(precision, prepared, entry, found)
    prepared.baselines.strict = found
    prepared.save()
    return found


def _measure_at(precision: str, prepared: PreparedTask, entry: PoolEntry, found: dict[str, dict[str, Any]]) -> None:
    """Adds the baselines at ``precision`` to ``found``, the result of ``strict_baselines``. The task's model must
    compute at this precision already. ``entry`` has inputs for eager's error."""
    if entry.exact is not None:
        with prepared.lease.working():
            found["errors"][precision] = error(prepared, prepared.oracle.outputs(entry.inputs), entry.exact)
        if precision != "fp32" and found["errors"][precision] == found["errors"]["fp32"]:
            del found["errors"][precision]  # the task does not depend on the precision
            return
    eager = baseline("eager", precision)
    eagers = prepared.samples(prepared.oracle, careful=True)
    for name, mode in _MODES.items() if precision in _TIMED and prepared.settings.compiled else ():
        label = baseline(name, precision)
        try:
            compiled = prepared.compiled(mode, precision)
        except (WorkerError, WorkerDied, TaskError) as failure:
            found["failed"][label] = str(failure)[:300]
            continue
        try:
            beside, own = prepared.samples(prepared.oracle, compiled, careful=True)
            eagers.append(beside)
            found["shares"][label] = share_of(own, beside)
        except TaskError as failure:
            if not prepared.oracle.alive:
                raise
            found["failed"][label] = str(failure)[:300]
        finally:
            prepared.close(compiled)
    found["seconds"][eager] = min(map(statistics.median, eagers))
    for label in found["shares"]:
        if baseline_parts(label)[1] == precision:
            found["seconds"][label] = found["shares"][label][1] * found["seconds"][eager]


def error(prepared: PreparedTask, have: Sequence[Any], exact: Sequence[Any]) -> float:
    """Returns the relative error |have - exact| / |exact|, with 2-norms over all floating outputs together."""
    return _relative(
        [prepared.memory.distance(h, e, t) for h, e, t in zip(have, exact, prepared.spec.outputs, strict=True)]
    )


def _relative(squares: Sequence[tuple[float, float]]) -> float:
    off, norm = sum(s[0] for s in squares), sum(s[1] for s in squares)
    return math.sqrt(off / norm) if norm > 0 else math.sqrt(off)


def check(
    prepared: PreparedTask, call: Callable[[Any, str], list[Any]], tolerance: float
) -> tuple[dict[str, Any], str]:
    """Checks a candidate in strict mode on inputs of every kind that the task has. Adds normal inputs until there are
    at least 10 sets of inputs.

    Args:
        prepared: The task.
        call: Runs the candidate. ``call(entry, when)`` returns the outputs for the inputs of ``entry``. If the
            candidate fails, the error message ends with ``when``, such as "a second time on the same inputs".
        tolerance: The tolerance of the comparison of outputs.

    Returns:
        The facts for the report (such as errors by kind of inputs), and the reason for a refusal (empty if there is
        none)."""
    said: dict[str, Any] = {"kinds": {}, "skipped": [], "error": 0.0, "eager_error": 0.0, "repeatable": True}
    count = 0
    for number, kind in enumerate(itertools.chain(KINDS, itertools.repeat("normal"))):
        if number >= len(KINDS) and count >= _INPUTS:
            break
        with prepared.lease.working():
            entry = prepared.fresh(kind)
            if entry is None:
                said["skipped"].append(kind)
                continue
            count += 1
            outputs, wrong = _tried(prepared, call, kind, entry, tolerance)
            mine = eagers = None
            if entry.exact is not None:
                mine, eagers = error(prepared, outputs, entry.exact), error(prepared, entry.outputs, entry.exact)
                said["error"], said["eager_error"] = max(said["error"], mine), max(said["eager_error"], eagers)
            if wrong:
                return said, wrong
            said["kinds"][kind] = mine
            if kind == "normal" and number == 0:
                again = call(entry, "a second time on the same inputs")
                said["repeatable"] = prepared.memory.same(outputs, again)
    said["inputs"] = count
    return said, ""


def check_kinds(prepared: PreparedTask, call: Callable[[Any, str], list[Any]], settings: JudgeSettings) -> int:
    """Checks a candidate in quick mode on inputs of the kinds in ``settings.input_kinds``. Skips kinds for which the
    task has no usable inputs. ``call(entry, when)`` runs the candidate on the inputs of ``entry`` and returns the
    outputs; ``when`` is the end of a message about a failure. Returns the number of checked kinds. Raises
    ``CandidateRefused`` if an output is wrong."""
    count = 0
    for kind in settings.input_kinds:
        with prepared.lease.working():
            if entry := prepared.varied(kind):
                count += 1
                if wrong := _tried(prepared, call, kind, entry, settings.tolerance)[1]:
                    raise CandidateRefused("wrong", wrong)
    return count


def _tried(
    prepared: PreparedTask, call: Callable[[Any, str], list[Any]], kind: str, entry: PoolEntry, tolerance: float
) -> tuple[list[Any], str]:
    """Runs a candidate on ``entry``, which has inputs of ``kind``. Returns the outputs and the reason why they are
    wrong. The reason is empty if the outputs are within ``tolerance``, or if their errors are only rounding."""
    outputs = call(entry, f"on inputs of the kind {kind!r}")
    message, _ = prepared.memory.mismatch(entry.outputs, outputs, prepared.spec.outputs, tolerance, math.inf)
    good = not message or (entry.exact is not None and _only_rounding(prepared, entry, outputs, tolerance))
    return outputs, "" if good else f"inputs of the kind {kind!r}: {message}"


def _only_rounding(prepared: PreparedTask, entry: PoolEntry, outputs: Sequence[Any], tolerance: float) -> bool:
    """Returns whether all outputs that differ from the expected ones by more than ``tolerance`` still count as right.
    Each of them must be floating. One of two rules must hold for its error, the distance from the model's output in
    float64:

    - It is at most ``_AS_GOOD`` times the error of eager PyTorch in fp32 or in tf32 (GPU only). Eager in tf32 counts
      only if its output also differs from the expected one by more than ``tolerance``. Without this rule, correct
      candidates would fail on tasks where large terms cancel out.
    - It is ``_negligible``. Without this rule, a variance of equal values would have to be 0 to the last bit."""
    tensors, exact = prepared.spec.outputs, entry.exact or []

    def differs(index: int, have: Sequence[Any]) -> bool:
        one = [entry.outputs[index]], [have[index]], [tensors[index]]
        return bool(prepared.memory.mismatch(*one, tolerance, math.inf)[0])

    def off(index: int, have: Sequence[Any]) -> float:
        return _relative([prepared.memory.distance(have[index], exact[index], tensors[index])])

    def good(index: int, eagers: Sequence[Any], precision: str) -> bool:
        counts = precision == "fp32" or differs(index, eagers)
        return counts and off(index, outputs) <= _AS_GOOD * off(index, eagers)

    left = [index for index in range(len(tensors)) if differs(index, outputs)]
    if not all(tensors[index].dtype.startswith(("float", "bfloat")) for index in left):
        return False
    for precision in _PRECISIONS[prepared.settings.device]:
        if precision in _TIMED and left:
            eagers = prepared.outputs_at(entry.inputs, precision)
            left = [index for index in left if not good(index, eagers, precision)]
    return all(_negligible(prepared, entry, outputs, index, tolerance) for index in left)


def _negligible(prepared: PreparedTask, entry: PoolEntry, outputs: Sequence[Any], index: int, tolerance: float) -> bool:
    """Returns whether output ``index`` is finite, and its largest error is at most ``_ROUNDING`` times the tolerance of
    an output of usual size. The usual size is the root mean square of the model's output for normal inputs."""
    usual, memory, tensor = prepared.varied("normal"), prepared.memory, prepared.spec.outputs[index]
    if usual is None or usual.exact is None or entry.exact is None:
        return False
    size = math.sqrt(memory.distance(usual.outputs[index], usual.exact[index], tensor)[1] / math.prod(tensor.shape))
    _, largest = memory.mismatch([entry.outputs[index]], [outputs[index]], [tensor], tolerance, math.inf)
    finite = math.isfinite(memory.distance(outputs[index], entry.exact[index], tensor)[0])
    return finite and largest <= _ROUNDING * tolerance * size


def excused(prepared: PreparedTask, entry: PoolEntry, outputs: Sequence[Any]) -> bool:
    """Returns whether outputs of a timed call that exceed the tolerance still count as right. They do if their errors
    are at most a small multiple of the errors of eager PyTorch. Both errors are distances from the model's outputs in
    float64. The caller holds the timing lease, and has set the reference worker to fp32."""
    prepared.oracle.outputs(entry.inputs)
    exact = prepared.exact(entry.inputs)
    if exact is None:
        return False
    good = _only_rounding(prepared, replace(entry, exact=exact), outputs, prepared.settings.tolerance)
    prepared.oracle.precision("fp32")
    return good


def precision_of(own: float, errors: dict[str, float]) -> str:
    """Says at which precision a solution computes, judged by its relative error ``own``. ``errors`` maps each precision
    to eager's error, the most exact precision first. Returns the first precision for which ``own`` is at most about
    twice eager's error. If there is none, returns "below" and the last precision, such as "below bf16". If ``errors``
    is empty, returns an empty string."""
    if not errors:
        return ""
    for name, eagers in errors.items():  # from the most exact one
        if own <= 2 * eagers + 1e-7:
            return name
    return f"below {list(errors)[-1]}"


def time_pairs(candidate: Callable[[], float], eager: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Times calls of the candidate and of eager in turn, until the confidence interval of their ratio is narrow or time
    is up. Returns the seconds of the candidate's calls and of eager's calls."""
    mine: list[float] = []
    anchors: list[float] = []
    begin = time.monotonic()
    while len(mine) < _PAIRS[0] or (len(mine) < _PAIRS[1] and time.monotonic() < begin + _SECONDS[1]):
        mine.append(candidate())
        anchors.append(eager())
        if len(mine) >= _PAIRS[0] and len(mine) % 4 == 0 and time.monotonic() > begin + _SECONDS[0]:
            low, high = interval(mine, anchors)
            if high < (1 + _NARROW) * low:
                break
    return mine, anchors


def interval(mine: Sequence[float], eager: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a speed-up, by a bootstrap of pairs of calls. The speed-up is the median
    of ``eager`` divided by the median of ``mine`` (the solution). Both arguments hold seconds, one per pair."""
    generator = numpy.random.default_rng(0)
    rows = numpy.array([mine, eager])
    picks = generator.integers(0, rows.shape[1], (_RESAMPLES, rows.shape[1]))
    ratios = numpy.median(rows[1][picks], axis=1) / numpy.median(rows[0][picks], axis=1)
    low, high = numpy.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def report(verdict: Verdict, anchors: Sequence[float], yard: dict[str, dict[str, Any]]) -> None:
    """Writes baselines, intervals and precision to the verdict. ``anchors`` are the seconds of the calls of eager
    PyTorch that alternated with the candidate's calls. ``yard`` is the result of ``strict_baselines``. All times in
    ``yard`` are multiplied by one factor, so that eager's fp32 time becomes the median of ``anchors``."""
    assert verdict.strict is not None
    own = verdict.strict["kinds"].get("normal")
    eager, compiled = baseline("eager", "fp32"), baseline("compile", "fp32")
    verdict.eager_seconds = statistics.median(anchors)
    verdict.interval = [*interval(verdict.samples, anchors)]
    scale = verdict.eager_seconds / yard["seconds"][eager]
    verdict.strict |= {
        "baselines": {label: scale * seconds for label, seconds in yard["seconds"].items()},
        "intervals": _intervals(verdict.interval, yard),
        "failed": yard["failed"],
        "eager_errors": yard["errors"],
        "precision": precision_of(own, yard["errors"]) if own is not None else "",
    }
    verdict.compile_seconds = verdict.strict["baselines"].get(compiled)
    verdict.compile_interval = verdict.strict["intervals"].get(compiled)


def _intervals(over_eager: Sequence[float], yard: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the interval [lower end, upper end] of the candidate's speed-up over each baseline, by the baseline's
    label. ``over_eager`` is the measured interval of the speed-up over eager in fp32. ``yard`` is the result of
    ``strict_baselines``. The speed-up over a baseline is that over eager in fp32, multiplied by the baseline's time
    divided by eager's fp32 time. For a compiled baseline, the interval is wider, because the measured ratio of its
    time to eager's has an interval, too."""
    seconds, shares = yard["seconds"], yard["shares"]
    low, high = over_eager
    middle, found = math.sqrt(low * high), {}
    for label in seconds:
        same = seconds[baseline("eager", baseline_parts(label)[1])]  # eager at the same precision
        scale = same / seconds[baseline("eager", "fp32")]
        share = shares.get(label, [seconds[label] / same] * 3)
        found[label] = [scale * end for end in quotient((low, middle, high), share)]
    return found
