"""Declared parameters of a solution: how they are found and replaced, and which variant wins."""

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from cuda_agent.cli.main import app
from cuda_agent.errors import TaskError
from cuda_agent.optimize.tuning import declared, tune, tuning_lines, variants_of, with_values
from cuda_agent.sandbox.wire import Solution, Verdict
from cuda_agent.tasks.task import Task

KERNEL = """
// tune: BLOCK 64 128 256
#define ITEMS 4  // tune: ITEMS 4 2 8
template <int N> constexpr int WIDE = N;
constexpr long DEPTH = -1; // tune: DEPTH 3
int use(int ITEMS_2 = 5) { return ITEMS == 4 ? BLOCK : DEPTH; }
"""
PLAN = {"constants": {"BLOCK": 128}, "nodes": [{"kernel": "kernels/k.cu", "function": "f"}]}
FILES = {"plan.json": json.dumps(PLAN), "kernels/k.cu": KERNEL}


def test_a_parameter_is_a_constant_of_the_plan_or_one_number_of_its_file() -> None:
    found = declared(FILES)
    assert [(one.name, one.values, one.file) for one in found] == [
        ("BLOCK", (128, 64, 256), "plan.json"),
        ("ITEMS", (4, 2, 8), "kernels/k.cu"),
        ("DEPTH", (-1, 3), "kernels/k.cu"),
    ]
    changed = with_values(FILES, found, {"BLOCK": 256, "ITEMS": 16, "DEPTH": 3})
    assert json.loads(changed["plan.json"]) == PLAN | {"constants": {"BLOCK": 256}}
    assert changed["kernels/k.cu"] == KERNEL.replace("ITEMS 4  //", "ITEMS 16  //").replace("DEPTH = -1;", "DEPTH = 3;")


