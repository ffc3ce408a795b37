"""The published schemas fit what the sandbox gives and takes, and the published files are the generated ones."""

import json
import random
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuda_agent.cli.sandbox import schema as command
from cuda_agent.sandbox.formats import plan, schema
from cuda_agent.sandbox.wire import KernelUse, Solution, TaskSpec, Tensor, Verdict
from cuda_agent.synthesis.teacher.family import sample_task
from cuda_agent.synthesis.teacher.teacher import solve
from tests.sandbox.conftest import KERNEL, PLAN, Running, plan_solution, task

VERDICT = jsonschema.Draft202012Validator(schema.verdict())
GRAMMAR = jsonschema.Draft202012Validator(schema.plan())


@pytest.mark.parametrize("name", sorted(schema.SCHEMAS))
def test_the_published_files_are_the_generated_ones(name, capsys):
    jsonschema.Draft202012Validator.check_schema(schema.SCHEMAS[name]())
    published = Path(__file__).parents[3] / "docs" / "schemas" / f"{name}.json"
    command(name)
    assert capsys.readouterr().out == published.read_text(), f"cuda-agent sandbox schema {name} > {published}"


def test_real_verdicts_of_every_kind_fit(running: Running):
    solutions = [
        plan_solution(),
        plan_solution(KERNEL.replace("0.0f)", "0.0f) + 0.5f")),
        plan_solution(KERNEL.replace("y[i] =", "z[i] =")),
        plan_solution(KERNEL.replace("y[i] =", "y[1L << 40] =")),
        Solution("python", {}),
    ]
    verdicts = [running.evaluate(task(), solution) for solution in solutions]
    assert len({verdict.status for verdict in verdicts}) == 4
    for verdict in [*verdicts, Verdict("infra", "plan", "strict", "cuda", "real", "lost")]:
        VERDICT.validate(json.loads(json.dumps(verdict.to_json())))


def test_the_kernels_of_a_plan_are_optional_and_a_verdict_without_them_does_not_name_them():
    use = KernelUse("fused<4>", 1024, 256, 40, 0, 0, 0.75, "registers", 1.3)
    verdict = Verdict("ok", "plan", "quick", "cuda", "real", kernels=[use])
    data = json.loads(json.dumps(verdict.to_json()))
    VERDICT.validate(data)
    assert Verdict.from_json(data) == verdict
    assert not VERDICT.is_valid(data | {"kernels": [data["kernels"][0] | {"more": 1}]})
    assert "kernels" not in Verdict("ok", "plan", "quick", "cpu", "real").to_json()


def test_a_timed_verdict_fits(timed: Running):
    verdict = timed.evaluate(task(), plan_solution(KERNEL + "// for the schema\n")).to_json()
    assert verdict["samples"] and verdict["phases"]
    VERDICT.validate(verdict)


@pytest.mark.parametrize(
    "change",
    [{"status": "fine"}, {"seconds": "fast"}, {"reward": 4}, {"more": 1}, {"samples": [None]}, {"advisory": None}],
)
def test_what_is_no_verdict_does_not_fit(change):
    good = Verdict("ok", "plan", "quick", "cpu", "real").to_json()
    VERDICT.validate(good)
    assert not VERDICT.is_valid(good | change)
    assert not VERDICT.is_valid({key: value for key, value in good.items() if key != "reward"})


def test_plans_of_the_teacher_fit_and_are_accepted():
    rng = random.Random(3)
    seen = set()
    for _ in range(200):
        made = sample_task(rng)
        text = solve(made, rng).files["plan.json"]
        GRAMMAR.validate(json.loads(text))
        seen.add(text)
    assert any("workspaces" in text for text in seen) and len(seen) > 5


def test_the_plans_of_the_guide_fit():
    text = (Path(__file__).parents[3] / "docs" / "guide.md").read_text()
    examples = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        GRAMMAR.validate(json.loads(example))


CUDA = {
    "kernel": "kernels/a.cu", "function": "a<4>", "grid": ["cdiv(in0.numel, 256)", 1, 2], "block": [256, 1, 1],
    "cluster": 2, "shared": "4 * in0.shape[1]", "cooperative": True, "args": ["in0", "out0", 1.5],
}  # fmt: skip


