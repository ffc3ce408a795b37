"""The local executor: runs the stages of a graph on one machine, each in a separate process.

The executor continues the newest unfinished run of the same configuration.  If there is none, it creates a run.  For
each stage, it takes the result from the cache or starts a process.  If a process exits with code 75 (try again), the
executor waits and starts another process, at most ``run.retries`` times.  At the end it copies the report from the
store to a local folder, and records how the run ended.

The executor and the stages' processes may be killed at any moment.  A result counts only once it is complete, and the
next call continues from the newest checkpoints.  If ``run.parallel_stages`` is set, independent stages run at the same
time.  A stage that measures times always runs alone."""

import contextlib
import functools
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.compose import freeze
from cuda_agent.config import Config
from cuda_agent.errors import EXIT_BUG, EXIT_DONE, EXIT_RETRY, ConfigError
from cuda_agent.pipeline import runs, trace
from cuda_agent.pipeline.compare import newest_results, why_missed
from cuda_agent.pipeline.graph import Stage, check, needs, stages_of
from cuda_agent.pipeline.locks import using
from cuda_agent.pipeline.manifest import (
    Manifest,
    config_entry,
    identity_of,
    is_whole,
    read_manifest,
    serve_from_cache,
)
from cuda_agent.pipeline.recorder import Recorder
from cuda_agent.pipeline.spawn import PRELOAD, Spawner
from cuda_agent.pipeline.stage_main import StageOrder
from cuda_agent.spans import add, new_id, span
from cuda_agent.storage import Store, StoreError, absolute_uri, open_store
from cuda_agent.tracking import read_notes, read_progress

GRACE = 60.0  # seconds that a stage has after SIGTERM to save a checkpoint


@dataclass
class StageView:
    """The state of one stage, for a screen that shows the run's progress."""

    name: str
    weight: float  # share of the run's time
    state: str = "waiting"  # waiting, running, retry, cached, done, failed
    done: int = 0  # progress: units that are done
    total: int = 0  # all units of the stage; 0: unknown
    unit: str = ""  # of ``done`` and ``total``, such as episodes
    rates: dict[str, float] = field(default_factory=dict)  # by name, such as tokens_per_second
    notes: list[str] = field(default_factory=list)
    waits: str = ""  # on a cluster: why its pods do not start
    attempt: int = 0  # number of the attempt
    began: float = 0.0  # start of the attempt, by ``time.monotonic``
    seconds: float = 0.0  # duration of the finished stage
    message: str = ""  # why the last attempt failed


@dataclass
class RunOutcome:
    run: str  # name of the run
    code: int  # exit code
    stage: str = ""  # the stage that failed
    message: str = ""  # why the run failed or stopped
    report: Path | None = None  # folder of the report
    log: Path | None = None  # log of the stage that failed
    resumed: bool = False  # whether an unfinished run was continued
    manifests: dict[str, Manifest] = field(default_factory=dict)  # of the finished stages, by stage


def run_pipeline(
    config: Config,
    *,
    new: bool = False,
    stages: Sequence[Stage] | None = None,
    table: str = "",
    watch: Callable[[str, list[StageView]], None] = lambda run, views: None,
    preload: tuple[str, ...] = PRELOAD,
    pause: float = 2.0,
    began: int = 0,
) -> RunOutcome:
    """Runs a graph of stages and returns how the run ended.  If a ConfigError or a StoreError
    occurs, does not raise it, but returns an outcome with an exit code and the error's message.

    Args:
        config: Selects the graph (``graph``), configures its stages and names the store.
        new: Whether to create a run even if there is an unfinished run of this configuration.
        stages: The stages to run; None: all stages of the graph.
        table: Where a stage's process finds ``stages``, as ``module:NAME``; empty: in the configuration's graph.
        watch: Function that is called several times a second with the run's name and the states of all stages.
        preload: Modules that the fork server imports before it forks the stages' processes.
        pause: Seconds before the second attempt of a stage; doubles before each further attempt.
        began: Start of the command, in nanoseconds since 1970, for the run's trace; 0: the start of this call."""
    began = began or time.time_ns()
    stages = stages_of(config) if stages is None else stages
    check(stages)
    outcome = RunOutcome(run="", code=EXIT_BUG)
    try:
        with _prepare(config, new) as (store, home, run, outcome.resumed):
            outcome.run = run.name
            _Execution(config, store, home, run, stages, table, watch, pause, outcome, began).run(preload)
    except (StoreError, ConfigError) as error:
        outcome.code, outcome.message = error.exit_code, str(error)
    return outcome


@contextlib.contextmanager
def _prepare(config: Config, new: bool) -> Iterator[tuple[Store, Path, runs.Run, bool]]:
    if config.run.store.startswith("memory:"):
        raise ConfigError("run.store: expected a folder or s3://bucket/prefix; memory:// ends with one process.")
    text, sha256 = freeze(config)
    store = open_store(config.run.store)
    home = runs.local_home(config.run.store)
    with runs.try_lock(runs.lock_path(home, store, sha256)) as free:
        if not free:
            running = runs.newest_unfinished(store, sha256)
            name = running.name if running else "a run"
            raise StoreError(f"{name} of this configuration is under way on this machine. Wait for it, or stop it.")
        with using(store):
            store.create(config_entry(sha256), text.encode())
            unfinished = None if new else runs.newest_unfinished(store, sha256)
            record = unfinished or runs.create_run(store, config, sha256)
            runs.touch(store, record)
        yield store, home, record, unfinished is not None


