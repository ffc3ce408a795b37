"""Other people's models: a scripted server behind an OpenAI-compatible address plays in the real sandbox."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cuda_agent.compose import compose, freeze
from cuda_agent.config import Config
from cuda_agent.optimize.benchmark import (
    BenchmarkError,
    Player,
    benchmark,
    fast_rows,
    in_short,
    levels_in,
    policy_folder,
    with_defaults,
)
from cuda_agent.optimize.score_text import benchmark_lines
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.manifest import Manifest, config_entry, manifest_entry
from cuda_agent.policy.episode import Episode, read_episodes
from cuda_agent.policy.served import ServedModel, ServedModelError
from cuda_agent.rl.scores import score
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.storage import open_store
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, x, unused):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64, 32), torch.randn(8)]
def get_init_inputs():
    return []
"""
KERNEL = """#include <algorithm>
void relu(long block, long grid, const float* x, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = std::max(x[i], 0.0f);
}
"""
PLAN = {"nodes": [{"kernel": "kernels/relu.cpp", "function": "relu", "grid": 2, "args": ["in0", "out0", "in0.numel"]}]}
SCRIPT = [
    {"calls": [("Write", {"path": "kernels/relu.cpp", "content": KERNEL})]},
    {"calls": [("Write", {"path": "plan.json", "content": json.dumps(PLAN)}), ("Bash", {"command": "verify"})]},
    {"calls": [("Bash", "not json")]},
    {"content": "Done."},
]


