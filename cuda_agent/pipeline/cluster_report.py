"""A run's report, fetched from the chart's MLflow through the API server.

What it does not cover: reports of a run whose MLflow is elsewhere; they lie there, and in the store.
"""

import shutil
from pathlib import Path
from typing import Any

import httpx

from cuda_agent.config import ConfigError
from cuda_agent.pipeline.cluster_api import Cluster, ClusterError
from cuda_agent.pipeline.forward import forwarded, pod_of
from cuda_agent.tracking import RUN_TAG, STAGE_TAG

MLFLOW_PORT = 5000


def fetch_report(cluster: Cluster, run: str, folder: Path) -> Path:
    """See ``download``.  Raises ``ClusterError`` when MLflow does not answer."""
    with forwarded(cluster, pod_of(cluster, "mlflow"), MLFLOW_PORT) as port:
        try:
            return download(f"http://127.0.0.1:{port}", run, folder)
        except httpx.HTTPError as error:
            raise ClusterError(f"MLflow in {cluster.namespace} of {cluster.name} does not answer: {error}") from None


def download(mlflow: str, run: str, folder: Path) -> Path:
    """Fills ``folder`` with all that the run left in MLflow, the report's index.html among it.  Raises ConfigError when
    there is no report yet."""
    with httpx.Client(base_url=mlflow, timeout=60, trust_env=False) as client:
        run_id = _find(client, run)
        files = _files(client, run_id, "")
        if "index.html" not in files:
            raise ConfigError(f"Run {run} has no report yet.")
        shutil.rmtree(folder, ignore_errors=True)
        for name in files:
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(f"MLflow names a file outside of the report: {name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            answer = client.get("/get-artifact", params={"run_uuid": run_id, "path": name})
            target.write_bytes(answer.raise_for_status().content)
    return folder


def _find(client: httpx.Client, run: str) -> str:
    """MLflow's name of the parent run."""
    experiments = _post(client, "experiments/search", {"max_results": 1000}).get("experiments", [])
    query = {
        "experiment_ids": [item["experiment_id"] for item in experiments],
        "filter": f"tags.`{RUN_TAG}` = '{run}' and tags.`{STAGE_TAG}` = ''",
        "max_results": 1,
    }
    for found in _post(client, "runs/search", query).get("runs", []):
        return str(found["info"]["run_id"])
    raise ConfigError(f"MLflow knows no run {run}.")


def _files(client: httpx.Client, run_id: str, path: str) -> list[str]:
    answer = client.get("/api/2.0/mlflow/artifacts/list", params={"run_id": run_id, "path": path})
    found: list[str] = []
    for item in answer.raise_for_status().json().get("files", []):
        found += _files(client, run_id, item["path"]) if item["is_dir"] else [item["path"]]
    return found


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(f"/api/2.0/mlflow/{path}", json=body).raise_for_status().json()
    return answer