@dataclass
class _Execution:
    config: Config
    store: Store
    home: Path  # this machine's folder for locks, caches and scratch files
    run_record: runs.Run
    stages: Sequence[Stage]
    table: str
    watch: Callable[[str, list[StageView]], None]
    pause: float
    outcome: RunOutcome
    began: int  # nanoseconds since 1970
    running: dict[str, Stage] = field(default_factory=dict)
    again_at: dict[str, float] = field(default_factory=dict)  # stage -> time of its next attempt
    stopping: bool = False
    recorded: float = 0.0  # time of the last record in MLflow
    notes: dict[str, list[str]] = field(default_factory=dict)  # stage -> notes that the executor added
    ordered: dict[str, tuple[str, int]] = field(default_factory=dict)  # stage -> id and start of its attempt's span

    def __post_init__(self) -> None:
        self.scratch = self.home / "work" / self.run_record.name
        self.done = self.outcome.manifests
        self.views = {stage.name: StageView(stage.name, stage.weight) for stage in self.stages}
        uri = self.config.run.mlflow or f"sqlite:///{self.home / 'mlflow.db'}"
        artifacts = self.home / "mlflow-artifacts" if uri.startswith("sqlite:") else None
        run = self.run_record
        facts = self.store, self.config, run.config, run.name, self.stages, self._note, artifacts, run.submitter
        self.recorder = Recorder(uri, *facts)

    def run(self, preload: tuple[str, ...]) -> None:
        run = self.run_record.name
        folder = runs.spans_folder(self.home, run)
        with trace.session(folder, self.store, run, "run", trace.RUN, self.began, self._note) as facts:
            add("start", self.began, time.time_ns())
            self._run(Spawner(preload))
            facts["code"] = self.outcome.code
        self._show()  # a last note
        if self.outcome.code == EXIT_DONE:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _run(self, spawner: Spawner) -> None:
        try:
            with _signals(lambda: self._stop(spawner)):
                self._loop(spawner)
            if self.outcome.code == EXIT_DONE and (report := self.done.get("report")):
                with span("fetch report"):
                    self.outcome.report = fetch_report(self.store, self.home, self.run_record.name, report)
            ended = self.outcome
            runs.end_run(self.store, self.run_record, ended.code, ended.stage, ended.message, self.done)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.outcome.code = EXIT_RETRY if interrupted else getattr(error, "exit_code", EXIT_BUG)
            raise
        finally:
            with span("end"):
                spawner.close()
                self._close_recorder()

    def _loop(self, spawner: Spawner) -> None:
        self.outcome.code = EXIT_DONE
        killed_at = 0.0
        while True:
            progressed = False
            for stage in self.stages:
                if self._may_start(stage):
                    self._serve_or_start(stage, spawner)
                    progressed = True
            self._show()
            if progressed:
                continue
            if not self.running:
                if self.outcome.code != EXIT_DONE or self.stopping or len(self.done) == len(self.stages):
                    return
                time.sleep(0.05)
            for name, code in spawner.wait(0.1).items():
                own, ordered = self.ordered[name]
                add(name, ordered, time.time_ns(), id=own, kind=trace.STAGE, code=code)
                self._ended(self.running.pop(name), code)
                if self.outcome.code != EXIT_DONE:
                    self._stop(spawner)
            if self.stopping and self.running:
                killed_at = killed_at or time.monotonic() + GRACE
                if time.monotonic() > killed_at:
                    for name in self.running:
                        spawner.signal(name, signal.SIGKILL)

    def _may_start(self, stage: Stage) -> bool:
        if stage.name in self.done or stage.name in self.running or self.stopping or self.outcome.code != EXIT_DONE:
            return False
        if any(above not in self.done for above in needs(self.stages, stage)):
            return False
        if time.monotonic() < self.again_at.get(stage.name, 0.0):
            return False
        if not self.running:
            return True
        beside = [*self.running.values(), stage]
        return self.config.run.parallel_stages and not any(other.timing for other in beside)

    @functools.cached_property
    def _earlier(self) -> dict[str, str]:
        """Stage -> the run whose result a message compares with.  Many requests, which a run from the cache does not
        need."""
        return newest_results(self.store)

    def _serve_or_start(self, stage: Stage, spawner: Spawner) -> None:
        view = self.views[stage.name]
        sha256, run = self.run_record.config, self.run_record.name
        with span("look up", stage=stage.name):
            identity = identity_of(self.store, self.stages, stage, self.config, self.done)
            result = serve_from_cache(self.store, run, identity)
            if result is not None:
                self._finish(stage, result, "cached")
                return
        if self.stopping:  # a signal arrived meanwhile
            return
        if view.attempt == 0 and (why := why_missed(self.store, self._earlier.get(stage.name), stage, identity)):
            self._note(f"not in the cache; {why}", stage.name)
        folder = self.scratch / stage.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        store = absolute_uri(self.config.run.store)
        own, now = self.ordered[stage.name] = new_id(), time.time_ns()
        spans = str(runs.spans_folder(self.home, run) / f"{stage.name}-{own}.jsonl")
        order = StageOrder(store, sha256, run, stage.name, str(folder), str(self.home), self.table, spans, own, now)
        spawner.start(stage.name, asdict(order), folder / "log.txt")
        self.running[stage.name] = stage
        if self.stopping:
            spawner.signal(stage.name, signal.SIGTERM)
        view.state, view.began, view.attempt = "running", time.monotonic(), view.attempt + 1

    def _ended(self, stage: Stage, code: int) -> None:
        view, folder = self.views[stage.name], self.scratch / stage.name
        self._read(view)
        log = folder / "log.txt"
        with contextlib.suppress(StoreError, FileNotFoundError):
            self.store.put(f"runs/{self.run_record.name}/{stage.name}/log.txt", log)
        if code == EXIT_DONE:
            manifest = read_manifest(self.store, self.run_record.name, stage.name)
            assert manifest is not None, "a stage that exits 0 has written its manifest"
            self._finish(stage, manifest, "done")
            shutil.rmtree(folder, ignore_errors=True)
            return
        view.message = outcome_message(folder, stage.name, code)
        if code == EXIT_RETRY and not self.stopping and view.attempt <= self.config.run.retries:
            for above in stage.upstream:  # make a damaged input again
                if above in self.done and not is_whole(self.store, self.done[above]):
                    self._note("its result is damaged and is made again", above)
                    self.views[above].state = "waiting"
                    del self.done[above]
            self.again_at[stage.name] = time.monotonic() + self.pause * 2 ** (view.attempt - 1)
            view.state = "retry"
            return
        view.state = "retry" if self.stopping and code == EXIT_RETRY else "failed"
        if self.outcome.code == EXIT_DONE:
            self.outcome.code = code if code > 0 else EXIT_BUG
            self.outcome.stage, self.outcome.message, self.outcome.log = stage.name, view.message, log
        self.recorder.failed(stage.name, code)

    def _finish(self, stage: Stage, manifest: Manifest, state: str) -> None:
        self.done[stage.name] = manifest
        view = self.views[stage.name]
        view.state, view.seconds, view.done = state, manifest.seconds, view.total
        notes = self.recorder.finished(stage.name, manifest)
        view.notes = view.notes or notes

    def _stop(self, spawner: Spawner) -> None:
        if not self.stopping:
            self.stopping = True
            if self.outcome.code == EXIT_DONE:
                self.outcome.code, self.outcome.message = EXIT_RETRY, "Stopped. The same command goes on from here."
            for name in self.running:
                spawner.signal(name, signal.SIGTERM)

    def _read(self, view: StageView) -> None:
        folder = self.scratch / view.name
        view.notes = self.notes.get(view.name, []) + read_notes(folder / "notes.jsonl")
        if progress := read_progress(folder / "progress.json"):
            vars(view).update(progress)  # done, total, unit, rates

    def _show(self) -> None:
        record = time.monotonic() - self.recorded > 1.0
        for name in self.running:
            self._read(self.views[name])
            if record:
                self.recorded = time.monotonic()
                self.recorder.running(name, self.scratch / name)
        self.watch(self.run_record.name, list(self.views.values()))

    def _note(self, text: str, stage: str = "") -> None:
        """Adds the message ``text`` to the notes that the screen shows for ``stage`` (empty: the first stage).

        Also keeps the message in ``self.notes``.  While a stage runs, ``_read`` regularly replaces the shown notes by
        those in the stage's file and those in ``self.notes``."""
        view = self.views[stage or next(iter(self.views))]
        self.notes.setdefault(view.name, []).append(text)
        view.notes = [*view.notes, text]

    def _close_recorder(self) -> None:
        if self.outcome.report:
            self.recorder.attach(self.outcome.report)
        self.recorder.ended(self.outcome.code)
        if not self.recorder.close(30.0):
            self._note("MLflow did not take everything; the metrics are in the store.")
            self.watch(self.run_record.name, list(self.views.values()))


def fetch_report(store: Store, home: Path, run: str, manifest: Manifest) -> Path:
    """Copies the report of ``run`` from the store to a folder below ``home``, and returns this folder.  ``manifest`` is
    the record of the finished stage ``report``."""
    folder = home / "reports" / run
    shutil.rmtree(folder, ignore_errors=True)
    store.get_folder(next(iter(manifest.outputs.values())), folder)
    return folder


def outcome_message(folder: Path, stage: str, code: int) -> str:
    """Returns why a stage failed: the message in the file ``outcome.json`` of ``folder``.  If there is no message,
    returns a sentence with the exit code ``code``."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        if message := json.loads((folder / "outcome.json").read_text())["message"]:
            return message
    return f"stage {stage} was killed or crashed (exit code {code})"


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Handles SIGTERM, SIGHUP and Ctrl-C: the first signal calls ``stop``, the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
