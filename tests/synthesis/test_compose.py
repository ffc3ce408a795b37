"""The two writers."""

import asyncio
import http.server
import json
import threading
from random import Random

import pytest

from cuda_agent.policy.served import ServedModelError
from cuda_agent.synthesis import catalogue
from cuda_agent.synthesis.compose import (
    ComposeError,
    ModelWriter,
    ProgrammaticWriter,
    batch_for,
    build,
    pick_operators,
    speed_of,
    task_from_answer,
)
from cuda_agent.tasks.inspect import problems
from tests.synthesis.test_catalogue import run

WINDOW = (1e-4, 5e-3)


def writer(max_ops: int = 5, window=WINDOW, device: str = "cpu") -> ProgrammaticWriter:
    return ProgrammaticWriter(speed_of(device, 2), window, max_ops)


def compose(writer, seed):
    return asyncio.run(writer.compose(Random(seed)))


def test_the_same_seed_composes_the_same_task():
    assert compose(writer(), "7") == compose(writer(), "7") != compose(writer(), "8")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_composed_tasks_have_the_form_and_count_their_operators(device):
    window = WINDOW if device == "cpu" else (1e-3, 1e-1)
    tasks = [compose(writer(device=device, window=window), f"s{seed}") for seed in range(60)]
    assert all(problems(task.code) == [] for task in tasks)
    chains = [task for task in tasks if task.data_source != "transformers"]
    assert all(task.data_source == f"torch#{len(task.ops)}" and len(task.ops) <= 5 for task in chains)
    assert 0 < len(tasks) - len(chains) < 30
    assert len({len(task.ops) for task in chains}) >= 3


def test_max_ops_bounds_the_stack():
    tasks = [compose(writer(max_ops=1), f"m{seed}") for seed in range(10)]
    assert {task.data_source for task in tasks} <= {"torch#1", "transformers"}


def test_stacks_of_several_operators_run_and_give_the_shape_they_promise():
    """The chains are built on tiny inputs: the writer's own shapes are for the window, not for a test."""
    tiny = {2: (2, 16), 3: (2, 8, 16), 4: (2, 8, 12, 12), 5: (2, 4, 6, 8, 8)}
    built = 0
    for seed in range(300):
        rng = Random(seed)
        operators = pick_operators(catalogue.CATALOGUE, rng.choice((2, 3, 4, 5)), rng)
        ranks = [rank for rank in operators[0].ranks if rank in tiny] if operators else []
        chain = build(operators, tiny[rng.choice(ranks)], rng) if ranks else None
        if chain is not None and chain.largest < 1 << 20:
            assert tuple(run(chain.code()).shape) == chain.shape
            built += 1
    assert built >= 40


def test_a_window_that_nothing_fits_is_an_error_and_not_a_hang():
    with pytest.raises(ComposeError, match="no shape fits"):
        compose(writer(window=(1e-9, 2e-9)), "1")


def test_the_batch_follows_the_target():
    for seed in range(20):
        batch = batch_for(lambda batch: 1e-5 + batch * 1e-6, WINDOW, Random(seed))
        assert batch is not None and WINDOW[0] <= 1e-5 + batch * 1e-6 <= WINDOW[1]
    assert batch_for(lambda batch: 1.0, WINDOW, Random(0)) is None


GOOD = """Here it is:
```python
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.l = nn.Linear(n, n)
    def forward(self, x):
        return torch.tanh(self.l(x))
def get_inputs():
    return [torch.randn(8, 16)]
def get_init_inputs():
    return [16]
```
Enjoy."""


def test_a_model_s_answer_becomes_a_task_with_ops_of_its_code():
    task = task_from_answer(GOOD)
    assert (task.ops, task.data_source) == (("nn.Linear", "torch.tanh"), "torch#2")
    assert "Enjoy" not in task.code


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot.",
        "```python\n```",
        "```python\nclass Model(:\n```",
        GOOD.replace("get_inputs", "inputs"),
        GOOD.replace("torch.tanh(self.l(x))", "x"),
        "```" * 9,
        "\0",
        "x = " + "(" * 500,
    ],
)
def test_a_malformed_answer_is_refused_by_name(answer):
    with pytest.raises(ComposeError, match="malformed"):
        task_from_answer(answer)


def test_more_operators_than_allowed_are_refused():
    with pytest.raises(ComposeError, match="too many"):
        task_from_answer(GOOD, max_ops=1)


@pytest.fixture
def server():
    """An OpenAI-compatible address that answers from a list of (status, body) and keeps the requests."""
    replies, requests = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            requests.append((self.path, self.headers.get("Authorization"), json.loads(self.rfile.read(length))))
            status, body = replies.pop(0) if len(replies) > 1 else replies[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}/v1", replies, requests
        http_server.shutdown()


def model_writer(url: str) -> ModelWriter:
    return ModelWriter(url, "some-model", "WRITER_TEST_KEY", WINDOW, pause=0.001)


def answer(text):
    return {"choices": [{"message": {"content": text}}]}


def test_the_model_writer_asks_with_the_key_of_the_environment(server, monkeypatch):
    url, replies, requests = server
    monkeypatch.setenv("WRITER_TEST_KEY", "secret")
    replies.append((200, answer(GOOD)))
    assert compose(model_writer(url), "1").ops == ("nn.Linear", "torch.tanh")
    path, authorization, body = requests[0]
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", "Bearer secret", "some-model")
    assert "0.1 and 5 ms" in body["messages"][1]["content"]


def test_the_model_writer_tries_again_when_the_server_is_busy(server):
    url, replies, requests = server
    replies += [(503, b""), (429, b""), (200, answer(GOOD))]
    assert compose(model_writer(url), "1").ops
    assert len(requests) == 3 and requests[0][1] is None


@pytest.mark.parametrize("text", [None, 7, "", "no code"])
def test_an_answer_without_a_task_is_one_lost_attempt(server, text):
    url, replies, _ = server
    replies.append((200, answer(text)))
    with pytest.raises(ComposeError):
        compose(model_writer(url), "1")


@pytest.mark.parametrize("body", [b"not json", [], {}, {"choices": []}])
def test_an_address_that_gives_no_chat_completions_is_named(server, body):
    url, replies, _ = server
    replies.append((200, body))
    with pytest.raises(ServedModelError, match="no chat completion"):
        compose(model_writer(url), "1")


@pytest.mark.parametrize(("status", "message"), [(401, "WRITER_TEST_KEY is not set"), (404, "404"), (500, "HTTP 500")])
def test_an_address_that_refuses_is_named(server, status, message):
    url, replies, _ = server
    replies.append((status, b"no"))
    with pytest.raises(ServedModelError, match=message):
        compose(model_writer(url), "1")


def test_an_address_that_is_not_there_is_named():
    with pytest.raises(ServedModelError, match="ConnectError"):
        compose(model_writer("http://127.0.0.1:9/v1"), "1")
