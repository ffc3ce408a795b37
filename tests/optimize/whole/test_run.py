"""Whole models in the real sandbox, with a scripted server. Most tests have the model clock."""

import asyncio
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from chat_server import call, serve, turn_of
from optimizing import DONE, PROFILE, SANDBOX, TERMS

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import TaskError
from cuda_agent.optimize import search
from cuda_agent.optimize.folder import OptimizeError, SearchOrder
from cuda_agent.optimize.whole import run as whole_run
from cuda_agent.policy.served import ServedModelError

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]

MODEL = """import torch


class Steps(torch.nn.Module):
    def __init__(self, by):
        super(Steps, self).__init__()
        self.by = [by]

    def forward(self, x):
        for _ in range(60):
            x = x + self.by[0]
        return x


class Shrink(torch.nn.Module):
    def forward(self, x):
        for _ in range(40):
            x = x * 0.99
        return x


class Model(torch.nn.Module):
    def __init__(self, width):
        super(Model, self).__init__()
        self.first = torch.nn.Linear(width, width)
        self.steps = torch.nn.ModuleList([Steps(0.05), Steps(OTHER)])
        self.shrink = Shrink()

    def forward(self, x):
        x = self.shrink(self.first(x))
        for step in self.steps:
            x = step(x)
        return x


def get_inputs():
    return [torch.randn(64, 256)]


def get_init_inputs():
    return [256]
"""
STEPS_NAMES = ("steps.0", "steps.1")
EQUAL, HIDDEN = MODEL.replace("OTHER", "0.05"), MODEL.replace("OTHER", "0.5")
ONE_LAYER = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super(Model, self).__init__()
        self.only = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.only(x))


def get_inputs():
    return [torch.randn(4, 8)]


def get_init_inputs():
    return []
