"""The service as its users meet it: a real server, driven over HTTP."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema
import pytest

from cuda_agent.sandbox.protocol import BODY_BYTES
from cuda_agent.sandbox.wire import Verdict
from tests.sandbox.conftest import CHAIN, KERNEL, plan_solution
from tests.sandbox.service.serving import ONE_JUDGE, QUICK, SLOW, TOKEN, Served, body, variant

FAILING = KERNEL.replace("0.0f)", "0.0f) + 0.5f")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served"), "--workspaces", "3", *QUICK) as served:
        yield served.ready()


def metric(served: Served, name: str) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"cuda_agent_sandbox_{name}"))


def finished(served: Served, id: str) -> dict:
    while (job := served.http.get(f"/v1/jobs/{id}?wait=20").json())["state"] in ("queued", "running"):
        pass
    return job


# -------------------------------------------------------------------------------------------------- routes and verdicts


def test_a_solution_is_judged_in_one_call(served):
    answer = served.http.post("/v1/evaluate", json=body())
    verdict = Verdict.from_json(answer.json())
    assert (answer.status_code, verdict.status, verdict.checks, verdict.clock) == (200, "ok", 2, "model")
    bad = served.http.post("/v1/evaluate", json=body(plan_solution(FAILING))).json()
    assert bad["status"] == "wrong" and bad["reward"] == -1


def test_a_job_is_submitted_polled_and_followed(served):
    answer = served.http.post("/v1/jobs", json=variant(1) | {"priority": 7})
    job = answer.json()
    assert answer.status_code == 202 and job["kind"] == "evaluate" and job["priority"] == 7
    done = finished(served, job["id"])
    assert done["state"] == "done" and done["result"]["status"] == "ok" and done["error"] is None
    assert job["submitted"] <= done["started"] <= done["ended"]
    events = served.http.get(f"/v1/jobs/{job['id']}/events")
    lines = [json.loads(line) for line in events.text.splitlines()]
    assert events.headers["content-type"] == "application/x-ndjson"
    assert [line["event"] for line in lines] == ["queued", "running", "done"]
    assert lines[-1]["job"] == done and "job" not in lines[0]


def test_events_are_told_while_they_happen(served):
    job = served.http.post("/v1/jobs", json=body(plan_solution(SLOW))).json()
    with served.http.stream("GET", f"/v1/jobs/{job['id']}/events") as stream:
        told = [(json.loads(line), time.time()) for line in stream.iter_lines()]
    assert [line["event"] for line, _ in told] == ["queued", "running", "done"]
    assert told[1][1] < told[2][0]["job"]["ended"], "the two seconds of the solution were not over"


def test_the_same_content_is_judged_once(served):
    request = variant(2)
    before = metric(served, "verdicts_total")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.http.post("/v1/evaluate", json=request).json(), range(8)))
    jobs = {served.http.post("/v1/jobs", json=request | {"priority": n}).json()["id"] for n in range(3)}
    assert len(jobs) == 1 and all(answer == answers[0] for answer in answers)
    assert metric(served, "verdicts_total") == before + 1
    named = {**request, "task": request["task"] | {"name": "another name"}}
    assert served.http.post("/v1/jobs", json=named).json()["id"] in jobs


def test_spec_and_probe_of_a_task_and_a_build_for_its_spec(served):
    spec = served.http.post("/v1/spec", json={"task": {"code": CHAIN}}).json()
    assert spec["inputs"] == [{"shape": [32, 128], "dtype": "float32"}]
    probe = served.http.post("/v1/probe", json={"task": {"code": CHAIN}, "compile": False}).json()
    assert probe["error"] == "" and probe["deterministic"]
    solution = body()["solution"]
    assert served.http.post("/v1/build", json={"solution": solution, "spec": spec}).json() == {
        "status": "ok",
        "message": "",
    }
    broken = plan_solution(KERNEL.replace("y[i] =", "z[i] =")).files
    answer = served.http.post("/v1/build", json={"solution": {"format": "plan", "files": broken}, "spec": spec}).json()
    assert answer["status"] == "build_error" and "kernels/chain.cpp:5" in answer["message"]


def test_a_task_that_cannot_run_is_a_clear_422(served):
    answer = served.http.post("/v1/spec", json={"task": {"code": "import torch"}})
    assert answer.status_code == 422
    assert answer.json()["error"] == {"kind": "task", "message": "AttributeError: the task defines no Model"}


def test_a_queued_job_is_cancelled_and_a_running_one_leaves_its_place_when_it_is_through(served):
    slow = [
        served.http.post("/v1/jobs", json=body(plan_solution(SLOW + f"// {number}"))).json()["id"]
        for number in range(7)
    ]
    assert {served.http.delete(f"/v1/jobs/{id}").json()["state"] for id in slow[4:]} == {"cancelled"}
    for id in slow[2:4]:
        served.http.delete(f"/v1/jobs/{id}")
    assert served.http.delete(f"/v1/jobs/{slow[0]}").status_code == 200
    assert finished(served, slow[0])["state"] == "cancelled"
    assert finished(served, slow[1])["result"]["status"] == "timeout"
    assert served.http.post("/v1/evaluate", json=variant(3)).json()["status"] == "ok"


def test_whoever_hangs_up_takes_the_submission_back(served):
    first = served.http.post("/v1/jobs", json=body(plan_solution(SLOW + "// a"))).json()["id"]
    second = served.http.post("/v1/jobs", json=body(plan_solution(SLOW + "// b"))).json()["id"]
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/v1/evaluate", json=body(plan_solution(SLOW + "// c")), timeout=0.5)
    finished(served, first)
    finished(served, second)
    assert metric(served, 'verdicts_total{format="plan",status="timeout"}') >= 2
    for _ in range(100):
        if metric(served, "queue_length") + metric(served, "running ") == 0:
            return
        time.sleep(0.05)
    raise AssertionError("the third one was left in the queue")


def test_urgent_work_overtakes_what_waits(served):
    first = [
        served.http.post("/v1/jobs", json=body(plan_solution(SLOW + f"// {n} of order"))).json()["id"] for n in range(2)
    ]
    patient = [served.http.post("/v1/jobs", json=variant(100 + n)).json()["id"] for n in range(12)]
    urgent = [served.http.post("/v1/jobs", json=variant(200 + n) | {"priority": 9}).json()["id"] for n in range(6)]
    jobs = {id: finished(served, id) for id in patient + urgent}
    begun = {id: job["started"] for id, job in jobs.items()}
    for late in urgent:  # what waited when it came begins after it
        waited = [begun[id] for id in patient if begun[id] > jobs[late]["submitted"]]
        assert begun[late] <= min(waited, default=begun[late])
    assert [begun[id] for id in patient] == sorted(begun[id] for id in patient)
    assert all(finished(served, id)["state"] == "done" for id in first)


def test_settings_that_differ_are_refused_by_name(served):
    answer = served.http.post("/v1/evaluate", json=variant(4) | {"settings": {"clock": "real"}})
    assert answer.status_code == 409
    assert answer.json()["error"] == {
        "kind": "settings",
        "message": "sandbox.clock is model on this server, real was asked for",
    }
    assert served.http.post("/v1/evaluate", json=variant(4) | {"settings": {"clock": "model"}}).status_code == 200


def test_metrics_are_in_prometheus_form(served):
    served.http.post("/v1/evaluate", json=body())
    text = served.http.get("/metrics").text
    names = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            names.add(line.split()[2])
        elif not line.startswith("#"):
            float(line.rsplit(" ", 1)[1])
            assert any(line.startswith(name) for name in names), line
    for name in ("queue_length", "running", "verdicts_total", "rejected_total", "infra_faults_total", "phase_seconds"):
        assert f"cuda_agent_sandbox_{name}" in names
    assert 'cuda_agent_sandbox_verdicts_total{format="plan",status="ok"}' in text
    assert 'phase_seconds_bucket{kind="evaluate",le="+Inf",phase="run"}' in text


def test_the_api_describes_itself(served):
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {"/v1/jobs", "/v1/evaluate", "/v1/workspaces/{id}/calls", "/readyz"} <= set(paths)
    assert served.http.get("/docs").status_code == 200


def test_the_api_lists_the_refusals_that_it_sends(served):
    described = served.http.get("/openapi.json").json()
    assert "HTTPValidationError" not in described["components"]["schemas"]
    answers = [method["responses"] for path in described["paths"].values() for method in path.values()]
    assert all("422" not in answer for answer in answers)
    schemas = [answer["default"]["content"]["application/json"]["schema"] for answer in answers]
    for path in ("/v1/jobs/x", "/v1/jobs/x?wait=-1"):
        refused = served.http.get(path)
        assert refused.status_code in (404, 422)
        for schema in schemas:
            jsonschema.validate(refused.json(), schema)
    assert "text/plain" in described["paths"]["/readyz"]["get"]["responses"]["503"]["content"]


# ------------------------------------------------------------------------------------------------- refusals, the token


@pytest.mark.parametrize("header", [None, "", "Bearer", f"Bearer {TOKEN}x", f"bearer {TOKEN}", f"Basic {TOKEN}", "ü"])
def test_every_route_but_health_asks_for_the_token(served, header):
    headers = {} if header is None else {"Authorization": header.encode()}
    with httpx.Client(base_url=served.address, headers=headers, trust_env=False) as stranger:
        for path in ("/metrics", "/v1/about", "/docs", "/openapi.json", "/v1/jobs/x", "/nothing"):
            answer = stranger.get(path)
            assert answer.status_code == 401 and answer.json()["error"]["kind"] == "token", path
        assert stranger.post("/v1/evaluate", content=b"x" * (BODY_BYTES + 1)).status_code == 401
        assert stranger.get("/healthz").status_code == stranger.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        ({}, "task"),
        (body() | {"mood": "good"}, "mood"),
        (body(mode="loose"), "mode"),
        (body(priority=10**9), "priority"),
        (body(priority=True), "priority"),
        (body() | {"task": {"code": 3}}, "task.code"),
        (body() | {"task": {"code": "\ud800"}}, "task.code"),
        (body() | {"task": {"code": "x" * (1 << 20)}}, "task.code"),
        (body() | {"solution": {"format": "shell", "files": {}}}, "solution.format"),
        (body() | {"solution": {"format": "plan", "files": {"../x": ""}}}, "solution.files"),
        (body() | {"solution": {"format": "plan", "files": {"/x": ""}}}, "solution.files"),
        (body() | {"solution": {"format": "plan", "files": {"a\0b": ""}}}, "solution.files"),
        (body() | {"solution": {"format": "plan", "files": {"a" * 300: ""}}}, "solution.files"),
        (body() | {"solution": {"format": "plan", "files": {"\ud800": ""}}}, "solution.files"),
        (body() | {"solution": {"format": "plan", "files": {str(n): "" for n in range(300)}}}, "solution.files"),
        (body() | {"solution": {"format": "plan", "files": {"a": "x" * (2 << 20)}}}, "solution.files"),
        (body() | {"settings": {"favourite": 3}}, "settings"),
    ],
)
def test_a_malformed_request_is_a_422_that_names_its_part(served, request_, where):
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/evaluate", "/v1/jobs"):
        answer = served.http.post(path, content=json.dumps(request_).encode(), headers=headers)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["kind"] == "malformed"
        assert answer.json()["error"]["where"].startswith(where)
        assert len(answer.content) < 1000, "what was sent is not sent back"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 422),
        (b"[" * 200_000, {}, 400),
        (b'{"task": ' * 5_000, {}, 400),
        (b"\xff\xfe", {}, 422),
        (b'{"priority": 1e999}', {}, 422),
        (b'{"priority": ' + b"9" * 5000 + b"}", {}, 400),
        (b"x" * (BODY_BYTES + 1), {}, 413),
        (b"{}", {"Content-Type": "text/plain"}, 422),
    ],
)
def test_what_is_no_json_or_too_large_is_refused(served, content, headers, status):
    answer = served.http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) <= {"kind", "message", "where"}


def test_a_body_without_a_length_is_counted_as_it_arrives(served):
    def endless():
        for _ in range(1000):
            yield b" " * 65536

    try:
        answer = served.http.post("/v1/jobs", content=endless(), headers={"Content-Type": "application/json"})
    except httpx.WriteError:
        return  # it hung up before all was sent
    assert answer.status_code == 413


def test_a_request_with_two_lengths_is_refused_and_its_connection_ends(served):
    host, port = served.address.removeprefix("http://").split(":")
    head = f"POST /v1/spec HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 4\r\n"
    smuggled = "0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: here\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n{smuggled}".encode())
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1, answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["kind"] == "malformed"


def test_unknown_routes_methods_and_jobs_are_refusals_like_any_other(served):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("PUT", "/v1/jobs", 405),
        ("GET", "/v1/jobs/nosuch", 404),
        ("GET", "/v1/jobs/nosuch/events", 404),
        ("GET", "/v1/jobs/nosuch?wait=soon", 422),
        ("GET", "/v1/jobs/nosuch?wait=1e9", 422),
        ("GET", "/v1/jobs/nosuch?wait=nan", 422),
        ("DELETE", "/v1/jobs/nosuch", 404),
        ("POST", "/v1/workspaces/x/answers/y", 422),
    ):
        answer = served.http.request(method, path)
        assert (answer.status_code, set(answer.json())) == (status, {"error"}), path


LOOK = """
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <initializer_list>
extern "C" char** environ;
static const unsigned char hidden[] = {HIDDEN};
static bool holds(const char* text, long length) {
  const long n = sizeof hidden;
  for (long i = 0; i + n <= length; i++) {
    long same = 0;
    while (same < n && (unsigned char)(text[i + same] ^ 90) == hidden[same]) same++;
    if (same == n) return true;
  }
  return false;
}
static bool inside(const char* path) {
  static char data[1 << 20];
  int file = open(path, O_RDONLY);
  if (file < 0) return false;
  long length = 0, count;
  while (length < (long)sizeof data && (count = read(file, data + length, sizeof data - length)) > 0) length += count;
  close(file);
  return holds(data, length);
}
static bool found() {
  for (char** entry = environ; entry && *entry; entry++) if (holds(*entry, strlen(*entry))) return true;
  char path[64];
  for (int pid : {PIDS, (int)getppid(), (int)getpid()}) {
    for (const char* name : {"environ", "cmdline", "task/../environ"}) {
      snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
      if (inside(path)) return true;
    }
  }
  return false;
}
""".replace("HIDDEN", ", ".join(str(byte ^ 90) for byte in TOKEN.encode()))


def test_neither_a_candidate_nor_a_shell_ever_sees_the_token(served, tmp_path):
    """It is told the processes to look at: the server's and all of its children."""
    source = tmp_path / "look.cpp"
    with subprocess.Popen(["sleep", "100"], env={"ANY": TOKEN, "PATH": os.environ["PATH"]}) as other:
        source.write_text(LOOK.replace("PIDS", str(other.pid)) + "int main() { return found() ? 7 : 0; }\n")
        subprocess.run(["g++", "-o", tmp_path / "look", source], check=True)
        assert subprocess.run([tmp_path / "look"]).returncode == 7, "the search finds a token that is there"
        other.kill()
    pids = [served.process.pid, *descendants(served.process.pid)]
    kernel = LOOK.replace("PIDS", ", ".join(map(str, pids))) + KERNEL.replace(
        "long low", "if (found()) return; long low"
    )
    verdict = served.http.post("/v1/evaluate", json=body(plan_solution(kernel))).json()
    assert (verdict["status"], verdict["message"]) == ("ok", "")
    with Room(served) as room:
        text = room.call("Bash", {"command": "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'"})["text"]
    assert "PATH=" in text and TOKEN not in text


