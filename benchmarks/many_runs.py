"""Measures the commands where there are many runs: 200 on a cluster, and 10,000 in a store that is 20 ms away.

    python benchmarks/many_runs.py --json many_runs.json

The cluster is an API server in memory (``tests/cluster/fake_api.py``) with Workflows as Argo leaves them: the chart's
template twice, 41 nodes, and the API server's ``managedFields``. The store is a server of S3 in memory that waits
before each answer. Each command is a new process, so its seconds contain Python's start and imports. The aims are 2 s
and 2 MB for each command on the cluster, and 3 s for ``runs`` of the store. Needs helm (``.ci/tools``).
"""

import argparse
import asyncio
import bisect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_agent.cluster.rayjobs import can_be_spread, task_name
from cuda_agent.cluster.submit import submission
from cuda_agent.compose import compose, freeze
from cuda_agent.pipeline.graph import ROWS
from tests.cluster.fake_api import FakeApi
from tests.deploy.charts import template

CHART = {"minio": {"enabled": True}, "mlflow": {"enabled": True}, "fullnameOverride": "cuda-agent"}
PODS = [("prepare", True), *((row.name, True) for row in ROWS), ("finish", True)]
STEPS = [*PODS, *((task_name(row.name), False) for row in ROWS if can_be_spread(row))]  # name, does it run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=200)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds of the store before each answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {
        "cluster": on_a_cluster(options.workflows) if options.workflows else {},
        "store": in_a_store(options.runs, options.latency),
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def on_a_cluster(count: int) -> dict[str, Any]:
    """Returns seconds, bytes and requests of each command in a namespace with ``count`` runs."""
    spec = next(one["spec"] for one in template(CHART) if "-cpu-" in one["metadata"]["name"])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, FakeApi() as api:
        for number in range(count):
            workflow = argos(f"run-{number:03}", spec, "Running" if number == 7 else "Succeeded")
            api.add("Workflow", **workflow)
            api.add("ConfigMap", f"run-{number:03}", workflow["labels"], data={"config.json": "{}"})
        found["bytes a Workflow"] = len(json.dumps(api.objects["workflows", "run-000"], separators=(",", ":")))
        where = os.environ | {"KUBECONFIG": str(api.kubeconfig(Path(folder)))}
        for command in (["runs"], ["watch", "run-003"], ["watch", "last"], ["cancel", "run-007"]):
            api.requests, api.sent = [], 0
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "cuda_agent.cli", *command, "--on", "fake"],
                capture_output=True, text=True, env=where,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            seconds = time.perf_counter() - began
            found[" ".join(command)] = {"seconds": seconds, "bytes": api.sent, "requests": len(api.requests)}
    return found


def argos(name: str, spec: dict[str, Any], phase: str) -> dict[str, Any]:
    """Returns a Workflow of the template ``spec``, as ``FakeApi.add`` takes it, after Argo's controller ran it."""
    sent = submission(compose(["experiment=smoke", f"run.name={name}"]), "cpu", "cuda-agent-cpu").workflow
    labels = sent["metadata"]["labels"] | {"workflows.argoproj.io/phase": phase}
    stored = {f"namespaced/cuda-agent-cpu/{one['name']}": one for one in spec["templates"]}
    status = {
        "phase": phase, "progress": "70/70", "startedAt": "2026-01-01T00:00:00Z",
        "nodes": {node["id"]: node for node in nodes(name)},
        "storedTemplates": stored, "storedWorkflowTemplateSpec": spec,
    }  # fmt: skip
    managed = [{"manager": "workflow-controller", "fieldsType": "FieldsV1", "fieldsV1": {"f:status": fields(status)}}]
    metadata = {"annotations": sent["metadata"]["annotations"], "managedFields": managed}
    return {"name": name, "labels": labels, "metadata": metadata, "spec": sent["spec"], "status": status}


def nodes(workflow: str) -> list[dict[str, Any]]:
    """Returns Argo's nodes of a run: the graph, for each step that runs the step and its pod, and the skipped steps."""
    servers = f"http://{workflow}-build-0.{workflow}-sandbox:8750,http://{workflow}-evaluate-0.{workflow}-sandbox:8750"
    inputs = {"parameters": [{"name": "servers", "value": servers}, {"name": "engines", "value": ""}]}
    made = [{"id": workflow, "name": workflow, "displayName": workflow, "type": "DAG", "phase": "Succeeded"}]
    for number, (step, runs) in enumerate(STEPS):
        common = {
            "boundaryID": workflow, "children": [f"{workflow}-{10**9 + number}"], "templateName": step,
            "templateScope": f"namespaced/{workflow}", "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:00:05Z", "progress": "5/5", "nodeFlag": {},
            "resourcesDuration": {"cpu": 12, "ephemeral-storage": 0, "memory": 658},
        }  # fmt: skip
        kinds = [("Retry", "", 2 * 10**9), ("Pod", "(0)", 3 * 10**9)] if runs else [("Skipped", "", 2 * 10**9)]
        for kind, attempt, base in kinds:
            shown, phase = f"{step}{attempt}", "Succeeded" if runs else "Skipped"
            one = {"id": f"{workflow}-{base + number}", "name": f"{workflow}.{shown}", "displayName": shown}
            made.append(common | one | {"type": kind, "phase": phase, **({"inputs": inputs} if runs else {})})
    return made


