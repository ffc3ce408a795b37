"""Counts the GPU-hours of a run, and stops its stages when ``run.gpu_hours`` are used.

Each process of a stage keeps a record of its use in the store: since when it works, until when, and how many GPUs are
there for it.  Waiting is not counted: for a pod, for a turn, for another run that makes the same result.  An attempt
that was cut is counted up to its last record.

The GPUs of the stage's own pods are counted for each stage.  Those of the run's servers, and on one machine all GPUs,
are shared: while two stages work side by side, they are counted once."""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from cuda_agent import machine
from cuda_agent.errors import BudgetSpent, TryAgain
from cuda_agent.storage import StoreError, open_store

RECORD_SECONDS = 30.0  # pause between two records; what a killed process loses of its count, at most


@dataclass(frozen=True)
class Use:
    """GPUs that one process of a stage had, and when.  Times are in seconds since 1970."""

    began: float
    ended: float
    own: int  # GPUs of the stage's pods
    shared: int  # GPUs that all stages of the run share


def gpu_hours(uses: Iterable[Use]) -> float:
    """Returns the GPU-hours of a run.  Shared GPUs are counted once while several processes have them."""
    seconds, counted = 0.0, 0.0
    for use in sorted(uses, key=lambda use: use.began):
        seconds += use.own * (use.ended - use.began)
        seconds += use.shared * max(0.0, use.ended - max(use.began, counted))
        counted = max(counted, use.ended)
    return seconds / 3600


def gpus() -> tuple[int, int]:
    """Returns how many GPUs the stage of this process has for itself, and how many it shares with the run's other
    stages.  In a pod, the chart counts them in CUDA_AGENT_GPUS.  Elsewhere the stages share this machine's GPUs."""
    given = os.environ.get("CUDA_AGENT_GPUS")
    if not given:
        return 0, machine.gpus()
    counts = json.loads(given)
    pods = int(os.environ.get("CUDA_AGENT_RAY_PODS", "0"))
    engines = counts["engines"] if os.environ.get("CUDA_AGENT_ENGINE_SERVERS") else 0
    return counts["stage"] + pods * counts["ray"], counts["sandboxes"] + engines


@contextlib.contextmanager
def metered(uri: str, run: str, stage: str, budget: float | None) -> Iterator[Callable[[], bool]]:
    """Counts the GPU-hours of this process during the ``with`` block.  Yields a function that returns whether the run
    has used ``budget`` GPU-hours; None: no limit, and nothing is counted.  ``uri`` names the store.

    Raises:
        BudgetSpent: The budget is used before the block begins, or the block raises TryAgain when it is used."""
    if budget is None:
        yield lambda: False
        return
    meter, ended = _Meter(uri, run, stage), threading.Event()

    def is_spent() -> bool:
        return meter.hours() >= budget

    def why() -> BudgetSpent:
        return BudgetSpent(
            f"The run has used {meter.hours():.3g} of {budget:g} GPU-hours (run.gpu_hours). A run with a higher budget "
            "takes what is finished from the cache, and goes on from the last checkpoint."
        )

    if is_spent():
        raise why()
    recorder = threading.Thread(target=meter.record_until, args=(ended,), daemon=True)
    recorder.start()
    try:
        yield is_spent
    except TryAgain as error:
        if is_spent():
            raise why() from error
        raise
    finally:
        ended.set()
        recorder.join()


class _Meter:
    """The use of one process, and what it knows of the run's other processes."""

    def __init__(self, uri: str, run: str, stage: str) -> None:
        self._store, self._folder = open_store(uri), f"runs/{run}/gpus"
        self._entry = f"{self._folder}/{stage}-{secrets.token_hex(4)}.json"
        self._began, self._use = time.monotonic(), Use(time.time(), time.time(), *gpus())
        self._others = self._read()

    def hours(self) -> float:
        """Returns the GPU-hours of the run up to now."""
        return gpu_hours([*self._others, self._now()])

    def record_until(self, ended: threading.Event) -> None:
        """Renews the record, and reads those of the others, until ``ended`` is set."""
        last = False
        while not last:
            last = ended.wait(RECORD_SECONDS)
            with contextlib.suppress(StoreError):  # a store that is away gets the next record
                self._store.put(self._entry, json.dumps(asdict(self._now())).encode())
                self._others = self._read()

    def _now(self) -> Use:
        return replace(self._use, ended=self._use.began + time.monotonic() - self._began)

    def _read(self) -> list[Use]:
        keys = [key for key in self._store.list(self._folder) if key != self._entry]
        return [Use(**json.loads(self._store.get(key))) for key in keys]
