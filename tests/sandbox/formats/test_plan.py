"""Reading plan.json: the expression grammar, and errors that point at the node."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuda_agent.sandbox.formats.expressions import Buffer, PlanError, evaluate
from cuda_agent.sandbox.formats.plan import compile_plan
from cuda_agent.sandbox.wire import TaskSpec, Tensor

SPEC = TaskSpec(
    inputs=(Tensor((4, 96), "float32"), Tensor((4,), "int64")),
    outputs=(Tensor((4, 96), "float32"),),
    weights={"linear.weight": Tensor((96, 32), "float32"), "linear.bias": Tensor((96,), "float32")},
    arguments=({"tensor": 0}, [{"tensor": 1}, {"value": 3}]),
    init=({"value": 7}, {"value": 0.5}, {"value": [1, 2]}),
)
NODE: dict[str, Any] = {
    "kernel": "k.cpp",
    "function": "f<8>",
    "grid": "cdiv(in0.numel, 64)",
    "args": ["in0", "out0", "w:linear.bias", "in0.shape[1]", "init0", "init1", "in2", 2.5],
}


def files(plan: Any) -> dict[str, str]:
    return {"plan.json": plan if isinstance(plan, str) else json.dumps(plan), "k.cpp": "void f() {}"}


def test_a_plan_becomes_a_program_and_a_trampoline() -> None:
    program = compile_plan(files({"nodes": [{"memset": "out0"}, NODE]}), SPEC)
    assert program.nodes[0] == {"memset": "out:0", "bytes": 4 * 96 * 4, "value": 0}
    assert program.nodes[1]["grid"] == 6
    assert program.nodes[1]["args"] == [
        {"buffer": "in:0"}, {"buffer": "out:0"}, {"buffer": "w:1"}, {"int": 96}, {"int": 7}, {"float": 0.5}, {"int": 3},
        {"float": 2.5},
    ]  # fmt: skip
    assert '#include "k.cpp"' in program.source
    assert "f<8>(block, grid, (float*)a[0], (float*)a[1], (float*)a[2], *(long*)a[3]" in program.source


def test_a_constant_is_one_number_in_expressions_and_in_kernels() -> None:
    node = NODE | {"grid": "cdiv(in0.numel, BLOCK)", "function": "f<BLOCK>", "args": ["in0", "out0", "BLOCK // 2"]}
    program = compile_plan(files({"constants": {"BLOCK": 96, "LOW": -1}, "nodes": [node]}), SPEC)
    assert program.nodes[0]["grid"] == 4 and program.nodes[0]["args"][-1] == {"int": 48}
    assert program.source.startswith('constexpr int BLOCK = 96;\nconstexpr int LOW = -1;\n#include "k.cpp"')


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("in0.numel", 384), ("in0.shape[-1] * 2 + in0.ndim", 194), ("in0.shape[0] // 3 % 2", 1), ("min(5, 3, 4)", 3),
        ("max(in0.shape[0], 9)", 9), ("cdiv(10, 4)", 3), ("select(in0.shape[1] >= 96, 8, 1)", 8), ("-2 + init0", 5),
        ("w:linear.weight.numel // w:linear.weight.shape[1]", 96), ("in2", 3), (12, 12), ("in1.numel == 4", 1),
    ],
)  # fmt: skip
def test_expressions(text: Any, value: int) -> None:
    from cuda_agent.sandbox.formats.plan import _names

    assert evaluate(text, _names(SPEC), "here") == value


def test_weights_with_similar_names_and_a_workspace_keep_their_own_shapes() -> None:
    sizes = {"w:a.b": 2, "w:a_b": 5, "weight0": 7, "weight_w_a_b": 11}
    names = {name: Buffer(name, Tensor((size,), "float32")) for name, size in sizes.items()}
    before = dict(names)
    assert evaluate("w:a.b.numel * 10 + w:a_b.numel", names, "here") == 25
    assert evaluate("w:a_b.numel * 100 + weight0.numel * 10 + weight_w_a_b.numel", names, "here") == 581
    assert names == before


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("{", "plan.json is not JSON"),
        ("[]", "plan.json: an object is expected"),
        ({}, "plan.json: 'nodes' is missing"),
        ({"nodes": [], "node": 1}, "plan.json: 'node' is unknown; there are constants, guards, nodes, workspaces"),
        ({"nodes": []}, "nodes: 1 to 256 are possible"),
        ({"nodes": [dict(NODE, kernel="x.cpp")]}, "nodes[0].kernel: there is no file 'x.cpp'"),
        ({"nodes": [dict(NODE, kernel="../k.cpp")]}, "nodes[0].kernel"),
        ({"nodes": [dict(NODE, function="f(); system")]}, "nodes[0].function"),
        ({"nodes": [dict(NODE, grid=0)]}, "nodes[0].grid: 1 to"),
        ({"nodes": [dict(NODE, block=32)]}, "nodes[0]: 'block' is unknown"),
        ({"nodes": [dict(NODE, args=["in9"])]}, "nodes[0].args[0]: there is no in9 (there are in0, in1, in2, out0"),
        ({"nodes": [dict(NODE, args=["in0 * 2"])]}, "nodes[0].args[0]: in0 is a buffer; use in0.numel"),
        ({"nodes": [dict(NODE, args=["in0.shape[2]"])]}, "nodes[0].args[0]: in0 has 2 dimensions"),
        ({"nodes": [dict(NODE, grid="1 // 0")]}, "nodes[0].grid: division by zero"),
        ({"nodes": [dict(NODE, grid="__import__('os')")]}, "nodes[0].grid"),
        ({"nodes": [dict(NODE, grid="9 ** 9")]}, "nodes[0].grid"),
        ({"nodes": [dict(NODE, grid="(" * 200)]}, "nodes[0].grid"),
        ({"nodes": [{"memset": "in0"}]}, "nodes[0].memset: 'in0' is no output and no workspace"),
        ({"nodes": [{"library": "gemm"}]}, "nodes[0]: 'a' is missing"),
        ({"nodes": [NODE], "guards": ["in0.shape[1] % 64 == 0"]}, "guards[0]: 'in0.shape[1] % 64 == 0' does not hold"),
        ({"nodes": [NODE], "workspaces": {"t": {"size": "1 << 40"}}}, "workspaces.t.size"),
        ({"nodes": [NODE], "workspaces": {"t": {"size": 1 << 40}}}, "workspaces.t.size"),
        ({"nodes": [NODE], "workspaces": {"in0": {"size": 4}}}, "workspaces.in0: not a name"),
        ({"nodes": [NODE], "workspaces": {"t": {"size": 4, "dtype": "int8", "init": 1000}}}, "workspaces.t.init"),
        ({"nodes": [NODE], "workspaces": {"t": {"size": 4, "dtype": ["int8"]}}}, "workspaces.t.dtype: ['int8'] is"),
        ({"nodes": [NODE], "workspaces": {"t": 4}}, "workspaces.t: an object is expected, not 4"),
        ({"nodes": [NODE], "constants": {"B": 1.5}}, "constants.B: an integer of 32 bits is expected, not 1.5"),
        ({"nodes": [NODE], "constants": {"B": True}}, "constants.B: an integer of 32 bits is expected, not true"),
        ({"nodes": [NODE], "constants": {"B": 1 << 31}}, "constants.B: an integer of 32 bits is expected"),
        ({"nodes": [NODE], "constants": {"in0": 4}}, "constants.in0: not a name for a constant"),
        ({"nodes": [NODE], "constants": {"B; int x": 4}}, "constants.B; int x: not a name for a constant"),
        ({"nodes": [NODE], "constants": {"t": 4}, "workspaces": {"t": {"size": 4}}}, "workspaces.t: not a name"),
        ({"nodes": [NODE], "constants": []}, "constants: an object is expected, not []"),
        ({"nodes": {}}, "nodes: a list is expected, not {}"),
        ({"nodes": [NODE, 3]}, "nodes[1]: an object is expected, not 3"),
        ({"nodes": [{"grid": None, "x": 1}]}, "nodes[0]: 'function' is missing"),
        ({"nodes": [dict(NODE, grid=None, x=1)]}, "nodes[0]: 'x' is unknown; there are args, function, grid, kernel"),
        ({"nodes": [dict(NODE, shared=None)]}, "nodes[0]: 'shared' is unknown; there are args, function, grid, kernel"),
        ({"nodes": [dict(NODE, grid=None)]}, "nodes[0].grid: an integer or an expression is expected, not null"),
        ({"nodes": [dict(NODE, args="in0")]}, 'nodes[0].args: a list is expected, not "in0"'),
        ({"nodes": [{"memset": "out0", "value": True}]}, "nodes[0].value: a byte from 0 to 255, not True"),
        ({"nodes": [{"memset": 0}]}, "nodes[0].memset: 0 is no output and no workspace"),
    ],
)  # fmt: skip
def test_an_error_points_at_its_place(plan: Any, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        compile_plan(files(plan), SPEC)
    assert words in str(caught.value) and "\n" not in str(caught.value)


LIBRARY_NODES: list[dict[str, Any]] = [
    {"library": "gemm", "a": "in0", "b": "in0", "c": "out0", "m": 4, "n": 4, "k": 96, "transpose_b": True},
    {
        "library": "convolution", "input": "in0", "weight": "w:linear.weight", "output": "out0", "compute": "fp32",
        "input_shape": [4, 1, 96], "weight_shape": [1, 1, 3], "padding": [1], "transposed": False,
    },
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


def test_any_json_is_either_a_program_or_a_plan_error() -> None:
    accepted = refused = 0

    @settings(deadline=None)
    @given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
    @example("in0")
    @example(1)
    def check(value: Any) -> None:
        nonlocal accepted, refused
        plans = [value, {"nodes": value}, {"nodes": [value]}, {"nodes": [dict(NODE, args=[value])]}]
        plans += [
            {"nodes": [node | {key: value}]} for node in LIBRARY_NODES for key in (*node, "bias", "stride", "batch")
        ]
        for plan in plans:
            try:
                program = compile_plan(files(json.dumps(plan)), SPEC)
            except PlanError:
                refused += 1
            else:
                assert len(program.nodes) == len(plan["nodes"])
                accepted += 1

    check()
    assert accepted > 1 and refused > 1


def test_any_text_is_either_a_number_or_a_plan_error() -> None:
    numbers: set[int] = set()

    @given(st.text(max_size=40))
    @example("n")
    @example("cdiv(7, n) * 2")
    def check(text: str) -> None:
        try:
            number = evaluate(text, {"n": 3}, "here")
        except PlanError:
            return
        assert type(number) is int
        numbers.add(number)

    check()
    assert {3, 6} <= numbers
