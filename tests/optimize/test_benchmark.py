"""Other people's models: a scripted server behind an OpenAI-compatible address plays in the real sandbox."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cuda_agent.compose import compose
from cuda_agent.config import Config
from cuda_agent.optimize.evaluation import BenchmarkError, Player, benchmark, policy_folder, score_lines
from cuda_agent.policy.served import ServedModel, ServedModelError

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
    scores = asyncio.run(
        benchmark(config, tmp_path / "cache", player, tmp_path / "tasks", tmp_path / "out", said.append)
    )
    assert scores.final.overall.passed == 1.0 and scores.final.families[0].group == "level1"
    assert scores.mean_tokens == 28 and scores.mean_turns == 4
    assert "100.0%" in "\n".join(score_lines(scores)) and len(said) == 1
    assert scores.lets_through == {"level1/19_ReLU": ["input 1 ignored (0.0001)"]}
    assert " ".join(score_lines(scores)[-1].split()) == "level1/19_ReLU 100.0% input 1 ignored (0.0001)"
    path, headers, body = handler.requests[-1]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sesame"
    assert body["model"] == "some-model" and {tool["function"]["name"] for tool in body["tools"]} >= {"Bash", "Write"}
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    assert "verify: ok" in results[2] and "no JSON" in results[3]
    assert (tmp_path / "out" / "scores.json").exists()


@pytest.mark.nightly
def test_a_served_models_final_answers_may_be_judged_in_strict_mode(address, tmp_path):
    (tmp_path / "model.py").write_text(TASK)
    config = compose(["experiment=benchmark", "sandbox.clock=model", "evaluate.mode=strict"])
    player = Player(base_url=address[0], model="some-model")
    scores = asyncio.run(benchmark(config, tmp_path / "cache", player, tmp_path / "model.py", None, print))
    assert scores.mode == "strict" and scores.final.overall.passed == scores.best.overall.passed == 1.0
    assert "strict mode" in score_lines(scores)[2]


def test_an_output_folder_that_cannot_be_made_is_found_out_before_anything_is_played(address, tmp_path):
    url, handler = address
    (tmp_path / "model.py").write_text(TASK)
    player = Player(base_url=url, model="some-model")
    with pytest.raises(BenchmarkError, match="/proc/x: cannot be made"):
        asyncio.run(benchmark(Config(), tmp_path / "cache", player, tmp_path / "model.py", Path("/proc/x"), print))
    assert not handler.requests


def test_without_a_store_a_policy_of_a_run_is_answered_with_the_store_that_is_missing(tmp_path):
    store = tmp_path / "store"
    with pytest.raises(BenchmarkError, match=f"there is no folder last/agentic, and no store at {store} "):
        policy_folder("last/agentic", str(store))
    with pytest.raises(BenchmarkError, match="named as in last/agentic"):
        policy_folder("/some/where", str(store))


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
