"""The sweep over designs: what is drawn, the talk with the child, and what follows from its answers.

The child here is a script that gives the answers which the programs ask for."""

import asyncio
import json
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_agent.errors import SandboxUnready
from cuda_agent.sandbox.build.builder import Builder, BuildError
from cuda_agent.sandbox.build.toolchain import CompilerMissing
from cuda_agent.sandbox.formats.plan import build as compile_files
from cuda_agent.sandbox.formats.plan import compile_plan
from cuda_agent.sandbox.formats.solution_format import Toolchain
from cuda_agent.sandbox.judge.memory import check
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor, Verdict
from cuda_agent.synthesis.teacher import design_sweep
from cuda_agent.synthesis.teacher.cuda_kernels import fault
from cuda_agent.synthesis.teacher.design_bench import cases, values_off
from cuda_agent.synthesis.teacher.design_sweep import Sweep, draw_designs, programs, summary, unit
from cuda_agent.synthesis.teacher.family import FamilySpec, make_task, parse, task_spec
from cuda_agent.synthesis.teacher.optimum import Optimum, Swept, read_optima, write_optima
from cuda_agent.synthesis.teacher.teacher import solve
from cuda_agent.tasks.task import Task

CHAIN = make_task(FamilySpec((("mish", None), ("tanh", None)), None, 1000, 1000))
ROWS = make_task(FamilySpec((("gelu", None),), "layer_norm", 1024, 1000))
COLUMNS = make_task(FamilySpec((("tanh", None), ("mul_y", None)), "column_var", 250, 8388))
TRANSPOSED = make_task(FamilySpec((("gelu", None),), "transpose", 1048, 1000))
OTHER = make_task(FamilySpec((("exp", None),), "sum", 1024, 1000))

PACKAGE = Path(__file__).parents[3]
CHILD = """
import json, sys
log = open(sys.argv[1], "a")
print("start", file=log, flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print("request", len(request["programs"]), request["tolerance"], *request["kinds"], file=log, flush=True)
    nodes = [program["nodes"][0] for program in request["programs"]]
    print(json.dumps({"held": True}), flush=True)
    for answer in [nodes[0].get("eager", 8.0) if nodes else 8.0, *(node["answer"] for node in nodes)]:
        if answer == "die":
            sys.exit(3)
        answer = {"seconds": answer} if isinstance(answer, float) else answer
        print(json.dumps(answer), flush=True)
        if "error" in answer:
            sys.exit(1)
"""


