"""The benchmark of the sandbox: real evaluations in every format, and their report."""

import asyncio
import random

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.diagnostics import sandbox_bench
from cuda_agent.errors import ConfigError
from cuda_agent.sandbox.wire import Probe


@pytest.mark.nightly
def test_every_format_is_measured_on_solutions_that_are_right():
    config = SandboxConfig(clock="model", checks=2, servers=["http://nobody.invalid"])
    answer = asyncio.run(sandbox_bench.measure(config, tasks=1, solutions=2, formats=sandbox_bench.formats_of(None)))
    assert list(answer["formats"]) == ["plan", "extension", "python"]
    for row in answer["formats"].values():
        assert row["statuses"] == {"ok": 6} and row["evaluations"] == 2
        assert row["phases"]["whole"]["p50"] > 0 and row["per_minute"]["all_at_once"] > 0
    text = "\n".join(sandbox_bench.lines(answer))
    assert "extension: 2 evaluations a round (6 ok)" in text and "sandbox.clock=model" in text


@pytest.mark.nightly  # torch.compile is timed too
def test_the_real_clock_shows_where_the_time_goes():
    answer = asyncio.run(
        sandbox_bench.measure(SandboxConfig(timed_calls=4, checks=2), tasks=1, solutions=1, formats=["python"])
    )
    phases = answer["formats"]["python"]["phases"]
    assert set(phases) == {"build", "start", "check", "time", "observe", "prepare", "cleanup", "whole", "in a row"}
    parts = sum(phases[name]["p50"] for name in ("start", "check", "time"))
    assert 0 < parts <= phases["whole"]["p50"]


def test_p95_is_of_the_slow_end():
    figures = sandbox_bench.figures([float(n) for n in random.Random(0).sample(range(100), 100)])
    assert figures == {"p50": 49.5, "p95": 95.0}


def test_a_gpu_is_paid_by_the_hour():
    row = {"evaluations": 1, "statuses": {"ok": 2}, "phases": {"whole": {"p50": 1.0, "p95": 2.0}}}
    row |= {"per_minute": {"one_by_one": 60.0, "all_at_once": 90.0}, "per_gpu_hour": 5400.0}
    answer = {"machine": "m", "clock": "real", "prepare": {"p50": 1.0, "p95": 1.0}, "formats": {"plan": row}}
    assert "  5400 per GPU-hour" in sandbox_bench.lines(answer)


def test_formats_come_in_their_order_and_others_are_refused():
    assert sandbox_bench.formats_of("python, plan") == ("plan", "python")
    with pytest.raises(ConfigError, match="got 'shell'"):
        sandbox_bench.formats_of("plan,shell")
    assert sandbox_bench.formats_of(None, "cuda") == ("plan", "python")
    with pytest.raises(ConfigError, match="on cuda expected any of plan, python, got 'extension'"):
        sandbox_bench.formats_of("extension", "cuda")


class NoTask:
    config = SandboxConfig(clock="model")

    def __init__(self):
        self.asked = 0

    async def probe(self, task, compile=True):
        self.asked += 1
        return Probe(error="no module named torch")


def test_a_machine_that_runs_no_task_is_told_so():
    sandbox = NoTask()
    with pytest.raises(
        ConfigError, match=r"Only 0 of 100 tasks can be measured on this machine: .*no module named torch"
    ):
        asyncio.run(sandbox_bench.prepare(sandbox, 2, random.Random(0)))
    assert sandbox.asked == 100
