"""Runs one stage of the workflow in a separate process, for the local executor or in a pod of a cluster.

The process computes the stage's cache key (a hash of its code, environment, configuration and inputs) and takes a lock
on the key.  If the store has no result for the key, the process fetches the inputs, runs the stage, and stores the
outputs, a manifest (the record of the result) and a cache entry.  If an interrupted attempt left checkpoints, the stage
continues from the newest one."""

import contextlib
import errno
import faulthandler
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cuda_agent import spans
from cuda_agent.compose import restricted
from cuda_agent.config import Config
from cuda_agent.context import SCORE, StageContext
from cuda_agent.errors import EXIT_BUG, EXIT_DONE, EXIT_RETRY, BadConfiguration, TryAgain
from cuda_agent.pipeline.budget import metered
from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.pipeline.closure import code_digests, environment_versions
from cuda_agent.pipeline.graph import Stage, ancestors, stages_of
from cuda_agent.pipeline.locks import using
from cuda_agent.pipeline.manifest import (
    Identity,
    Manifest,
    commit,
    identity_of,
    key_entry,
    placed,
    read_manifest,
    serve_from_cache,
)
from cuda_agent.pipeline.runs import read_config, try_lock
from cuda_agent.storage import Store, open_store
from cuda_agent.tracking import FileTracker, read_metrics

Stop = Callable[[], bool]


@dataclass(frozen=True)
class StageOrder:
    """The arguments of a process that runs one stage once.  The process writes metrics, notes, progress and
    ``outcome.json`` (how the process ended) to the folder ``scratch``.  ``local`` is the folder for the locks and
    caches that all runs on the machine share."""

    store: str  # URI of the store
    config: str  # sha256 of the configuration
    run: str  # name of the run
    stage: str  # name of the stage
    scratch: str
    local: str
    table: str = ""  # ``package.module:NAME`` of a table of stages that replaces the configuration's graph
    spans: str = ""  # file for the stage's spans; empty: none are recorded
    span: str = ""  # id of the span of the whole stage
    ordered: int = 0  # nanoseconds since 1970 at which the process was ordered


def graph_of(config: Config, table: str = "") -> Sequence[Stage]:
    """Returns the stages of a run.  ``table`` names a Python variable that holds the stages, as
    ``package.module:NAME``.  If ``table`` is empty, the stages are those that ``config`` gives."""
    if not table:
        return stages_of(config)
    module, attribute = table.split(":")
    return getattr(importlib.import_module(module), attribute)


