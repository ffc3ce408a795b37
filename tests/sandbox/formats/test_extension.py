"""The extension format: a work folder with a Python module, kernels and bindings."""

import time

import pytest
import torch

from cuda_agent.sandbox.formats import extension
from cuda_agent.sandbox.wire import Solution
from cuda_agent.sandbox.worker.binding import Outputs
from tests.sandbox.conftest import Running, task

LINEAR = """
import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 5)
    def forward(self, x):
        return torch.relu(self.linear(x)), x.sum()
def get_inputs():
    return [torch.randn(6, 16)]
def get_init_inputs():
    return [16]
"""

MODEL = """
import torch
import cuda_extension

class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 5)

    def forward(self, x):
        return cuda_extension.linear_relu(x, self.linear.weight, self.linear.bias, 0.0)
"""

KERNEL = """
void linear_relu(const float* x, const float* w, const float* b, float* y, float* total, long rows, long in, long out) {
#pragma omp parallel for
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < out; o++) {
      float sum = b[o];
      for (long i = 0; i < in; i++) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum > 0 ? sum : 0;
    }
  *total = 0;
  for (long i = 0; i < rows * in; i++) *total += x[i];
}
"""

BINDING = """
#include "../binding_registry.h"
void linear_relu(const float*, const float*, const float*, float*, float*, long, long, long);

static Tensors forward(const Tensor& x, const Tensor& w, const Tensor& b, float floor) {
  check(x.dtype() == Float32 && x.dim() == 2, "linear_relu: a float32 matrix is expected");
  check(x.is_contiguous(), "linear_relu: x is not contiguous");
  long rows = x.size(0), in = x.size(-1), out = w.size(0);
  Tensor y = empty({rows, out});
  Tensor total = empty(nullptr, 0);
  linear_relu(x.data<float>(), w.data<float>(), b.data<float>(), y.data<float>(), total.data<float>(), rows, in, out);
  Tensors results;
  results.add(y);
  results.add(total);
  return results;
}
REGISTER_BINDING(linear_relu, forward);
"""


def folder(model: str = MODEL, kernel: str = KERNEL, binding: str = BINDING) -> Solution:
    files = {"model_new.py": model, "kernels/linear.cpp": kernel, "kernels/linear_binding.cpp": binding}
    return Solution("extension", files)


def test_a_work_folder_is_built_loaded_with_the_weights_and_judged(running: Running) -> None:
    verdict = running.evaluate(task(LINEAR), folder())
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)


def test_it_is_timed_like_any_other(timed: Running) -> None:
    timed.know_compile_time(task(LINEAR))
    verdict = timed.evaluate(task(LINEAR), folder())
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.seconds is not None


@pytest.mark.parametrize(
    ("solution", "status", "words"),
    [
        (folder(model="x ="), "build_error", "model_new.py:1: invalid syntax"),
        (folder(model=MODEL.replace("ModelNew", "Other")), "build_error", "model_new.py defines no ModelNew"),
        (folder(model="import sklearn_of_old\n" + MODEL), "build_error", "(model_new.py line 1)"),
        (folder(model=MODEL.replace("self.linear =", "self.layer =")), "build_error", "state_dict"),
        (folder(model=MODEL.replace("bias, 0.0", "bias")), "crash", "wrong number of arguments"),
        (folder(model=MODEL.replace("linear_relu(x,", "linear_relu(x.t(),")), "crash", "x is not contiguous"),
        (folder(model=MODEL.replace("return cuda", "x = torch.relu(x); return cuda")), "cheat", "forward calls torch."),
        (folder(model=MODEL.replace("bias, 0.0)", "bias, 0.0)[0]")), "crash", "1 outputs instead of 2"),
        (folder(kernel=KERNEL.replace("sum > 0 ?", "sum < 0 ?")), "wrong", "output 0[6, 5]"),
        (folder(kernel=KERNEL.replace("y[r *", "y[1L << 40 | r *")), "crash", "SIGSEGV"),
        (folder(kernel="#include <torch/extension.h>\nint n = torch::relu(3);" + KERNEL), "build_error", "relu"),
        (folder(binding=BINDING.replace("REGISTER_BINDING", "// ")), "build_error", "no REGISTER_BINDING"),
        (Solution("extension", {"model_new.py": MODEL}), "build_error", "there is no kernels/*.cpp"),
        (Solution("extension", {}), "build_error", "there is no model_new.py"),
    ],
)  # fmt: skip
def test_a_broken_work_folder_gets_the_status_it_earned(
    running: Running, solution: Solution, status: str, words: str
) -> None:
    verdict = running.evaluate(task(LINEAR), solution)
    assert words in verdict.message
    assert verdict.status == status


def test_an_output_is_written_in_its_place_from_the_second_call_on() -> None:
    """Copying it would be timed."""
    targets = [[torch.zeros(2, 3)], [torch.zeros(2, 3)]]
    outputs = Outputs(targets)
    for call, slot in enumerate((0, 1, 0)):
        outputs.begin(slot)
        outputs.empty([4], torch.float32)
        made = outputs.empty([6], torch.float32)
        made.fill_(call + 1)
        outputs.store([made.view(2, 3)])
        assert bool((targets[slot][0] == call + 1).all())
        assert (made.data_ptr() == targets[slot][0].data_ptr()) is (call > 0)


def test_an_output_in_another_order_of_its_memory_is_right_in_every_call() -> None:
    """The second call wrote over the memory that it read."""
    targets = [[torch.zeros(2, 3)]]
    outputs = Outputs(targets)
    for _ in range(3):
        outputs.begin(0)
        made = outputs.empty([3, 2], torch.float32)
        made.copy_(torch.arange(6.0).view(3, 2))
        outputs.store([made.t()])
        assert targets[0][0].tolist() == [[0, 2, 4], [1, 3, 5]]


def test_outputs_that_lie_in_each_others_memory_are_not_mixed_up() -> None:
    targets = [[torch.zeros(2), torch.zeros(2)]]
    outputs = Outputs(targets)
    for order in ((0, 1), (1, 0), (0, 1)):
        outputs.begin(0)
        made = [outputs.empty([2], torch.float32).fill_(value) for value in (1, 2)]
        outputs.store([made[i] for i in order])
        assert [t[0].item() for t in targets[0]] == [order[0] + 1, order[1] + 1]


def test_a_long_run_of_newlines_takes_no_time() -> None:
    files = {"kernels/a.cpp": "REGISTER_BINDING(f, f);", "kernels/pad.h": "\n" * 250_000 + "x"}
    begin = time.process_time()
    extension.sources_of(files, "cpu")
    assert time.process_time() - begin < 5, "it took minutes: the square of the run"


def test_a_library_that_only_a_comment_names_is_not_linked() -> None:
    files = {
        "kernels/a.cpp": '// no cudnn here\nauto s = "cudnn";\nREGISTER_BINDING(f, f);',
        "kernels/b.cu": "int cublasx;",
    }
    assert extension.sources_of(files, "cuda")[2] == ["cublas"] and extension.sources_of(files, "cpu")[2] == []


@pytest.mark.parametrize("binding", ["REGISTER_BINDING (f, f);", "namespace a { REGISTER_BINDING(f, f); }"])
def test_a_binding_may_stand_anywhere_on_a_line(binding: str) -> None:
    assert extension.sources_of({"kernels/a.cpp": binding}, "cpu")[1] == ["kernels/a.cpp"]