# ----------------------------------------------------------------------------------------------------------- workspaces


class Room:
    """The client's side of the protocol, by hand."""

    def __init__(self, served: Served, answer=lambda question: {"text": f"{question['name']}: ok"}) -> None:
        self.http, self.answer = served.http, answer
        files = {"model.py": "task\n", "kernels/a.cpp": "int x;\n"}
        opened = self.http.post("/v1/workspaces", json={"files": files, "protected": ["model.py"]})
        assert opened.status_code == 201, opened.text
        self.path = f"/v1/workspaces/{opened.json()['id']}"
        self.headers = {"X-Workspace-Owner": opened.json()["owner"]}

    def call(self, tool: str, arguments: dict) -> dict:
        request = {"tool": tool, "arguments": arguments}
        with self.http.stream("POST", f"{self.path}/calls", json=request, headers=self.headers) as stream:
            for line in map(json.loads, stream.iter_lines()):
                if question := line.get("command"):
                    path = f"{self.path}/answers/{question['number']}"
                    self.http.post(path, json=self.answer(question), headers=self.headers).raise_for_status()
                elif "result" in line:
                    return line["result"]
        raise AssertionError("the stream ended without a result")

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.delete(self.path, headers=self.headers)


def test_tools_work_over_the_network_and_their_commands_are_answered_by_the_client(served):
    asked = []

    def answer(question):
        asked.append(question)
        return {"text": "verify: wrong", "error": True}

    with Room(served, answer) as room:
        assert room.call("Write", {"path": "plan.json", "content": "{}"}) == {"text": "ok", "error": False}
        result = room.call("Bash", {"command": "verify --all || echo failed; ls"})
        assert result["text"].splitlines()[:2] == ["verify: wrong", "failed"]
        assert (asked[0]["name"], asked[0]["argv"]) == ("verify", ["--all"])
        assert asked[0]["files"]["plan.json"] == "{}"
        files = served.http.get(f"{room.path}/files", headers=room.headers).json()["files"]
        assert files == {"model.py": "task\n", "kernels/a.cpp": "int x;\n", "plan.json": "{}"}
        assert room.call("Nothing", {})["error"]


