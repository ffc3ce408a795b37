import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import build, call
from kernels import reference

from cuda_agent.sandbox.formats.expressions import PlanError
from cuda_agent.sandbox.formats.plan import compile_plan
from cuda_agent.synthesis.teacher.cuda_columns import COLUMN_DESIGNS, TRANSPOSE_DESIGNS, ColumnDesign, TransposeDesign
from cuda_agent.synthesis.teacher.cuda_kernels import (
    CHAIN_DESIGNS,
    PLAN,
    ROW_DESIGNS,
    ChainDesign,
    Design,
    RowDesign,
    draw_design,
    fault,
    files,
    plain,
    redraw,
)
from cuda_agent.synthesis.teacher.cuda_parts import SHARED_BYTES
from cuda_agent.synthesis.teacher.family import (
    ENDINGS,
    LENGTHS,
    OPERATORS,
    FamilySpec,
    make_task,
    sample_spec,
    task_spec,
)
from cuda_agent.synthesis.teacher.teacher import solve_right, spoil

CHAIN = (("mul_y", None), ("tanh", None), ("add", "3"))


def _chains() -> list[tuple[FamilySpec, Design]]:
    designs = [ChainDesign(*values) for values in itertools.product(*CHAIN_DESIGNS.values())]
    return [(FamilySpec(CHAIN, None, 9, 61), design) for design in designs]


def _endings(kind: str) -> list[str]:
    return [name for name, ending in ENDINGS.items() if ending.kind == kind]


def _rows(columns: int) -> list[tuple[FamilySpec, Design]]:
    """Every ending meets every lane, cache, vector and way of computing moments."""
    rng = random.Random(columns)
    cases: list[tuple[FamilySpec, Design]] = []
    for ending, lanes, cache, vector in itertools.product(
        _endings("row"), ROW_DESIGNS["lanes"], ROW_DESIGNS["cache"], ROW_DESIGNS["vector"]
    ):
        threads, items, moments = (rng.choice(ROW_DESIGNS[name]) for name in ("threads", "items", "moments"))
        design = RowDesign(lanes, min(threads, 256), items, vector, cache, moments)
        cases.append((FamilySpec(CHAIN, ending, 9, columns), design))
    return cases


def _columns(rows: int, columns: int) -> list[tuple[FamilySpec, Design]]:
    """Every ending meets every depth and vector; the other choices are drawn."""
    rng = random.Random(columns)
    cases: list[tuple[FamilySpec, Design]] = []
    for ending, deep, vector in itertools.product(_endings("column"), COLUMN_DESIGNS["deep"], COLUMN_DESIGNS["vector"]):
        spec = FamilySpec(CHAIN, ending, rows, columns)
        guard, split, cache, moments = (rng.choice(COLUMN_DESIGNS[n]) for n in ("guard", "split", "cache", "moments"))
        cases.append((spec, plain(spec, ColumnDesign(64, deep, vector, guard, split, cache, moments))))
    return cases


def _transposes(rows: int, columns: int) -> list[tuple[FamilySpec, Design]]:
    designs = (TransposeDesign(*values) for values in itertools.product(*TRANSPOSE_DESIGNS.values()))
    spec = FamilySpec(CHAIN, "transpose", rows, columns)
    return [(spec, design) for design in designs if design.threads < 1024 and design == plain(spec, design)]


CASES = {
    "chains": _chains(), "rows of 40": _rows(40), "rows of 37": _rows(37), "columns of 40": _columns(40, 128),
    "columns of 69": _columns(69, 70), "whole squares": _transposes(64, 128), "ragged squares": _transposes(68, 100),
    "odd squares": _transposes(70, 65), "odd columns": _transposes(64, 67),
}  # fmt: skip


BY_DAY = ("chains", "odd squares")  # they take ten seconds each, rows a minute