class Server(BaseHTTPRequestHandler):
    requests: list
    failures: list

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, dict(self.headers), body))
        status = self.failures.pop(0) if self.failures else 200
        turn = SCRIPT[sum(message["role"] == "assistant" for message in body["messages"])]
        calls = [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": name, "arguments": a if isinstance(a, str) else json.dumps(a)},
            }
            for n, (name, a) in enumerate(turn.get("calls", []))
        ]
        message = {"role": "assistant", "content": turn.get("content"), "tool_calls": calls}
        answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}
        data = json.dumps(answer).encode() if status == 200 else b"busy"
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def address():
    handler = type("Handler", (Server,), {"requests": [], "failures": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    server.shutdown()
    server.server_close()


@pytest.mark.nightly
def test_a_served_model_is_measured_on_a_kernelbench_folder(address, tmp_path, monkeypatch):
    url, handler = address
    monkeypatch.setenv("SOME_KEY", "sesame")
    (tmp_path / "tasks" / "level1").mkdir(parents=True)
    (tmp_path / "tasks" / "level1" / "19_ReLU.py").write_text(TASK)
    config = compose(["experiment=benchmark", "sandbox.clock=model"])
    player = Player(base_url=url, model="some-model", key_env="SOME_KEY")
    said = []
    tasks = read_any(tmp_path / "tasks")
    result = asyncio.run(benchmark(config, tmp_path / "cache", player, tasks, tmp_path / "out", said.append))
    scores, lines = result.scores, benchmark_lines(result.scores, result.answers, result.fast)
    assert scores.final.overall.passed == 1.0 and scores.final.families[0].group == "level1"
    assert scores.mean_tokens == 28 and scores.mean_turns == 4 and scores.format == "plan"
    assert said[0] == "1 task, one sample of each, format plan on cpu"
    assert said[1].startswith("check of task 1/1 level1/19_ReLU: ") and said[2].startswith("1/1 level1/19_ReLU: ok: ")
    assert "100.0%" in "\n".join(lines) and len(said) == 3 and result.answers == {"ok": 1}
    assert scores.lets_through == {"level1/19_ReLU": ["input 1 ignored (0.0001)"]}
    assert " ".join(lines[-1].split()) == "level1/19_ReLU 100.0% input 1 ignored (0.0001)"
    path, headers, body = handler.requests[-1]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sesame"
    assert body["model"] == "some-model" and {tool["function"]["name"] for tool in body["tools"]} >= {"Bash", "Write"}
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    assert "verify: ok" in results[2] and "no JSON" in results[3]
    assert (tmp_path / "out" / "scores.json").exists()


@pytest.mark.nightly
def test_episodes_that_are_finished_stay_when_the_server_fails(address, tmp_path):
    url, handler = address
    (tmp_path / "model.py").write_text(TASK)
    (tmp_path / "tasks").mkdir()
    for name in ("a", "b"):
        (tmp_path / "tasks" / f"{name}.py").write_text(TASK)
    handler.failures += [200] * 5 + [403] * 9  # one to look for the model, four of the first episode
    config = compose(["experiment=benchmark", "sandbox.clock=model", "agent.concurrency=1"])
    said: list[str] = []
    tasks = read_any(tmp_path / "tasks")
    with pytest.raises(ServedModelError):
        player = Player(base_url=url, model="some-model")
        asyncio.run(benchmark(config, tmp_path / "cache", player, tasks, tmp_path / "out", said.append))
    assert [episode.task for episode in read_episodes(tmp_path / "out" / "episodes.jsonl")] == ["a"]
    assert said[-1].startswith("1 episode of 2 are in ") and not (tmp_path / "out" / "scores.json").exists()


@pytest.mark.nightly
def test_a_served_models_final_answers_may_be_judged_in_strict_mode(address, tmp_path):
    (tmp_path / "model.py").write_text(TASK)
    config = compose(["experiment=benchmark", "sandbox.clock=model", "evaluate.mode=strict"])
    player = Player(base_url=address[0], model="some-model")
    result = asyncio.run(benchmark(config, tmp_path / "cache", player, read_any(tmp_path / "model.py"), None, print))
    scores = result.scores
    assert scores.mode == "strict" and scores.final.overall.passed == scores.best.overall.passed == 1.0
    assert "strict mode" in benchmark_lines(scores, result.answers, result.fast)[2]


def test_an_output_folder_that_cannot_be_made_is_found_out_before_anything_is_played(address, tmp_path):
    url, handler = address
    (tmp_path / "model.py").write_text(TASK)
    player = Player(base_url=url, model="some-model")
    with pytest.raises(BenchmarkError, match="/proc/x: cannot be made"):
        tasks = read_any(tmp_path / "model.py")
        asyncio.run(benchmark(Config(), tmp_path / "cache", player, tasks, Path("/proc/x"), print))
    assert not handler.requests


def test_without_a_store_a_policy_of_a_run_is_answered_with_the_store_that_is_missing(tmp_path):
    store = tmp_path / "store"
    with pytest.raises(BenchmarkError, match=f"there is no folder last/agentic, and no store at {store} "):
        policy_folder("last/agentic", str(store))
    with pytest.raises(BenchmarkError, match="named as in last/agentic"):
        policy_folder("/some/where", str(store))


def test_a_policy_of_a_run_answers_in_the_format_of_the_run(tmp_path):
    store = open_store(tmp_path / "store")
    config = Config.model_validate({"run": {"name": "a"}, "sandbox": {"format": "extension"}})
    text, sha256 = freeze(config)
    store.create(config_entry(sha256), text.encode())
    runs.create_run(store, config, sha256)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    outputs = {"policy": store.put_folder(tmp_path / "made")}
    made = Manifest("rft", "a", "k", "c", "e", None, sha256, {}, outputs, "m", 1.0, "2026")
    store.put(manifest_entry("a", "rft"), made.to_bytes())
    folder, trained = policy_folder("a/rft", str(tmp_path / "store"))
    assert trained == "extension" and (folder / "config.json").read_text() == "{}"
    assert policy_folder(str(folder), str(tmp_path / "store")) == (folder, None)


OWN = [Task("relu", TASK, family="file")]
KERNELBENCH = [Task("level1/19_ReLU", TASK, family="level1"), Task("level2/1_Sum", TASK, family="level2")]


@pytest.mark.parametrize(
    ("given", "tasks", "trained", "format"),
    [
        ([], KERNELBENCH, None, "python"),
        ([], OWN, None, "plan"),
        ([], [*KERNELBENCH, *OWN], None, "plan"),
        ([], KERNELBENCH, "extension", "extension"),
        (["sandbox.format=triton"], KERNELBENCH, "extension", "triton"),
        (["experiment=paper"], KERNELBENCH, None, "extension"),
    ],
)
def test_the_solution_format_is_kernelbenchs_for_its_tasks_unless_another_is_known(given, tasks, trained, format):
    config = compose(with_defaults(given, tasks, trained, None))
    assert config.sandbox.format == format and config.evaluate.samples == Config().evaluate.samples
    assert config.run.pipeline == ("paper" if given == ["experiment=paper"] else "benchmark")
    assert compose(with_defaults(given, tasks, trained, 7)).evaluate.samples == 7


def test_levels_are_numbers():
    assert levels_in(None) == [] and levels_in("1") == [1] and levels_in("1, 3") == [1, 3]
    with pytest.raises(BenchmarkError, match="expected numbers, as in --levels 1,2, got 'one'"):
        levels_in("one")


def played(task: Task, number: int, verdict: Verdict | None, **facts) -> Episode:
    return Episode(
        f"benchmark/{task.name}/{number}", task.name, "agent", [], [], [], [], [],
        **({"reward": 1.0, "ended": "answer", "files": {"model_new.py": "x"}} | facts),
        verdict=verdict.to_json() if verdict else None,
    )  # fmt: skip


def judged(status: str = "ok", eager: float = 1.0, compiled: float = 1.0, message: str = "") -> Verdict:
    times = {"seconds": 1.0, "eager_seconds": eager, "compile_seconds": compiled} if status == "ok" else {}
    return Verdict(status, "python", "quick", "cpu", "real", message=message, **times)


@pytest.mark.parametrize(
    ("verdict", "facts", "said"),
    [
        (judged(eager=1.5, compiled=0.75), {}, ("ok", "1.50× eager, 0.75× torch.compile")),
        (judged("wrong", message="differs by 1"), {}, ("wrong", "differs by 1")),
        (judged("build_error", message="line 1"), {"ended": "turns"}, ("build error", "line 1")),
        (
            judged("build_error", message="no file"),
            {"files": {}, "ended": "turns"},
            ("no answer", "its turns were used up"),
        ),
        (
            judged("build_error"),
            {
                "files": {},
                "messages": [{"role": "assistant", "content": " I cannot. "}, {"role": "assistant", "content": ""}],
            },
            ("no answer", "the model ended with: I cannot."),
        ),
        (judged("build_error"), {"files": {}}, ("no answer", "the model ended with: nothing")),
        (None, {"reward": None, "ended": "deadline"}, ("lost", "its time limit")),
        (
            None,
            {"reward": None, "ended": "infra", "messages": [{"role": "tool", "content": "[a fault]"}]},
            ("lost", "[a fault]"),
        ),
    ],
)
def test_every_sample_has_a_reason(verdict, facts, said):
    assert in_short(played(OWN[0], 0, verdict, **facts)) == said


def test_fast_p_counts_as_kernelbench_does_beside_the_mean_over_all_samples():
    """KernelBench: of the first samples, correct ones with a speed-up above p, over all tasks (its ``score.py``)."""
    relu, total = KERNELBENCH
    lost = Task("level1/20_Lost", TASK, family="level1")
    episodes = [
        played(relu, 0, judged(eager=1.2, compiled=0.7)),
        played(relu, 1, judged("wrong")),
        played(total, 0, judged("wrong")),
        played(total, 1, judged(eager=2.5, compiled=2.0)),
        played(lost, 0, None, reward=None, ended="infra"),
    ]
    tasks = [*KERNELBENCH, lost]
    scores = score("m", episodes, tasks, "real")
    rows = fast_rows(scores, tasks)
    found = {(row["group"], row["samples"], row["baseline"]): row for row in rows}
    assert {name: [row["tasks"], *row["fast_p"].values()] for name, row in found.items()} == {
        ("all", "first", "eager"): [3, 1 / 3, 1 / 3, 1 / 3, 1 / 3, 0, 0],
        ("all", "first", "compile"): [3, 1 / 3, 1 / 3, 0, 0, 0, 0],
        ("all", "all", "eager"): [2, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25],
        ("all", "all", "compile"): [2, 0.5, 0.5, 0.25, 0.25, 0.25, 0],
        ("level1", "first", "eager"): [2, 0.5, 0.5, 0.5, 0.5, 0, 0],
        ("level1", "first", "compile"): [2, 0.5, 0.5, 0, 0, 0, 0],
        ("level2", "first", "eager"): [1, 0, 0, 0, 0, 0, 0],
        ("level2", "first", "compile"): [1, 0, 0, 0, 0, 0, 0],
    }
    assert list(rows[0]["fast_p"]) == ["0", "0.5", "0.8", "1", "1.5", "2"]
    lines = benchmark_lines(scores, {"ok": 2, "wrong": 2, "lost": 1}, rows)
    assert lines[0] == "m: 4 episodes of 3 tasks, format python: 2 ok, 2 wrong, 1 lost"
    assert lines[1] == "1 lost to faults of ours; they are not scored"
    assert [line for line in lines if line.endswith("format python")] == [
        "final answer, format python", "best of trajectory, format python", "fast_p, format python",
    ]  # fmt: skip


def test_a_busy_server_is_asked_again(address):
    url, handler = address
    handler.failures += [503]

    async def ask():
        async with ServedModel(url, "m") as model:
            return await model.chat([{"role": "user", "content": "x"}])

    assert asyncio.run(ask()).calls[0]["name"] == "Write" and len(handler.requests) == 2


def test_a_refusing_server_is_one_clear_error(address):
    url, handler = address
    handler.failures += [401]

    async def ask():
        async with ServedModel(url, "m", "MY_KEY") as model:
            await model.chat([{"role": "user", "content": "x"}])

    with pytest.raises(ServedModelError, match="MY_KEY"):
        asyncio.run(ask())
    assert len(handler.requests) == 1
