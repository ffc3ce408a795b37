import ctypes
import random
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernels import reference

from cuda_agent.sandbox.messages import Frame, WorkerOperation
from cuda_agent.sandbox.wire import TaskSpec
from cuda_agent.sandbox.worker.reference import Reference
from cuda_agent.synthesis.teacher.family import (
    BINARY,
    DRAWN,
    ELEMENTS,
    ENDINGS,
    LENGTHS,
    OPERATORS,
    UNARY,
    FamilySpec,
    chain_values,
    combination,
    make_task,
    parse,
    sample_spec,
    sample_task,
    steps,
    task_spec,
)
from cuda_agent.tasks.inspect import problems
from cuda_agent.tasks.task import Task


@pytest.fixture(scope="module")
def tasks():
    rng = random.Random(5)
    return [sample_task(rng) for _ in range(400)]


def test_the_same_seed_gives_the_same_tasks(tasks):
    rng = random.Random(5)
    assert [sample_task(rng) for _ in range(20)] == tasks[:20]


def test_tasks_have_the_published_form_and_at_most_five_operators(tasks):
    for task in tasks:
        assert problems(task.code) == []
        assert 1 <= len(task.ops) <= 5
        assert task.data_source == f"torch#{len(task.ops)}"
        assert task.family == "teacher"


def test_every_operator_and_every_ending_occurs(tasks):
    assert {name for task in tasks for name in parse(task).names} == set(OPERATORS) | set(DRAWN["cpu"])


@pytest.mark.parametrize("scale", [1, 30], ids=["usual", "large"])
def test_every_operator_is_in_cpp_as_exact_as_in_torch_wherever_torch_is_finite(tmp_path: Path, scale: int):
    """Strict mode checks inputs that are 30 times as large: a form that overflows there is wrong for every design."""
    torch.manual_seed(0)
    x, y = scale * torch.randn(2, 4096)
    specs = {
        name: FamilySpec(((name, "4" if one.has_constant else None),), None, 64, 64) for name, one in OPERATORS.items()
    }
    loops = (
        f'extern "C" void of_{name}(const float* x, const float* y, float* z) '
        f"{{ for (int i = 0; i < 4096; i++) {{ float v = x[i], w = y[i]; {steps(spec)[0]} z[i] = v; }} }}"
        for name, spec in specs.items()
    )
    (tmp_path / "forms.cpp").write_text("#include <cmath>\nusing namespace std;\n" + "\n".join(loops))
    library = tmp_path / "forms.so"
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, tmp_path / "forms.cpp"], check=True)
    of = ctypes.CDLL(str(library))
    off = {}
    for name, operator in OPERATORS.items():
        code, names = operator.torch.replace("{c}", "4"), {"torch": torch, "F": F, "x": x, "y": y}
        want, have = eval(code, names), torch.empty(4096)
        of[f"of_{name}"](*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, y, have)))
        known = want.isfinite()
        want, have = want[known], have[known]
        limit = 1e-4 * (want.square().mean().sqrt() + want.abs())
        if wrong := int((~((want - have).abs() <= limit)).sum()):
            off[name] = wrong
    assert off == {}


def test_parse_inverts_make_task_for_every_operator_and_ending():
    for name, operator in OPERATORS.items():
        for ending in (None, *ENDINGS):
            spec = FamilySpec(((name, "4" if operator.has_constant else None),), ending, 64, 128)
            assert parse(make_task(spec)) == spec


def test_the_judges_worker_reports_the_same_specification():
    for ending in (None, *ENDINGS):
        for name in ("tanh", "mul_y"):
            spec = FamilySpec(((name, None),), ending, 64, 128)
            reference = Reference(None, {"device": "cpu", "train_mode": False})
            report = reference.open_task(
                Frame(WorkerOperation.OPEN_TASK, 0, {"seed": 0, "code": make_task(spec).code}, [])
            )
            assert TaskSpec.from_json(report) == task_spec(spec)


def test_foreign_code_is_refused(tasks):
    code = tasks[0].code
    for other in ("", "x = 1", code.replace("return []", "return [1]"), code.replace("torch.randn", "torch.rand")):
        with pytest.raises(ValueError, match="family"):
            parse(Task("other", other, (), "torch#1"))


def test_the_combination_ignores_constants_and_shapes_but_not_order():
    def key(chain, ending=None, rows=64):
        return combination(make_task(FamilySpec(chain, ending, rows, 128)))

    assert key((("mul", "5"), ("relu", None))) == key((("mul", "8"), ("relu", None)), rows=32) == "mul>relu"
    assert key((("relu", None), ("mul", "5"))) != key((("mul", "5"), ("relu", None)))
    assert key((("mul_y", None),), "sum") == "mul_y>sum"


@pytest.mark.parametrize("device", LENGTHS)
def test_at_most_one_second_input_and_shapes_within_bounds(device):
    rng = random.Random(2)
    for _ in range(300):
        spec = sample_spec(rng, device)
        assert sum(name in BINARY for name, _ in spec.chain) <= 1
        least, most = ELEMENTS[device]
        length = spec.rows if spec.kind == "column" else spec.columns
        assert 2**least - length < spec.rows * spec.columns <= 2**most
        assert length in LENGTHS[device][ENDINGS[spec.ending].length if spec.ending else "plain"]
        assert parse(sample_task(random.Random(0), device))


def test_only_a_gpu_has_tasks_over_columns_and_transposes():
    rng = random.Random(2)
    kinds = {device: {parse(sample_task(rng, device)).kind for _ in range(300)} for device in DRAWN}
    assert kinds == {"cpu": {"chain", "row"}, "cuda": {"chain", "row", "column", "transpose"}}
    drawn = {parse(sample_task(rng, "cuda")).ending for _ in range(1000)}
    assert drawn == {None, *ENDINGS}
    assert set(DRAWN["cpu"]) == {name for name, ending in ENDINGS.items() if ending.kind == "row"}


def test_the_python_form_of_every_operator_is_what_torch_computes():
    for name in UNARY:
        operator = OPERATORS[name]
        chain = ((name, "4" if operator.has_constant else None),)
        # the points reach beyond what an operator allows only for those that would overflow
        expected = torch.tensor(chain_values(chain), dtype=torch.float64)
        points = torch.tensor([-5.2, -2.5, -1.5, -1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 5.2]).double()
        got = reference(make_task(FamilySpec(chain, None, 64, 128)).code)(points)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5), name


def test_outputs_differ_between_inputs_by_more_than_the_tolerance(tasks):
    torch.manual_seed(0)
    rng = random.Random(3)
    on_a_gpu = [task for task in (sample_task(rng, "cuda") for _ in range(200)) if parse(task).kind != "row"]
    for task in [*tasks[:200], *on_a_gpu[:60]]:
        spec, model = parse(task), reference(task.code)
        shape = (spec.rows, 64) if spec.kind == "column" else (64, spec.columns)
        one, two = (model(*[torch.randn(shape) for _ in range(1 + spec.binary)]) for _ in range(2))
        assert torch.isfinite(one).all(), task.name
        assert not torch.allclose(one, two, rtol=1e-2, atol=1e-2), task.name
        assert (one - one.flatten()[0]).abs().max() > 1e-2, task.name
