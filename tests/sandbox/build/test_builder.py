"""CUDA sources are compiled without a GPU, so that what is wrong with them is known anywhere."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.build import builder as build
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.formats import extension, plan
from cuda_agent.sandbox.formats.solution_format import SolutionError, Toolchain
from cuda_agent.sandbox.jail.scratch import make_folder
from cuda_agent.sandbox.judge.timing.occupancy import Multiprocessor, of_log
from cuda_agent.sandbox.messages import KERNELS_LOG
from cuda_agent.sandbox.wire import TaskSpec, Tensor
from tests.sandbox import published
from tests.sandbox.test_cuda import KERNEL, PLAN

SPEC = TaskSpec(
    inputs=(Tensor((32, 128), "float32"),),
    outputs=(Tensor((32, 128), "float32"),),
    weights={},
    arguments=({"tensor": 0},),
    init=({"value": 1.5},),
)


@pytest.fixture
def builder(tmp_path: Path) -> build.Builder:
    return build.Builder(tmp_path / "builds", make_folder("build"), tmp_path / "lease", 300, 8192)


def kernels(builder: build.Builder, source: str, nodes: Any = PLAN) -> tuple[bytes, dict[str, str]]:
    files = {"plan.json": json.dumps(nodes), "kernels/chain.cu": source}
    program = plan.compile_plan(files, SPEC, "cuda")
    sources = {"kernels/chain.cu": source, "plan.cu": program.source}
    image, names = asyncio.run(builder.kernels(sources, "plan.cu", program.expressions, "sm_90a"))
    return image.read_bytes(), names


def test_a_plan_becomes_a_cubin_that_knows_its_kernels_arguments(builder: build.Builder) -> None:
    image, names = kernels(builder, KERNEL)
    assert image[:4] == b"\x7fELF"
    assert names["chain<float, 4>"].encode() in image
    assert b"ppqf\0" in image  # two pointers, a 64-bit integer, a float: what the launcher must pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda source: source.replace("fmaxf(", "fmaxff("), 'identifier "fmaxff" is undefined'),
        (lambda source: source.replace("chain(", "other("), 'identifier "chain" is undefined'),
        (lambda source: "#include <torch/extension.h>\n" + source, "torch/extension.h"),
    ],
    ids=["unknown function", "unknown kernel", "torch"],
)
def test_an_error_is_quoted_with_its_place(builder: build.Builder, change: Callable[[str], str], said: str) -> None:
    with pytest.raises(build.BuildError) as caught:
        kernels(builder, change(KERNEL))
    assert said in str(caught.value)
    assert "kernels/chain.cu(" in str(caught.value) or "plan.json nodes[0]" in str(caught.value)


def test_a_host_file_cannot_be_included(builder: build.Builder) -> None:
    with pytest.raises(build.BuildError) as caught:
        kernels(builder, '#include "/etc/passwd"\n' + KERNEL)
    assert "root:" not in str(caught.value)


def folder(builder: build.Builder, files: dict[str, str]) -> Path:
    try:
        toolchain.find_nvcc()
    except toolchain.CompilerMissing as missing:
        pytest.skip(str(missing))
    spec = TaskSpec((Tensor((8, 8), "float32"),), (Tensor((8, 8), "float32"),), {}, ({"tensor": 0},), ({"value": 8},))
    load = asyncio.run(extension.build(files, spec, Toolchain(builder, "sm_90a")))
    return Path(load["library"])


def test_the_published_work_folder_builds_unchanged(builder: build.Builder) -> None:
    library = folder(builder, published.FILES)
    assert b"norm_gelu_launcher" in library.read_bytes()


def test_the_assemblers_report_on_the_kernels_of_an_extension_is_kept(builder: build.Builder) -> None:
    library = folder(builder, published.FILES)
    (use,) = of_log((library.parent / KERNELS_LOG).read_text(), Multiprocessor())
    assert use.name == "norm_gelu_kernel" and 8 <= use.registers <= 255 and use.local_bytes == 0
    assert use.grid == 0 and 0 < use.occupancy <= 1


def test_what_nvcc_refuses_is_quoted(builder: build.Builder) -> None:
    files = published.FILES | {"kernels/norm_gelu.cu": published.KERNEL.replace("rsqrtf(", "resqrt(")}
    with pytest.raises(build.BuildError, match='identifier "resqrt" is undefined'):
        folder(builder, files)


def test_a_kernel_file_may_not_include_torch(builder: build.Builder) -> None:
    files = published.FILES | {"kernels/norm_gelu.cu": "#include <torch/types.h>\n" + published.KERNEL}
    with pytest.raises(SolutionError, match=r"may not be included in a \.cu file"):
        folder(builder, files)
