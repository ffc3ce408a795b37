"""Serves metrics of the stage that runs in this pod, for Prometheus.

The files of the stage's ``FileTracker`` are read whenever Prometheus asks.  The chart sets the port, and a PodMonitor
finds the pods (``monitoring.podMonitor``)."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cuda_agent.pipeline.runs import read_run
from cuda_agent.storage import Store
from cuda_agent.tracking import read_metrics, read_progress

PORT = "CUDA_AGENT_METRICS_PORT"


@contextlib.contextmanager
def serving(scratch: Path, store: Store, run: str, stage: str) -> Iterator[None]:
    """Serves metrics of ``stage`` in the ``with`` block, on the port in ``CUDA_AGENT_METRICS_PORT``.  Without this
    variable, does nothing.  ``scratch`` is the folder in which the stage writes metrics and progress."""
    if not (port := os.environ.get(PORT)):
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(StageCollector(scratch, run, stage, read_run(store, run).submitter))
    server, _ = start_http_server(int(port), registry=registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class StageCollector:
    """The metrics of one stage.  Each has the labels ``run``, ``stage`` and ``submitter``."""

    def __init__(self, scratch: Path, run: str, stage: str, submitter: str) -> None:
        self._scratch = scratch
        self._labels = {"run": run, "stage": stage, "submitter": submitter}

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, text: str, values: dict[str, float], label: str = "") -> Any:
            family = GaugeMetricFamily(f"cuda_agent_stage_{name}", text, labels=[*self._labels, *filter(None, [label])])
            for key, value in values.items():
                family.add_metric([*self._labels.values(), *([key] if label else [])], value)
            return family

        progress = read_progress(self._scratch / "progress.json") or {"done": 0, "total": 0}
        newest: dict[str, float] = {}
        steps = read_metrics(self._scratch / "metrics.jsonl").values()
        for values in steps:
            newest |= values
        lost = sum(values.get("lost", 0.0) for values in steps)
        files = (self._scratch / name for name in ("pid", "progress.json", "metrics.jsonl"))
        changed = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
        yield gauge("done", "Units of the stage's work that are done.", {"": progress["done"]})
        yield gauge("units", "All units of the stage's work; 0: unknown.", {"": progress["total"]})
        yield gauge("progress_timestamp_seconds", "When the stage began, or last made progress.", {"": changed})
        yield gauge("lost_episodes", "Episodes that infrastructure faults ended.", {"": lost})
        yield gauge("metric", "The newest value of each metric that the stage logs.", newest, "name")