def run_stage(order: StageOrder) -> int:
    """Runs the stage that ``order`` names.  Writes ``outcome.json`` with the exit code and the error's message.
    Returns the exit code."""
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` writes the stacks to the log
    scratch = Path(order.scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "pid").write_text(str(os.getpid()))  # helps a person to find the process of a stage that hangs
    code, message = EXIT_DONE, ""
    _say(f"{order.stage}: process started")
    try:
        with spans.recording(Path(order.spans), order.span) if order.spans else contextlib.nullcontext():
            spans.add("start process", order.ordered, time.time_ns())
            _run(order, scratch, lambda: stopped)
    except BaseException as error:
        code, message = getattr(error, "exit_code", EXIT_BUG), str(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            code, message = EXIT_RETRY, f"No room left on this machine: {error}. Free some; the same command goes on."
        elif code == EXIT_BUG:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        (scratch / "outcome.json").write_text(json.dumps({"code": code, "message": message}))
    except OSError:
        print(message, file=sys.stderr)
    return code


def _run(order: StageOrder, scratch: Path, should_stop: Stop) -> None:
    tracker = FileTracker(scratch)
    work = scratch / "work"
    with spans.span("look up"):
        store = open_store(order.store)
        config = read_config(store, order.config)
        stages = graph_of(config, order.table)
        stage = next((row for row in stages if row.name == order.stage), None)
        if stage is None:
            raise BadConfiguration(f"There is no stage {order.stage}: {', '.join(row.name for row in stages)}.")
        shutil.rmtree(work, ignore_errors=True)
        identity = identity_of(store, stages, stage, config, _manifests_above(store, order.run, stages, stage))
    with using(store):  # from now on, collections keep the checkpoints of this key
        store.put(key_entry(order.run, stage.name), identity.key.encode())
    with _lock(Path(order.local) / "locks" / f"{stage.name}-{identity.key[:32]}", tracker, should_stop):
        if serve_from_cache(store, order.run, identity) is None:
            with metered(order.store, order.run, stage.name, config.run.gpu_hours) as is_spent:
                ends = (should_stop, is_spent)
                _make(order, store, placed(config), stage, identity, tracker, lambda: any(end() for end in ends))
    shutil.rmtree(work, ignore_errors=True)


def _make(
    order: StageOrder, store: Store, config: Config, stage: Stage, identity: Identity, tracker: FileTracker, stop: Stop
) -> None:
    work, cache = Path(order.scratch) / "work", Path(order.local) / "cache"
    with spans.span("fetch inputs"):
        for name, digest in identity.inputs.items():
            store.get_folder(digest, work / "inputs" / name)
    outputs = {name: work / "outputs" / name for name in stage.outputs}
    for folder in (*outputs.values(), work / "scratch", work / "checkpoint", cache):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoints = StageCheckpoints(store, stage.name, identity.key, work / "checkpoint", tracker)
    _say(f"{stage.name}: inputs are here")
    with spans.span("import"):  # nearly all stages import PyTorch: a second or two in a fresh process
        run = importlib.import_module(stage.module).run
    _say(f"{stage.name}: begins")
    context = StageContext(
        name=stage.name,
        config=restricted(config, stage.config),
        inputs={name: work / "inputs" / name for name in identity.inputs},
        outputs=outputs,
        work=work / "scratch",
        tracker=tracker,
        checkpoints=checkpoints,
        should_stop=stop,
        cache=cache,
    )
    run(context)
    _say(f"{stage.name}: ends")
    with spans.span("store outputs"):
        made = {name: store.put_folder(folder) for name, folder in outputs.items()}
        empty = [name for name, digest in made.items() if not store.tree(digest)]
        if empty:
            raise RuntimeError(f"stage {stage.name} returned without writing {', '.join(empty)}")
        store.put_json(code_digests(stage.module))  # the facts behind two hashes of the key, for ``compare.why_missed``
        store.put_json(environment_versions())
        tracker.save(work / "said")
        said = store.put_folder(work / "said")
        metrics = read_metrics(work / "said" / "metrics.jsonl")
        shared = ("stage", "key", "code", "environment", "device", "inputs")
        manifest = Manifest(
            **{fact: getattr(identity, fact) for fact in shared},
            run=order.run,
            config=order.config,
            outputs=made,
            metrics=said,
            seconds=round(checkpoints.seconds, 3),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            resumed=checkpoints.resumed,
            lost=round(sum(values.get("lost", 0.0) for values in metrics.values())),
            scores={
                name.removeprefix(SCORE): value
                for values in metrics.values()
                for name, value in values.items()
                if name.startswith(SCORE)
            },
        )
        written = {digest: outputs[name] for name, digest in made.items()} | {said: work / "said"}
        commit(store, order.run, manifest, written)
        checkpoints.clear()


def _say(text: str) -> None:
    print(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}", flush=True)


def _manifests_above(store: Store, run: str, stages: Sequence[Stage], stage: Stage) -> dict[str, Manifest]:
    done = {}
    for name in ancestors(stages, stage.name):
        manifest = read_manifest(store, run, name)
        if manifest is None:
            raise BadConfiguration(f"Stage {stage.name} needs {name}, which is not done in run {run}.")
        done[name] = manifest
    return done


@contextlib.contextmanager
def _lock(path: Path, tracker: FileTracker, should_stop: Stop) -> Iterator[None]:
    """Waits for the file lock ``path`` and holds it, so that two runs on this machine do not compute the same result at
    once.

    Raises:
        TryAgain: ``should_stop`` returned True during the wait."""
    while True:
        with try_lock(path) as free:
            if free:
                yield
                return
        if should_stop():
            raise TryAgain("stopped while another run was making the same")
        tracker.note("waited for another run that was making the same")
        time.sleep(0.2)
