import asyncio
import itertools
import json
import os
import random
import subprocess
from dataclasses import replace

import pytest
import torch
from kernels import FLAGS, build, call, reference

from cuda_agent.agent.tools import first_error
from cuda_agent.sandbox.build.builder import Builder, BuildError
from cuda_agent.sandbox.build.toolchain import CompilerMissing
from cuda_agent.synthesis.teacher.cpu_kernels import GRIDS, KERNEL, Design, draw_design, fault, files
from cuda_agent.synthesis.teacher.family import DRAWN, OPERATORS, FamilySpec, make_task, parse, sample_task
from cuda_agent.synthesis.teacher.teacher import redesign, solve, spoil

# All designs, and few enough of them for one compilation: every operator and every ending meets every choice.
DESIGNS = [
    Design(*choices)
    for choices in itertools.product(
        ("float", "double"), ("part", "stride"), GRIDS, (1, 8), ("fused", "split"), ("one", "two")
    )
]


def _cover() -> list[tuple[FamilySpec, Design]]:
    rng = random.Random(7)
    cases = []
    names = list(OPERATORS)
    for k in range(0, len(names), 2):  # two operators at a time, as they come: the C++ forms are what is tested
        pair = tuple((name, "4" if OPERATORS[name].has_constant else None) for name in names[k : k + 2])
        if sum(OPERATORS[name].binary for name, _ in pair) == 2:
            cases += [(FamilySpec((one,), None, 16, 40), rng.choice(DESIGNS)) for one in pair]
        else:
            cases.append((FamilySpec(pair, None, 16, 40), rng.choice(DESIGNS)))
    for ending in DRAWN["cpu"]:
        for passes, moments in itertools.product(("fused", "split"), ("one", "two")):
            design = replace(rng.choice(DESIGNS), passes=passes, moments=moments)
            cases.append((FamilySpec((("mul_y", None), ("add", "3")), ending, 16, 40), design))
    return cases


@pytest.fixture(scope="module")
def sampled():
    rng = random.Random(11)
    found = []
    while len(found) < 12:
        task = sample_task(rng)
        if (worked := solve(task, rng)).status == "ok":
            found.append((task, worked))
    return found


def test_every_operator_ending_and_choice_computes_what_torch_computes(tmp_path):
    torch.manual_seed(0)
    cases = _cover()
    tasks = [make_task(spec) for spec, _ in cases]
    library = build([files(*case) for case in cases], tmp_path)
    for k, (task, (spec, design)) in enumerate(zip(tasks, cases, strict=True)):
        inputs = [torch.randn(spec.rows, spec.columns) for _ in range(1 + spec.binary)]
        expected = reference(task.code)(*inputs)
        got = call(library, k, inputs, expected)
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3), (task.name, design)


def test_a_design_is_right_or_leaves_elements_out_as_its_fault_says(tmp_path):
    rng, cases = random.Random(12), []
    for ending in (None, "sum", "amax", "log_softmax", "rms_norm"):
        for rows, columns in ((48, 64), (51, 63), (50, 40), (47, 24)):
            spec = FamilySpec((("mul", "5"), ("tanh", None)), ending, rows, columns)
            cases += [(spec, draw_design(spec, rng)) for _ in range(6)]
    library = build([files(*case) for case in cases], tmp_path)
    found = []
    for k, (spec, design) in enumerate(cases):
        inputs = [torch.randn(spec.rows, spec.columns)]
        expected = reference(make_task(spec).code)(*inputs)
        right = torch.allclose(call(library, k, inputs, expected), expected, rtol=1e-2, atol=1e-2)
        assert fault(spec, design) == ("ok" if right else "wrong", ""), (spec, design)
        found.append(right)
    assert found.count(False) > 10
    shares = [solve(sample_task(rng), rng).status for _ in range(1000)]
    assert 500 < shares.count("ok") < 700, "designs are drawn without regard to the shape"


