"""load_inline against the stand-ins for torch's headers: the same answers as torch's own build, in seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.formats import first_pass
from cuda_agent.sandbox.worker import stand_ins
from cuda_agent.sandbox.worker.replay import link_libraries
from tests.sandbox.conftest import Running, task
from tests.sandbox.formats.test_first_pass import kept, needs_ninja, solution

PROGRAM = "tests.sandbox.formats.inline_sources"


def toolchain_of(place: Path) -> dict[str, str]:
    """The environment of a first pass for an H100, with links to CUDA's libraries in ``place``."""
    found = first_pass._toolchain("sm_90a")
    link_libraries(place / "links", found.get("CUDA_HOME", ""))
    return found | {"LIBRARY_PATH": f"{place}/links"}


def built(place: Path, device: str, kind: str) -> dict[str, Any]:
    """What the calls of ``inline_sources`` give in a build with ``kind`` (``stand-ins`` or ``torch``) of headers."""
    place.mkdir()
    environment = os.environ | toolchain_of(place)
    command = [sys.executable, "-X", "faulthandler", "-m", PROGRAM, str(place), device, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{kind}: status {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@needs_ninja
def test_a_module_of_the_stand_ins_is_used_like_torchs(tmp_path: Path) -> None:
    found = built(tmp_path / "place", "cpu", "stand-ins")
    assert "stand-ins" in found["file"]
    said = {call.partition(" ")[2]: answer for call, answer in found["answers"].items()}
    matrix = ["torch.float32", "cpu", [64, 64], [64, 1], "Tensor"]
    assert said["m.scaled(x)"][:5] == matrix
    assert said["m.scaled(torch.nn.Parameter(x))"] == said["m.scaled(x)"] != said["m.scaled(x.t())"]
    assert said["m.scaled(x[0])"] == ["RuntimeError", "expected a matrix, got 1 dimensions of sizes [64]"]
    assert said["m.scaled(x.int())"] == ["NotImplementedError", "\"scaled\" not implemented for 'Int'"]
    unfit = ["TypeError", "scaled(): incompatible function arguments. The following argument types are supported:"]
    for call in ("m.scaled(x, 'two')", "m.scaled(x, shift=1.5)", "m.scaled(x, y=1)", "m.scaled()", "m.scaled(None)"):
        assert said[call] == unfit
    assert said["m.moments(x)"][0] == "list" and len(said["m.moments(x)"]) == 3
    assert said["m.moments(x.double())"] == ["RuntimeError", "expected scalar type Float but found Double"]
    assert said["m.shapes(x)"][0] == "tuple" and said["m.shapes(x)"][1][2:4] == [[1, 3, 2], [3, 1, 3]]
    assert said["m.shapes(x)"][2:] == ["1", "False", "16384.0"]
    assert said["m.shapes(x, x, [0, 1])"][2:] == ["1", "True", "16384.0"]
    assert said["m.fill(x, 3)"] == "None"
    assert said["m.wrong()"] == ["ValueError", "an invalid argument"]
    assert said["m.size_of(x, -1)"] == "64"
    assert said["m.size_of(x, 2)"][0] == "IndexError"
    assert said["m.__doc__"] == "'functions'"
    assert [answer[0] for call, answer in found["answers"].items() if "kept" in call] == [
        "torch.int64",
        "torch.float32",
    ]


@pytest.mark.nightly  # torch's headers take half a minute
@needs_ninja
def test_torchs_own_headers_give_the_same_answers(tmp_path: Path) -> None:
    both = [built(tmp_path / kind, "cpu", kind)["answers"] for kind in ("stand-ins", "torch")]
    assert both[0] == both[1]


@pytest.mark.gpu
@needs_ninja
def test_kernels_give_the_same_answers_with_both_headers(tmp_path: Path) -> None:
    both = [built(tmp_path / kind, "cuda", kind) for kind in ("stand-ins", "torch")]
    assert ["stand-ins" in one["file"] for one in both] == [True, False]
    assert both[0]["answers"] == both[1]["answers"]
    errors = {answer[0] for answer in both[0]["answers"].values() if answer != "None"}
    assert {"RuntimeError", "NotImplementedError", "AcceleratorError", "torch.float32", "list", "tuple"} <= errors


@needs_ninja
@pytest.mark.nightly
def test_the_styles_of_models_compile_for_a_gpu(tmp_path: Path) -> None:
    """The library is loaded, so all that it needs of torch is there. Without a GPU its calls fail."""
    try:
        toolchain.find_nvcc()
    except toolchain.CompilerMissing:
        pytest.skip("no nvcc")
    code = f"from pathlib import Path; from {PROGRAM} import build; build(Path({str(tmp_path)!r}), 'cuda', 'stand-ins')"
    environment = os.environ | toolchain_of(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "extensions" / "styles_cuda" / "stand-ins" / "styles_cuda.so").is_file()


# A module without torch: both builds take a second.
PLAIN = r'''
from torch.utils.cpp_extension import load_inline
plain = load_inline("plain", no_implicit_headers=True, cpp_sources="""
INCLUDE
#include <Python.h>
static PyObject* scale(PyObject*, PyObject* number) { return PyFloat_FromDouble(PyFloat_AsDouble(number) SCALE); }
static PyMethodDef methods[] = {{"scale", scale, METH_O, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef plain = {PyModuleDef_HEAD_INIT, "plain", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_plain() { return PyModule_Create(&plain); }
""")
'''
FORWARD = "return torch.relu(x) * plain.scale(self.scale)"


def plain(include: str = "", scale: str = "* 1.0", more: str = "") -> Any:
    return solution(PLAIN.replace("INCLUDE", include).replace("SCALE", scale) + more, FORWARD)


@pytest.mark.nightly
@needs_ninja
def test_a_source_that_the_stand_ins_do_not_cover_is_built_with_torchs_headers(running: Running) -> None:
    verdict = running.evaluate(task(), plain("#include <torch/version.h>", "* (TORCH_VERSION_MAJOR > 1)"))
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)
    folder = kept(running)[-1] / "extensions" / "plain"
    assert (folder / "plain.so").is_file() and not (folder / "stand-ins" / "plain.so").exists()


@needs_ninja
def test_a_solution_that_fails_with_the_stand_ins_is_tried_with_torchs_headers(running: Running) -> None:
    verdict = running.evaluate(task(), plain(more="assert 'stand-ins' not in plain.__file__, 'seen'\n"))
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)
    folder = kept(running)[-1]
    assert (folder / "extensions" / "plain" / "plain.so").is_file() and not (folder / "stand-ins").exists()


