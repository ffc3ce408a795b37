"""Compares the time of a ``quick`` verdict in the sandbox with the same checks in one Python process.

    python benchmarks/sandbox_beside.py --tasks 2 --solutions 3

Most evaluators use one process. Every solution is judged twice, one after the other and without a build cache. First
the sandbox judges it as a ``plan``, with the task already prepared. Then a fresh interpreter does the following. It
builds the same kernel with a binding against torch's headers (``g++ -shared``, which is what ``load_inline`` runs,
without ninja). It runs the model and the solution on five inputs, and compares the outputs. It times the solution as
often as the sandbox did, and the model equally often. This process has no jail, no fresh input for a timed call, no
outputs filled with NaN, no check of a timed call, and no ``torch.compile`` baseline.

Both sides compile the kernel with the same flags, except for the C++ standard. A GPU is not covered.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

_CHECKS = 5
_HEADER = """#pragma once
#include <torch/extension.h>
using at::Tensor;
using at::empty_like;
static Tensor empty(std::initializer_list<long> shape) { return at::empty(std::vector<int64_t>(shape)); }
static Tensor empty(const long*, long) { return at::empty({}); }
#define REGISTER_BINDING(name, function) PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def(#name, &function); }
"""
_PHASES = ("interpreter", "build", "start", "check", "time")


# ------------------------------------------------------------------------------------------------ in the one process


def judge_here(order: dict[str, Any]) -> dict[str, Any]:
    """Judges a solution (a work folder) in this process, which also imports torch. Returns the ``seconds`` of each
    phase, and whether the solution is ``right``."""
    begin = time.perf_counter()
    import torch

    seconds = {"import": time.perf_counter() - begin}
    torch.set_num_threads(order["threads"])
    torch.set_grad_enabled(False)

    def load(code: str) -> dict[str, Any]:
        space: dict[str, Any] = {}
        exec(compile(code, "model.py", "exec"), space)
        return space

    begin = time.perf_counter()
    task = load(order["task"])
    torch.manual_seed(42)
    model = task["Model"](*task["get_init_inputs"]()).eval()
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder), order["files"], order["flags"])
        sys.path.insert(0, folder)
        mine = load(order["files"]["model_new.py"])["ModelNew"](*task["get_init_inputs"]()).eval()
    seconds["build"] = time.perf_counter() - begin

    begin = time.perf_counter()
    right = True
    for number in range(_CHECKS):
        torch.manual_seed(number)
        inputs = task["get_inputs"]()
        right = right and torch.allclose(model(*inputs), mine(*inputs), atol=1e-2, rtol=1e-2)
    seconds["check"] = time.perf_counter() - begin

    begin = time.perf_counter()
    for call in (mine, model):
        for _ in range(order["timed"]):
            call(*inputs)
    seconds["time"] = time.perf_counter() - begin
    return {"seconds": seconds, "right": right}


def _build(folder: Path, files: dict[str, str], flags: list[str]) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    for name, text in {**files, "binding_registry.h": _HEADER}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    units = [str(folder / name) for name in files if name.endswith(".cpp")]
    command = ["g++", *flags, "-fopenmp", "-DTORCH_EXTENSION_NAME=cuda_extension", *includes, *units]
    subprocess.run([*command, "-shared", "-o", str(folder / "cuda_extension.so"), *libraries], check=True)


# --------------------------------------------------------------------------------------------------------- beside ours


async def measure(tasks: int, solutions: int) -> list[dict[str, Any]]:
    """Judges solutions on both sides. Returns one row per solution: ``ours`` (the sandbox) and ``beside`` (the single
    process) hold seconds by phase, and ``timed`` is the number of timed calls. The first solution of each task is not
    counted. Raises RuntimeError if a solution is not correct on either side."""
    from cuda_agent.config import SandboxConfig
    from cuda_agent.diagnostics import sandbox_bench
    from cuda_agent.sandbox.build.toolchain import FLAGS
    from cuda_agent.sandbox.local import LocalSandbox
    from cuda_agent.sandbox.wire import Solution
    from cuda_agent.synthesis.teacher.teacher import solve_right

    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        async with LocalSandbox(SandboxConfig(), Path(cache)) as sandbox:
            prepared, _ = await sandbox_bench.prepare(sandbox, tasks, rng)
            specs = {task.name: await sandbox.spec(task) for task in prepared}
            drawn = sandbox_bench.distinct(
                prepared,
                solutions + 1,
                rng,
                lambda task: Solution("plan", solve_right(task, rng).files),
            )
            first: set[str] = set()
            for task, solution in drawn:
                begin = time.perf_counter()
                verdict = await sandbox.evaluate(task, solution)
                ours = verdict.phases | {"whole": time.perf_counter() - begin}
                if task.name not in first:  # this evaluation also drew the task's inputs and started the compiler
                    first.add(task.name)
                    continue
                order = {
                    "task": task.code, "files": sandbox_bench.work_folder(solution.files, specs[task.name]),
                    "flags": [flag for flag in FLAGS if flag != "-std=c++17"] + ["-std=c++20"],
                    "timed": len(verdict.samples), "threads": sandbox.config.threads,
                }  # fmt: skip
                said, whole = await asyncio.to_thread(_beside, order)
                beside = said["seconds"] | {"whole": whole}
                beside["interpreter"] = whole - sum(beside[name] for name in ("build", "check", "time"))
                rows.append({
                    "task": task.name, "status": verdict.status, "right": said["right"], "timed": len(verdict.samples),
                    "ours": ours, "beside": beside,
                })  # fmt: skip
                if verdict.status != "ok" or not said["right"]:
                    raise RuntimeError(
                        f"{task.name}: {verdict.status} here ({verdict.message}), {said['right']} beside"
                    )
    return rows


def _beside(order: dict[str, Any]) -> tuple[dict[str, Any], float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(order["threads"]), "PYTHONPATH": str(Path(__file__).parents[1])}
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, __file__, "--here"], input=json.dumps(order), capture_output=True, text=True, env=environment
    )
    whole = time.perf_counter() - begin
    if process.returncode:
        raise RuntimeError(process.stderr[-2000:])
    return json.loads(process.stdout), whole


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Returns ``rows``, the result of ``measure``, as lines of text."""

    def cell(side: str, value: Any) -> str:
        found = sorted(value(row[side]) for row in rows)
        if None in found or not found:
            return f"{'':>10}{'':>10}"
        return f"{statistics.median(found):10.3f}{found[min(len(found) - 1, int(0.95 * len(found)))]:10.3f}"

    def row(label: str, value: Any) -> str:
        return f"{label:24}{cell('ours', value)}{cell('beside', value)}"

    text = [
        f"{len(rows)} solutions, {statistics.median(row['timed'] for row in rows):g} timed calls each (median); seconds"
    ]
    text.append(f"{'':24}{'ours p50':>10}{'p95':>10}{'beside p50':>10}{'p95':>10}")
    text += [row(name, lambda phases, name=name: phases.get(name, 0.0)) for name in _PHASES]
    text.append(row("whole", lambda phases: phases["whole"]))
    text.append(row("without interpreter", lambda phases: phases["whole"] - phases.get("interpreter", 0.0)))
    text.append(
        row("and without build", lambda phases: phases["whole"] - phases.get("interpreter", 0.0) - phases["build"])
    )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--solutions", type=int, default=3, help="a task")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(judge_here(json.load(sys.stdin))))
        return
    rows = asyncio.run(measure(options.tasks, options.solutions))
    print("\n".join(lines(rows)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
