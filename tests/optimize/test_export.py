"""Exported solutions, each in a fresh process that has PyTorch alone."""

import contextlib
import json
import math
import re
import subprocess

import pytest
import torch
from fresh import only_torch, run

from cuda_agent.config import SandboxConfig
from cuda_agent.optimize import export, standalone_plan, standalone_program
from cuda_agent.optimize.export import model_new
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.formats.expressions import PlanError
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor
from cuda_agent.tasks.task import Task

CHAIN = '''from __future__ import annotations

import torch
import ctypes, math  # names that the exported runtime uses, too


class Model(torch.nn.Module):
    """A chain; it's "quoted" \\\\ here."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.norm = torch.nn.Linear(128, 128)
        self.register_buffer("shift", torch.ones(128))

    def forward(self, x, pair, power):
        y = torch.relu(x) * self.scale + self.shift * self.norm.bias
        return {"y": y, "more": (pair[0] + power, y.sum())}


def get_inputs():
    return [torch.randn(32, 128), [torch.randn(4), torch.randn(4)], 3]


def get_init_inputs():
    return [1.5]
'''
CHAIN_KERNEL = """
void chain(long block, long grid, const float* x, const float* s, const float* b, float* y, long n, double scale) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++)
    y[i] = std::max(x[i], 0.0f) * (float)scale + s[i % 128] * b[i % 128];
}
void add(long, long, const float* p, float* out, long n, long power) {
  for (long i = 0; i < n; i++) out[i] = p[i] + power;
}
template <int SEED> void sum(long, long, const float* y, const double* tmp, float* out, long n) {
  double total = tmp[0] - SEED;  // '''quotes''' and a \\\\ backslash
  for (long i = 0; i < n; i++) total += y[i];
  out[0] = (float)total;
}
"""
CHAIN_PLAN = {
    "workspaces": {"tmp": {"size": 2, "dtype": "float64", "init": 7}},
    "nodes": [
        {"memset": "out0", "value": 1},
        {
            "kernel": "kernels/chain.cpp", "function": "chain", "grid": "cdiv(in0.numel, 1024)",
            "args": ["in0", "w:shift", "w:norm.bias", "out0", "in0.numel", "init0"],
        },
        {"kernel": "kernels/chain.cpp", "function": "add", "args": ["in1", "out1", "in1.numel", "in3"]},
        {"kernel": "kernels/chain.cpp", "function": "sum<7>", "args": ["out0", "tmp", "out2", "out0.numel"]},
    ],
}  # fmt: skip
LIBRARY = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.linear = torch.nn.Linear(128, 16, bias=False)
    def forward(self, x):
        return self.linear(torch.flatten(self.conv(x), 1))
def get_inputs():
    return [torch.randn(4, 3, 8, 8)]
def get_init_inputs():
    return []
"""
LIBRARY_PLAN = {
    "workspaces": {"tmp": {"size": 512}},
    "nodes": [
        {
            "library": "convolution", "input": "in0", "weight": "w:conv.weight", "bias": "w:conv.bias",
            "output": "tmp", "stride": 2, "padding": 1,
        },
        {
            "library": "gemm", "a": "tmp", "b": "w:linear.weight", "c": "out0", "m": 4, "n": 16, "k": 128,
            "transpose_b": True,
        },
    ],
}  # fmt: skip
FOLDER = {
    "model_new.py": """import torch
import cuda_extension

class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.linear = torch.nn.Linear(128, 16, bias=False)

    def forward(self, x):
        return cuda_extension.product(x, self.conv.weight, self.conv.bias, self.linear.weight)
""",
    "kernels/product.cpp": """
void product(const float* x, const float* w, const float* b, const float* l, float* y, long batch) {
  for (long n = 0; n < batch; n++) {
    float mid[128];
    for (long o = 0; o < 8; o++) for (long i = 0; i < 4; i++) for (long j = 0; j < 4; j++) {
      float s = b[o];
      for (long c = 0; c < 3; c++) for (long p = 0; p < 3; p++) for (long q = 0; q < 3; q++) {
        long r = 2 * i + p - 1, t = 2 * j + q - 1;
        if (r >= 0 && r < 8 && t >= 0 && t < 8)
          s += w[((o * 3 + c) * 3 + p) * 3 + q] * x[((n * 3 + c) * 8 + r) * 8 + t];
      }
      mid[(o * 4 + i) * 4 + j] = s;
    }
    for (long k = 0; k < 16; k++) {
      float s = 0;
      for (long i = 0; i < 128; i++) s += l[k * 128 + i] * mid[i];
      y[n * 16 + k] = s;
    }
  }
}
""",
    "kernels/product_binding.cpp": """