DIES_AT_IMPORT = """#include <csignal>
#if __has_include(<stand_in/types.h>)
static int died = raise(SIGSEGV);
#endif"""
JUDGED = "if 'stand-ins' in plain.__file__ and not os.access('.', os.W_OK): "  # the second pass may not write there


@pytest.mark.nightly
@needs_ninja
@pytest.mark.parametrize(
    "faulty",
    [
        plain(DIES_AT_IMPORT),
        plain(more=JUDGED + "ctypes.string_at(0)\n"),
        plain(more=JUDGED + "plain.scale = lambda s: 9 * s\n"),
    ],
    ids=["it dies as its library is loaded", "the judged run dies", "the judged run is wrong"],
)
def test_no_verdict_is_bad_because_of_the_stand_ins(running: Running, faulty: Any) -> None:
    verdict = running.evaluate(task(), faulty)
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)
    assert not (kept(running)[-1] / "stand-ins").exists()


@needs_ninja
def test_a_wrong_solution_is_wrong_with_both_headers(running: Running) -> None:
    assert running.evaluate(task(), plain(scale="* 3.0")).status == "wrong"
    assert not (kept(running)[-1] / "stand-ins").exists()


@needs_ninja
def test_a_solution_that_fails_with_both_headers_gets_the_error_of_torchs_build(running: Running) -> None:
    verdict = running.evaluate(task(), plain(more="raise ValueError(plain.__file__.split('/')[-2])\n"))
    assert verdict.status == "build_error" and "ValueError: plain (model_new.py" in verdict.message


def test_only_solutions_that_call_torchs_builder_get_stand_ins() -> None:
    assert first_pass.stand_ins({"model_new.py": "import triton"}) == {}
    found = first_pass.stand_ins(
        {"model_new.py": 'load_inline("#include <ATen/cuda/CUDAContext.h>\\n#include <torch/headeronly/util/Half.h>")',
         "more/a.h": '#include "c10/util/Half.h"\n# include <../x/torch/y.h>\n#include <torch/../z.h>'}
    )  # fmt: skip
    assert {"torch/extension.h", "torch/types.h", "ATen/cuda/CUDAContext.h", "c10/util/Half.h"} == {
        name for name in found if not name.startswith("stand_in/")
    }
    assert found["ATen/cuda/CUDAContext.h"] == "#include <stand_in/cuda.h>\n"
    assert found["torch/extension.h"] == "#include <stand_in/module.h>\n"


INLINE = """
from torch.utils.cpp_extension import load_inline
SOURCE = '''#include <torch/extension.h>
SOURCE'''
try:
    module = load_inline("given", SOURCE, functions=["FUNCTION"])
except RuntimeError as error:
    assert "Error building extension 'given'" in str(error)
"""
DECLARED = "torch::Tensor scaled(torch::Tensor x) { return x; }"


@pytest.mark.nightly
@needs_ninja
@pytest.mark.parametrize(
    ("source", "function"),
    [
        (DECLARED, "scale_all"),
        (DECLARED + " PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def('one', &scaled); }".replace("'", '"'), "scaled"),
    ],
    ids=["a function that is declared nowhere", "a module that is defined twice"],
)
def test_what_torchs_headers_would_refuse_too_is_not_built_with_them(
    running: Running, source: str, function: str
) -> None:
    code = INLINE.replace("SOURCE'''", source + "'''").replace("FUNCTION", function)
    verdict = running.evaluate(task(), solution(code))
    assert (verdict.status, verdict.message) == ("ok", "")
    extension = kept(running)[-1] / "extensions" / "given"
    assert (extension / "stand-ins" / "build.ninja").exists() and not (extension / "build.ninja").exists()


def test_a_function_that_a_header_of_torch_may_declare_is_built_with_torchs_headers(tmp_path: Path) -> None:
    def says(name: str, before: str = "") -> str:
        line = f'    4 | m.def("{name}", torch::wrap_pybind_function({name}), "{name}");'
        return f"FAILED: main.o\n{before}main.cpp:4:52: error: '{name}' was not declared in this scope\n{line}\n"

    assert stand_ins._fails_anyway(says("scale_all"), tmp_path)
    assert not stand_ins._fails_anyway(says("wrap_pybind_function"), tmp_path)
    other = "main.cpp:2:1: error: 'NewType' does not name a type\n"
    assert not stand_ins._fails_anyway(says("scale_all", other), tmp_path), "the function may be what it declares"
    assert stand_ins._fails_anyway(f"FAILED: cuda.o\n{other}{says('scale_all')}", tmp_path)