def test_python_files_declare_parameters_too() -> None:
    text = "BLOCK: int = 64  # tune: BLOCK 32\nkernel[grid](x, num_warps=4)\n# tune: num_warps 8\n"
    files = {"model_new.py": text}
    found = declared(files)
    assert [(one.name, one.values) for one in found] == [("BLOCK", (64, 32)), ("num_warps", (4, 8))]
    changed = with_values(files, found, {"BLOCK": 128, "num_warps": 2})["model_new.py"]
    assert changed.startswith("BLOCK: int = 128 ") and "num_warps=2)" in changed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("// tune: BLOCK", "k.cu, line 1: expected a name and integers"),
        ("\n// tune:", "k.cu, line 2: expected a name and integers"),
        ("// tune: BLOCK 1.5", "expected a name and integers"),
        ("// tune: 3 4", "expected a name and integers"),
        ("#define B 1 // tune: B 2\n// tune: B 3", "line 2: B is declared twice"),
        ("// tune: B 2", "no line gives B a number in this file"),
        ("float B = 1.5; // tune: B 2", "no line gives B"),
        ("int B = 1; int BB = 1; B = 2; // tune: B 3", "several lines give B a number"),
        ("int A = B; // tune: A 3", "no line gives A"),
    ],
)
def test_a_faulty_declaration_is_named_with_its_place(text: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        declared({"k.cu": text})


def test_the_given_solution_is_the_first_variant_and_stays_as_it_is() -> None:
    solution, found = Solution("plan", FILES), declared(FILES)
    every = variants_of(solution, found, 100)
    assert len(every) == 18 and len({variant.solution.digest for variant in every}) == 18
    assert every[0].solution == solution and every[0].said == "BLOCK=128 ITEMS=4 DEPTH=-1"
    some = variants_of(solution, found, 5)
    assert len(some) == 5 and some[0].solution == solution
    assert {v.said for v in some} < {v.said for v in every} and len({v.said for v in some}) == 5
    assert [v.said for v in some] == [v.said for v in variants_of(solution, found, 5)]


class Judged:
    """Judges a variant by its value of B: ``quick`` and ``strict`` map it to a time in seconds, or to a status."""

    def __init__(self, quick: dict[int, Any], strict: dict[int, Any]) -> None:
        self.tables, self.asked = {"quick": quick, "strict": strict}, []

    async def evaluate(self, task: Task, solution: Solution, mode: str = "quick") -> Verdict:
        value = int(solution.files["k.cu"].split()[2])
        self.asked.append((mode, value))
        said = self.tables[mode][value]
        if isinstance(said, str):
            return Verdict(said, "plan", mode, "cuda", "real", "no")  # type: ignore[arg-type]
        return Verdict("ok", "plan", mode, "cuda", "real", seconds=said, eager_seconds=1.0)  # type: ignore[arg-type]


def tuned(quick: dict[int, Any], strict: dict[int, Any]) -> tuple[Any, Judged]:
    values = " ".join(map(str, quick))
    sandbox = Judged(quick, strict)
    solution = Solution("plan", {"k.cu": f"#define B {next(iter(quick))} // tune: B {values}"})
    task = Task("t", "")
    return asyncio.run(tune(task, solution, sandbox, 100, lambda line: None)), sandbox  # type: ignore[arg-type]


def test_strict_verdicts_decide_among_the_fastest_and_the_given_one_is_among_them() -> None:
    quick = {1: 0.9, 2: 0.5, 3: 0.4, 4: 0.3, 5: "wrong", 6: 0.2, 7: 0.6}
    found, sandbox = tuned(quick, {1: 0.9, 2: 0.45, 3: 0.3, 4: 0.5, 6: "wrong"})
    assert sorted(value for mode, value in sandbox.asked if mode == "strict") == [1, 2, 3, 4, 6]
    assert found.best.values == {"B": 3} and not found.faulty
    lines = tuning_lines(found)
    assert lines[0] == "7 variants: 6 ok, 1 wrong"
    assert lines[-1] == "B=3 is the fastest, 3.00 times as fast as the given values (B=1)"


def test_a_solution_that_only_other_values_make_right_is_found() -> None:
    found, _ = tuned({1: "build_error", 2: 0.5}, {2: 0.5})
    assert tuning_lines(found)[-1].startswith("B=2 is the fastest; with the given values (B=1) the solution is not")


def test_nothing_right_and_a_failed_sandbox_are_told_apart() -> None:
    wrong, _ = tuned({1: "wrong", 2: "crash"}, {})
    failed, _ = tuned({1: "infra", 2: "wrong"}, {})
    assert (wrong.best, wrong.faulty, failed.best, failed.faulty) == (None, False, None, True)


def test_a_solution_without_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match="declares no parameter"):
        asyncio.run(tune(Task("t", ""), Solution("plan", {"k.cu": ""}), None, 9, print))  # type: ignore[arg-type]


def test_the_command_writes_the_fastest_variant(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.abs()\n"
        "def get_inputs():\n    return [torch.randn(64, 8)]\ndef get_init_inputs():\n    return []\n"
    )
    folder = tmp_path / "solution" / "kernels"
    folder.mkdir(parents=True)
    (folder / "k.cpp").write_text(
        "#include <cmath>\n// tune: BLOCKS 2\n#define SIGN 1 // tune: SIGN -1\n"
        "void f(long block, long grid, const float* x, float* y, long n) {\n"
        "  for (long i = block; i < n; i += BLOCKS) y[i] = SIGN * std::fabs(x[i]);\n}\n"
    )
    node = {"kernel": "kernels/k.cpp", "function": "f", "grid": "BLOCKS", "args": ["in0", "out0", "in0.numel"]}
    (tmp_path / "solution" / "plan.json").write_text(json.dumps({"constants": {"BLOCKS": 1}, "nodes": [node]}))
    command = [
        "tune",
        "model.py",
        "solution",
        "sandbox.clock=model",
        f"run.store={tmp_path / 'store'}",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "4 variants: 2 ok, 2 wrong" in done.output
    written = json.loads((tmp_path / "solution-tuned" / "plan.json").read_text())
    assert written["constants"]["BLOCKS"] in (1, 2)
    assert json.loads((tmp_path / "solution-tuned" / "verdict.json").read_text())["mode"] == "strict"
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0 and "exists already" in str(again.exception or again.output)