def test_a_workspace_answers_its_owner_only(served):
    with Room(served) as room:
        for owner in ({}, {"X-Workspace-Owner": ""}, {"X-Workspace-Owner": "x" * 32}):
            for method, path in (("GET", "/files"), ("POST", "/calls"), ("DELETE", "")):
                sent = {"json": {"tool": "Bash"}} if method == "POST" else {}
                answer = served.http.request(method, room.path + path, headers=owner, **sent)
                assert answer.status_code == 404, (method, path)
        assert room.call("Bash", {"command": "echo mine"})["text"] == "mine"


def test_more_workspaces_than_there_are_places_are_told_when_to_come_back(served):
    rooms = [Room(served) for _ in range(3)]
    answer = served.http.post("/v1/workspaces", json={"files": {}})
    assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
    rooms.pop().__exit__()
    rooms.append(Room(served))
    for room in rooms:
        room.__exit__()


def test_a_call_that_is_broken_off_ends_the_workspace(served):
    with Room(served) as room:
        request = {"tool": "Bash", "arguments": {"command": "compile"}}
        with served.http.stream("POST", f"{room.path}/calls", json=request, headers=room.headers) as stream:
            lines = stream.iter_lines()  # kept: the stream ends with what reads it
            assert "command" in json.loads(next(lines))
            busy = served.http.post(f"{room.path}/calls", json=request, headers=room.headers)
            assert busy.status_code == 409 and busy.json()["error"]["kind"] == "busy"
        for _ in range(100):
            if served.http.get(f"{room.path}/files", headers=room.headers).status_code == 404:
                return
            time.sleep(0.05)
        raise AssertionError("it is still there")


