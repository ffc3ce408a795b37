"""Runs a search of `cuda-agent optimize` on a cluster: submits it, follows it and fetches its result.

The folder of the result also stands for the search: the file ``cluster.json`` in it says where the search is."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda_agent.cli.places import cluster_of
from cuda_agent.cluster.api import AWAY, Cluster, ClusterError
from cuda_agent.errors import EXIT_RETRY, ConfigError, UserError

if TYPE_CHECKING:
    from cuda_agent.config import SandboxConfig
    from cuda_agent.optimize.folder import SearchOrder
    from cuda_agent.optimize.search import SearchOutcome

FILE = "cluster.json"
EVERY = 2.0  # seconds between two queries of a search


@dataclass(frozen=True)
class Place:
    """Where on which cluster a search is, or shall be."""

    on: str | None  #: context of the kubeconfig; None: the current one
    namespace: str | None = None
    release: str | None = None
    profile: str = "cpu"
    search: str = ""  #: name of the search; empty: it is not submitted yet


class SearchFailed(UserError):
    """A search on a cluster has failed; the message says in which step."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.exit_code = int(code) if code.isdigit() and code != "0" else EXIT_RETRY  # type: ignore[misc]


def place_in(folder: Path) -> Place | None:
    """Returns where the search of ``folder`` is; None if it is no search on a cluster."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return Place(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read ({type(error).__name__}: {error})") from None


def default_device(overrides: Sequence[str], on: str, namespace: str | None, release: str | None, profile: str) -> str:
    """Returns the device that the overrides name, else ``cuda`` if the profile's sandboxes have GPUs."""
    from cuda_agent.cluster import templates

    named = next((word.partition("=")[2] for word in overrides if word.startswith("sandbox.device=")), "")
    return named or (
        "cpu" if templates.choose(cluster_of(on, namespace), profile, release).gpus in ("", "0") else "cuda"
    )


def begin(
    place: Place, order: "SearchOrder", settings: "SandboxConfig", source: Path, folder: Path, as_json: bool
) -> "SearchOutcome | None":
    """Submits a new search for the problem in the file ``source``, and follows it (see ``follow``).

    Raises:
        TaskError, OptimizeError: The problem or the folder cannot be used.
        ClusterError, ConfigError: The cluster refuses, or has no release with a server for searches."""
    from cuda_agent.cluster import searches
    from cuda_agent.optimize import folder as folders
    from cuda_agent.tasks.io import task_from_file

    task = task_from_file(source)
    cluster = cluster_of(place.on, place.namespace)
    template = searches.template_for(cluster, place.profile, place.release, order.terms.device)
    name = searches.new_name()
    with folders.opened(order, settings, task, folder, False):
        (folder / "transcript.jsonl").touch()  # without one, the folder of a refused search would stay
        _submit(cluster, name, name, place.profile, template.name, order, settings, source.stem, task.code)
        there = Place(cluster.name, cluster.namespace, template.release, place.profile, name)
        (folder / FILE).write_text(json.dumps(asdict(there), indent=1))
    return follow(cluster, there, folder, as_json)


def go_on(
    place: Place, order: "SearchOrder", settings: "SandboxConfig", folder: Path, changed: bool, as_json: bool
) -> "SearchOutcome | None":
    """Goes on with the search of ``folder``.  Follows it if it is under way.  Fetches its result if it has ended well.
    If it failed or was stopped, or the user has ``changed`` its options, submits it again: its attempts go on where
    they were.

    Raises:
        ConfigError: The options of a search that is under way shall change."""
    from cuda_agent.cluster import searches
    from cuda_agent.optimize import folder as folders
    from cuda_agent.tracking import write_whole

    cluster = cluster_of(place.on, place.namespace)
    last = searches.newest(cluster, place.search)
    if last is not None and not searches.is_done(last):
        if changed:
            stop = f"cuda-agent cancel {place.search} --on {cluster.name} --namespace {cluster.namespace}"
            raise ConfigError(f"The search is under way. To change its options, stop it first: {stop}")
        return follow(cluster, place, folder, as_json)
    if not changed and (last is None or searches.phase(last) == "Succeeded"):
        return _fetched(cluster, place, folder)
    template = searches.template_for(cluster, place.profile, place.release, order.terms.device)
    code, workflow = (folder / "model.py").read_text(), searches.next_workflow(cluster, place.search)
    _submit(cluster, place.search, workflow, place.profile, template.name, order, settings, "model", code)
    sandbox = settings.model_dump(mode="json")
    write_whole(folder / "run.json", json.dumps({"order": asdict(order), "sandbox": sandbox}, indent=1))
    assert folders.read_order(folder)
    return follow(cluster, place, folder, as_json)