class Fake:
    """A sandbox that only builds.  The node of design number n holds the answer number n of the child.  If one of the
    answers is an error, the designs do not build together."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.lease_folder = list(answers), Path("/lease")
        self.config = SimpleNamespace(tolerance=0.01, input_kinds=["ramp"])
        self.builds: list[int] = []  # number of designs in each

    async def prepare(self, solution: Any, spec: TaskSpec) -> dict[str, Any]:
        assert solution.format == "plan" and spec.inputs[0] == Tensor((1024, 1000), "float32")
        count = len(json.loads(solution.files["plan.json"])["nodes"])
        self.builds.append(count)
        broken = [answer for answer in self.answers[:count] if isinstance(answer, Exception)]
        if count > 1 and broken:
            raise BuildError("one of them")
        answers, self.answers = self.answers[:count], self.answers[count:]
        if broken:
            raise broken[0]
        return {
            "workspaces": {},
            "nodes": [a if isinstance(a, dict) and "answer" in a else {"answer": a} for a in answers],
        }


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(
        design_sweep, "COMMAND", [sys.executable, "-S", str(tmp_path / "child.py"), str(tmp_path / "log")]
    )
    return tmp_path / "log"


def swept(sandbox: Fake, *tasks: Task) -> list[Swept]:
    async def run() -> list[Swept]:
        async with Sweep(sandbox, designs=4) as sweeps:  # type: ignore[arg-type]
            return list(await asyncio.gather(*map(sweeps, tasks)))

    return asyncio.run(run())


def test_designs_are_distinct_right_and_the_same_each_time() -> None:
    drawn, right = draw_designs(ROWS)
    designs = [worked.design for worked in right]
    assert len(designs) == len(set(designs)) == design_sweep.DESIGNS
    assert all(fault(parse(ROWS), design)[0] == "ok" for design in designs)
    assert set(designs) < set(drawn) and drawn.total() > len(designs)
    assert draw_designs(ROWS) == (drawn, right)
    few, some = draw_designs(CHAIN)  # there are not 48 right designs of a chain
    assert len(some) < design_sweep.DESIGNS and few.total() == 4 * design_sweep.DESIGNS


def test_only_tasks_of_the_family_are_swept(log: Path) -> None:
    with pytest.raises(ValueError, match="not of the teacher's family"):
        swept(Fake(), Task("own", CHAIN.code.replace("1000", "999 + 1"), family="teacher"))
    assert not log.exists()


def test_one_child_times_the_designs_of_many_tasks(log: Path) -> None:
    sandbox = Fake(1.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, 5.0)
    first, second = swept(sandbox, ROWS, OTHER)
    assert sandbox.builds == [4, 4]  # the designs of a task are built together
    assert (first.eager_seconds, first.seconds, first.median_seconds, first.speedup) == (8.0, 1.0, 2.5, 8.0)
    assert (second.seconds, second.median_seconds) == (5.0, 6.5)
    designs = [str(worked.design) for worked in draw_designs(ROWS, 4)[1]]
    assert first.fastest == tuple(designs[:2]) and second.fastest != first.fastest
    assert first.surprises == second.surprises == ()
    assert log.read_text().split("\n")[:-1] == ["start", "request 4 0.01 ramp", "request 4 0.01 ramp"]


@pytest.mark.parametrize(
    ("answer", "said"), [("die", "the child ended with 3"), ({"error": "DriverError: 700"}, "DriverError: 700")]
)
def test_a_design_that_kills_the_child_is_named_and_a_new_child_goes_on(log: Path, answer: Any, said: str) -> None:
    (optimum,) = swept(Fake(4.0, answer, 2.0, 3.0), ROWS)
    drawn, right = draw_designs(ROWS, 4)
    assert (optimum.seconds, optimum.median_seconds) == (2.0, 3.0)
    assert optimum.surprises == (f"{right[1].design}: {said}",)
    assert optimum.right == 3 / drawn.total()
    assert log.read_text().split("\n")[:-1] == ["start", "request 4 0.01 ramp", "start", "request 2 0.01 ramp"]


def test_a_wrong_design_and_one_that_does_not_build_are_named(log: Path) -> None:
    sandbox = Fake(4.0, BuildError("no such thing"), {"wrong": "7 values are wrong"}, 3.0)
    (optimum,) = swept(sandbox, ROWS)
    assert sandbox.builds == [4, 1, 1, 1, 1]
    designs = [worked.design for worked in draw_designs(ROWS, 4)[1]]
    assert optimum.surprises == (f"{designs[1]}: does not build: no such thing", f"{designs[2]}: 7 values are wrong")
    assert optimum.seconds == 3.0


def test_a_design_that_is_wrong_for_another_kind_of_inputs_counts_as_wrong_and_is_no_surprise(log: Path) -> None:
    (optimum,) = swept(Fake(4.0, {"wrong": "7 values are wrong", "kind": "ramp"}, 5.0, 3.0), ROWS)
    drawn, _ = draw_designs(ROWS, 4)
    assert (optimum.seconds, optimum.right, optimum.surprises) == (3.0, 3 / drawn.total(), ())


class Judging:
    """A sandbox whose judge gives the answer number n to the design number n: its seconds, or a status."""

    def __init__(self, *answers: float | str) -> None:
        self.config = SimpleNamespace(tolerance=0.01, input_kinds=[])
        files = [worked.files for worked in draw_designs(ROWS, 4)[1]]
        self.answers = list(zip(files, answers, strict=True))

    async def evaluate(self, task: Task, solution: Solution) -> Verdict:
        answer = next(answer for files, answer in self.answers if files == solution.files)
        timed = isinstance(answer, float)
        verdict = Verdict("ok" if timed else answer, solution.format, "quick", "cuda", "real")  # type: ignore[arg-type]
        return replace(verdict, seconds=answer, eager_seconds=9.0) if timed else replace(verdict, message="why")


@pytest.mark.parametrize(
    ("answers", "best", "seconds", "surprised"),
    [
        ((3.0, 2.0), 1, 2.0, ()),  # the judge's times decide, not the sweep's
        (("wrong_result", 2.0), 1, 2.0, (0,)),
        ((3.0, "infra"), 0, 3.0, ()),  # the sandbox's fault says nothing about the design
        (("wrong_result", "infra"), None, None, (0,)),
    ],
)
def test_the_judge_times_the_fastest_designs_of_a_sweep(
    answers: Sequence[float | str], best: int | None, seconds: float | None, surprised: Sequence[int]
) -> None:
    designs = [str(worked.design) for worked in draw_designs(ROWS, 4)[1]]
    sweep = Sweep(Judging(*answers, 1.0, 1.0), designs=4)  # type: ignore[arg-type]
    optimum = asyncio.run(sweep.judged(ROWS, Swept(8.0, 1.0, 2.0, 0.5, tuple(designs[:2]))))
    design = "" if best is None else designs[best]
    assert (optimum.design, optimum.seconds, optimum.eager_seconds) == (design, seconds, seconds and 9.0)
    assert optimum.surprises == tuple(f"{designs[number]}: wrong_result: why" for number in surprised)
    assert optimum.speedup == (seconds and 9.0 / seconds)


def test_a_sweep_checks_the_kinds_for_which_the_model_is_finite() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    known = list(cases(torch.exp, [x], ["large", "ramp", "boundary"]))
    assert [kind for kind, _, _ in known] == ["normal", "ramp", "boundary"]
    assert torch.equal(known[0][1][0], x)
    assert all(torch.equal(wanted[0], inputs[0].exp()) for _, inputs, wanted in known)


def test_a_child_that_cannot_run_the_task_itself_ends_the_sweep(log: Path) -> None:
    with pytest.raises(SandboxUnready, match="no device"):
        swept(Fake(*4 * [{"answer": 1.0, "eager": {"error": "no device"}}]), ROWS)
    assert log.read_text().count("start") == 2


def test_a_child_finds_this_package_first_and_then_what_the_caller_finds(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (log.parent / "child.py").write_text("import json, os\nprint(json.dumps({'error': os.environ['PYTHONPATH']}))")
    for given, wanted in (("/packages", f"{PACKAGE}{os.pathsep}/packages"), ("", str(PACKAGE))):
        monkeypatch.setenv("PYTHONPATH", given)
        with pytest.raises(SandboxUnready) as unready:
            swept(Fake(4.0, 5.0, 6.0, 7.0), ROWS)
        assert str(unready.value).endswith(f": {wanted}")


def test_a_child_that_does_not_answer_is_replaced(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (log.parent / "child.py").write_text(CHILD.replace("sys.exit(3)", "__import__('time').sleep(60)"))
    monkeypatch.setattr(design_sweep, "_ANSWER_SECONDS", 2.0)
    (optimum,) = swept(Fake(4.0, 5.0, 6.0, "die"), ROWS)
    assert optimum.seconds == 4.0 and "no answer in 2 s" in optimum.surprises[0]


def test_a_damaged_answer_of_the_child_is_named_and_the_child_is_replaced(log: Path) -> None:
    broken = CHILD.replace("sys.exit(3)", "print('{\"seconds\": 1.', flush=True)")
    (log.parent / "child.py").write_text(broken)
    (optimum,) = swept(Fake(4.0, 5.0, 6.0, "die"), ROWS)
    assert optimum.seconds == 4.0 and "the child's answer is damaged" in optimum.surprises[0]


def test_a_child_may_wait_for_the_lease_longer_than_for_an_answer(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = 'print(json.dumps({"held"'
    (log.parent / "child.py").write_text(CHILD.replace(held, f"__import__('time').sleep(3); {held}"))
    monkeypatch.setattr(design_sweep, "_ANSWER_SECONDS", 2.0)
    (optimum,) = swept(Fake(4.0, 5.0, 6.0, 7.0), ROWS)
    assert optimum.seconds == 4.0 and optimum.surprises == () and log.read_text().count("start") == 1


def test_a_child_that_does_not_start_is_not_waited_for(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (log.parent / "child.py").write_text(CHILD.replace("print(json", "__import__('time').sleep(60)\nprint(json", 1))
    monkeypatch.setattr(design_sweep, "_ANSWER_SECONDS", 1.0)
    with pytest.raises(SandboxUnready, match="no answer in 1 s"):
        swept(Fake(4.0, 5.0, 6.0, 7.0), ROWS)


def test_designs_that_are_built_together_keep_their_own_kernels_and_launches(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    builder = Builder(tmp_path / "builds", tmp_path / "scratch", None, 60, 2048, 1)
    tools = Toolchain(builder, "sm_90")
    try:
        for task in (ROWS, CHAIN, COLUMNS, TRANSPOSED):
            spec, solutions = task_spec(parse(task)), [worked.files for worked in draw_designs(task, 12)[1]]
            whole = asyncio.run(compile_files(unit(solutions), spec, tools))
            parts = list(programs(whole, solutions))
            assert len(parts) == 12
            for number, (part, files) in enumerate(zip(parts, solutions, strict=True)):
                alone = compile_plan(files, spec, "cuda")
                assert list(part["workspaces"].values()) == list(alone.workspaces.values())
                for node, expected in zip(part["nodes"], alone.nodes, strict=True):
                    assert f"d{number}" in part["names"][node["symbol"]] and part["names"][f"&{node['codes']}"]
                    for argument in (*node["args"], *expected["args"]):
                        argument["buffer"] = argument.get("buffer", "").replace(f"ws:d{number}_", "ws:")
                    same = node.keys() - {"symbol", "codes"}
                    assert {key: node[key] for key in same} == {key: expected[key] for key in same}
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    finally:
        builder.close()


def test_the_share_counts_every_draw() -> None:
    drawn = Counter({"a": 3, "b": 1, "c": 4, "faulty": 2})
    found = summary(8.0, drawn, {"b": 4.0, "a": 2.0, "c": "wrong"})
    assert found == Swept(8.0, 2.0, 3.0, 0.4, ("a", "b"), ("c: wrong",))
    assert summary(8.0, drawn, {}) == Swept(8.0, None, None, 0.0)
    assert summary(8.0, drawn, {}).speedup is None


def test_optima_survive_their_file(tmp_path: Path) -> None:
    assert read_optima(tmp_path) == {}
    optima = {"t0": Optimum("a", 2.0, 8.0, ("c: wrong",)), "t1": Optimum("b", 1e-4, 1e-3)}
    write_optima(tmp_path, optima)
    assert read_optima(tmp_path) == optima
    rows = json.loads((tmp_path / "optimum.json").read_text())
    rows["t1"] |= {"median_seconds": 2e-4, "right": 1.0}  # as an earlier version wrote them
    (tmp_path / "optimum.json").write_text(json.dumps(rows))
    assert read_optima(tmp_path) == optima


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_outputs_are_compared_as_the_judge_compares_them(scale: float) -> None:
    torch.manual_seed(0)
    want = torch.randn(64, 100) * scale
    have = want * (1 + 0.02 * torch.randn(64, 100)) + 0.01 * scale * torch.randn(64, 100)
    have[0, 0] = torch.nan
    spec = [Tensor((64, 100), "float32")]
    expected = check.values_off([want.numpy()], [have.numpy()], spec, 0.01)
    assert 100 < expected < 5000 and values_off(want, have, 0.01) == expected
    assert values_off(want, want, 0.01) == 0


def test_the_program_ends_with_a_line_that_says_why_it_cannot_run_a_task(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    async def run() -> tuple[bytes, int]:
        child = await asyncio.create_subprocess_exec(*design_sweep.COMMAND, stdin=-1, stdout=-1)
        said, _ = await child.communicate(json.dumps({"code": "", "lease": str(tmp_path)}).encode() + b"\n")
        return said, child.returncode or 0

    said, code = asyncio.run(run())
    ready, held, error = map(json.loads, said.splitlines())
    assert code == 1 and ready == {"ready": True} and held == {"held": True} and "error" in error


def test_the_teacher_is_right_as_often_as_a_sweep_says() -> None:
    drawn, right = draw_designs(ROWS, 100)
    share = sum(drawn[worked.design] for worked in right) / drawn.total()
    rng = random.Random(0)
    asked = statistics.mean(solve(ROWS, rng, "cuda").status == "ok" for _ in range(500))
    assert share == pytest.approx(asked, abs=0.1)