@pytest.mark.nightly
def test_a_workspace_that_nobody_uses_is_closed(tmp_path):
    with Served(tmp_path, "--roles", "workspace", "--idle-seconds", "1", *QUICK) as served:
        room = Room(served.ready())
        for _ in range(200):
            if metric(served, "workspaces ") == 0:
                break
            time.sleep(0.1)
        assert served.http.get(f"{room.path}/files", headers=room.headers).status_code == 404
        assert metric(served, "workspaces_idle_total") == 1
        answer = served.http.post("/v1/evaluate", json=body())
        assert answer.status_code == 404 and answer.json()["error"]["kind"] == "role"


# ------------------------------------------------------------------------------------------------- readiness, the drain

NO_LANDLOCK = """
import ctypes
from cuda_agent.sandbox.jail import jail
program = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(op.to_bytes(2, "little") + bytes((a, b)) + k.to_bytes(4, "little") for op, a, b, k in program)
jail._libc_call("prctl", 38, 1, 0, 0, 0)
jail._libc_call("prctl", 22, 2, ctypes.byref(jail._Filter(4, code)), 0, 0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("roles", ["evaluate", "workspace"])
def test_a_kernel_without_a_wall_keeps_the_service_unready_and_the_wall_is_named(tmp_path, roles):
    """A kernel that knows no Landlock, as far as the server and its children can tell."""
    with Served(tmp_path, "--roles", roles, *QUICK, wrapper=NO_LANDLOCK) as served:
        while "starting" in (answer := served.http.get("/readyz")).text:
            time.sleep(0.05)
        assert answer.status_code == 503 and "'landlock' is missing" in answer.text
        path, request = ("/v1/workspaces", {"files": {}}) if roles == "workspace" else ("/v1/evaluate", body())
        refused = served.http.post(path, json=request)
        assert refused.status_code == 503 and "landlock" in refused.json()["error"]["message"]
        assert "Retry-After" in refused.headers and served.http.get("/healthz").text == "ok\n"
        assert metric(served, "ready ") == 0


def test_a_machine_without_a_compiler_keeps_the_service_unready(tmp_path):
    with Served(
        tmp_path, "--roles", "build", *QUICK, wrapper="import os; os.environ['PATH'] = '/nonexistent'"
    ) as served:
        while "starting" in (answer := served.http.get("/readyz")).text:
            time.sleep(0.05)
        assert answer.status_code == 503 and "no C++ compiler" in answer.text


@pytest.mark.nightly
def test_without_a_token_it_listens_on_this_machine_only_and_says_so(tmp_path):
    arguments = ("--roles", "workspace", "--host", "0.0.0.0")
    with Served(tmp_path, *arguments, *QUICK, token=None) as served:
        assert served.address.startswith("http://127.0.0.1:")
        assert "no token is configured: listening on 127.0.0.1 only, not on 0.0.0.0" in served.log.read_text()
        assert served.ready().http.get("/v1/about").json()["roles"] == ["workspace"]
    for number, token in enumerate(("short", "with spaces in the middle of it")):
        with pytest.raises(AssertionError, match="at least 16 printable"):
            (tmp_path / str(number)).mkdir()
            Served(tmp_path / str(number), token=token)


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(name))
    found, front = [], [pid]
    while front:
        children = parents.get(front.pop(), [])
        found += children
        front += children
    return found


def alive(pids: list[int]) -> list[int]:
    """Those that do not end within ten seconds: a process that was killed dies when its turn comes."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if _command_line(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.nightly