GEMM = {"library": "gemm", "a": "in0", "b": "in0", "c": "out0", "m": 1, "n": 1, "k": 1, "compute": "tf32"}
CONVOLUTION = {
    "library": "convolution", "input": "in0", "weight": "w:w", "bias": None, "output": "out0", "stride": 1, "groups": 1,
    "input_shape": [1, 1, "in0.numel"], "weight_shape": [1, 1, 3], "padding": [1], "dilation": 1, "compute": "tf32",
    "transposed": False, "output_padding": 0,
}  # fmt: skip


@pytest.mark.parametrize("node", [CUDA, GEMM, CONVOLUTION])
def test_nodes_for_a_gpu_fit_and_the_cpu_refuses_them(node):
    GRAMMAR.validate({"nodes": [node]})
    with pytest.raises(plan.PlanError):
        plan.compile_plan({"plan.json": json.dumps({"nodes": [node]}), "kernels/a.cu": ""}, SPEC)
    plan.compile_plan({"plan.json": json.dumps({"nodes": [node]}), "kernels/a.cu": ""}, SPEC, "cuda")


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"nodes": []},
        {"nodes": [{}]},
        {"nodes": [PLAN["nodes"][0]], "notes": ""},
        {"nodes": [{"kernel": "a.cpp"}]},
        {"nodes": [{"memset": "out0", "value": 256}]},
        {"nodes": [PLAN["nodes"][0]], "workspaces": {"in0": {"size": 1}}},
        {"nodes": [PLAN["nodes"][0]], "workspaces": {"a": {"size": 1, "dtype": "float7"}}},
        {"nodes": [PLAN["nodes"][0]], "guards": [1.5]},
        {"nodes": [{"library": "gemm"}]},
        {"nodes": [CONVOLUTION | {"library": "gemm"}]},
        {"nodes": [CONVOLUTION | {"stride": []}]},
        {"nodes": [CONVOLUTION | {"compute": "fp8"}]},
    ],
)
def test_what_no_plan_may_say_does_not_fit(bad):
    assert not GRAMMAR.is_valid(bad)


SPEC = TaskSpec(
    inputs=(Tensor((32, 128), "float32"),),
    outputs=(Tensor((32, 128), "float32"),),
    weights={"w": Tensor((4,), "float32")},
    arguments=({"tensor": 0},),
    init=({"value": 1.5},),
)
VALUES = st.sampled_from(
    ["in0", "out0", "tmp", "w:w", "init0", "in0.numel", "cdiv(in0.numel, 8)", 1, 4, 0.5, "x +", -1]
)
NODES = st.one_of(
    st.fixed_dictionaries(
        {"kernel": st.sampled_from(["k.cpp", "no.cpp"]), "function": st.sampled_from(["f", "f<2>", "f f"])},
        optional={"grid": VALUES, "args": st.lists(VALUES, max_size=4), "note": VALUES},
    ),
    st.fixed_dictionaries({"memset": VALUES}, optional={"value": st.integers(-1, 300) | st.booleans()}),
    st.builds(
        dict.__or__,
        st.sampled_from([CONVOLUTION | {"compute": "fp32"}, GEMM | {"compute": "bf16"}]),
        st.dictionaries(
            st.sampled_from(sorted({*CONVOLUTION, *GEMM, "batch", "transpose_a"})),
            VALUES | st.lists(VALUES, max_size=4) | st.booleans() | st.sampled_from(["fp16", "tf32"]),
            max_size=2,
        ),
    ),
)
SPACES = st.dictionaries(
    st.sampled_from(["tmp", "in0", "init7", "a b", "größe", "x_1"]),
    st.fixed_dictionaries(
        {"size": VALUES}, optional={"dtype": st.sampled_from(["float32", "bool", "float16"]), "init": VALUES}
    ),
    max_size=2,
)
PLANS = st.fixed_dictionaries(
    {"nodes": st.lists(NODES, min_size=1, max_size=3)},
    optional={"workspaces": SPACES, "guards": st.lists(VALUES, max_size=2)},
)


def test_whatever_the_sandbox_accepts_fits_the_schema():
    accepted = []

    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PLANS)
    def check(made):
        try:
            plan.compile_plan({"plan.json": json.dumps(made), "k.cpp": ""}, SPEC)
        except plan.PlanError:
            return
        accepted.append(made)
        GRAMMAR.validate(made)

    check()
    kinds = {
        kind for made in accepted for node in made["nodes"] for kind in ("kernel", "memset", "library") if kind in node
    }
    assert len(accepted) >= 5 and kinds, "hardly a plan was accepted: the test shows nothing"
