"""Measures how many solutions per minute the sandbox judges on this machine, and the time of each phase.

The benchmark first draws random tasks. It probes each task (runs it without a solution), and measures how long that
takes. Then it measures each format of solutions (plan, extension, python) in three rounds: one solution at a time with
pauses, one at a time without pauses, and all at once. The cache is empty, so the sandbox builds, checks and times each
solution.

Solutions in the format ``plan`` come from the scripted teacher, a program that writes kernels of random design. Those
in ``extension`` wrap such a kernel in a Python extension. Those in ``python`` copy the task's PyTorch model."""

import asyncio
import json
import platform
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline.closure import device_name
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Format, Solution, TaskSpec, Verdict
from cuda_agent.synthesis.filters import TaskRefused, check_compiled, check_eager
from cuda_agent.synthesis.teacher.cpu_kernels import KERNEL, PLAN
from cuda_agent.synthesis.teacher.family import sample_task
from cuda_agent.synthesis.teacher.teacher import solve_right
from cuda_agent.tasks.task import Task

# Seconds that an eager call may take: the ranges of ``experiment=demo`` and ``experiment=cuda``.
WINDOW = {"cpu": (1e-4, 5e-3), "cuda": (1e-5, 5e-3)}
_TRIES = 50  # most tasks that are tried for each one that is wanted
_FORMATS: tuple[Format, ...] = ("plan", "extension", "python")
_ORDER = ("build", "start", "check", "time", "settle", "whole", "in a row")  # order of printed phases
PAUSE = 0.25  # seconds before a solution that is judged alone


def formats_of(text: str | None, device: str = "cpu") -> tuple[Format, ...]:
    """Returns the formats that ``text`` lists, as in ``plan,python``, in a fixed order. If ``text`` is None, returns
    all formats that the benchmark supports on ``device``: plan and python, and on a CPU also extension.

    Raises:
        ConfigError: A format does not exist, or cannot be measured on ``device``."""
    known = [format for format in _FORMATS if device == "cpu" or format != "extension"]
    wanted = list(known) if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"--formats: on {device} expected any of {', '.join(known)}, got {unknown[0]!r}")
    return tuple(format for format in known if format in wanted)


async def measure(config: SandboxConfig, tasks: int, solutions: int, formats: Sequence[Format]) -> dict[str, Any]:
    """Measures the sandbox with each format in three rounds: one solution at a time with pauses, one at a time without
    pauses, and all at once. Returns the results as a dictionary, with times in seconds.

    Args:
        config: The sandbox's settings. ``servers`` is ignored: the sandbox runs on this machine.
        tasks: Number of tasks.
        solutions: Average number of solutions per task in one round. It is lower if too few different solutions are
            found.
        formats: The formats to measure.

    Raises:
        ConfigError: Too few of the drawn tasks can be measured on this machine."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as cache:
        async with LocalSandbox(config.model_copy(update={"servers": []}), Path(cache)) as sandbox:
            prepared, seconds = await prepare(sandbox, tasks, rng)
            rounds = {format: await _measure_format(sandbox, prepared, format, solutions, rng) for format in formats}
    return {
        "device": config.device,
        "machine": f"{platform.machine()}, {device_name(config.device)}",
        "clock": config.clock,
        "prepare": figures(seconds),
        "formats": rounds,
    }


async def _measure_format(
    sandbox: LocalSandbox, tasks: Sequence[Task], format: Format, count: int, rng: random.Random
) -> dict[str, Any]:
    specs = {task.name: await sandbox.spec(task) for task in tasks}
    device = sandbox.config.device

    def solution(task: Task) -> Solution:
        if format == "python":
            return Solution(format, _reference(task, rng))
        files = solve_right(task, rng, device).files
        return Solution(format, files if format == "plan" else work_folder(files, specs[task.name]))

    drawn = distinct(tasks, 3 * count, rng, solution)
    share = len(drawn) // 3
    verdicts: list[Verdict] = []

    async def evaluate(task: Task, solution: Solution, pause: float = 0.0) -> float:
        await asyncio.sleep(pause)
        begin = time.perf_counter()
        verdicts.append(await sandbox.evaluate(task, solution))
        return time.perf_counter() - begin

    alone = [await evaluate(*one, pause=PAUSE) for one in drawn[:share]]
    names = sorted({name for verdict in verdicts for name in verdict.phases})
    phases = {name: figures([v.phases[name] for v in verdicts if name in v.phases]) for name in names}
    in_a_row = [await evaluate(*one) for one in drawn[share : 2 * share]]
    begin = time.perf_counter()
    await asyncio.gather(*(evaluate(*one) for one in drawn[2 * share :]))
    at_once = 60 * (len(drawn) - 2 * share) / (time.perf_counter() - begin)
    return {
        "evaluations": share,
        "phases": phases | {"whole": figures(alone), "in a row": figures(in_a_row)},
        "per_minute": {"one_by_one": 60 * share / sum(in_a_row), "all_at_once": at_once},
        "statuses": dict(Counter(verdict.status for verdict in verdicts)),
        **({"per_gpu_hour": 60 * at_once} if sandbox.config.device == "cuda" else {}),
    }


async def prepare(sandbox: LocalSandbox, count: int, rng: random.Random) -> tuple[list[Task], list[float]]:
    """Draws random tasks until ``count`` of them have passed two probes (runs without a solution). The first probe
    runs the task in eager mode, the second one also with ``torch.compile``. The filters ``check_eager`` and
    ``check_compiled`` decide whether a task passes. They refuse, for example, tasks with nondeterministic outputs. With
    a real clock (``sandbox.clock``), they also refuse tasks whose eager time is outside the device's ``WINDOW``.

    Returns:
        The tasks that passed, and for each of them the seconds that its two probes took together.

    Raises:
        ConfigError: Fewer than ``count`` of ``_TRIES * count`` tasks passed."""
    device = sandbox.config.device
    window = WINDOW[device] if sandbox.config.clock == "real" else (0.0, float("inf"))
    tasks: list[Task] = []
    seconds: list[float] = []
    refused = ""
    for _ in range(_TRIES * count):
        task = sample_task(rng, device)
        begin = time.perf_counter()
        try:
            check_eager(await sandbox.probe(task, compile=False), window)
            check_compiled(await sandbox.probe(task))
        except TaskRefused as reason:
            refused = str(reason)
            continue
        tasks.append(task)
        seconds.append(time.perf_counter() - begin)
        if len(tasks) == count:
            return tasks, seconds
    raise ConfigError(f"Only {len(tasks)} of {_TRIES * count} tasks can be measured on this machine: {refused}")


_BINDING = """#include "../binding_registry.h"
{declaration};
static Tensor forward({inputs}) {{
  Tensor z = {output};
{workspace}  long grid = {grid};
#pragma omp parallel for
  for (long block = 0; block < grid; block++) fused(block, grid, {arguments});
  return z;
}}
REGISTER_BINDING(forward, forward);
"""
_MODEL = """import cuda_extension
import torch


