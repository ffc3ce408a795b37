"""Whatever the judge lets run or compares on the device happens while it holds the timing lease: another process that
times a kernel is not disturbed."""

import fcntl
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.judge import mutants, prepared, strict
from cuda_agent.sandbox.judge.memory import host
from cuda_agent.sandbox.judge.prepared import PreparedTask
from tests.sandbox.judge.fakes import Pool, Reference, settings_in
from tests.test_lease import free_for

_OF_THE_REFERENCE = "inputs", "outputs", "examples", "exact", "mutant", "count", "account", "seconds"
_COMPARISONS = "mismatch", "agree", "distance", "same", "values_off"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operations that ran while the lease was free."""
    names: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if free_for(tmp_path / "lease", fcntl.LOCK_EX):
                names.append(name)
            return real(*args, **options)

        return call

    for owner, operations in ((Reference, _OF_THE_REFERENCE), (host, _COMPARISONS)):
        for name in operations:
            monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    monkeypatch.setattr(prepared, "ReferenceClient", Reference)
    return names


def task(tmp_path: Path, clock: str = "real") -> PreparedTask:
    pool: Any = Pool(settings_in(tmp_path, clock=clock))
    made = PreparedTask("", "d", pool)
    made.compiled = lambda mode, precision: Reference()  # type: ignore[method-assign,assignment,return-value]
    made._peaks = lambda again=False: prepared.roofline.Peaks(1e9)  # type: ignore[method-assign]
    return made


def right(entry: Any, when: str) -> list[Any]:
    return [2 * entry.inputs[0]]


@pytest.mark.parametrize("clock", ["real", "model"])
@pytest.mark.parametrize(
    "work",
    [
        lambda task: task.repeats(),
        lambda task: task.measure(compile=True),
        mutants.survey,
        strict.strict_baselines,
        lambda task: strict.check(task, right, 1e-2),
    ],
    ids=["repeats", "measure", "survey", "strict_baselines", "strict_check"],
)
def test_the_lease_is_held_while_the_device_works(
    tmp_path: Path, outside: list[str], work: Callable[[PreparedTask], Any], clock: str
) -> None:
    work(task(tmp_path, clock))
    assert not outside
