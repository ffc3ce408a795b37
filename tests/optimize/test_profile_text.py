"""What profile says about rates, kernels and the limiter."""

from dataclasses import replace

import pytest

from cuda_agent.optimize.profile_text import profile_lines
from cuda_agent.sandbox.wire import KernelUse, Ran, Verdict

USE = KernelUse("fused<4>", 1024, 256, 40, 0, 0, 0.75, "registers", 1.3)
VERDICT = Verdict(
    "ok", "plan", "quick", "cuda", "real", seconds=1e-3, bytes=2_400_000_000, flops=1_000_000_000,
    peak_bytes_per_second=4.8e12, peak_flops=6e13, ran=[Ran("fused<4>", "own", 1)], kernels=[USE],
)  # fmt: skip


def last(**changes):
    return profile_lines(replace(VERDICT, **changes))[-1]


def test_rates_kernels_and_the_limiter_are_told_with_their_figures():
    lines = "\n".join(profile_lines(VERDICT))
    assert "2.4 TB/s, 50% of the device's peak" in lines and "1 TFLOP/s, 2% of the device's peak" in lines
    assert (
        "fused<4>: 40 registers a thread, no spills, no shared memory; occupancy 75% with 256 threads a block, "
        "limited by registers; 1024 blocks fill it 1.3 times"
    ) in lines


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"bytes": 4_000_000_000}, "limiter: memory, at 83% of the peak rate"),
        ({"bytes": 1000, "flops": 50_000_000_000}, "limiter: arithmetic, at 83% of the peak rate"),
        ({"seconds": 1e-4}, "limiter: not known: less is done than is counted"),
        ({}, "neither memory nor arithmetic (memory is at 50% of the peak rate); probably latency: too few loads"),
        ({"seconds": 3e-6, "bytes": 10_000, "flops": None}, "launches: 1 in 3.0 us"),
        ({"kernels": [replace(USE, local_bytes=256)]}, "local memory: fused<4> keeps 256 bytes a thread"),
        ({"kernels": [USE, replace(USE, grid=50, waves=0.06)]}, "parallelism: the 50 blocks of fused<4> fill 6%"),
        ({"kernels": [replace(USE, occupancy=0.125, limit="shared memory")]}, "occupancy: fused<4> reaches 12%"),
        (
            {"bytes": 4_000_000_000, "eager_seconds": 2e-3, "compile_seconds": 0.5e-3},
            "not the device's peak rates, as torch.compile takes 500.0 us; probably latency",
        ),
        ({"device": "cpu", "kernels": []}, "probably latency of the processor"),
    ],
)
def test_the_limiter_is_said_in_words(changes, words):
    assert words in last(**changes)


@pytest.mark.parametrize("changes", [{"status": "wrong"}, {"clock": "model"}, {"seconds": None}])
def test_without_a_measured_time_nothing_is_told(changes):
    assert profile_lines(replace(VERDICT, **changes)) == []


def test_without_a_known_peak_no_limiter_is_told():
    lines = profile_lines(replace(VERDICT, peak_bytes_per_second=None, peak_flops=None))
    assert lines and not any(line.startswith("limiter") for line in lines)


def test_of_a_kernel_that_host_code_launches_the_launch_is_not_told():
    lines = profile_lines(replace(VERDICT, kernels=[replace(USE, grid=0, waves=0.0, occupancy=0.25)]))
    assert any(
        line.endswith("occupancy 25% if launched with 256 threads a block, limited by registers") for line in lines
    )
    assert "probably latency" in lines[-1]


def test_a_solution_of_many_kernels_is_told_in_few_lines():
    kernels = [replace(USE, name=f"k{number}") for number in range(9)]
    lines = profile_lines(replace(VERDICT, kernels=kernels))
    assert sum(": 40 registers" in line for line in lines) == 6 and "3 more kernels" in lines
