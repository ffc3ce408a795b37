"""The trace of a run on a cluster.  Each step's pod records its spans as a process on one machine does
(``pipeline.trace``).  Argo's nodes become spans too: a Workflow is the root, and the spans of a pod are below the span
of its node.  The step ``finish`` adds the nodes, and packs all spans of the run into one file, for MLflow."""

import gzip
import hashlib
import json
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from cuda_agent import machine
from cuda_agent.cluster.submit import submitter_of
from cuda_agent.pipeline import trace
from cuda_agent.pipeline.trace import Span
from cuda_agent.spans import add
from cuda_agent.storage import Store

PACKED = "trace.jsonl.gz"  # name of the packed file in MLflow
_MESSAGE = 300  # most characters of a node's message


def folder(work: Path) -> Path:
    """Returns the folder for the spans of a pod's processes.  ``work`` is the pod's folder of scratch files."""
    return work / "spans"


def session(
    work: Path, store: Store, run: str, name: str, kind: str = "", own: str = ""
) -> AbstractContextManager[dict[str, Any]]:
    """Returns a context manager that records the spans of this pod, below the span of its Argo node.  ``name``,
    ``kind`` and ``own`` (the id) are those of the span of the whole pod.  Yields this span's attributes."""
    node, said = os.environ.get("ARGO_NODE_ID"), partial(print, file=sys.stderr)
    return trace.session(folder(work), store, run, name, kind, machine.began(), said, _id(node) if node else "", own)


def node_spans(workflow: dict[str, Any]) -> list[Span]:
    """Returns a span for a Workflow, one for its wait until its first pod, and one for each attempt of a step.  What
    has not ended yet ends now."""
    about, status = workflow["metadata"], workflow.get("status", {})
    root, created = _id(about["uid"]), _time(about["creationTimestamp"])
    nodes = [node for node in status.get("nodes", {}).values() if node.get("type") == "Pod" and node.get("startedAt")]
    facts = {"kind": trace.RUN, "workflow": about["name"], "phase": status.get("phase", "")}
    facts |= {"submitter": submitter_of(workflow)}
    spans = [Span(root, "", "run", created, _time(status.get("finishedAt")), facts)]
    first = min((_time(node["startedAt"]) for node in nodes), default=_time(None))
    spans.append(Span(_id(f"{about['uid']} wait"), root, "wait for the first pod", created, first))
    for node in nodes:
        facts = {"node": node["displayName"], "phase": node.get("phase", ""), "host": node.get("hostNodeName", "")}
        facts |= {"message": node["message"][:_MESSAGE]} if node.get("message") else {}
        name = f"pod of {node['displayName'].partition('(')[0]}"
        spans.append(Span(_id(node["id"]), root, name, _time(node["startedAt"]), _time(node.get("finishedAt")), facts))
    return spans


def pack(store: Store, run: str, workflow: dict[str, Any] | None, folder: Path) -> Path:
    """Records the spans of a Workflow's nodes in this pod's session.  Writes them and all spans of ``run`` in ``store``
    to a compressed file in ``folder``, and returns its path."""
    nodes = node_spans(workflow) if workflow else []
    for node in nodes:
        add(node.name, node.start, node.end, id=node.id, parent=node.parent, **node.attributes)
    spans = [*trace.of_run(store, run), *nodes]
    file = folder / PACKED
    file.write_bytes(gzip.compress("".join(json.dumps(asdict(span)) + "\n" for span in spans).encode(), 5))
    return file


def unpacked(data: bytes) -> list[Span]:
    return list(trace.parsed(gzip.decompress(data).decode().splitlines(keepends=True)))


def _id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _time(text: str | None) -> int:
    """Returns an ISO time as nanoseconds since 1970; None: the present."""
    return round((datetime.fromisoformat(text) if text else datetime.now(UTC)).timestamp() * 1e9)