def test_sampled_solutions_are_right_and_mistakes_are_seen(sampled, tmp_path):
    rng = random.Random(3)
    torch.manual_seed(0)
    spoilt = []
    for task, worked in sampled:
        while (mistake := spoil(task, worked, rng)).status != "wrong":
            pass
        spoilt.append(mistake)
    library = build([w.files for _, w in sampled] + [m.files for m in spoilt], tmp_path)
    for k, (task, _) in enumerate(sampled):
        spec = parse(task)
        inputs = [torch.randn(spec.rows, spec.columns) for _ in range(1 + spec.binary)]
        expected = reference(task.code)(*inputs)
        assert torch.allclose(call(library, k, inputs, expected), expected, rtol=1e-2, atol=1e-2), task.name
        wrong = call(library, k + len(sampled), inputs, expected)
        assert not torch.allclose(wrong, expected, rtol=1e-2, atol=1e-2), (task.name, spoilt[k].wrong)


def test_build_errors_are_the_compilers_own(sampled, tmp_path):
    rng = random.Random(4)
    seen = set()
    for task, worked in itertools.cycle(sampled):
        mistake = spoil(task, worked, rng)
        kind = mistake.message.partition("error: ")[2][:8]
        if mistake.status == "build_error" and kind not in seen:
            seen.add(kind)
            (tmp_path / "kernels").mkdir(exist_ok=True)
            (tmp_path / KERNEL).write_text(mistake.files[KERNEL])
            done = subprocess.run(
                ["g++", *FLAGS, "-fsyntax-only", KERNEL],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                env=os.environ | {"LC_ALL": "C"},
            )
            path, line, message = mistake.message.split(":", 2)
            found = next(text for text in done.stderr.splitlines() if ": error: " in text)
            assert found.startswith(f"{path}:{line}:") and found.endswith(message), done.stderr
        if len(seen) == 2:
            return


def test_a_mistake_is_mended_by_its_own_edit(sampled):
    rng = random.Random(5)
    for task, worked in sampled * 5:
        mistake = spoil(task, worked, rng)
        assert mistake.files[mistake.path].count(mistake.wrong) == 1
        assert mistake.files[mistake.path].replace(mistake.wrong, mistake.right) == worked.files[mistake.path]


def test_choices_are_drawn_uniformly_and_show_in_the_files():
    rng = random.Random(6)
    task = make_task(FamilySpec((("tanh", None), ("mul", "5")), None, 64, 128))
    texts = [solve(task, rng).files for _ in range(400)]
    doubles = sum("double v" in text[KERNEL] for text in texts)
    strides = sum("+= grid" in text[KERNEL] for text in texts)
    wide = sum("g * 8" in text[KERNEL] for text in texts)
    assert 150 < doubles < 250 and 150 < strides < 250 and 150 < wide < 250
    grids = [json.loads(text["plan.json"])["nodes"][0]["grid"] for text in texts]
    assert all(60 < grids.count(grid) < 140 for grid in GRIDS)


def test_a_redesign_changes_one_choice_and_the_files():
    rng = random.Random(8)
    task = make_task(FamilySpec((("tanh", None),), "sum", 64, 128))
    for _ in range(50):
        worked = solve(task, rng)
        other = redesign(task, worked, rng)
        before, after = worked.design, other.design
        assert sum(getattr(before, f) != getattr(after, f) for f in Design.__dataclass_fields__) == 1
        assert other.files != worked.files


def test_on_a_gpu_build_errors_are_the_compilers_own_and_mistakes_are_mended(tmp_path):
    rng = random.Random(6)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    builder = Builder(tmp_path / "builds", scratch, None, 60, 2048, 1)
    statuses = set()
    try:
        while len(statuses) < 2:
            task = sample_task(rng, "cuda")
            worked = solve(task, rng, "cuda")
            mistake = spoil(task, worked, rng)
            assert mistake.files[mistake.path].replace(mistake.wrong, mistake.right) == worked.files[mistake.path]
            if mistake.status == "build_error" and mistake.status not in statuses:
                try:
                    build = builder.kernels(mistake.files, mistake.path, ["fused"], "sm_90")
                    asyncio.run(build)
                    pytest.fail("it compiles")
                except CompilerMissing as missing:
                    pytest.skip(str(missing))
                except BuildError as error:
                    assert first_error(str(error)) == first_error(mistake.message)
            statuses.add(mistake.status)
    finally:
        builder.close()
