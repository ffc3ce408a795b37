"""The occupancy of kernels, against figures of NVIDIA's calculator, and reports of a worker that are not valid."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_agent.sandbox.judge.timing.occupancy import Multiprocessor, blocks_at_once, of_log, of_plan

H100 = Multiprocessor(count=132)
A100 = Multiprocessor(shared_bytes=167936, count=108)
RTX_3090 = Multiprocessor(threads=1536, blocks=16, shared_bytes=102400, count=82)
T4 = Multiprocessor(threads=1024, blocks=16, shared_bytes=65536, reserved_bytes=0, count=40)


@pytest.mark.parametrize(
    "limits, threads, registers, shared, blocks, limit",
    [
        (H100, 256, 32, 0, 8, "threads"),
        (H100, 256, 40, 0, 6, "registers"),  # 48 of 64 warps
        (H100, 256, 64, 0, 4, "registers"),
        (H100, 256, 128, 0, 2, "registers"),
        (H100, 256, 255, 0, 1, "registers"),
        (H100, 1024, 65, 0, 0, "registers"),  # cannot be launched
        (H100, 32, 16, 0, 32, "blocks"),
        (H100, 128, 32, 48 << 10, 4, "shared memory"),
        (H100, 128, 32, 227 << 10, 1, "shared memory"),
        (H100, 33, 32, 0, 32, "threads"),  # a block of 33 threads has two warps
        (A100, 128, 32, 48 << 10, 3, "shared memory"),
        (A100, 256, 96, 0, 2, "registers"),
        (RTX_3090, 256, 32, 0, 6, "threads"),
        (RTX_3090, 1024, 32, 0, 1, "threads"),
        (RTX_3090, 64, 32, 0, 16, "blocks"),
        (RTX_3090, 128, 32, 48 << 10, 2, "shared memory"),
        (T4, 256, 64, 0, 4, "threads"),
        (T4, 128, 32, 32 << 10, 2, "shared memory"),
    ],
)
def test_the_blocks_at_once_are_those_of_the_calculator(limits, threads, registers, shared, blocks, limit):
    assert blocks_at_once(threads, registers, shared, limits) == (blocks, limit)


@given(st.integers(1, 1024), st.integers(1, 255), st.integers(0, 232448))
def test_what_is_held_at_once_fits(threads, registers, shared):
    blocks, _ = blocks_at_once(threads, registers, shared, H100)
    assert blocks * math.ceil(threads / 32) * 32 <= H100.threads and blocks <= H100.blocks
    assert blocks * math.ceil(threads / 32) * 32 * registers <= H100.registers
    assert blocks * (shared + H100.reserved_bytes) <= H100.shared_bytes


NODE = {"symbol": "fused<4>", "grid": [100, 2, 1], "block": [32, 8, 1], "shared": 1000}
MEMSET = {"memset": "out0", "value": 0}


def test_the_kernels_of_a_plan_have_resources_and_equal_launches_are_told_once():
    one, two = of_plan(
        [NODE, MEMSET, NODE, NODE | {"shared": 0}], [[40, 16, 24], None, [40, 16, 24], [40, 16, 24]], H100
    )
    assert (one.name, one.grid, one.block, one.registers, one.local_bytes) == ("fused<4>", 200, 256, 40, 16)
    assert (one.shared_bytes, two.shared_bytes) == (1024, 24)
    assert (one.occupancy, one.limit) == (0.75, "registers") and one.waves == pytest.approx(200 / (6 * 132))


@pytest.mark.parametrize(
    "told", [None, [], "x", {"a": 1}, [[1, 2]], [[-1, 0, 0]], [["1", 0, 0]], [None], [[1, 2, 3]] * 2]
)
def test_a_report_that_is_not_valid_gives_nothing(told):
    assert of_plan([NODE], told, H100) == []


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN1a5otherEPf' for 'sm_90a'
ptxas info    : Function properties for _ZN1a5otherEPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 94.754 ms
ptxas info    : Compiling entry function '_Z5fusedILi4EEvPKfPfl' for 'sm_90a'
ptxas info    : Function properties for _Z5fusedILi4EEvPKfPfl
    256 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 256 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_the_assemblers_report_tells_the_kernels_of_an_extension():
    other, fused, plain = of_log(LOG, H100)
    assert (other.name, fused.name, plain.name) == ("other", "fused", "plain")
    assert (other.registers, other.local_bytes, other.shared_bytes, other.occupancy) == (8, 0, 0, 1.0)
    assert (fused.registers, fused.local_bytes, fused.shared_bytes, fused.limit) == (80, 256, 4096, "registers")
    assert fused.occupancy == 0.375 and (fused.grid, fused.block, fused.waves) == (0, 256, 0)


@pytest.mark.parametrize(
    "log", ["", "nothing", LOG.replace("registers", "x"), "ptxas info : Compiling entry function '' for 'sm_90a'\n"]
)
def test_a_report_without_kernels_gives_nothing(log):
    assert of_log(log, H100) == []
