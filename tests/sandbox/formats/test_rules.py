"""Static rules: what is seen in the text of a solution, and what is not mistaken for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.exploits.cases.honest import HONEST
from cuda_agent.sandbox.formats import rules
from cuda_agent.sandbox.wire import Solution
from tests.sandbox import published
from tests.sandbox.conftest import Running, plan_solution, task


def of_python(code: str) -> set[tuple[str, str]]:
    found = rules.findings(Solution("python", {"model_new.py": code}))
    return {(finding.rule, finding.what) for finding in found}


def of_native(text: str, name: str = "kernels/k.cu") -> set[tuple[str, str]]:
    return {(finding.rule, finding.what) for finding in rules.findings(Solution("extension", {name: text}))}


MODEL = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import matmul as product
import cuda_extension

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4).relu())

    def forward(self, x):
        FORWARD
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return torch.relu(x)", ("torch", "torch.relu")),
        ("return F.gelu(x)", ("torch", "torch.nn.functional.gelu")),
        ("return product(x, x)", ("torch", "torch.matmul")),
        ("return torch.ops.aten.relu(x)", ("torch", "torch.ops.aten.relu")),
        ("return x.softmax(-1)", ("torch", ".softmax()")),
        ("return x @ x", ("torch", "@")),
        ("return self.layer(x)", ("torch", "self.layer")),
        ("G = torch.nn.functional; return G.relu(x)", ("torch", "torch.nn.functional.relu")),
        ("s = torch.cuda.Stream()", ("stream", "torch.cuda.Stream")),
        ("import threading; threading.Thread()", ("thread", "threading.Thread")),
        ("import os; os.fork()", ("thread", "os.fork")),
        ("import time; time.perf_counter()", ("probe", "time.perf_counter")),
        ("from time import perf_counter; perf_counter()", ("probe", "time.perf_counter")),
        ("import sys; sys.modules['a']", ("probe", "sys.modules")),
        ("import gc; gc.get_objects()", ("probe", "gc.get_objects")),
        ("open('/proc/self/maps')", ("probe", "/proc/self/maps")),
        ("x.forward.__code__", ("probe", ".__code__")),
        ("import ctypes; ctypes.CDLL('x')", ("native", "ctypes.CDLL")),
        ("import atexit; atexit.register(x)", ("hook", "atexit.register")),
        ("torch.cuda.synchronize = print", ("patch", "torch.cuda.synchronize")),
        ("setattr(torch, 'relu', print)", ("patch", "setattr(torch, ...)")),
        ("torch.backends.cuda.matmul.allow_tf32 = True", ("precision", "torch.backends.cuda.matmul.allow_tf32")),
        ("exec('1')", ("dynamic", "exec")),
    ],
)
def test_what_a_module_does_beside_calling_its_extension_is_seen(line: str, found: tuple[str, str]) -> None:
    assert found in of_python(MODEL.replace("FORWARD", line))


@pytest.mark.parametrize(
    "line",
    [
        "return cuda_extension.relu(x.contiguous().view(-1), self.weight, x.size(0), torch.float32)",
        "y = torch.empty_like(x); cuda_extension.sum(x, y); return y.view(x.shape[0], -1).t()",
        "return cuda_extension.softmax(torch.zeros(4, device=x.device))",
        "'torch.relu(x), threading and time.time() stand in a string'; return x  # os.fork()",
    ],
)
def test_what_the_published_rules_allow_is_not_reported(line: str) -> None:
    assert of_python(MODEL.replace("FORWARD", line)) == set()


def test_a_deleter_and_a_subclass_of_tensors_are_hooks() -> None:
    code = "class A:\n    def __del__(self): pass\n    @classmethod\n    def __torch_function__(cls): pass\n"
    assert of_python(code) == {("hook", "__del__"), ("hook", "__torch_function__")}


def test_kernels_of_triton_are_no_torch_calls() -> None:
    code = "import triton\nimport triton.language as tl\n@triton.jit\ndef kernel(x):\n    y = x.sum() @ x\n"
    assert of_python(code) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auto y = at::relu(x);", ("torch", "at::relu")),
        ("auto y = torch :: nn :: functional :: gelu ( x );", ("torch", "torch::nn::functional::gelu")),
        ("#include <ATen/ATen.h>\n", ("torch", "<ATen/ATen.h>")),
        ("cublasSgemm(h);", ("library", "cublasSgemm")),
        ("cudnnConvolutionForward(h);", ("library", "cudnnConvolutionForward")),
        ("cusparseSpMM(h);", ("foreign", "cusparseSpMM")),
        ("thrust::sort(a, b);", ("foreign", "thrust::sort")),
        ('void* l = dlopen("a.so", 1);', ("native", "dlopen")),
        ("cudaStreamCreateWithFlags(&s, 1);", ("stream", "cudaStreamCreateWithFlags")),
        ("cudaGraphLaunch(g, s);", ("stream", "cudaGraphLaunch")),
        ("std::thread t(work);", ("thread", "std::thread")),
        ("pthread_create(&t, 0, run, 0);", ("thread", "pthread_create")),
        ('char* v = getenv("A");', ("probe", "getenv")),
        ("auto t = std::chrono::steady_clock::now();", ("probe", "std::chrono::steady_clock::now")),
        ('int f = open("/proc/self/mem", 2);', ("probe", "/proc/self/mem")),
        ("__attribute__((constructor)) void c() {}", ("hook", "__attribute__((constructor))")),
        ("cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 1);", ("cache", "cudaLimitPersistingL2CacheSize")),
        ("cublasSetMathMode(h, CUBLAS_TF32_TENSOR_OP_MATH);", ("precision", "CUBLAS_TF32_TENSOR_OP_MATH")),
    ],
)
def test_what_native_code_reaches_for_is_seen(text: str, found: tuple[str, str]) -> None:
    assert found in of_native(text)


@pytest.mark.parametrize(
    "text",
    [
        "// cublasSgemm and std::thread\n/* dlopen(\n) */ float y;",
        'const char* text = "at::relu(x); pthread_create(";',
        'const char* text = R"x(dlopen("a") )" )x";',
        "float time = 1, clock = 2; y[i] = time * clock;",
        "self.signal(1); p->clone(); int n = 1'000'000;",
        "torch::Tensor y = torch::empty_like(x); TORCH_CHECK(x.is_cuda()); at::cuda::getCurrentCUDAStream();",
    ],
)
def test_comments_strings_variables_and_types_are_no_findings(text: str) -> None:
    assert of_native(text) == set()


def test_a_finding_names_file_and_line_and_cuda_in_a_python_string_is_read_too() -> None:
    code = 'import torch\nsource = """\n__global__ void k() {}\nvoid f() { cudaStreamCreate(&s); }\n"""\n'
    (found,) = rules.findings(Solution("python", {"model_new.py": code}))
    assert (found.file, found.line, found.rule, found.what) == ("model_new.py", 4, "stream", "cudaStreamCreate")
    assert rules.advice([found])[0].startswith("model_new.py:4: stream: cudaStreamCreate (")


def test_the_published_folder_and_honest_plans_and_extensions_give_no_advice() -> None:
    assert rules.findings(Solution("extension", published.FILES)) == []
    noted = {
        name for name, honest in HONEST.items()
        if honest.format != "python" and rules.findings(Solution(honest.format, dict(honest.files)))
    }  # fmt: skip
    assert noted == {"plan_helper_thread_that_is_done"}


def test_a_long_text_is_said_not_to_be_read_and_advice_stays_short() -> None:
    files = {f"kernels/{i}.cpp": "dlopen(0);" for i in range(100)} | {"z.cpp": "int a;\n" * 100_000}
    found = rules.findings(Solution("extension", files))
    assert ("z.cpp", "long") in {(finding.file, finding.rule) for finding in found}
    lines = rules.advice(found)
    assert len(lines) == 20 and lines[-1] == "and 82 more files and rules"


PIECES = st.sampled_from(
    [
        '"',
        "'",
        "/*",
        "*/",
        "//",
        "\\",
        "\n",
        'R"a(',
        ')a"',
        "#include <",
        "torch::",
        "dlopen(",
        " ",
        "x",
        "::",
        "\0",
        "é",
    ]
)


@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_has_tokens_on_its_own_lines(text: str) -> None:
    for token in rules.tokens(text):
        assert 1 <= token.line <= text.count("\n") + 1
        assert token.text.replace(" ", "") in text.replace(" ", "").replace("\t", "") or token.kind == "include"


@settings(deadline=None)
@given(st.text(max_size=200) | st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for name in ("model_new.py", "kernels/a.cu"):
        for line in rules.advice(rules.findings(Solution("python", {name: text}))):
            assert line.isprintable()


def test_advice_is_in_the_verdict_and_changes_nothing_else(running: Running) -> None:
    plain = running.evaluate(task(), plan_solution())
    kernel = plan_solution().files["kernels/chain.cpp"] + "\n#include <time.h>\nlong now() { return time(0); }\n"
    noted = running.evaluate(task(), plan_solution(kernel))
    assert plain.advice == []
    assert (noted.status, noted.reward) == (plain.status, plain.reward)
    assert noted.advice == [f"kernels/chain.cpp:9: probe: time ({rules.MEANING['probe']})"]


def test_advice_stands_beside_a_build_that_fails(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution("void chain() { dlopen(0); }"))
    assert verdict.status == "build_error"
    assert [line.split(" (")[0] for line in verdict.advice] == ["kernels/chain.cpp:1: native: dlopen"]