#include <torch/types.h>
#include "binding_registry.h"
void product(const float*, const float*, const float*, const float*, float*, long);
static torch::Tensor forward(torch::Tensor x, torch::Tensor w, torch::Tensor b, torch::Tensor l) {
  TORCH_CHECK(x.is_contiguous(), "contiguous");
  torch::Tensor y = torch::empty({x.size(0), 16}, x.options());
  product(x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(), l.data_ptr<float>(), y.data_ptr<float>(),
          x.size(0));
  return y;
}
REGISTER_BINDING(product, forward);
""",
}
CUDA = SandboxConfig(device="cuda")
COMPARE = """
import torch, model
from model_new import ModelNew
assert not [name for name in sys.modules if name.startswith("cuda_agent")]
arguments = model.get_init_inputs()
old, new = model.Model(*arguments).eval(), ModelNew(*arguments).eval()
new.load_state_dict(old.state_dict())
for _ in range(3):
    given = model.get_inputs()
    with torch.no_grad():
        torch.testing.assert_close(new(*given), old(*given), rtol=1e-3, atol=1e-3)
assert sys.float_info.min / 2 > 0, "loading the kernels turned off denormals"
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    return only_torch(tmp_path_factory.mktemp("fresh") / "packages")


@pytest.fixture
def exported(loop, sandbox, packages, tmp_path):
    """``exported(code, solution, then)`` runs the comparison, and ``then``, with the exported file."""

    def exported(code, solution, then=""):
        spec = loop.run(sandbox.spec(Task("t", code, (), "torch#1")))
        (tmp_path / "model.py").write_text(code)
        new = model_new(code, solution, spec, SandboxConfig(), "Made here.\n\nTwo lines.")
        (tmp_path / "model_new.py").write_text(new)
        return run(packages, COMPARE + then, tmp_path, tmp_path / "home")

    return exported


def plan(nodes, **kernels):
    files = {f"kernels/{name}.cpp": text for name, text in kernels.items()}
    return Solution("plan", {"plan.json": json.dumps(nodes), **files})


@pytest.mark.nightly
def test_a_plan_computes_what_the_model_computes_nested_as_the_model_nests_it(exported):
    refusals = """
rest = given[1:]
wrongs = [torch.randn(32, 64), *rest], [given[0].double(), *rest], ["x", *rest], [*given[:2], 4], given[:2]
for wrong in wrongs:
    try:
        new(*wrong)
        raise SystemExit("not refused")
    except ValueError as error:
        assert "made for" in str(error), error
try:
    ModelNew(2.5)
    raise SystemExit("not refused")
except ValueError:
    pass
with torch.no_grad():
    new.norm.bias.add_(1.0); old.norm.bias.add_(1.0)
    torch.testing.assert_close(new(*given), old(*given), rtol=1e-3, atol=1e-3)
    turned = torch.randn(128, 32).T
    torch.testing.assert_close(new(turned, *given[1:]), old(turned, *given[1:]), rtol=1e-3, atol=1e-3)
import copy
torch.testing.assert_close(copy.deepcopy(new)(*given)["y"], new(*given)["y"])
import os, model_new
refused = ("XDG_CACHE_HOME", "/proc/none", "set XDG_CACHE_HOME"), ("PATH", "/nowhere", "built with g++")
for name, value, said in refused:
    before, os.environ[name] = os.environ.get(name), value
    try:
        model_new._built({"new.cpp": "int x;"}, ["g++", "new.cpp"], "a.out")
        raise SystemExit("not refused")
    except RuntimeError as error:
        assert said in str(error), error
    os.environ.pop(name) if before is None else os.environ.update({name: before})
"""
    done = exported(CHAIN, plan(CHAIN_PLAN, chain=CHAIN_KERNEL), refusals)
    assert done.returncode == 0, done.stderr


def test_library_nodes_take_weights_and_workspaces_along(exported):
    done = exported(LIBRARY, plan(LIBRARY_PLAN), PROGRAM)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(TIMES, done.stdout), done.stdout