def test_sigterm_finishes_what_runs_hands_back_what_waits_and_leaves_nothing(tmp_path):
    served = Served(tmp_path, *QUICK).ready()
    room = Room(served)
    slow = [served.http.post("/v1/jobs", json=body(plan_solution(SLOW + f"// {n}"))).json()["id"] for n in range(7)]
    children = descendants(served.process.pid)
    answers: dict[str, dict] = {}
    threads = [
        threading.Thread(target=lambda id=id: answers.update({id: finished(served, id)}), daemon=True) for id in slow
    ]
    for thread in threads:
        thread.start()
    served.process.send_signal(signal.SIGTERM)
    while (answer := served.http.get("/readyz")).status_code == 200:
        time.sleep(0.02)
    assert (answer.status_code, answer.text) == (503, "draining\n")
    for path, request in (("/v1/evaluate", variant(1)), ("/v1/workspaces", {"files": {}})):
        refused = served.http.post(path, json=request)
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert refused.json()["error"]["kind"] == "draining"
    assert room.call("Bash", {"command": "echo still here"})["text"] == "still here"
    room.__exit__()
    for thread in threads:
        thread.join(30)
    assert [answers[id]["result"]["status"] for id in slow[:2]] == ["timeout", "timeout"]
    assert answers[slow[6]]["state"] == "failed" and answers[slow[6]]["error"]["kind"] == "draining"
    assert served.process.wait(30) == 0
    assert len(children) >= 4 and not alive(children)
    assert os.listdir(served.tmp) == []
    served.http.close()


