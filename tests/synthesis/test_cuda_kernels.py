import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import build, call
from kernels import reference

from cuda_agent.sandbox.formats.expressions import PlanError
from cuda_agent.sandbox.formats.plan import compile_plan
from cuda_agent.synthesis.cuda_kernels import (
    CHAIN_DESIGNS,
    PLAN,
    ROW_DESIGNS,
    SHARED_BYTES,
    ChainDesign,
    Design,
    RowDesign,
    draw_design,
    fault,
    files,
    redraw,
)
from cuda_agent.synthesis.family import ENDINGS, OPERATORS, FamilySpec, make_task, sample_spec, task_spec

CHAIN = (("mul_y", None), ("tanh", None), ("add", "3"))


def _chains() -> list[tuple[FamilySpec, Design]]:
    designs = [ChainDesign(*values) for values in itertools.product(*CHAIN_DESIGNS.values())]
    return [(FamilySpec(CHAIN, None, 9, 61), design) for design in designs]


def _rows(columns: int) -> list[tuple[FamilySpec, Design]]:
    """Every ending meets every lane, cache, vector and way of computing moments."""
    rng = random.Random(columns)
    cases: list[tuple[FamilySpec, Design]] = []
    for ending, lanes, cache, vector in itertools.product(
        ENDINGS, ROW_DESIGNS["lanes"], ROW_DESIGNS["cache"], ROW_DESIGNS["vector"]
    ):
        threads, items, moments = (rng.choice(ROW_DESIGNS[name]) for name in ("threads", "items", "moments"))
        design = RowDesign(lanes, min(threads, 256), items, vector, cache, moments)
        cases.append((FamilySpec(CHAIN, ending, 9, columns), design))
    return cases


@pytest.mark.parametrize("cases", [_chains(), _rows(40), _rows(37)], ids=["chains", "rows of 40", "rows of 37"])
def test_a_design_is_right_or_leaves_elements_out_as_its_fault_says(
    cases: list[tuple[FamilySpec, Design]], tmp_path: Path
) -> None:
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
    assert found == {True, False}


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
    for _ in range(200):
        spec = sample_spec(rng, "cuda")
        design = draw_design(spec, rng)
        made = files(spec, design), task_spec(spec), "cuda"
        _, message = fault(spec, design)
        if message.startswith("nodes[0]"):
            with pytest.raises(PlanError, match=re.escape(message)):
                compile_plan(*made)
            continue
        (node,) = compile_plan(*made).nodes
        assert node["block"][0] == design.threads
        if isinstance(design, RowDesign):
            assert node["grid"][0] * design.rows >= spec.rows
            shared = 4 * spec.columns * design.rows if design.cache == "shared" else 0
            assert node["shared"] == shared
            assert ("a block has at most" in message) == (shared > SHARED_BYTES)


def test_designs_drawn_without_regard_to_the_shape_are_often_wrong() -> None:
    rng = random.Random(1)
    drawn = [fault(spec, draw_design(spec, rng))[0] for spec in (sample_spec(rng, "cuda") for _ in range(2000))]
    assert 0.2 < 1 - drawn.count("ok") / len(drawn) < 0.6
    assert drawn.count("build_error") > 10


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
