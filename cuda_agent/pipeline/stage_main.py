"""Runs one stage in one process, from its order to its exit code: as a local subprocess, as a container step, by hand.

    resolve inputs -> key -> lock -> made already? -> fetch inputs -> resume and run -> data, manifest, cache entry

Not covered: the order of stages and retries (``local``), and the start of a process (``spawn``).
"""

import errno
import faulthandler
import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cuda_agent.compose import load, restricted
from cuda_agent.config import Config
from cuda_agent.context import StageContext
from cuda_agent.errors import (
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_RETRY,
    BadConfiguration,
    ConfigError,
    StageError,
    TryAgain,
)
from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.pipeline.graph import STAGES_INPUT, Stage, ancestors, stages_of
from cuda_agent.pipeline.manifest import (
    Identity,
    Manifest,
    config_entry,
    find_result,
    identify,
    key_entry,
    make_stages_folder,
    manifest_entry,
    placed,
    publish,
    read_manifest,
    resolve_inputs,
)
from cuda_agent.storage import Store, StoreError, open_store
from cuda_agent.tracking import FileTracker

# Errors that a user can fix (a base without tokenizer, a file that is no task, a machine without a jail).  By name:
# importing their modules here would make every stage start as slowly as the slowest.
_PERSONS_FAULT = ("PolicyError", "TaskError", "SandboxUnready", "JailError")


@dataclass(frozen=True)
class StageOrder:
    """The order of one stage's process.  ``scratch``: this attempt's folder, for metrics, notes, progress and
    ``outcome.json``; ``local``: the machine's folder for locks and caches."""

    store: str
    config: str  # sha256
    run: str
    stage: str
    scratch: str
    local: str
    table: str = ""  # ``package.module:NAME`` in place of the configuration's graph

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def graph_of(config: Config, table: str = "") -> Sequence[Stage]:
    """Returns the configuration's graph, or the table named ``package.module:NAME``."""
    if not table:
        return stages_of(config)
    module, attribute = table.split(":")
    return getattr(importlib.import_module(module), attribute)


def run_stage(order: StageOrder) -> int:
    """Runs the stage and returns the exit code; ``outcome.json`` holds the message for the user."""
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` writes the stacks to the log
    scratch = Path(order.scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "pid").write_text(str(os.getpid()))
    code, message = EXIT_DONE, ""
    _say(f"{order.stage}: process started")
    try:
        _run(order, scratch, lambda: stopped)
    except StageError as error:
        code, message = error.exit_code, str(error)
    except ConfigError as error:
        code, message = EXIT_CONFIG, str(error)
    except StoreError as error:
        code, message = EXIT_RETRY, str(error)
    except BaseException as error:
        code, message = EXIT_BUG, f"{type(error).__name__}: {error}"
        if type(error).__name__ in _PERSONS_FAULT:
            code, message = EXIT_CONFIG, str(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            code, message = EXIT_RETRY, f"No room left on this machine: {error}. Free some; the same command goes on."
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        (scratch / "outcome.json").write_text(json.dumps({"code": code, "message": message}))
    except OSError:
        print(message, file=sys.stderr)
    return code


def _run(order: StageOrder, scratch: Path, should_stop: Any) -> None:
    store = open_store(order.store)
    config = load(store.get(config_entry(order.config)).decode(), order.config)
    stages = graph_of(config, order.table)
    stage = next((row for row in stages if row.name == order.stage), None)
    if stage is None:
        raise BadConfiguration(f"There is no stage {order.stage}: {', '.join(row.name for row in stages)}.")
    tracker = FileTracker(scratch)
    work = scratch / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    done = _manifests_above(store, order.run, stages, stage)
    inputs = resolve_inputs(store, stage, done)
    for name, source in stage.inputs.items():
        if source == STAGES_INPUT:
            make_stages_folder(store, stages, stage, config, done, work / "made")
            inputs[name] = store.put_folder(work / "made")
    here = placed(config)
    identity = identify(stage, here, inputs)
    store.put(key_entry(order.run, stage.name), identity.key.encode())
    with _lock(Path(order.local) / "locks" / f"{stage.name}-{identity.key[:32]}", tracker, should_stop):
        if (result := find_result(store, order.run, identity)) is None:
            result = _make(order, store, here, stage, identity, tracker, work, should_stop)
        publish(store, order.run, result)
    shutil.rmtree(work, ignore_errors=True)


def _make(
    order: StageOrder,
    store: Store,
    config: Config,
    stage: Stage,
    identity: Identity,
    tracker: FileTracker,
    work: Path,
    should_stop: Any,
) -> Manifest:
    for name, digest in identity.inputs.items():
        store.get_folder(digest, work / "inputs" / name)
    for name in (*stage.outputs, "."):
        (work / "outputs" / name).mkdir(parents=True, exist_ok=True)
    for folder in ("scratch", "checkpoint"):
        (work / folder).mkdir()
    cache = Path(order.local) / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    checkpoints = StageCheckpoints(store, stage.name, identity.key, work / "checkpoint", tracker)
    _say(f"{stage.name}: inputs are here")
    run = importlib.import_module(stage.module).run  # nearly all import PyTorch: a second or two in a fresh process
    _say(f"{stage.name}: begins")
    run(
        StageContext(
            name=stage.name,
            config=restricted(config, stage.config),
            inputs={name: work / "inputs" / name for name in identity.inputs},
            outputs={name: work / "outputs" / name for name in stage.outputs},
            work=work / "scratch",
            tracker=tracker,
            checkpoints=checkpoints,
            should_stop=should_stop,
            cache=cache,
        )
    )
    _say(f"{stage.name}: ends")
    outputs = {name: store.put_folder(work / "outputs" / name) for name in stage.outputs}
    empty = [name for name, digest in outputs.items() if not store.tree(digest)]
    if empty:
        raise RuntimeError(f"stage {stage.name} returned without writing {', '.join(empty)}")
    tracker.save(work / "said")
    manifest = Manifest(
        stage=stage.name,
        run=order.run,
        key=identity.key,
        code=identity.code,
        environment=identity.environment,
        device=identity.device,
        config=order.config,
        inputs=identity.inputs,
        outputs=outputs,
        metrics=store.put_folder(work / "said"),
        seconds=round(checkpoints.seconds, 3),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        resumed=checkpoints.resumed,
    )
    manifest = publish(store, order.run, manifest)
    checkpoints.clear()
    return manifest


def _say(text: str) -> None:
    """Writes a line to the log; these lines show the overhead of a stage."""
    print(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}", flush=True)


def _manifests_above(store: Store, run: str, stages: Sequence[Stage], stage: Stage) -> dict[str, Manifest]:
    done = {}
    for name in ancestors(stages, stage.name):
        manifest = read_manifest(store, manifest_entry(run, name))
        if manifest is None:
            raise BadConfiguration(f"Stage {stage.name} needs {name}, which is not done in run {run}.")
        done[name] = manifest
    return done


@contextmanager
def _lock(path: Path, tracker: FileTracker, should_stop: Any) -> Iterator[None]:
    """Locks a result on this machine, so that only one run makes it: a second run waits, and finds it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        waiting = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if should_stop():
                    raise TryAgain("stopped while another run was making the same") from None
                if not waiting:
                    tracker.note("waited for another run that was making the same")
                waiting = True
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)
