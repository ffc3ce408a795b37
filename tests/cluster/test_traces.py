"""The trace of a run on a cluster: Argo's nodes, below them the spans of real processes, packed for MLflow."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from drill import table

from cuda_agent.cluster import results, traces
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline import trace
from cuda_agent.pipeline.trace import critical_path
from cuda_agent.storage import open_store
from tests.cluster.test_pod import here, prepare, settings, stage, submitted  # noqa: F401  (here is a fixture)

S = 1_000_000_000


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * S


def workflow(**nodes) -> dict:
    """A Workflow as Argo's API server gives it; the nodes are display name -> (id, start, end)."""
    made = {
        id: {"id": id, "type": "Pod", "displayName": name, "phase": "Succeeded", "hostNodeName": "node-1"}
        | {"startedAt": start, "finishedAt": end}
        for name, (id, start, end) in nodes.items()
    }
    made["a-0"] = {"id": "a-0", "type": "Retry", "displayName": "make", "startedAt": "2026-08-01T10:00:05Z"}
    made["a-9"] = {"id": "a-9", "type": "Skipped", "displayName": "twin", "startedAt": "2026-08-01T10:00:05Z"}
    return {
        "metadata": {"name": "a", "uid": "u-1", "creationTimestamp": "2026-08-01T10:00:00Z", "labels": {}}
        | {"annotations": {"cuda-agent.io/submitter": "ada"}},
        "status": {"phase": "Running", "nodes": made},
    }


def test_the_nodes_of_a_workflow_are_spans_below_it():
    flow = workflow(
        **{
            "prepare(0)": ("a-1", "2026-08-01T10:00:05Z", "2026-08-01T10:00:15Z"),
            "train(1)": ("a-2", "2026-08-01T10:00:20Z", None),
        }
    )
    flow["status"]["nodes"]["a-2"] |= {"phase": "Running", "message": "x" * 1000}
    before = datetime.now(UTC).timestamp() * 1e9
    root, wait, first, second = traces.node_spans(flow)
    assert (root.name, root.parent, root.start) == ("run", "", seconds("2026-08-01T10:00:00Z"))
    assert (
        root.attributes == {"kind": "run", "workflow": "a", "phase": "Running", "submitter": "ada"}
        and root.end >= before
    )
    assert (wait.name, wait.start, wait.end) == ("wait for the first pod", root.start, root.start + 5 * S)
    assert (first.name, first.start, first.end) == ("pod of prepare", root.start + 5 * S, root.start + 15 * S)
    assert first.attributes == {"node": "prepare(0)", "phase": "Succeeded", "host": "node-1"}
    assert second.name == "pod of train" and second.end >= before and len(second.attributes["message"]) == 300
    assert {wait.parent, first.parent, second.parent} == {root.id}
    assert [span.id for span in traces.node_spans(flow)] == [root.id, wait.id, first.id, second.id], "ids are stable"


def test_the_spans_of_a_pod_are_below_its_node(tmp_path, here, monkeypatch):  # noqa: F811
    sha256 = submitted(here, settings(tmp_path, epochs=2))
    monkeypatch.setenv("ARGO_NODE_ID", "a-1")
    prepare(here, sha256)
    nodes = {"prepare(0)": ("a-1", "2026-08-01T10:00:05Z", None)}
    for number, row in enumerate(table.STAGES[:2], 2):
        monkeypatch.setenv("ARGO_NODE_ID", f"a-{number}")
        process = stage(here, row.name, sha256)
        said = process.communicate()
        assert process.returncode == 0, said
        nodes[f"{row.name}(0)"] = (f"a-{number}", "2026-08-01T10:00:05Z", None)
    store = open_store(here.store)
    data = traces.pack(store, "a", workflow(**nodes), tmp_path).read_bytes()
    spans = traces.unpacked(data)
    names = {span.id: span.name for span in spans}
    above = {(span.name, names.get(span.parent, "")) for span in spans}
    assert above >= {
        ("run", ""), ("pod of train", "run"), ("train", "pod of train"), ("start process", "train"),
        ("save checkpoint", "train"), ("prepare", "pod of prepare"), ("make", "pod of make"),
    }  # fmt: skip
    assert {span.attributes["trace"] for span in spans if "trace" in span.attributes} == {trace.trace_id(store, "a")}
    assert "unfinished" not in critical_path(spans, "a").rows
    assert not list(traces.folder(here.work).iterdir()), "files of spans are moved to the store"


def test_a_trace_is_read_from_mlflow_and_the_workflows(tmp_path, here, monkeypatch):  # noqa: F811
    flow = workflow(**{"prepare(0)": ("a-1", "2026-08-01T10:00:05Z", "2026-08-01T10:00:15Z")})
    cluster = SimpleNamespace(find=lambda kind, name: flow if (kind, name) == ("Workflow", "a") else None)

    def refuse(cluster):
        raise ConfigError("the release has no MLflow")

    monkeypatch.setattr(results, "workflows", lambda cluster, run: [{"metadata": flow["metadata"]}])
    monkeypatch.setattr(results, "mlflow", refuse)
    id, spans = results.trace(cluster, "a")
    assert id == "" and [span.name for span in spans] == ["run", "wait for the first pod", "pod of prepare"]
    monkeypatch.setattr(results, "workflows", lambda cluster, run: [])
    with pytest.raises(ConfigError, match="no MLflow"):
        results.trace(cluster, "a")