def _submit(
    cluster: Cluster,
    search: str,
    workflow: str,
    profile: str,
    template: str,
    order: "SearchOrder",
    settings: "SandboxConfig",
    task: str,
    code: str,
) -> None:
    from cuda_agent.cluster import searches
    from cuda_agent.cluster.submit import submit
    from cuda_agent.optimize.fan_out import packed

    text = packed(order, settings.model_dump(mode="json"), task, code)
    submit(cluster, searches.submission(search, workflow, profile, template, text))


def follow(cluster: Cluster, place: Place, folder: Path, as_json: bool) -> "SearchOutcome | None":
    """Shows the steps of a search until it ends, and fetches its result.  Returns None if the user stops to follow it
    (Ctrl-C): the search goes on.

    Raises:
        SearchFailed: A step of the search has failed, or the search was stopped.
        ClusterError: The cluster does not answer for minutes."""
    from cuda_agent.cluster import searches

    def say(**facts: Any) -> None:
        line = json.dumps({"kind": "step", "search": place.search} | facts)
        print(line if as_json else f"{facts['step']:14} {facts['state']}", flush=True)

    if not as_json:
        print(f"search {place.search} in namespace {cluster.namespace} of {cluster.name}", flush=True)
    shown: dict[str, str] = {}
    heard = time.monotonic()
    try:
        while True:
            try:
                workflow = searches.newest(cluster, place.search)
                heard = time.monotonic()
            except ClusterError as error:  # the search itself goes on while the API server restarts
                if error.exit_code != EXIT_RETRY or time.monotonic() - heard > AWAY:
                    raise
                time.sleep(EVERY)
                continue
            if workflow is None:
                raise ConfigError(f"The search {place.search} was deleted.")
            now = searches.steps(workflow)
            for step, state in now.items():
                if shown.get(step) != state:
                    say(step=step, state=state)
            shown = now
            if searches.is_done(workflow):
                break
            time.sleep(EVERY)
    except KeyboardInterrupt:
        print(f"The search goes on. Follow it with: cuda-agent optimize --resume {folder}", file=sys.stderr)
        return None
    if searches.phase(workflow) != "Succeeded":
        message, code = searches.failure(workflow)
        again = f"Go on with: cuda-agent optimize --resume {folder}"
        if workflow["spec"].get("shutdown"):
            raise SearchFailed(f"The search was stopped. {again}", str(EXIT_RETRY))
        raise SearchFailed(f"The search has failed: {message}\n{again}", code)
    return _fetched(cluster, place, folder)


def _fetched(cluster: Cluster, place: Place, folder: Path) -> "SearchOutcome":
    """Fetches the result of a search that has ended into ``folder``.  An older result is replaced only when the new one
    is here, because ``gc`` removes results from the cluster."""
    from cuda_agent.cluster import searches
    from cuda_agent.optimize import fan_out

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as fetched:
        if not searches.fetch(cluster, place.search, Path(fetched)):
            kept = f" {folder} keeps what it holds." if (folder / "verdict.json").exists() else ""
            raise ConfigError(f"MLflow in namespace {cluster.namespace} has no result of {place.search}.{kept}")
        outcome = fan_out.outcome_of(Path(fetched))
        fan_out.clear_result(folder)
        shutil.copytree(fetched, folder, dirs_exist_ok=True)
    return replace(outcome, folder=folder)
