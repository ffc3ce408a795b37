"""The fault drill itself, small here and whole at night; and that its CUDA sources build."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.build import builder as build
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.formats import extension, plan
from cuda_agent.sandbox.formats.solution_format import Toolchain
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor
from tests.sandbox.build.test_builder import SPEC, builder  # noqa: F401
from tests.sandbox.drill import Outcome, Report, draw
from tests.sandbox.faults import faults, honest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "drill.py"


def drilled(tmp_path: Path, *options: str) -> dict[str, Any]:
    result = tmp_path / "drill.json"
    command = [sys.executable, str(SCRIPT), "--json", str(result), *options]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.exists(), ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    assert ran.returncode == (1 if found["problems"] else 0)
    return found


def only_late(problems: list[str]) -> bool:
    return all(problem.startswith("late: ") for problem in problems)


@pytest.mark.nightly
def test_a_small_drill_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    found = drilled(tmp_path, "--evaluations", "24", "--seed", "5", "--clock", "model")
    assert only_late(found["problems"]), found["problems"]
    assert len(found["outcomes"]) == 24


def _reachable_for_others() -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (SCRIPT, *SCRIPT.parents) if folder.is_dir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
@pytest.mark.skipif(not _reachable_for_others(), reason="the project lies in a closed folder")
@pytest.mark.nightly
def test_an_ordinary_user_needs_no_privilege_for_it(tmp_path: Path) -> None:
    found = drilled(tmp_path, "--evaluations", "200", "--seed", "6", "--user", "65534")
    assert found["user"] == 65534
    assert not found["problems"], found["problems"]


@pytest.mark.nightly
def test_two_hundred_evaluations_with_every_fault(tmp_path: Path) -> None:
    found = drilled(tmp_path, "--evaluations", "200", "--seed", "7")
    assert not found["problems"]
    kinds = {outcome["kind"] for outcome in found["outcomes"]}
    assert kinds >= {fault.name for fault in faults("cpu")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_drill_is_what_its_seed_says_and_has_every_fault(device: str) -> None:
    first, again, other = (draw(200, seed, device) for seed in (1, 1, 2))

    def names(units: Any) -> list[str]:
        return [name for unit in units for name, *_ in unit]

    assert names(first) == names(again) != names(other)
    assert len(names(first)) == 200
    assert {fault.name for fault in faults(device)} <= {*names(first)}
    for unit in first:
        assert unit[-1][0].startswith("honest")
        assert len({task.name for *_, task in unit}) == 1


@pytest.mark.parametrize(
    ("outcome", "left", "said"),
    [
        (Outcome("k", "t", ["crash"], "crash", "", 1.0, 2.0), {}, ""),
        (Outcome("k", "t", ["crash"], "ok", "", 1.0, 2.0), {}, "wrong: k on t is ok, not crash"),
        (Outcome("k", "t", ["crash"], "infra", "", 1.0, 2.0), {}, "wrong: k on t is infra, not crash"),
        (Outcome("k", "t", ["crash"], "", "TimeoutError", 1.0), {}, "lost: k on t: TimeoutError"),
        (Outcome("k", "t", ["crash"], "crash", "", 1.0, 16.0), {}, "late: 16.0 s after k"),
        (Outcome("k", "t", ["crash"], "crash", "", 1.0, None), {"process": ["7 sh"]}, "left behind: process: 7 sh"),
    ],
)
def test_a_report_names_what_is_not_as_it_must_be(outcome: Outcome, left: dict[str, list[str]], said: str) -> None:
    problems = Report("cpu", "model", 0, 0, 1.0, [outcome], left).problems()
    assert len(problems) == bool(said) and all(said in problem for problem in problems)


def cuda_solutions(format: str) -> list[tuple[str, Solution]]:
    made = [(fault.name, fault.make(1)) for fault in faults("cuda") if "build_error" not in fault.right]
    made += [(f"honest {name}", make(1)) for name, make in honest("cuda").items()]
    return [(name, solution) for name, solution in made if solution.format == format]


@pytest.mark.parametrize(("name", "solution"), cuda_solutions("plan"), ids=lambda value: str(value)[:40])
def test_a_faulty_plan_builds(builder: build.Builder, name: str, solution: Solution) -> None:  # noqa: F811
    program = plan.compile_plan(solution.files, SPEC, "cuda")
    sources = {n: text for n, text in solution.files.items() if n != "plan.json"} | {"plan.cu": program.source}
    image, _ = asyncio.run(builder.kernels(sources, "plan.cu", program.expressions, "sm_90a"))
    assert image.exists()


@pytest.mark.nightly  # nvcc takes its time
@pytest.mark.parametrize(("name", "solution"), cuda_solutions("extension"), ids=lambda value: str(value)[:40])
def test_a_faulty_work_folder_builds(builder: build.Builder, name: str, solution: Solution) -> None:  # noqa: F811
    try:
        toolchain.find_nvcc()
    except toolchain.CompilerMissing as missing:
        pytest.skip(str(missing))
    spec = TaskSpec((Tensor((8, 8), "float32"),), (Tensor((8, 8), "float32"),), {}, ({"tensor": 0},), ({"value": 1.5},))
    assert asyncio.run(extension.build(solution.files, spec, Toolchain(builder, "sm_90a")))
