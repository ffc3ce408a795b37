"""Reads results of a cluster run from MLflow: report, logs, episodes, configuration and manifests.

An episode holds an agent's turns on one task.  A manifest is the record of a finished stage.  If the Helm chart
installed MLflow, MLflow is reached through a forwarded port of its pod.  Any other MLflow is reached at its address."""

import contextlib
import gzip
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.cluster.forward import forwarded, pod_of
from cuda_agent.cluster.submit import workflows
from cuda_agent.cluster.templates import templates
from cuda_agent.cluster.traces import PACKED as PACKED_TRACE
from cuda_agent.cluster.traces import node_spans, unpacked
from cuda_agent.compose import validate
from cuda_agent.context import SCORE
from cuda_agent.errors import ConfigError
from cuda_agent.mlflow_api import MlflowEntry, Rest, refusal
from cuda_agent.pipeline import rows
from cuda_agent.pipeline.compare import Facts
from cuda_agent.pipeline.episodes import FILE, PACKED, TOKENIZER, Left
from cuda_agent.pipeline.graph import ROWS
from cuda_agent.pipeline.manifest import Manifest
from cuda_agent.pipeline.trace import Span
from cuda_agent.tracking import MANIFEST_TAG, POLICY_TAG, RELEASE_TAG, RUN_TAG, STAGE_TAG, SWEEP_TAG, with_tag

MLFLOW_PORT = 5000
SCORED = 20  # runs whose scores are read for a list of runs
_NAME = re.compile(r"[A-Za-z0-9._-]+")  # a name that may stand in a filter expression


@dataclass(frozen=True)
class Server:
    """An MLflow server, and the releases of the chart whose runs are wanted from it; others may share it."""

    address: str
    releases: tuple[str, ...] = ()  # as in the tag ``RELEASE_TAG``; empty: all

    def of_ours(self, found: list[MlflowEntry]) -> list[MlflowEntry]:
        """Returns those MLflow runs in ``found`` that belong to runs of these releases."""
        return with_tag(found, RELEASE_TAG, *self.releases, "") if self.releases else found


@contextlib.contextmanager
def mlflow(cluster: Cluster) -> Iterator[Server]:
    """Yields the MLflow server that the Helm release uses.  Its address is valid inside the ``with`` block.

    Raises:
        ClusterError: MLflow does not answer.
        ConfigError: The release has no MLflow, or it refuses this user."""
    try:
        address, releases = _elsewhere(cluster)
        if address:
            yield Server(address, releases)
            return
        with forwarded(cluster, pod_of(cluster, "mlflow"), MLFLOW_PORT) as port:
            yield Server(f"http://127.0.0.1:{port}", releases)
    except httpx.HTTPError as error:
        if refused := refusal(error):
            raise ConfigError(refused) from None
        raise ClusterError(f"MLflow in {cluster.namespace} of {cluster.name} does not answer: {error}") from None


def _elsewhere(cluster: Cluster) -> tuple[str, tuple[str, ...]]:
    """Returns (the address of the MLflow server that the Helm release uses, or "" if the release itself installed this
    server; the names of the namespace's releases).

    Raises:
        ConfigError: The release has no MLflow."""
    there = templates(cluster)
    uri = next((one.mlflow for one in there), "")
    if uri == "off":
        raise ConfigError(
            f"The release in namespace {cluster.namespace} of {cluster.name} has no MLflow, which keeps "
            "logs and reports for people: see mlflow.enabled and tracking.uri of the chart."
        )
    releases = {f"{cluster.namespace}/{one.release}" for one in there}
    return "" if is_of_chart(uri) else uri, tuple(sorted(releases))


def is_of_chart(uri: str) -> bool:
    """Returns whether the chart installed the MLflow server at ``uri``: the host is then a service's name, without a
    dot."""
    return "." not in uri.split("//", 1)[-1]


def download(server: Server, run: str, folder: Path) -> Path:
    """Downloads a run's files, such as the report, from ``server``.  Replaces the content of
    ``folder`` with them, and returns ``folder``.

    Raises:
        ConfigError: MLflow does not know the run, or has no report of it yet, or names a file outside of ``folder``."""
    api, entries = _open(server, run)
    run_id = entries[""].run_id
    files = api.files(run_id)
    if "index.html" not in files:
        raise ConfigError(f"Run {run} has no report yet.")
    shutil.rmtree(folder, ignore_errors=True)
    save(api, run_id, [name for name in files if name != PACKED_TRACE], folder)
    return folder


def save(api: Rest, run_id: str, names: Iterable[str], folder: Path) -> None:
    """Writes the files ``names`` of a run in MLflow to ``folder``.

    Raises:
        ConfigError: MLflow names a file outside of ``folder``."""
    for name in names:
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"MLflow names a file outside of the folder: {name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(api.read(run_id, name))


def trace(cluster: Cluster, run: str) -> tuple[str, list[Span]]:
    """Returns the id and the spans of a run's trace.  The spans of Argo's nodes come from the run's Workflows, and all
    others from MLflow, to which the last step of the run copies them.  The id is "" as long as MLflow has none.

    Raises:
        ConfigError, ClusterError: The run has no Workflow, and MLflow cannot be read or does not know the run."""
    attempts = [cluster.find("Workflow", item["metadata"]["name"]) for item in workflows(cluster, run)]
    spans = {span.id: span for workflow in attempts if workflow for span in node_spans(workflow)}
    try:
        with mlflow(cluster) as server:
            api, entries = _open(server, run)
            run_id = entries[""].run_id
            if PACKED_TRACE in api.files(run_id):
                spans = {span.id: span for span in unpacked(api.read(run_id, PACKED_TRACE))} | spans
    except (ConfigError, ClusterError):
        if not spans:
            raise
    id = next((span.attributes["trace"] for span in spans.values() if "trace" in span.attributes), "")
    return id, list(spans.values())


