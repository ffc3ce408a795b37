"""Tests which wrong answers to a task pass the judge's comparison of outputs.

If many wrong answers pass, the task is of little use. A mutant is a wrong answer made on purpose. Examples are zeros, a
constant, a copy of an input, scaled outputs, outputs computed in bfloat16, and the outputs of a model that ignores an
input or the weights. The comparison, the tolerance and the number of inputs are those of quick mode, the judge's
default mode. The inputs have the values that the task's own code draws (kind ``normal`` in ``wire.KINDS``)."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.judge.prepared import PoolEntry, PreparedTask
from cuda_agent.sandbox.judge.reference_client import TaskKilled
from cuda_agent.sandbox.wire import ROUNDING

_TOLERANCES = (1e-2, 1e-3, 1e-4)  # tried below the sandbox's own
_FLOATING = ("float", "bfloat", "complex")  # how the names of these dtypes begin


class _Mutant(NamedTuple):
    """A way to make wrong answers to a task. ``make(entry, other)`` returns wrong outputs for the inputs of the pool
    entry ``entry``. A pool entry is a set of inputs with the right outputs. ``make`` may also use values of a second
    pool entry, ``other``. It returns ``None`` if this way does not apply to the task. ``wrong`` holds the indices of
    the outputs to compare."""

    name: str
    wrong: Sequence[int]
    make: Callable[[PoolEntry, PoolEntry], list[Any] | None]


def _mutants(prepared: PreparedTask) -> Iterator[_Mutant]:
    oracle, spec = prepared.oracle, prepared.spec
    every = range(len(spec.outputs))
    sizes = [math.prod(tensor.shape) for tensor in spec.outputs]

    def told(kind: str, **more: Any) -> Callable[[PoolEntry, PoolEntry], list[Any] | None]:
        return lambda entry, other: oracle.mutant(entry.inputs, {"kind": kind} | more)

    # The mutants of single outputs come first: they are made from the outputs of the last call of ``oracle.outputs``.
    for number, output in enumerate(spec.outputs):
        where = f" in output {number}" if len(every) > 1 else ""
        if sizes[number]:
            yield _Mutant(f"zeros{where}", [number], told("zeros"))
        if sizes[number] > 1:
            yield _Mutant(f"constant{where}", [number], told("constant"))
        for position, tensor in enumerate(spec.inputs):
            if tensor.dtype == output.dtype and math.prod(tensor.shape) == sizes[number]:
                yield _Mutant(f"copy of input {position}{where}", [number], told("copy", input=position))
    floating = [n for n in every if sizes[n] and spec.outputs[n].dtype.startswith(_FLOATING)]
    for name in ("2x", "1.01x") if floating else ():
        yield _Mutant(name, floating, told("scale", factor=float(name[:-1])))
    yield _Mutant("inputs ignored", every, lambda entry, other: other.outputs)
    for position in range(len(spec.inputs)) if len(spec.inputs) > 1 else ():
        yield _Mutant(f"input {position} ignored", every, _with_one_of_another(prepared, position))
    if spec.weights:
        other_weights = {"seed": prepared.weights_seed + 1, "plain": not oracle.kept}
        yield _Mutant("weights ignored", every, told("weights", **other_weights))
    yield _Mutant("bf16", every, told("bf16"))


def _with_one_of_another(prepared: PreparedTask, position: int) -> Callable[[PoolEntry, PoolEntry], list[Any]]:
    def make(entry: PoolEntry, other: PoolEntry) -> list[Any]:
        mixed = [*entry.inputs[:position], other.inputs[position], *entry.inputs[position + 1 :]]
        return prepared.oracle.outputs(mixed)

    return make


def survey(prepared: PreparedTask) -> dict[str, float | None]:
    """Compares every mutant (a wrong answer made on purpose) with the right outputs, on several sets of inputs and at
    several tolerances: the sandbox's own and smaller ones. The mutants in ``ROUNDING`` (with small errors) are compared
    on one set of inputs only. Leaves out mutants that the task's model cannot compute. If the computation of a mutant
    ends the model's process, returns the results so far.

    Returns:
        A dictionary from each mutant's name to the least tolerance that accepts the mutant on all inputs. The value is
        ``None`` if the sandbox's own tolerance rejects the mutant.

    Raises:
        TaskError: If the task itself fails."""
    found: dict[str, float | None] = {}
    pending = list(_mutants(prepared))
    for number in range(prepared.base, prepared.base + prepared.settings.checks):
        entry, other = prepared.entry(number), prepared.entry(number + 1)
        with prepared.lease.working():
            prepared.oracle.outputs(entry.inputs)
        for mutant in pending:
            with prepared.lease.working():
                try:
                    outputs = mutant.make(entry, other)
                except TaskKilled:
                    raise
                except TaskError:
                    if not prepared.oracle.alive:
                        return found  # the judge prepares the task anew when it is asked again
                    continue
                if outputs is not None:
                    least = _least_tolerance(prepared, mutant.wrong, entry.outputs, outputs)
                    found[mutant.name] = None if least is None else max(least, found.get(mutant.name) or 0.0)
        pending = [mutant for mutant in pending if found.get(mutant.name) and mutant.name not in ROUNDING]
        if not pending:
            break
    return found


def _least_tolerance(
    prepared: PreparedTask, positions: Sequence[int], expected: Sequence[Any], actual: Sequence[Any]
) -> float | None:
    own, least = prepared.settings.tolerance, None
    want, have, tensors = ([of[n] for n in positions] for of in (expected, actual, prepared.spec.outputs))
    for tolerance in (own, *(lower for lower in _TOLERANCES if lower < own)):
        if not prepared.memory.agree(want, have, tensors, tolerance):
            break
        least = tolerance
    return least
