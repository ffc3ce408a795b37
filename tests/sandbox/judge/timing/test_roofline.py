"""Peaks of a device, and the floor below which no time is believed."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_agent.sandbox import judge_process
from cuda_agent.sandbox.judge import reference_client
from cuda_agent.sandbox.judge.timing import roofline
from cuda_agent.sandbox.judge.timing.roofline import Peaks
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor
from cuda_agent.sandbox.worker import observe
from tests.sandbox.conftest import CHAIN, Running, plan_solution, task

PYTHON = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return torch.relu(x) * self.scale
"""
SIZES = st.integers(0, 1 << 40)
RATES = st.floats(1e6, 1e14)


@given(SIZES, RATES, SIZES, st.floats(1, 4))
def test_whoever_writes_at_the_peak_is_believed(written: int, rate: float, cache: int, slack: float) -> None:
    peaks = Peaks(rate, cache, slack)
    assert roofline.below_physical_floor(written / rate, 1e9, written, peaks) == ""
    assert (
        roofline.below_physical_floor(max(0, written - cache) / rate, 1e9, written, peaks) == ""
    )  # the rest stays in the cache


@given(SIZES, RATES, SIZES, st.floats(0.01, 0.9))
def test_a_time_below_the_floor_is_not_believed_unless_eager_is_as_fast(
    written: int, rate: float, cache: int, part: float
) -> None:
    peaks = Peaks(rate, cache, 1.05)
    floor = peaks.floor(written)
    doubt = roofline.below_physical_floor(part * floor, floor, written, peaks)
    assert bool(doubt) is (floor > 0)
    assert roofline.below_physical_floor(part * floor, 0.99 * floor, written, peaks) == ""


@given(SIZES, SIZES)
def test_what_is_not_known_gives_no_floor(written: int, cache: int) -> None:
    assert Peaks(None, cache).floor(written) == 0 == Peaks(1e9, None).floor(written)


def test_an_arithmetic_peak_is_that_of_the_tasks_type_or_of_the_error_shown() -> None:
    peaks = Peaks(operations={"float32": 1.0, "tf32": 2.0, "bfloat16": 3.0, "float16": 4.0})
    single, half, integers = (
        TaskSpec((Tensor((4,), dtype),), (Tensor((4,), dtype),), {}, (), ())
        for dtype in ("float32", "float16", "int64")
    )
    assert [peaks.operations_for(spec) for spec in (single, half, integers)] == [1.0, 4.0, None]
    assert [peaks.operations_for(single, how) for how in ("fp32", "tf32", "bf16", "below bf16")] == [1.0, 2.0, 3.0, 3.0]
    assert peaks.operations_for(half, "tf32") == 4.0


def caches(folder: Path, rows: list[tuple[int, int, str, str]]) -> Path:
    for index, (processor, level, size, shared) in enumerate(rows):
        place = folder / f"cpu{processor}" / "cache" / f"index{index}"
        place.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
            (place / name).write_text(text + "\n")
    return folder


def test_the_last_caches_are_counted_once_each(tmp_path: Path) -> None:
    rows = [(0, 1, "32K", "0"), (0, 3, "32M", "0-1"), (1, 3, "32M", "0-1"), (2, 3, "16384K", "2-3"), (3, 3, "1G", "9")]
    folder = caches(tmp_path, rows)
    assert roofline.cache_bytes(folder, [0, 1]) == 32 << 20
    assert roofline.cache_bytes(folder, [0, 1, 2]) == 48 << 20
    assert roofline.cache_bytes(folder, [9]) is None
    (folder / "cpu0" / "cache" / "index1" / "size").write_text("large")
    assert roofline.cache_bytes(folder, [0]) is None


def test_a_measured_peak_is_kept_and_only_ever_grows(tmp_path: Path) -> None:
    quiet = []

    @contextmanager
    def lease() -> Any:
        quiet.append(True)
        yield

    file = tmp_path / "peaks" / "cpu.json"
    first = roofline.of_cpu(1, file, lease)
    assert first.bytes_per_second and first.bytes_per_second > 1e7 and len(quiet) == 1
    assert roofline.of_cpu(1, file, lease) == first and len(quiet) == 1
    file.write_text(json.dumps(vars(first) | {"bytes_per_second": 1e18}))
    assert roofline.of_cpu(1, file, lease, again=True).bytes_per_second == 1e18
    file.write_text(json.dumps(vars(first) | {"bytes_per_second": 1.0}))
    again = roofline.of_cpu(1, file, lease, again=True)
    assert again.bytes_per_second and again.bytes_per_second > 1e7
    assert roofline.of_cpu(1, file, lease) == again


def test_bytes_count_that_a_call_has_to_write() -> None:
    x, w = torch.randn(8, 16), torch.randn(4)
    made = torch.randn(8, 16)
    whole = 8 * 16 * 4

    def written(*results: torch.Tensor) -> int:
        return observe.written_bytes(results, [x, w])

    assert written(made) == whole
    assert written(x) == written(x.t()) == written(w.expand(100, 4)) == 0
    assert written(made, made.view(-1)) == whole  # once
    assert written(torch.randn(16).expand(1000, 16)) == 16 * 4
    assert written(made[:, :3]) == 8 * 3 * 4
    assert written(made.t().contiguous(), made) == 2 * whole
    assert written(torch.randn(0, 5), torch.tensor(1.0)) == 4


