"""The steps of a run on a cluster.  Each step runs in a separate pod.  Argo decides their order and retries them.

    prepare   stores the configuration, creates the run, takes results from the cache, starts the run's servers
    a stage   runs one stage of the pipeline (``stage_main``); copies its log, metrics and manifest to MLflow
    finish    removes the run's servers, records how the run ended, calls the webhook

The run's servers are sandbox servers, which build and run the generated kernels, and vLLM servers, which run the
language model.  A step may be killed at any moment and started again: it creates only objects that are missing."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_agent import machine
from cuda_agent.cluster import engines, rayjobs, run_pools, stage_metrics, traces, webhook
from cuda_agent.cluster.api import Cluster
from cuda_agent.cluster.submit import submitter_of
from cuda_agent.compose import load
from cuda_agent.errors import EXIT_BUG, EXIT_DONE, EXIT_RETRY, FINAL, ConfigError, TryAgain, UserError
from cuda_agent.pipeline import episodes, runs, trace
from cuda_agent.pipeline.compare import newest_results, why_missed
from cuda_agent.pipeline.graph import ABSENT, ROWS, Stage, needs, stages_of
from cuda_agent.pipeline.local import outcome_message
from cuda_agent.pipeline.locks import using
from cuda_agent.pipeline.manifest import (
    Manifest,
    config_entry,
    identity_of,
    manifest_entry,
    outcome_entry,
    prepare_entry,
    read_manifest,
    serve_from_cache,
)
from cuda_agent.pipeline.recorder import Recorder
from cuda_agent.pipeline.spawn import Spawner
from cuda_agent.pipeline.stage_main import StageOrder, graph_of
from cuda_agent.spans import new_id, span
from cuda_agent.storage import Store, StoreError, open_store
from cuda_agent.tracking import read_progress

RECORD_SECONDS = 20.0  # longest wait for MLflow at the end of a pod
LAST_RECORD_SECONDS = 60.0  # the same for finish, which records everything again: MLflow may be restarting


@dataclass(frozen=True)
class PodEnvironment:
    """The environment of a step in its pod: the paths that the step uses, and the addresses of the store and of MLflow.
    The Helm chart sets both addresses as environment variables of the pod."""

    store: str  # URI
    mlflow: str  # URI, or ``off``
    config: Path = Path("/config/config.json")  # from the Workflow's ConfigMap
    plan: Path = Path("/scratch/plan")  # folder in which ``prepare`` writes its outputs
    work: Path = Path("/scratch")  # folder of scratch files
    termination_message: Path = Path("/dev/termination-log")  # created by Kubernetes; absent elsewhere

    @classmethod
    def from_environment(cls) -> "PodEnvironment":
        store = os.environ.get("CUDA_AGENT_STORE")
        if not store:
            raise ConfigError("CUDA_AGENT_STORE is not set: this command is for the chart's pods.")
        return cls(store, os.environ.get("CUDA_AGENT_MLFLOW", "off"))


def termination_message(here: PodEnvironment, text: str) -> None:
    """Writes ``text``, the reason why this pod ends, to the pod's termination message.  `cuda-agent watch` shows it.

    Call this function only if Argo should not retry the step.  The chart's retry rule searches the message for words:
    with "deadline" Argo does not retry the step, and with "OOMKilled" only once."""
    if here.termination_message.exists():
        here.termination_message.write_text(text[:2000])


# prepare --------------------------------------------------------------------------------------------------------------


def prepare(
    here: PodEnvironment,
    run: str,
    sha256: str,
    workflow: str,
    cluster: Callable[[], Cluster] | None,
    base: Sequence[dict[str, Any]],
    stages: Sequence[Stage] | None = None,
    spread: bool = False,
    replicas: Sequence[dict[str, Any]] = (),
) -> dict[str, str]:
    """Runs the step ``prepare``, the first step of a run: creates the run in the store, takes results of stages from
    the cache, and starts the servers that the stages need.  Writes each output to a file, which Argo reads.

    Args:
        run: Name of the run.
        sha256: Hash of the configuration.
        workflow: Name of the run's Workflow.
        cluster: A function that connects to the cluster; None: no servers are created.
        base: Templates of the sandbox servers' Kubernetes objects.
        stages: The stages of the run; None: those of the configuration's graph.
        spread: Whether a stage may run in a Ray cluster of several pods; otherwise Ray runs in the stage's pod.
        replicas: Templates of the vLLM servers' Kubernetes objects; empty: each stage starts servers in its own pod.

    Returns:
        The outputs: a map from names to texts.  Each stage is a name.  Its text is ``run`` (to be run in one pod),
        ``ray`` (to be run in several pods), ``cached`` (has a result), or ``absent`` (not in the run's graph).  The
        texts of ``servers`` and ``engines`` are the addresses of the sandbox servers and of the vLLM servers, separated
        by commas.  The text of ``finish`` is ``run`` if Argo must run the step ``finish``, else ``no``.

    Raises:
        ConfigError: The configuration is invalid or does not have the hash ``sha256``, or a run of this name with
            another configuration exists.
        TryAgain: A garbage collection is running, the configuration's ConfigMap does not exist yet, or the run was
            stopped while its servers were starting.
        ClusterError: The API server refuses a request or does not answer, or the sandbox servers do not become
            ready."""
    store = open_store(here.store)
    store.delete(prepare_entry(run, sha256))
    if not here.config.exists() and not store.exists(config_entry(sha256)):
        raise TryAgain("The configuration has not arrived yet: it is made right after its Workflow.")
    text = here.config.read_text() if here.config.exists() else store.get(config_entry(sha256)).decode()
    config = load(text, sha256)
    submitter = submitter_of(cluster().get("Workflow", workflow)) if cluster else ""
    with using(store):
        store.create(config_entry(sha256), text.encode())
        record = runs.Run.begun(run, config, sha256, submitter)
        if not store.create(f"runs/{run}/run.json", record.to_bytes()):
            record = runs.read_run(store, run)
        if record.config != sha256:
            there = record.config[:8]
            raise ConfigError(f"There is a run {run} of another configuration ({there}). Choose another name.")
        runs.touch(store, record)
    graph = stages_of(config) if stages is None else stages
    done: dict[str, Manifest] = {}
    earlier = functools.cache(functools.partial(newest_results, store))  # not read if the cache has all results
    for stage in graph:
        if all(above in done for above in needs(graph, stage)):
            identity = identity_of(store, graph, stage, config, done)
            if result := serve_from_cache(store, run, identity):
                done[stage.name] = result
            elif why := why_missed(store, earlier().get(stage.name), stage, identity):
                print(f"{stage.name} is not in the cache; {why}", flush=True)
    left = [stage for stage in graph if stage.name not in done]
    spread = spread and config.runtime == "ray"
    for stage in left:  # how an earlier attempt ended says nothing about this one; a RayJob may still be running
        store.delete(manifest_entry(run, stage.name))
        if not (spread and rayjobs.can_be_spread(stage)):
            store.delete(outcome_entry(run, stage.name))
    with (
        tempfile.TemporaryDirectory() as folder,
        traces.session(here.work, store, run, "prepare"),
        _recording(here, store, config, sha256, run, graph, submitter=submitter) as recorder,
    ):
        for name, manifest in done.items():
            recorder.finished(name, manifest)
        servers, served = [], []
        if left and cluster is not None:
            if replicas and engines.wanted(config):
                served = run_pools.make_engines(cluster(), replicas, workflow, config)
            with span("start sandbox servers"):
                servers = run_pools.make_pools(cluster(), base, workflow, config)
        if not left:
            runs.end_run(store, record, EXIT_DONE, "", "", done)
            _record_report(recorder, store, done, Path(folder))
            recorder.ended(EXIT_DONE)
    outputs = {row.name: ABSENT for row in ROWS} if stages is None else {}
    outputs |= {stage.name: "ray" if spread and rayjobs.can_be_spread(stage) else "run" for stage in graph}
    outputs |= dict.fromkeys(done, "cached")
    told = "run" if left or os.environ.get("CUDA_AGENT_WEBHOOK") else "no"
    outputs |= {"servers": ",".join(servers), "engines": ",".join(served), "finish": told}
    here.plan.mkdir(parents=True, exist_ok=True)
    for name, value in outputs.items():
        (here.plan / name).write_text(value)
    return outputs


def prepare_failed(here: PodEnvironment, run: str, sha256: str, error: Exception) -> None:
    """Stores why ``prepare`` failed, for ``finish``.  Also writes it to the pod's status if Argo does not retry."""
    code = getattr(error, "exit_code", EXIT_BUG)
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(StoreError):
        open_store(here.store).put(prepare_entry(run, sha256), _outcome(code, message))
    if code in FINAL:
        termination_message(here, message)


# a stage --------------------------------------------------------------------------------------------------------------


def run_stage(
    here: PodEnvironment, name: str, run: str, sha256: str, table: str = "", spawner: Spawner | None = None
) -> int:
    """Runs one stage in a child process, and copies its log, metrics and manifest to MLflow.  If this process receives
    SIGTERM, the stage writes a checkpoint and ends.

    Args:
        name: Name of the stage.
        run: Name of the run.
        sha256: Hash of the configuration.
        table: ``module:NAME`` of a table of stages that replaces the configuration's graph; empty: no replacement.
        spawner: The fork server that starts the stage; None: a new one.  It is closed at the end.

    Returns:
        The stage's exit code.  It is 137 if Linux killed the stage for lack of memory, and 1 if a signal such as
        SIGSEGV ended the stage."""
    scratch = here.work / "stage" / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    log = scratch / "log.txt"
    own = new_id()
    spans = str(traces.folder(here.work) / f"{name}-{own}-process.jsonl")
    local = str(runs.local_home(here.store))
    order = StageOrder(here.store, sha256, run, name, str(scratch), local, table, spans, own, machine.began())
    before = machine.oom_kills()
    spawner = spawner or Spawner(preload=())
    stop = spawner.signal  # the stage writes a checkpoint
    with contextlib.closing(spawner), _on_sigterm(lambda: stop(name, signal.SIGTERM)):
        spawner.start(name, asdict(order), log)  # before all else, because the stage's imports take seconds
        store = open_store(here.store)
        config = runs.read_config(store, sha256)
        with (
            traces.session(here.work, store, run, name, trace.STAGE, own) as facts,
            stage_metrics.serving(scratch, store, run, name),
            _recording(here, store, config, sha256, run, graph_of(config, table)) as recorder,
        ):
            code = facts["code"] = _follow(spawner, name, scratch, log, recorder)
            spawner.close()
            with contextlib.suppress(StoreError, FileNotFoundError):
                store.put(f"runs/{run}/{name}/log.txt", log)
            recorder.keep(name, [log])
            if code == EXIT_DONE:
                manifest = _leave_manifest(here, store, run, name)
                recorder.finished(name, manifest)
                with contextlib.suppress(StoreError):
                    recorder.keep(name, episodes.packed(store, manifest, scratch / "episodes"))
                return code
            if code == EXIT_RETRY and machine.oom_kills() > before:
                code = 128 + signal.SIGKILL  # as Kubernetes reports it, so that Argo retries it once
                message = f"Stage {name} ran out of memory. Give it more in its profile, or make its batches smaller."
            else:
                message = outcome_message(scratch, name, code)
            with contextlib.suppress(StoreError):
                store.put(outcome_entry(run, name), _outcome(code if code > 0 else EXIT_BUG, message))
            recorder.failed(name, code)
            _explain(here, code, message)
            return code if code > 0 else EXIT_BUG


def _follow(spawner: Spawner, name: str, scratch: Path, log: Path, recorder: Recorder) -> int:
    """Copies a stage's log to stdout, its progress to Argo and its metrics to MLflow, until the stage ends.  Returns
    the stage's exit code."""
    shown, told = 0, 0.0
    while True:
        ended = spawner.wait(0.2)
        if log.exists():
            with open(log, "rb") as file:
                file.seek(shown)
                data = file.read()
            shown += len(data)
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        if name in ended:
            return ended[name]
        if time.monotonic() - told > 2.0:
            told = time.monotonic()
            progress = read_progress(scratch / "progress.json")
            if progress and (file_name := os.environ.get("ARGO_PROGRESS_FILE")):
                with contextlib.suppress(OSError):
                    Path(file_name).write_text(f"{progress['done']}/{max(progress['total'], 1)}")
            recorder.running(name, scratch)


def run_spread(
    here: PodEnvironment,
    name: str,
    run: str,
    sha256: str,
    workflow: str,
    servers: str,
    cluster: Cluster,
    base: Sequence[dict[str, Any]],
    served: str = "",
) -> int:
    """Runs one stage in a Ray cluster of several pods, and waits until the stage ends.

    Args:
        name: Name of the stage.
        run: Name of the run.
        sha256: Hash of the configuration.
        workflow: Name of the run's Workflow.
        servers: Addresses of the run's sandbox servers, separated by commas.
        cluster: The cluster on which the Ray cluster is created.
        base: Templates of the stage's Ray objects, from the Helm chart.
        served: Addresses of the run's vLLM servers, separated by commas.

    Returns:
        The stage's exit code."""
    store = open_store(here.store)
    config = runs.read_config(store, sha256)
    uid = cluster.get("Workflow", workflow)["metadata"]["uid"]
    arguments = ["pod", "stage", name, "--run", run, "--config", sha256, "--workflow", workflow]
    made = rayjobs.objects(base, workflow, uid, name, arguments, servers, config, served)
    stopped = threading.Event()
    with _on_sigterm(stopped.set):
        code, message = rayjobs.follow(cluster, store, made, run, name, workflow, stopped.is_set)
    if code == EXIT_DONE:
        _leave_manifest(here, store, run, name)
        return code
    store.create(outcome_entry(run, name), _outcome(code, message))
    _explain(here, code, message)
    return code


def _leave_manifest(here: PodEnvironment, store: Store, run: str, stage: str) -> Manifest:
    manifest = read_manifest(store, run, stage)
    assert manifest is not None, "a stage that exits 0 has written its manifest"
    (here.work / "manifest.json").write_bytes(manifest.to_bytes())
    return manifest


def _explain(here: PodEnvironment, code: int, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    if code in FINAL:
        termination_message(here, message)


def _outcome(code: int, message: str) -> bytes:
    return json.dumps({"code": code, "message": message}).encode()


@contextlib.contextmanager
def _on_sigterm(call: Callable[[], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# finish ---------------------------------------------------------------------------------------------------------------


def finish(
    here: PodEnvironment,
    run: str,
    sha256: str,
    workflow: str,
    status: str,
    cluster: Cluster | None,
    stages: Sequence[Stage] = ROWS,
) -> dict[str, Any]:
    """Runs the step ``finish``, the last step of a run: removes the run's servers, records how the run ended, and
    posts the result to the webhook if one is configured.

    Args:
        run: Name of the run.
        sha256: Hash of the configuration.
        workflow: Name of the run's Workflow.
        status: State of the Workflow: ``Running`` or ``Succeeded`` after a success, ``Failed`` or ``Error`` after a
            failure.  ``Running`` means success, because this step is itself part of the Workflow.
        cluster: The cluster on which the servers run; None: no servers are removed.
        stages: The stages of the run.

    Returns:
        How the run ended: ``run``, ``workflow``, ``code`` (exit code), ``stage`` (the failed one) and ``message``."""
    if cluster is not None:
        run_pools.remove_pools(cluster, workflow)
    if folder := os.environ.get("CUDA_AGENT_ENGINE_FOLDER"):
        attempts = re.compile(rf"{re.escape(run)}(-r\d+)?")  # of earlier ones, too: `cancel --now` leaves theirs
        for old in (Path(folder), *Path(folder).parent.glob(f"{run}*")):
            if old == Path(folder) or attempts.fullmatch(old.name):
                shutil.rmtree(old, ignore_errors=True)
    store = open_store(here.store)
    failed = status not in ("Running", "Succeeded")
    record = runs.read_run(store, run) if store.exists(f"runs/{run}/run.json") else None
    if record is not None and record.config != sha256:
        record = None  # another run has the name, so prepare refused it
    code, stage, message = _how_it_ended(store, run, sha256, stages) if failed else (EXIT_DONE, "", "")
    facts = {"run": run, "workflow": workflow, "code": code, "stage": stage, "message": message}
    if record is not None:
        done = runs.run_manifests(store, record, stages)
        runs.end_run(store, record, code, stage, message, done)
        config = runs.read_config(store, record.config)
        with (
            tempfile.TemporaryDirectory() as folder,
            traces.session(here.work, store, run, "finish"),
            _recording(here, store, config, sha256, run, stages, seconds=LAST_RECORD_SECONDS) as recorder,
        ):
            flow = cluster.get("Workflow", workflow) if cluster else None
            recorder.attach(traces.pack(store, run, flow, Path(folder)))
            for name, manifest in done.items():
                recorder.finished(name, manifest)
            _record_report(recorder, store, done, Path(folder) / "report")
            for name in (row.name for row in stages):  # records that MLflow missed when it or the stage's pod was down
                if store.exists(key := f"runs/{run}/{name}/log.txt"):
                    log = Path(folder) / "logs" / name / "log.txt"
                    log.parent.mkdir(parents=True)
                    log.write_bytes(store.get(key))
                    recorder.keep(name, [log])
                    if name not in done:
                        recorder.failed(name, code if name == stage else EXIT_RETRY)
            recorder.ended(code)
    if url := os.environ.get("CUDA_AGENT_WEBHOOK"):
        webhook.tell(url, facts)
    return facts


def _how_it_ended(store: Store, run: str, sha256: str, stages: Sequence[Stage]) -> tuple[int, str, str]:
    """Returns exit code, name and error message of the first failed step of an unsuccessful run: ``prepare`` or a
    stage.  If the store has no failed step, returns the code 75 (try again), an empty name, and a message that the run
    was stopped."""
    entries = {"prepare": prepare_entry(run, sha256)}
    entries |= {row.name: outcome_entry(run, row.name) for row in stages if not read_manifest(store, run, row.name)}
    for name, entry in entries.items():
        if store.exists(entry):
            said = json.loads(store.get(entry))
            return said["code"], name, said["message"]
    return EXIT_RETRY, "", "Stopped. `cuda-agent resume` goes on from here."


@contextlib.contextmanager
def _recording(
    here: PodEnvironment, *of: Any, seconds: float = RECORD_SECONDS, submitter: str = ""
) -> Iterator[Recorder]:
    """Yields a ``Recorder``, which records the run in MLflow.  After the ``with`` block, waits at most ``seconds``
    seconds until MLflow has all records.  ``of`` are arguments for ``Recorder``: the store, the configuration, its
    hash, the name of the run, and the stages.  ``submitter`` is the user who started the run, if it is known."""
    facts = [here.mlflow, *of, lambda text: print(text, file=sys.stderr), None, submitter]
    recorder = Recorder(*facts)
    try:
        yield recorder
    finally:
        recorder.close(seconds)


def _record_report(recorder: Recorder, store: Store, done: dict[str, Manifest], folder: Path) -> None:
    """Records the run's report in MLflow if ``done`` (stage -> manifest) contains the stage ``report``.  Writes the
    report's files to ``folder``.  The folder must exist until ``recorder`` is closed, because a thread reads it."""
    if "report" in done:
        store.get_folder(next(iter(done["report"].outputs.values())), folder)
        recorder.attach(folder)