@pytest.mark.nightly
def test_a_work_folder_brings_its_bindings_along(exported):
    done = exported(LIBRARY, Solution("extension", FOLDER), "assert 'cuda_extension' not in sys.modules\n" + PROGRAM)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(TIMES, done.stdout), done.stdout


PROGRAM = """
asking = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in given]
try:
    new(*asking)
    raise SystemExit("not refused")
except ValueError as error:
    assert "requires a gradient" in str(error) and "torch.no_grad()" in str(error)
with torch.no_grad():
    new(*asking)
import runpy
try:
    runpy.run_path("model_new.py", run_name="__main__")
except SystemExit as ended:
    print("ended", ended.code)
"""
TIMES = r"""ModelNew is correct on 5 draws of inputs, within 0.01
original +[\d.]+ µs
ModelNew +[\d.]+ µs   [\d.]+ times as fast
\(eager PyTorch on cpu; the best of seven medians each\)
ended 0
"""


def test_a_python_solution_stays_as_it_is_and_as_a_program_compares_itself(exported, tmp_path):
    code = LIBRARY.replace("class Model", "class ModelNew")
    done = exported(LIBRARY, Solution("python", {"model_new.py": code}), PROGRAM)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(TIMES, done.stdout), done.stdout
    assert (tmp_path / "model_new.py").read_text().startswith(f"# Made here.\n#\n# Two lines.\n{code.rstrip()}\n")


def test_infinite_and_missing_numbers_are_expressions():
    value = {"init": [{"value": [float("inf"), float("-inf"), (1, {"a": float("nan")})]}], "x": "text", "y": ()}
    read = eval(export._value(value))
    assert read["init"][0]["value"][:2] == [float("inf"), float("-inf")] and read["x"] == "text" and read["y"] == ()
    assert math.isnan(read["init"][0]["value"][2][1]["a"])


def test_the_program_of_a_model_is_left_out():
    code = 'import torch\n\nx = 1\n\nif __name__ == "__main__":\n    x = 2\n    raise SystemExit(x)\n\ny = 3\n'
    assert export.without_program(code) == "import torch\n\nx = 1\n\n\ny = 3"
    kept = "if __name__ == '__main__':\n    x = 1\nelse:\n    x = 2"
    assert export.without_program(kept) == kept, "a part of it is for imports"


def test_exported_kernels_get_contiguous_inputs():
    given = torch.arange(6.0).view(2, 3)
    forward = standalone_program._for_inference(lambda self, x, pair, named: [x, *pair, named["z"]])
    found = forward(None, given.t(), (given.t(), 3), named={"z": given[:, 1:]})
    assert all(one.is_contiguous() for one in found if isinstance(one, torch.Tensor)) and found[2] == 3
    torch.testing.assert_close(found[0], given.t())


def test_an_original_may_have_a_dataclass_with_annotations_as_text_and_read_its_source():
    code = (
        "from __future__ import annotations\nimport inspect\nfrom dataclasses import dataclass\n\n\n@dataclass\n"
        "class Size:\n    n: int = 3\n\n\ndef f():\n    return 1\n\n\nSOURCE = inspect.getsource(f)\n"
    )
    found = standalone_program._names(code)
    assert found["Size"]().n == 3 and found["SOURCE"] == "def f():\n    return 1\n"


def test_weights_that_a_parent_loads_are_used():
    names: dict = {}
    exec(export._PLAN.format(runner="_Runner").replace("_KERNELS = _Runner(_PROGRAM, _SOURCES, Model.forward)", ""), {
        "Model": torch.nn.Linear, "_check_init": lambda *_: None, "_PROGRAM": {"init": []}, "_KERNELS": None,
    }, names)  # fmt: skip
    model = names["ModelNew"].__new__(names["ModelNew"])
    torch.nn.Linear.__init__(model, 2, 2)
    parent = torch.nn.Sequential(model)
    model._weights = "old"
    parent.load_state_dict({name: torch.ones_like(weight) for name, weight in parent.state_dict().items()}, assign=True)
    assert model._weights is None


def test_a_solution_that_is_wrong_is_told_by_its_own_program(capsys):
    original = standalone_program._names(LIBRARY)
    wrong = standalone_program._names(LIBRARY.replace("self.conv(x)", "2 * self.conv(x)"))["Model"]
    assert standalone_program._compare(original, wrong, "cpu", False, 1e-2) == 1
    assert capsys.readouterr().out.startswith("ModelNew is wrong on draw 1 of inputs: Tensor-likes are not close!")