def test_outputs_that_a_call_does_not_write_are_views() -> None:
    x, w = torch.randn(8, 16), torch.randn(4)
    made = torch.randn(8, 16)

    def views(*results: torch.Tensor) -> list[list[int] | None]:
        return observe.views(results, [x, w])

    assert views(made, x.t(), torch.randn(8, 16).t(), torch.tensor(1.0)) == [None, [1, 16], None, None]
    assert views(made, made.t()) == [None, [1, 16]] and views(made[0], made.t(), made) == [[1], [1, 16], None]
    assert views(torch.randn(16).expand(1000, 16), torch.randn(16).expand(1, 16)) == [[0, 1], None]
    assert views(x[:, ::2], w[2:]) == [[16, 2], [1]]


def test_of_views_counts_what_a_copy_can_be_made_of() -> None:
    inputs, outputs = (Tensor((8, 16), "float32"),), (Tensor((16, 8), "float32"), Tensor((4,), "float32"))
    spec = TaskSpec(inputs, outputs, {}, (), ())

    def kept(*told: object) -> object:
        return reference_client.views({"views": list(told)}, spec)

    assert kept([1, 16], None) == [[1, 16], None]
    assert kept([0, 1], [32]) == [[], [32]], "one row again and again may come from a whole tensor"
    assert kept([1, 16], [64]) == [[1, 16], None], "further apart than the inputs reach"
    for nonsense in (([1, 16],), ([1, 16], [1], [1]), ([1], [1]), ([1.5, 1], [1]), ([-1, 16], [1]), (7, [1])):
        with pytest.raises((ValueError, TypeError)):
            kept(*nonsense)


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda: torch.randn(8, 16) @ torch.randn(16, 4), 2 * 8 * 16 * 4),
        (lambda: torch.nn.functional.linear(torch.randn(8, 16), torch.randn(4, 16), torch.randn(4)), 2 * 8 * 16 * 4),
        (
            lambda: torch.nn.functional.conv2d(torch.randn(2, 3, 8, 8), torch.randn(5, 3, 3, 3)),
            2 * 2 * 5 * 6 * 6 * 3 * 3 * 3,
        ),
        (
            lambda: torch.nn.functional.scaled_dot_product_attention(*[torch.randn(2, 4, 16, 8)] * 3),
            2 * 2 * 2 * 4 * 16 * 16 * 8,
        ),
        (lambda: torch.relu(torch.randn(100)), 0),
        (lambda: torch.nn.LSTM(8, 8)(torch.randn(3, 2, 8))[0], 0),  # more than is counted: not known
    ],
)
def test_operations_are_counted_where_all_are_known(call: Callable[[], torch.Tensor], count: int) -> None:
    with torch.no_grad():
        flops, result = observe.flops(call)
    assert flops == count and isinstance(result, torch.Tensor)


def test_a_timed_verdict_has_bytes_and_the_peak_of_memory(timed: Running) -> None:
    verdict = timed.evaluate(task(), plan_solution())
    assert verdict.bytes == 2 * 32 * 128 * 4
    assert verdict.flops is None and verdict.peak_flops is None
    assert verdict.peak_bytes_per_second and verdict.peak_bytes_per_second > 1e7


def test_a_matrix_product_has_operations(timed: Running) -> None:
    code = CHAIN.replace("torch.relu(x) * self.scale", "x @ x.t() * self.scale")
    timed.know_compile_time(task(code))
    module = PYTHON.replace("torch.relu(x) * self.scale", "x @ x.t() * self.scale")
    verdict = timed.evaluate(task(code), Solution("python", {"model_new.py": module}))
    assert (verdict.status, verdict.flops) == ("ok", 2 * 32 * 128 * 32)


def test_a_task_that_answers_otherwise_while_it_is_observed_ends_no_judge(timed: Running) -> None:
    mode = "torch.utils._python_dispatch._get_current_dispatch_mode()"
    code = CHAIN.replace(
        "return torch.relu(x) * self.scale",
        f"""y = torch.relu(x) * self.scale
        return y if {mode} is None else (y, y)""",
    )
    timed.know_compile_time(task(code))
    verdict = timed.evaluate(task(code), plan_solution())
    assert (verdict.status, verdict.message, verdict.bytes) == ("ok", "", 2 * 32 * 128 * 4)


def test_a_model_clock_knows_no_peak(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution())
    assert verdict.bytes == 2 * 32 * 128 * 4
    assert verdict.peak_bytes_per_second is None and verdict.flops is None


LARGE = CHAIN.replace("torch.randn(32, 128)", "torch.randn(4096, 1024)")


@pytest.mark.nightly
def test_a_forged_clock_meets_the_floor_in_the_lanes_that_could_forge_it(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_process.JudgeHandle, "program", "tests.sandbox.judge.forged_clock")
    running = start(clock="real", timed_calls=4, memory_mb=800)
    running.know_compile_time(task(LARGE))
    eager = {"eager": 1.0}  # that clock times the reference, too
    for file in (running.sandbox.cache / "baselines").glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | eager))
    verdict = running.evaluate(task(LARGE), Solution("python", {"model_new.py": PYTHON}))
    assert verdict.status == "cheat"
    assert "in which the device can write 17 MB of outputs" in verdict.message
    assert running.evaluate(task(LARGE), plan_solution()).status == "ok"  # its clock is ours


@pytest.mark.nightly
def test_a_peak_that_was_measured_on_a_busy_machine_accuses_nobody(start: Callable[..., Running]) -> None:
    running = start(clock="real", timed_calls=4, memory_mb=800)
    running.know_compile_time(task(LARGE))
    (peaks,) = (running.sandbox.cache / "peaks").glob("*.json")
    slow = json.loads(peaks.read_text()) | {"bytes_per_second": 1e5, "cache_bytes": 0}
    peaks.write_text(json.dumps(slow))
    for file in (running.sandbox.cache / "baselines").glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eager": 1e4}))
    verdict = running.evaluate(task(LARGE), Solution("python", {"model_new.py": PYTHON}))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert json.loads(peaks.read_text())["bytes_per_second"] > 1e7