"""
LOOP = "for (long i = n * block / grid; i < n * (block + 1) / grid; i++)"
STEPS = f"""void fused(long block, long grid, const float* x, float* y, long n) {{
  {LOOP} y[i] = x[i] + 3.0f;
}}
"""
WRONG = STEPS.replace("x[i] + 3.0f", "x[i]")
SLOW_LINEAR = """#include <unistd.h>
void fused(long block, long grid, const float* x, const float* w, const float* b, float* y) {
  usleep(20000);
  for (long row = 0; row < 64; row++)
    for (long out = 0; out < 256; out++) {
      float sum = b[out];
      for (long in = 0; in < 256; in++) sum += x[row * 256 + in] * w[out * 256 + in];
      y[row * 256 + out] = sum;
    }
}
"""


def files(kernel, args, grid):
    node = {"kernel": "kernels/fused.cpp", "function": "fused", "grid": grid, "args": args}
    plan = json.dumps({"nodes": [node]})
    return {
        "calls": [
            call("Write", path="kernels/fused.cpp", content=kernel),
            call("Write", path="plan.json", content=plan),
        ]
    }


ANSWERS = {
    "steps.0": files(STEPS, ["in0", "out0", "in0.numel"], 1),
    "shrink": files(WRONG, ["in0", "out0", "in0.numel"], 4),
    "first": files(SLOW_LINEAR, ["in0", "w:weight", "w:bias", "out0"], 1),
}


def part_of(request):
    return re.search(r"The submodule `([\w.]+)`", json.dumps(request["messages"]))[1]


def script(request):
    return [[ANSWERS[part_of(request)]], [PROFILE], DONE][min(turn_of(request), 2)]


class Whole:
    """Runs ``optimize_whole`` in ``folder``. ``events`` and ``lines`` are those of the last call."""

    def __init__(self, folder, shared, monkeypatch):
        self.folder, self.shared, self.events, self.lines = folder, shared, [], []
        monkeypatch.setattr(search, "open_sandbox", shared.open)
        monkeypatch.setattr(whole_run, "open_sandbox", shared.open)

    def __call__(self, code, script=script, resume=False, stop_at=None, settings=SANDBOX, **changes):
        source = self.folder / "model.py"
        source.write_text(code)
        stop = asyncio.Event()
        self.events.clear()
        self.lines.clear()

        def show(event, lines):
            self.events.append(event)
            self.lines.extend(lines)

        @contextmanager
        def watching(part):
            def watch(event):
                self.events.append(event | {"part": part})
                if stop_at and stop_at(event | {"part": part}):
                    stop.set()

            yield watch

        async def work(url):
            terms = replace(TERMS, target=1000.0)
            order = SearchOrder(**({"base_url": url, "model": "scripted", "terms": terms} | changes))
            out = self.folder / "out"
            command = whole_run.Command(order, settings, self.shared.cache, out, show, watching, stop)
            return await whole_run.optimize_whole(command, source, resume)

        with serve(script) as self.served:
            return self.shared.runner.run(work(self.served.url))

    def asked(self):
        return [part_of(request) for request in self.served.requests]


@pytest.fixture
def whole(tmp_path, shared, monkeypatch):
    return Whole(tmp_path, shared, monkeypatch)


def by_name(outcome):
    return {result.part.names: result for result in outcome.results}


def test_parts_that_make_the_model_faster_are_in_the_result_and_others_are_not(whole):
    """By the real clock: 120 additions become two, one kernel sleeps, and one is wrong."""
    real = SandboxConfig(memory_mb=SANDBOX.memory_mb)
    outcome = whole(EQUAL, settings=real)
    steps = by_name(outcome)[STEPS_NAMES]
    assert outcome.verdict.status == "ok" and outcome.verdict.mode == "strict" and steps.kept
    assert steps.part.share > 0.3 and steps.isolated.speedup_eager > 2
    assert steps.alone.speedup_eager > 1.1 and steps.expected > 1.2
    assert not any(result.kept for result in outcome.results if result is not steps)
    notes = {names: result.note for names, result in by_name(outcome).items()}
    assert notes[("first",)] in ("no faster than eager PyTorch", "less than 5% of the time")
    assert notes[("shrink",)] == "no solution was found"
    assert "max_autotune_fp32" in outcome.verdict.strict["baselines"] | outcome.verdict.strict["failed"]
    rest = [event for event in whole.events if event["kind"] == "integrated" and event["compiled"]]
    assert [event["verdict"]["status"] for event in rest] == ["ok"], "torch.compile around the solutions"
    out = whole.folder / "out"
    written = {path.name for path in out.iterdir()}
    assert written == {
        "model.py", "model_new.py", "parts", "parts.json", "report.html", "run.json", "solution", "trace.json",
        "verdict.json",
    }  # fmt: skip
    told = json.loads((out / "parts.json").read_text())
    assert told[0]["names"] == ["steps.0", "steps.1"] and told[0]["kept"] is True and told[0]["integrated"] > 1.1
    done = subprocess.run([sys.executable, out / "model_new.py"], capture_output=True, text=True, cwd=out)
    assert done.returncode == 0 and "correct on 5 draws" in done.stdout, done.stderr


@pytest.mark.gpu
def test_on_a_gpu_the_parts_that_make_the_model_faster_are_in_the_result(whole):
    kernel = """__global__ void fused(const float* x, float* y, long n) {
  long i = blockIdx.x * 256L + threadIdx.x;
  if (i < n) y[i] = x[i] + 3.0f;
}
"""
    node = {"kernel": "kernels/fused.cu", "function": "fused", "grid": "cdiv(in0.numel, 256)", "block": 256}
    plan = json.dumps({"nodes": [node | {"args": ["in0", "out0", "in0.numel"]}]})
    written = {
        "calls": [
            call("Write", path="kernels/fused.cu", content=kernel),
            call("Write", path="plan.json", content=plan),
        ]
    }

    def script(request):
        answer = [written] if part_of(request) == "steps.0" else [{"text": "nothing"}]
        return [answer, [PROFILE], DONE][min(turn_of(request), 2)]

    settings = SandboxConfig(device="cuda", memory_mb=16384, run_seconds=30)
    outcome = whole(EQUAL, script, settings=settings, terms=replace(TERMS, target=1000.0, device="cuda"))
    steps = by_name(outcome)[STEPS_NAMES]
    assert outcome.verdict.status == "ok" and outcome.verdict.mode == "strict" and steps.kept
    assert steps.part.share > 0.5 and steps.isolated.speedup_eager > 10
    assert steps.alone.speedup_eager > 1.5 and steps.expected > 1.5
    out = whole.folder / "out"
    told = json.loads((out / "parts.json").read_text())
    print([(part["names"], part["share"], part.get("expected"), part["integrated"]) for part in told])
    done = subprocess.run([sys.executable, out / "model_new.py"], capture_output=True, text=True, cwd=out)
    assert done.returncode == 0 and "correct on 5 draws" in done.stdout, done.stderr
    print(done.stdout)


def test_a_solution_that_is_right_alone_and_wrong_in_the_model_is_left_out(whole):
    """The two submodules look equal, but one adds another number: it is in a list, which the trace does not compare."""
    outcome = whole(HIDDEN)
    steps = by_name(outcome)[STEPS_NAMES]
    assert steps.isolated.status == "ok" and steps.alone.status == "wrong" and not steps.kept
    assert steps.note.startswith("wrong in the model") and outcome.verdict is None
    assert not (whole.folder / "out" / "model_new.py").exists()
    assert any("wrong" in line for line in whole.lines)


def test_a_wrong_kernel_is_no_solution_and_the_table_comes_first(whole):
    outcome = whole(EQUAL)
    (table,) = [event for event in whole.events if event["kind"] == "parts"]
    assert table["parts"][0]["names"] == ["steps.0", "steps.1"] and table["parts"][0]["share"] > 0.3
    assert whole.events.index(table) < next(i for i, e in enumerate(whole.events) if e["kind"] == "part")
    assert outcome.verdict and by_name(outcome)[STEPS_NAMES].kept
    assert all(event.get("part") for event in whole.events if "at" in event), "events of a search name their part"


def test_a_whole_is_resumed_where_it_stopped(whole):
    stopped = whole(EQUAL, stop_at=lambda event: event["kind"] == "turn" and event["turn"] == 1)
    assert stopped.why == "stopped" and not any(result.kept for result in stopped.results[1:])
    trace = (whole.folder / "out" / "trace.json").read_text()
    resumed = whole(EQUAL, resume=True)
    assert resumed.verdict and (whole.folder / "out" / "trace.json").read_text() == trace
    first = whole.served.requests[0]
    assert turn_of(first) >= 1, "the conversation goes on"
    again = whole(EQUAL, resume=True)
    assert whole.served.turns() == 0, "searches that have ended are not played again"
    assert again.verdict.speedup_eager == resumed.verdict.speedup_eager
    with pytest.raises(OptimizeError, match="has changed"):
        whole(HIDDEN, resume=True)


def test_a_model_of_one_layer_is_refused_and_costs_no_token(whole):
    with pytest.raises(OptimizeError, match=r"no parts to optimize apart from each other.*only.*leave out --whole"):
        whole(ONE_LAYER)
    assert whole.served.turns() == 0 and not (whole.folder / "out").exists()


def test_a_model_that_does_not_run_is_refused(whole):
    with pytest.raises(TaskError, match="does not run"):
        whole(EQUAL.replace("self.shrink(self", "self.missing(self"))
    assert not (whole.folder / "out").exists()


def test_a_server_that_refuses_ends_the_command_before_any_turn(whole):
    with pytest.raises(ServedModelError):
        whole(EQUAL, base_url="http://127.0.0.1:9/v1")
    assert not (whole.folder / "out").exists()


def test_a_part_for_which_no_budget_is_left_is_left_out_and_the_others_are_judged(whole):
    outcome = whole(EQUAL, tokens=20_000)
    notes = {names: result.note for names, result in by_name(outcome).items() if names != STEPS_NAMES}
    assert outcome.verdict and by_name(outcome)[STEPS_NAMES].kept
    assert "steps.0" in whole.asked() and len(set(whole.asked())) < 3
    assert any(note.startswith("--tokens") or note == "no budget is left" for note in notes.values()), notes


def test_the_command_refuses_a_model_of_one_layer_and_a_folder_of_another_kind(tmp_path, cache):
    (tmp_path / "one.py").write_text(ONE_LAYER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_AGENT_HOME": str(cache.parent)}

    def command(*arguments):
        line = [sys.executable, "-m", "cuda_agent.cli", "optimize", "--whole", *arguments]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)

    with serve(script) as served:
        server = ("--base-url", served.url, "--model", "m", "--device", "cpu", "sandbox.clock=model")
        done = command("one.py", *server)
    assert done.returncode == 78 and "leave out --whole" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "one-optimized").exists()
    order = {"order": asdict(SearchOrder("http://127.0.0.1:1/v1", "m")), "sandbox": {}}
    (tmp_path / "run.json").write_text(json.dumps(order))
    done = command("--resume", str(tmp_path))
    assert done.returncode == 78 and "begun without --whole" in done.stderr
