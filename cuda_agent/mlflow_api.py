"""A small client for MLflow: finds and creates runs, logs params, tags and metrics, uploads and reads artifacts.

``Rest`` sends requests to an MLflow server over HTTP.  It does not use MLflow's Python client, because in a pod the
import of that client takes longer than most stages of a small run.  ``Library`` uses that client.  It opens
databases, and uploads artifacts to storage that ``Rest`` cannot write."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Point = tuple[str, float, int]  # key, value, step
_SECONDS = 10.0  # limit for one request
_NAMES, _POINTS = 90, 800  # most per request; MLflow allows 100 params or tags and 1000 metrics


@dataclass
class MlflowEntry:
    """A run in MLflow: its id, its status, and what this process knows of its params, tags, metrics and artifacts."""

    run_id: str
    params: set[str] = field(default_factory=set)  # names of the params that are set
    tags: dict[str, str] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)  # metrics whose points were not read into ``points`` yet
    points: set[tuple[str, int]] = field(default_factory=set)  # (key, step)
    latest: dict[str, float] = field(default_factory=dict)  # metric -> value at its last step, when MLflow was asked
    status: str = "RUNNING"  # RUNNING, FINISHED, FAILED, KILLED
    artifacts: set[Path] = field(default_factory=set)  # local files and folders that were uploaded


def connect(uri: str) -> "Api":
    """Returns a connection to an MLflow server (``http://``, ``https://``) or MLflow database (``sqlite:///``)."""
    return Rest(uri) if uri.startswith(("http://", "https://")) else Library(uri)


class Rest:
    """A connection to an MLflow server over HTTP.  Credentials come from MLflow's environment variables."""

    def __init__(self, uri: str, seconds: float = _SECONDS) -> None:
        import httpx

        given = os.environ.get
        user, token = given("MLFLOW_TRACKING_USERNAME"), given("MLFLOW_TRACKING_TOKEN")
        self._uri = uri.rstrip("/")
        self._client = httpx.Client(
            base_url=f"{self._uri}/api/2.0/",
            auth=(user, given("MLFLOW_TRACKING_PASSWORD", "")) if user else None,
            headers={"Authorization": f"Bearer {token}"} if token and not user else {},
            verify=trusted(),
            timeout=seconds,
            trust_env="//127.0.0.1:" not in uri,  # a port of this machine is reached without a proxy
        )
        self._artifact_uris: dict[str, str] = {}  # run -> artifact address

    def experiment(self, name: str, artifacts: str | None) -> str:
        """Returns the id of the experiment ``name``.  If there is no such experiment, creates one, which stores
        artifacts at the address ``artifacts`` (None: the server decides).  Restores one that was deleted:
        MLflow takes no runs of it, and no other one of this name."""
        response = self._client.get("mlflow/experiments/get-by-name", params={"experiment_name": name})
        if response.status_code != 404:
            found = response.raise_for_status().json()["experiment"]
            if found.get("lifecycle_stage") == "deleted":
                self._post("experiments/restore", {"experiment_id": found["experiment_id"]})
            return str(found["experiment_id"])
        place = {"artifact_location": artifacts} if artifacts else {}
        return str(self._post("experiments/create", {"name": name, **place})["experiment_id"])

    def experiments(self) -> list[str]:
        """Returns the ids of the experiments, at most 1000."""
        found = self._post("experiments/search", {"max_results": 1000}).get("experiments", [])
        return [item["experiment_id"] for item in found]

    def find(self, experiments: Sequence[str], tag: str, value: str, most: int | None = None) -> list[MlflowEntry]:
        """Returns the runs whose tag ``tag`` is ``value``, newest first: all of them, or at most ``most``.  Does not
        read the points of their metrics: each entry lists all its metrics in ``unread``."""
        return self._search(experiments, f"tags.`{tag}` = '{value}'", most)

    def running(self, experiments: Sequence[str]) -> list[MlflowEntry]:
        """Returns the runs in the state RUNNING."""
        return self._search(experiments, "attributes.status = 'RUNNING'")

    def _search(self, experiments: Sequence[str], wanted: str, most: int | None = None) -> list[MlflowEntry]:
        query: dict[str, Any] = {"experiment_ids": experiments, "filter": wanted, "max_results": most or 1000}
        found: list[MlflowEntry] = []
        while True:
            answer = self._post("runs/search", query)
            found += [self._entry(run) for run in answer.get("runs", [])]
            token = answer.get("next_page_token")
            if most or not token:
                return found
            query["page_token"] = token

    def create(self, experiment: str, tags: dict[str, str]) -> MlflowEntry:
        asked = {"experiment_id": experiment, "start_time": _now(), "tags": _pairs(tags)}
        return self._entry(self._post("runs/create", asked)["run"])

    def steps(self, run_id: str, key: str) -> set[int]:
        """Returns the steps at which the metric ``key`` of a run has points."""
        found: set[int] = set()
        page = {"run_id": run_id, "metric_key": key, "max_results": "20000"}
        while True:
            answer = self._client.get("mlflow/metrics/get-history", params=page).raise_for_status().json()
            found |= {int(point["step"]) for point in answer.get("metrics", [])}
            if not (token := answer.get("next_page_token")):
                return found
            page["page_token"] = token

    def log(self, run_id: str, params: dict[str, str], tags: dict[str, str], points: Sequence[Point]) -> None:
        names, values, now = _pairs(params), _pairs(tags), _now()
        metrics = [{"key": key, "value": value, "step": step, "timestamp": now} for key, value, step in points]
        for n in range(max(-(-len(names) // _NAMES), -(-len(values) // _NAMES), -(-len(metrics) // _POINTS))):
            few, many = slice(n * _NAMES, (n + 1) * _NAMES), slice(n * _POINTS, (n + 1) * _POINTS)
            batch = {"params": names[few], "tags": values[few], "metrics": metrics[many]}
            self._post("runs/log-batch", {"run_id": run_id, **batch})

    def upload(self, run_id: str, path: Path) -> None:
        """Uploads the file ``path``, or all files of the folder ``path``, as artifacts of a run."""
        place = self._artifact_uris[run_id]
        if not place.startswith("mlflow-artifacts:"):
            Library(self._uri).upload(run_id, path)
            return
        folder = place.removeprefix("mlflow-artifacts:").lstrip("/")
        for file in [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file()):
            name = file.relative_to(path.parent if path.is_file() else path).as_posix()
            target = f"mlflow-artifacts/artifacts/{folder}/{name}"
            self._client.put(target, content=file.read_bytes()).raise_for_status()

    def files(self, run_id: str, path: str = "") -> list[str]:
        """Returns the names of all artifacts of a run below ``path``."""
        answer = self._client.get("mlflow/artifacts/list", params={"run_id": run_id, "path": path})
        found: list[str] = []
        for item in answer.raise_for_status().json().get("files", []):
            found += self.files(run_id, item["path"]) if item["is_dir"] else [item["path"]]
        return found

    def read(self, run_id: str, name: str) -> bytes:
        answer = self._client.get(f"{self._uri}/get-artifact", params={"run_uuid": run_id, "path": name})
        return answer.raise_for_status().content

    def end(self, run_id: str, status: str) -> None:
        """Sets the final status of a run; the status RUNNING opens the run again."""
        ended = {} if status == "RUNNING" else {"end_time": _now()}
        self._post("runs/update", {"run_id": run_id, "status": status, **ended})

    def delete(self, run_id: str) -> None:
        self._post("runs/delete", {"run_id": run_id})

    def purge(self, run_ids: Sequence[str]) -> None:
        """Does nothing: a server frees the place of deleted runs itself, with `mlflow gc`."""

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(f"mlflow/{path}", json=body).raise_for_status().json()

    def _entry(self, run: dict[str, Any]) -> MlflowEntry:
        info, data = run["info"], run.get("data", {})
        self._artifact_uris[info["run_id"]] = info["artifact_uri"]
        return MlflowEntry(
            info["run_id"],
            {item["key"] for item in data.get("params", [])},
            {item["key"]: item["value"] for item in data.get("tags", [])},
            {item["key"] for item in data.get("metrics", [])},
            status=info["status"],
            latest={item["key"]: item["value"] for item in data.get("metrics", [])},
        )


class Library:
    """A connection to a database or server through MLflow's Python client.  Importing the client takes seconds, and so
    does opening a new database."""

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{_SECONDS:.0f}")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        _quiet()
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        from mlflow import MlflowClient

        _quiet()  # the import changed log levels
        self._uri = uri
        self._client = MlflowClient(tracking_uri=uri)

    def experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return self._client.create_experiment(name, artifact_location=artifacts)
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def experiments(self) -> list[str]:
        return [found.experiment_id for found in self._client.search_experiments(max_results=1000)]

    def find(self, experiments: Sequence[str], tag: str, value: str) -> list[MlflowEntry]:
        return self._search(experiments, f"tags.`{tag}` = '{value}'")

    def running(self, experiments: Sequence[str]) -> list[MlflowEntry]:
        return self._search(experiments, "attributes.status = 'RUNNING'")

    def _search(self, experiments: Sequence[str], wanted: str) -> list[MlflowEntry]:
        found: list[MlflowEntry] = []
        token: str | None = ""
        while token is not None:
            page = self._client.search_runs(list(experiments), wanted, max_results=1000, page_token=token or None)
            found += map(self._entry, page)
            token = page.token or None
        return found

    def create(self, experiment: str, tags: dict[str, str]) -> MlflowEntry:
        return self._entry(self._client.create_run(experiment, tags=tags))

    def steps(self, run_id: str, key: str) -> set[int]:
        return {point.step for point in self._client.get_metric_history(run_id, key)}

    def log(self, run_id: str, params: dict[str, str], tags: dict[str, str], points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        now = _now()
        metrics = [Metric(key, value, now, step) for key, value, step in points]
        entries = [Param(*item) for item in params.items()], [RunTag(*item) for item in tags.items()]
        self._client.log_batch(run_id, metrics, *entries)  # splits entries at MLflow's limits

    def upload(self, run_id: str, path: Path) -> None:
        (self._client.log_artifacts if path.is_dir() else self._client.log_artifact)(run_id, str(path))

    def end(self, run_id: str, status: str) -> None:
        (self._client.update_run if status == "RUNNING" else self._client.set_terminated)(run_id, status)

    def delete(self, run_id: str) -> None:
        self._client.delete_run(run_id)

    def purge(self, run_ids: Sequence[str]) -> None:
        """Removes deleted runs and their artifacts from the database for good."""
        for begin in range(0, len(run_ids), _NAMES):
            where = ["--backend-store-uri", self._uri, "--tracking-uri", self._uri]
            names = ",".join(run_ids[begin : begin + _NAMES])
            command = [sys.executable, "-m", "mlflow", "gc", *where, "--run-ids", names]
            subprocess.run(command, check=True, capture_output=True)

    def _entry(self, run: Any) -> MlflowEntry:
        data, info = run.data, run.info
        params, tags, metrics = set(data.params), dict(data.tags), dict(data.metrics)
        return MlflowEntry(info.run_id, params, tags, set(metrics), status=info.status, latest=metrics)


Api = Rest | Library


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def trusted() -> Any:
    """Returns the certificates that httpx trusts (``verify``): the public ones, or those that MLflow's environment
    variable names, and those in the file that CUDA_AGENT_CA_FILE names."""
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() == "true":
        return False
    bundle, more = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"), os.environ.get("CUDA_AGENT_CA_FILE")
    if not bundle and not more:
        return True
    import ssl

    import httpx

    context = ssl.create_default_context(cafile=bundle) if bundle else httpx.create_ssl_context()
    if more:
        context.load_verify_locations(more)
    return context


def refusal(error: Exception) -> str:
    """Returns a sentence if ``error`` says that MLflow refuses this user, else an empty text."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status not in (401, 403):
        return ""
    helps = "Log in with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or with MLFLOW_TRACKING_TOKEN."
    return f"MLflow refuses this user ({status}). {helps}"


def try_out(uri: str) -> str:
    """Does on an MLflow server what a run does: creates a row, logs to it, uploads a file, reads it, deletes the row.

    Returns:
        A sentence about what was tried.

    Raises:
        httpx.HTTPError: The server does not answer, or refuses.
        RuntimeError: The file that was read differs from the one that was uploaded."""
    api = Rest(uri)
    row = api.create(api.experiment("cuda-agent-doctor", None), {"mlflow.runName": "doctor"}).run_id
    try:
        api.log(row, {"tried": "yes"}, {"tried": "yes"}, [("tried", 1.0, 0)])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tried.txt"
            file.write_text("yes")
            api.upload(row, file)
        if api.read(row, "tried.txt") != b"yes":
            raise RuntimeError("MLflow returned another file than the one that was uploaded")
        api.end(row, "FINISHED")
    finally:
        api.delete(row)
    return "a row and a file were written, read and deleted"


def _now() -> int:
    return int(time.time() * 1000)


def _quiet() -> None:
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