@pytest.mark.nightly
def test_work_that_does_not_end_is_cut_off_at_the_limit(tmp_path):
    settings = ("--drain-seconds", "0.5", *QUICK, "sandbox.run_seconds=600")
    served = Served(tmp_path, *settings, wrapper=ONE_JUDGE).ready()
    room = Room(served)
    job = served.http.post("/v1/jobs", json=body(plan_solution(SLOW))).json()
    while served.http.get(f"/v1/jobs/{job['id']}").json()["state"] == "queued":
        time.sleep(0.05)
    time.sleep(1.0)  # until the judge is at it
    children = descendants(served.process.pid)
    assert served.stop() == 0
    assert room.path and not alive(children)
    assert os.listdir(served.tmp) == []


def test_metrics_are_open_only_when_asked_for(tmp_path):
    with Served(tmp_path, *QUICK, "--roles", "build", "--open-metrics") as served:
        stranger = httpx.Client(base_url=served.address, trust_env=False)
        assert "cuda_agent_sandbox_ready" in stranger.get("/metrics").text
        assert stranger.get("/v1/about").status_code == 401


@pytest.mark.nightly
def test_a_server_that_has_judged_enough_ends_in_order(tmp_path):
    with Served(tmp_path, *QUICK, "--recycle-after", "1", wrapper=ONE_JUDGE) as served:
        served.ready()
        verdict = served.http.post("/v1/evaluate", json=body()).json()
        assert verdict["status"] == "ok"
        assert served.process.wait(60) == 0
        assert "recycled: " in served.log.read_text()