class ModelNew(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()

    def forward(self, *inputs):
        return cuda_extension.forward(*inputs)
"""


def work_folder(files: dict[str, str], spec: TaskSpec) -> dict[str, str]:
    """Converts ``files``, a solution in the format ``plan``, to a solution in the format ``extension`` that calls the
    same kernel. Returns its files (path -> text). ``spec`` describes the task's inputs and outputs."""
    plan = json.loads(files[PLAN])
    (node,) = plan["nodes"]
    spelled = {
        "in0": "x.data<float>()", "in1": "y.data<float>()", "out0": "z.data<float>()", "tmp": "b.data<float>()",
        "in0.numel": "x.numel()", "in0.shape[0]": "x.size(0)", "in0.shape[1]": "x.size(1)",
    }  # fmt: skip
    shape = ", ".join(str(extent) for extent in spec.outputs[0].shape)
    declaration = re.search(r"void fused\([^)]*\)", files[KERNEL])
    assert declaration is not None
    binding = _BINDING.format(
        declaration=declaration[0],
        inputs=", ".join(f"const Tensor& {name}" for name in "xy"[: len(spec.inputs)]),
        output=f"empty({{{shape}}})" if shape else "empty(nullptr, 0)",
        workspace="  Tensor b = empty_like(x);\n" if "tmp" in plan.get("workspaces", {}) else "",
        grid=spelled.get(node["grid"], node["grid"]),
        arguments=", ".join(spelled[name] for name in node["args"]),
    )
    return {"model_new.py": _MODEL, KERNEL: files[KERNEL], KERNEL.replace(".cpp", "_binding.cpp"): binding}


def _reference(task: Task, rng: random.Random) -> dict[str, str]:
    code = re.sub(r"^class Model\b", "class ModelNew", task.code, flags=re.MULTILINE)
    return {"model_new.py": f"{code}\n# {rng.getrandbits(32)}\n"}


def distinct(
    tasks: Sequence[Task], count: int, rng: random.Random, solution: Callable[[Task], Solution]
) -> list[tuple[Task, Solution]]:
    """Returns (task, solution) pairs in random order, with up to ``count`` different solutions per task. ``solution``
    draws a random solution of a task."""
    found: list[tuple[Task, Solution]] = []
    for task in tasks:
        mine: dict[str, Solution] = {}
        for _ in range(50 * count):
            one = solution(task)
            mine.setdefault(one.digest, one)
            if len(mine) == count:
                break
        found += [(task, one) for one in mine.values()]
    rng.shuffle(found)
    return found


def figures(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]}


def lines(answer: dict[str, Any]) -> list[str]:
    """Returns ``answer``, the result of ``measure``, as lines of text."""
    text = [answer["machine"], f"prepare a task: {_seconds(answer['prepare'])}"]
    if answer["clock"] == "model":
        text.append("sandbox.clock=model: nothing is timed, so that an evaluation is cheaper than a real one")
    for format, row in answer["formats"].items():
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(row["statuses"].items()))
        text += ["", f"{format}: {row['evaluations']} evaluations a round ({statuses})"]
        names = sorted(row["phases"], key=lambda name: _ORDER.index(name) if name in _ORDER else -1)
        text += [f"  {name:8} {_seconds(row['phases'][name])}" for name in names]
        pace = row["per_minute"]
        text.append(f"  {pace['one_by_one']:.0f} a minute one by one, {pace['all_at_once']:.0f} all at once")
        if "per_gpu_hour" in row:
            text.append(f"  {row['per_gpu_hour']:.0f} per GPU-hour")
    return text


def _seconds(figure: dict[str, float]) -> str:
    return f"p50 {figure['p50']:.3f} s  p95 {figure['p95']:.3f} s"