@pytest.mark.parametrize(
    "cases",
    [pytest.param(cases, id=name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name, cases in CASES.items()],
)
def test_a_design_is_right_or_leaves_elements_out_as_its_fault_says(
    cases: list[tuple[FamilySpec, Design]], tmp_path: Path
) -> None:
    cases = [case for case in cases if fault(*case)[0] != "build_error"]
    torch.manual_seed(0)
    spec, _ = cases[0]
    library = build([files(*case) for case in cases], tmp_path, spec.rows, spec.columns)
    inputs = [torch.randn(spec.rows, spec.columns) for _ in range(2)]
    found = set()
    for k, (spec, design) in enumerate(cases):
        expected = reference(make_task(spec).code)(*inputs)
        right = torch.allclose(call(library, k, inputs, expected), expected, rtol=1e-3, atol=1e-3)
        assert right == (fault(spec, design) == ("ok", "")), (spec, design)
        found.add(right)
    assert found == ({True} if spec.columns == 128 else {True, False})


def test_a_mistake_in_a_kernel_over_columns_or_in_a_transpose_is_seen(tmp_path: Path) -> None:
    rng = random.Random(2)
    torch.manual_seed(0)
    tasks, spoilt = [], []
    for ending in (*_endings("column"), "transpose"):
        tasks.append(make_task(FamilySpec((("mul_y", None), ("sinh", None), ("add", "3")), ending, 64, 128)))
        worked = solve_right(tasks[-1], rng, "cuda")
        while (mistake := spoil(tasks[-1], worked, rng)).status != "wrong":
            pass
        spoilt.append(mistake.files)
    library = build(spoilt, tmp_path, 64, 128)
    inputs = [torch.randn(64, 128) for _ in range(2)]
    for k, task in enumerate(tasks):
        expected = reference(task.code)(*inputs)
        assert not torch.allclose(call(library, k, inputs, expected), expected, rtol=1e-2, atol=1e-2), task.name


def test_every_operator_computes_what_torch_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    design = ChainDesign(64, 2, 1, True)
    cases = [FamilySpec(((name, "4" if op.has_constant else None),), None, 9, 61) for name, op in OPERATORS.items()]
    library = build([files(spec, design) for spec in cases], tmp_path, 9, 61)
    inputs = [torch.randn(9, 61) for _ in range(2)]
    for k, spec in enumerate(cases):
        expected = reference(make_task(spec).code)(*inputs[: 1 + spec.binary])
        assert torch.allclose(call(library, k, inputs, expected), expected, rtol=1e-3, atol=1e-3), spec


def test_plans_are_valid_and_ask_for_what_the_design_says() -> None:
    rng = random.Random(2)
    for _ in range(400):
        spec = sample_spec(rng, "cuda")
        design = draw_design(spec, rng)
        made = files(spec, design), task_spec(spec), "cuda"
        _, message = fault(spec, design)
        if message.startswith("nodes[0]"):
            with pytest.raises(PlanError, match=re.escape(message)):
                compile_plan(*made)
            continue
        node, *_ = compile_plan(*made).nodes
        assert node["block"][0] == design.threads
        if isinstance(design, RowDesign):
            assert node["grid"][0] * design.rows >= spec.rows
            shared = 4 * spec.columns * design.rows if design.cache == "shared" else 0
            assert node["shared"] == shared
            assert ("a block has at most" in message) == (shared > SHARED_BYTES)
        if isinstance(design, ColumnDesign):
            assert (node["grid"][0] * design.columns >= spec.columns) or not design.guard
            assert node["shared"] == (4 * spec.rows * design.columns if design.cache == "shared" else 0)
            assert ("a block has at most" in message) == (node["shared"] > SHARED_BYTES)
            assert node["grid"][1] == design.split


def test_a_grid_without_a_whole_block_is_a_build_error() -> None:
    column = FamilySpec(CHAIN, "column_sum", 16384, 32), ColumnDesign(256, 4, 1, False, 4, "none", "one")
    transpose = FamilySpec(CHAIN, "transpose", 40, 100), TransposeDesign("plain", "input", 64, 256, 1, False)
    for spec, design in (column, transpose):
        assert fault(spec, replace(design, guard=True)) == ("ok", "")
        status, message = fault(spec, design)
        assert status == "build_error"
        with pytest.raises(PlanError, match=re.escape(message)):
            compile_plan(files(spec, design), task_spec(spec), "cuda")


def test_designs_drawn_without_regard_to_the_shape_are_often_wrong() -> None:
    rng = random.Random(1)
    drawn: dict[str, list[str]] = {}
    for spec in (sample_spec(rng, "cuda") for _ in range(3000)):
        drawn.setdefault(spec.kind, []).append(fault(spec, draw_design(spec, rng))[0])
    assert drawn.keys() == {"chain", "row", "column", "transpose"}
    for kind, found in drawn.items():
        assert 0.2 < 1 - found.count("ok") / len(found) < 0.65, kind
    assert drawn["row"].count("build_error") > 10 and drawn["column"].count("build_error") > 3


def test_a_block_that_keeps_columns_in_shared_memory_has_room_for_its_reduction() -> None:
    for rows in (*LENGTHS["cuda"]["narrow"], *LENGTHS["cuda"]["medium"]):
        for threads, deep, vector in itertools.product(
            *(COLUMN_DESIGNS[name] for name in ("threads", "deep", "vector"))
        ):
            design = ColumnDesign(threads, deep, vector, True, 1, "shared", "two")
            kept = 4 * rows * design.columns
            assert kept > SHARED_BYTES or deep == 1 or kept + 2 * 4 * threads <= SHARED_BYTES


def test_a_redrawn_design_has_other_files() -> None:
    rng = random.Random(4)
    for _ in range(300):
        spec = sample_spec(rng, "cuda")
        design = draw_design(spec, rng)
        assert files(spec, redraw(spec, design, rng)) != files(spec, design)


def test_a_plan_is_one_line_of_json() -> None:
    rng = random.Random(0)
    spec = sample_spec(rng, "cuda")
    text = files(spec, draw_design(spec, rng))[PLAN]
    assert text.count("\n") == 1 and json.loads(text)["nodes"][0]["function"] == "fused"