@pytest.mark.nightly
def test_a_second_process_builds_nothing(exported, tmp_path):
    assert exported(CHAIN, plan(CHAIN_PLAN, chain=CHAIN_KERNEL)).returncode == 0
    kept = sorted((tmp_path / "home" / ".cache" / "model_new").iterdir())
    before = [path.stat().st_mtime_ns for path in kept]
    done = exported(CHAIN, plan(CHAIN_PLAN, chain=CHAIN_KERNEL), "import os; os.environ['PATH'] = ''\n")
    assert done.returncode == 0, done.stderr
    assert [
        path.stat().st_mtime_ns for path in sorted((tmp_path / "home" / ".cache" / "model_new").iterdir())
    ] == before


def test_kernels_of_an_exported_plan_for_a_gpu_compile_with_what_is_in_the_file(tmp_path):
    """Here up to the compiler: launching needs a GPU (test_export_cuda)."""
    kernel = "template <int N> __global__ void twice(const float* x, float* y, long n) {\n" + (
        "  long i = blockIdx.x * (long)blockDim.x + threadIdx.x; if (i < n) y[i] = N * x[i]; }\n"
    )
    nodes = {
        "nodes": [
            {"kernel": "kernels/t.cu", "function": "twice<2>", "grid": 8, "block": 256, "args": ["in0", "out0", 2048]}
        ]
    }
    spec = TaskSpec((Tensor((2048,), "float32"),), (Tensor((2048,), "float32"),), {}, ({"tensor": 0},), ())
    code = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
    text = model_new(code, Solution("plan", {"plan.json": json.dumps(nodes), "kernels/t.cu": kernel}), spec, CUDA)
    names: dict = {}
    exec(compile(text, "model_new.py", "exec"), names)
    assert issubclass(names["ModelNew"], names["Model"])
    try:
        tools = toolchain.find_nvrtc()
    except toolchain.CompilerMissing:
        pytest.skip("no NVRTC")
    assert names["_toolchain"].nvrtc_files()[0] == tools.library
    for name, source in {**names["_SOURCES"], "nvrtc.py": names["_PROGRAM"]["nvrtc"]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    request = {"library": tools.library, "includes": tools.includes, "architecture": "sm_90a", "unit": "unit.cu"}
    request["expressions"] = names["_PROGRAM"]["expressions"]
    done = subprocess.run(
        ["python3", "-I", "-S", "nvrtc.py", json.dumps(request)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads((tmp_path / "names.json").read_text())) == {"twice<2>", "&plan_codes_0"}


def test_definitions_take_along_constants_with_an_annotation():
    constants = "TABLE: dict[str, Any] = {'a': 1}\nOTHER: int = 2\n"
    source = f"from typing import Any\n{constants}\n\ndef look(x):\n    return TABLE[x]\n"
    text = export._definitions(source, ["look"])
    scope: dict = {}
    exec(text, scope)
    assert scope["look"]("a") == 1 and "OTHER" not in text and "typing" not in text


def test_what_is_no_solution_is_refused_when_it_is_exported():
    spec = TaskSpec((), (Tensor((1,), "float32"),), {}, (), ())
    with pytest.raises(PlanError):
        model_new("", Solution("plan", {"plan.json": "{}"}), spec, SandboxConfig())


class Scaled:
    def __init__(self, scale, shifts=(0, 1), *, eps=1e-5): ...


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((1.5,), {}, ""),
        ((), {"scale": 1.5}, ""),
        ((1.5, [0, 1]), {"eps": 1e-5}, ""),
        ((3.0,), {}, "a constructor argument is 3.0; these kernels were made for 1.5"),
        ((), {"scale": 3.0}, "a constructor argument is 3.0"),
        ((1.5, (0, 2)), {}, r"a constructor argument is \(0, 2\); these kernels were made for \(0, 1\)"),
        ((1.5,), {"eps": 0.1}, "a constructor argument is 0.1"),
        ((torch.ones(2),), {}, "a constructor argument is tensor"),
    ],
)
def test_other_arguments_of_the_constructor_are_refused_however_they_are_given(args, kwargs, said):
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        standalone_plan._check_init(Scaled, [{"value": 1.5}], args, kwargs)


def test_an_argument_that_is_not_a_number_equals_itself():
    standalone_plan._check_init(Scaled, [{"value": math.nan}], (math.nan,), {})