def log(server: Server, run: str, stage: str) -> list[str]:
    """Returns the lines of a stage's newest log in ``server``.

    Raises:
        ConfigError: MLflow has no log of this stage."""
    api, entries = _open(server, run)
    if (entry := entries.get(stage)) is None:
        raise ConfigError(f"Run {run} has not run {stage}.")
    if "log.txt" in api.files(entry.run_id):
        return api.read(entry.run_id, "log.txt").decode(errors="replace").splitlines()
    if (made_by := entry.tags.get("made by", run)) != run:
        raise ConfigError(f"{stage} was served from the cache; run {made_by} made it and has its log.")
    raise ConfigError(f"{stage} of run {run} has left no log.")


def logged(server: Server, run: str) -> list[str]:
    """Returns the names of a run's stages that have a log in ``server``.  The stage that started first
    comes first.  A stage whose result came from the cache has no log.

    Raises:
        ConfigError: MLflow does not know the run."""
    api, entries = _open(server, run)
    return [stage for stage, entry in entries.items() if stage and "log.txt" in api.files(entry.run_id)]


def episodes(server: Server, run: str, folder: Path) -> list[Left]:
    """Fetches a run's episodes (an agent's turns on one task each) from ``server`` into ``folder``.
    Returns one item for each stage with episodes: the stage's name and files.  The items are in the order in which the
    stages run.  If a stage's result came from the cache, fetches the episodes of the run that made the result.

    Raises:
        ConfigError: MLflow does not know the run."""
    found = []
    api, entries = _open(server, run)
    for stage, entry in ((row.name, entries[row.name]) for row in ROWS if row.name in entries):
        if (made_by := entry.tags.get("made by", run)) != run:
            entry = _search(api, server, made_by).get(stage, entry)
        names = api.files(entry.run_id)
        if PACKED not in names:
            continue
        target = folder / stage
        target.mkdir(parents=True)
        (target / FILE).write_bytes(gzip.decompress(api.read(entry.run_id, PACKED)))
        if TOKENIZER in names:
            (target / TOKENIZER).write_bytes(api.read(entry.run_id, TOKENIZER))
        found.append(Left(stage, target / FILE, target / TOKENIZER if TOKENIZER in names else None))
    return found


def facts(server: Server, run: str) -> Facts:
    """Returns a run's configuration and the manifests of its finished stages, read from ``server``.  A
    manifest records how a stage's result was made.

    Raises:
        ConfigError: MLflow does not know the run."""
    api, entries = _open(server, run)
    config = validate(json.loads(api.read(entries[""].run_id, "config.json")))
    texts = [entry.tags[MANIFEST_TAG] for entry in entries.values() if MANIFEST_TAG in entry.tags]
    manifests = [Manifest.from_bytes(text.encode()) for text in texts]
    return Facts(run, config, {manifest.stage: manifest for manifest in manifests})


def sweep(server: Server, name: str) -> list[Facts]:
    """Returns the runs of the sweep ``name`` that ``server`` knows, oldest first.  The list is empty if
    there is no such sweep."""
    if not _NAME.fullmatch(name):
        return []
    api = Rest(server.address, seconds=60.0)
    found = server.of_ours(api.find(api.experiments(), SWEEP_TAG, name))
    return [facts(server, run) for entry in reversed(found) if (run := entry.tags[RUN_TAG])]


def scores(server: Server) -> dict[str, tuple[str, dict[str, float]]]:
    """Returns run -> (policy, metric -> value): the last scores of the newest runs that ``server``
    knows.  They are at most ``SCORED``, because MLflow returns all settings of a run with its scores."""
    api = Rest(server.address, seconds=60.0)
    return {
        entry.tags[RUN_TAG]: (
            entry.tags[POLICY_TAG],
            {name.removeprefix(SCORE): value for name, value in entry.latest.items() if name.startswith(SCORE)},
        )
        for entry in server.of_ours(api.find(api.experiments(), STAGE_TAG, "", SCORED))
        if POLICY_TAG in entry.tags
    }


def end(cluster: Cluster, run: str, config: str) -> None:
    """Ends MLflow's rows of a run that was stopped at once: none of its steps can.  ``config`` is the hash of the run's
    configuration.

    Raises:
        ClusterError: MLflow does not answer.
        ConfigError: The release has no MLflow, or it refuses this user."""
    with mlflow(cluster) as server:
        rows.end(Rest(server.address), ("config", config), [run])


def _open(server: Server, run: str) -> tuple[Rest, dict[str, MlflowEntry]]:
    """Returns (a client of MLflow, MLflow's runs for ``run``).  MLflow has one run for ``run`` as a whole, and one for
    each stage.  The second item maps the name of the stage to the stage's run in MLflow, and "" to the run for ``run``
    as a whole.  Its order is that of creation.

    Raises:
        ConfigError: MLflow does not know the run."""
    api = Rest(server.address, seconds=60.0)
    entries = _search(api, server, run)
    if "" not in entries:
        raise ConfigError(f"MLflow knows no run {run}.")
    return api, entries


def _search(api: Rest, server: Server, run: str) -> dict[str, MlflowEntry]:
    found = server.of_ours(api.find(api.experiments(), RUN_TAG, run)) if _NAME.fullmatch(run) else []
    return {entry.tags[STAGE_TAG]: entry for entry in reversed(found)}