def fields(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``fieldsV1`` with which the API server records who set ``value``.  A list counts as one field."""
    owned = {f"f:{key}": fields(inner) if isinstance(inner, dict) else {} for key, inner in value.items()}
    return {".": {}, **owned}


def in_a_store(count: int, latency: float) -> dict[str, Any]:
    """Returns the seconds of ``runs`` for a store with ``count`` runs, of which every tenth was cut off."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(count, latency, there), daemon=True)
    server.start()
    where = os.environ | {"AWS_ENDPOINT_URL": here.recv(), "AWS_REGION": "us-east-1"}
    where |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    found = {}
    last = ["logs", f"run-{count // 2 + 1:06}", "critic"]
    for number, command in enumerate((["runs"], ["runs"], ["runs", "--json"], last)):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "cuda_agent.cli", *command, "--store", "s3://bucket"],
            capture_output=True, text=True, env=where,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        assert done.returncode == 0 and done.stdout.count("\n") >= (count if command[0] == "runs" else 1), done.stderr
        here.send("count")
        title = " ".join(command) + (", without an index" if number == 0 else "")
        found[title] = {"seconds": seconds, "requests": here.recv()}
    server.terminate()
    return found


def serve(count: int, latency: float, pipe: Any) -> None:
    """Serves a store with ``count`` runs over S3's interface, and tells by ``pipe`` how many requests there were."""
    from cuda_agent.pipeline.manifest import Manifest, config_entry
    from cuda_agent.pipeline.runs import Run

    text, sha256 = freeze(compose(["experiment=smoke"]))
    objects = {config_entry(sha256): text.encode()}
    made = Manifest("", "run", "k", "c", "e", None, sha256, {}, {}, "m", 1.0, "2026-01-01", scores={"passed": 0.5})
    for number in range(count):
        cut = number % 10 == 0
        name, created = f"run-{number:06}", f"2026-01-{number % 28 + 1:02}T00:00:00.{number:06}+00:00"
        done = [row.name for row in ROWS[: 3 if cut else None]]
        begun = Run(name, sha256, "default", created)
        objects[f"runs/{name}/run.json"] = begun.to_bytes()
        if not cut:
            objects[f"runs/{name}/end.json"] = replace(begun, code=0, stages=done).to_bytes()
        for stage in done:
            scores = made.scores if stage.startswith("evaluate") else {}
            objects[f"runs/{name}/{stage}/manifest.json"] = replace(made, stage=stage, scores=scores).to_bytes()
            for file in ("key", "log.txt"):
                objects[f"runs/{name}/{stage}/{file}"] = b"line\n"
    keys, requests = sorted(objects), 0

    def listing(query: dict[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
        entries: list[str] = []
        at = bisect.bisect_left(keys, max(prefix, after))
        while at < len(keys) and keys[at].startswith(prefix) and len(entries) < 1000:
            folder, slash, _ = keys[at][len(prefix) :].partition("/")
            if slash and "delimiter" in query:
                entries.append(f"<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>")
                at = bisect.bisect_left(keys, f"{prefix}{folder}0")  # "0" follows "/"
            else:
                facts = f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>1</ETag><Size>{5}</Size>"
                entries.append(f"<Contents><Key>{keys[at]}</Key>{facts}</Contents>")
                at += 1
        more = at < len(keys) and keys[at].startswith(prefix)
        token = f"<NextContinuationToken>{keys[at]}</NextContinuationToken>" if more else ""
        more_of = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        return f"<ListBucketResult>{''.join(entries)}{more_of}</ListBucketResult>".encode()

    class S3(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.read = transport, b""

        def data_received(self, data: bytes) -> None:
            nonlocal requests
            self.read += data
            while b"\r\n\r\n" in self.read:
                head, _, rest = self.read.partition(b"\r\n\r\n")
                size = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                length = int(size[1]) if size else 0
                if len(rest) < length:
                    return
                body, self.read = rest[:length], rest[length:]
                requests += 1
                method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                asyncio.get_running_loop().call_later(latency, self.transport.write, self.answer(method, target, body))

        def answer(self, method: str, target: str, body: bytes) -> bytes:
            parts = urlsplit(target)
            key = unquote(parts.path).removeprefix("/bucket").strip("/")
            if method == "PUT":
                found: bytes | None = b""
                objects[key] = body
            elif not key:
                found = listing({name: value[0] for name, value in parse_qs(parts.query).items()})
            else:
                found = objects.get(key)
            status = "404 Not Found" if found is None else "200 OK"
            body = b"<Error><Code>NoSuchKey</Code></Error>" if found is None else found
            facts = 'ETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT'
            head = f"HTTP/1.1 {status}\r\n{facts}\r\nContent-Length: {len(body)}\r\n\r\n"
            return head.encode() + (b"" if method == "HEAD" else body)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(S3, "127.0.0.1", 0)
        pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

        def count_up() -> None:
            nonlocal requests
            pipe.recv()
            pipe.send(requests)
            requests = 0

        loop.add_reader(pipe.fileno(), count_up)
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main()
