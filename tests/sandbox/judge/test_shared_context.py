"""One context for many plans: which solutions share it, how long it lives, and what it may not decide."""

from typing import Any

import pytest

from cuda_agent.sandbox.jail.processes import WorkerError
from cuda_agent.sandbox.judge import shared_context
from cuda_agent.sandbox.judge.memory import device
from cuda_agent.sandbox.judge.shared_context import SharedContext, is_best, may_share
from cuda_agent.sandbox.messages import WorkerOperation
from cuda_agent.sandbox.wire import FormatTraits
from tests.sandbox.judge.fakes import Worker, settings_in


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({}, True),
        ({"mode": "strict"}, False),
        ({"mode": "check"}, False),
        ({"device": "cpu"}, False),
        ({"clock": "model"}, False),
        ({"size": 2 << 30}, False),
        ({"host_is_ours": False}, False),
        ({"node": {"library": "gemm"}}, False),
        ({"node": {"memset": "out:0"}}, True),
        ({"image": b"\x7fELF\0fused\0"}, True),
        ({"image": b"\x7fELF\0fused\0malloc\0"}, False),
    ],
    ids=str,
)
def test_only_quick_plans_of_kernels_share_a_context(tmp_path: Any, change: dict[str, Any], shared: bool) -> None:
    case = {
        "mode": "quick",
        "device": "cuda",
        "clock": "real",
        "host_is_ours": True,
        "node": {},
        "image": b"",
        "size": 1,
    } | change
    (image := tmp_path / "image.cubin").write_bytes(case["image"])
    request: Any = {
        "mode": case["mode"], "traits": vars(FormatTraits(host_is_ours=case["host_is_ours"])),
        "load": {"nodes": [{"symbol": "f"}, case["node"]], "image": str(image)},
    }  # fmt: skip
    settings = settings_in(tmp_path, device=case["device"], clock=case["clock"])
    assert may_share(request, settings, case["size"]) is shared


def test_a_best_time_is_clearly_less_than_the_last() -> None:
    assert is_best(1.0, None) and is_best(0.94, 1.0)
    assert not is_best(0.96, 1.0) and not is_best(None, None)


@pytest.fixture
def started() -> list[Any]:
    return []


@pytest.fixture
def context(started: list[Any]) -> SharedContext:
    def start() -> Any:
        started.append(Worker(lambda number, inputs: None))
        return started[-1]

    return SharedContext(start)


def test_a_worker_serves_again_once_its_plan_is_unloaded(context: SharedContext, started: list[Any]) -> None:
    first = context.take()
    assert context.served == 0
    assert context.give_back(first, 2.0)
    assert started[0].operations == [WorkerOperation.UNLOAD_SOLUTION]
    assert context.used
    assert context.take() is first and context.served == 1


def test_a_worker_that_does_not_unload_is_replaced(context: SharedContext, started: list[Any]) -> None:
    worker = context.take()
    started[0].fails_at[WorkerOperation.UNLOAD_SOLUTION] = WorkerError("the context no longer computes correctly")
    assert not context.give_back(worker, 2.0)
    assert not worker.alive and context.take() is started[1] and context.served == 0


def test_a_worker_that_was_killed_is_replaced(context: SharedContext) -> None:
    worker = context.take()
    context.give_back(worker, 2.0)
    context.take().kill()
    assert context.take() is not worker and context.served == 0


def test_a_context_serves_a_limited_number_of_plans(
    context: SharedContext, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_context, "_MOST_SERVED", 3)
    for _ in range(7):
        context.give_back(context.take(), 2.0)
    assert [worker.alive for worker in started] == [False, False, True]
    context.end()
    assert not started[-1].alive and context.served == 0


def test_areas_are_wiped_and_replaced_only_if_one_is_too_small(
    context: SharedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made:
        def __init__(self, size: int) -> None:
            self.size, self.wiped, self.closed = size, 0, False

        of = classmethod(lambda cls, size: cls(size))

        def wipe(self) -> None:
            self.wiped += 1

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(device, "Area", Made)
    first: Any = context.areas(100, 10)
    assert context.areas(90, 10) == first and [area.wiped for area in first] == [2, 2]
    second: Any = context.areas(20, 11)
    assert [area.size for area in second] == [100, 11] and all(area.closed for area in first)
    context.end()
    assert all(area.closed for area in second)
    made: list[Made] = []

    def of(size: int) -> Made:
        if made:
            raise MemoryError
        made.append(Made(size))
        return made[0]

    monkeypatch.setattr(Made, "of", of)
    with pytest.raises(MemoryError):
        context.areas(1000, 1000)
    assert made[0].closed, "else its memory would be lost"
