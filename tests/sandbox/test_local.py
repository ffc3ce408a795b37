"""The sandbox of one machine: what it caches, what it asks again, and what it makes of a judge that fails."""

import asyncio
import importlib.metadata
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import SandboxUnready, TaskError
from cuda_agent.sandbox import judge_process
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.judge.baselines import baselines_file
from cuda_agent.sandbox.judge_process import JudgeHandle, JudgeLost
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.messages import JudgeRequest, receive_frame
from cuda_agent.sandbox.wire import Mode, Probe, Solution, TaskSpec, Tensor, Verdict
from tests.sandbox.conftest import Running, task
from tests.sandbox.judge.fakes import settings_in

SPEC = TaskSpec((Tensor((2,), "float32"),), (Tensor((2,), "float32"),), {}, ({"tensor": 0},), ({"value": 1.5},))
CODE = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x + x\n"
SOLUTION = Solution("python", {"model_new.py": CODE})


class Judge:
    """Answers each request by the next entry of ``answers``, or the last one."""

    torch = "2.0+cu130"
    pending, quarantined = 0, False

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[JudgeRequest] = []

    async def ask(self, operation: JudgeRequest, body: Mapping[str, Any]) -> Any:
        self.asked.append(operation)
        if operation == JudgeRequest.SPEC:
            return SPEC.to_json()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer.to_json()

    def evaluations(self) -> int:
        return self.asked.count(JudgeRequest.EVALUATE)


def verdict(status: Any = "ok", **more: Any) -> Verdict:
    return Verdict(status, "python", "quick", "cpu", "model", **more)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], LocalSandbox]:
    async def runtime(*_: Any) -> Path:
        return tmp_path

    monkeypatch.setattr("cuda_agent.sandbox.formats.plan.runtime", runtime)

    def made(judge: Any) -> LocalSandbox:
        sandbox = LocalSandbox(SandboxConfig(clock="model"), tmp_path / "cache")
        sandbox._judges = [judge]
        sandbox._builder = None  # type: ignore[assignment]  # this format builds nothing
        return sandbox

    return made


Make = Callable[[Any], LocalSandbox]


def test_a_verdict_is_asked_for_once_and_again_on_demand(make: Make) -> None:
    judge = Judge(verdict(message="first"), verdict(message="second"))
    sandbox = make(judge)
    assert asyncio.run(sandbox.evaluate(task(), SOLUTION)).message == "first"
    assert asyncio.run(make(judge).evaluate(task(), SOLUTION)).message == "first", "the cache outlives the sandbox"
    assert judge.evaluations() == 1
    assert asyncio.run(sandbox.evaluate(task(), SOLUTION, again=True)).message == "second"
    assert asyncio.run(sandbox.evaluate(task(), SOLUTION)).message == "second"


def test_equal_requests_at_once_are_judged_once_even_if_the_first_is_cancelled(make: Make) -> None:
    class Slow(Judge):
        async def ask(self, operation: JudgeRequest, body: Mapping[str, Any]) -> Any:
            await asyncio.sleep(0.05)
            return await super().ask(operation, body)

    async def at_once(sandbox: LocalSandbox, cancel: bool) -> list[Any]:
        asked = [asyncio.ensure_future(sandbox.evaluate(task(), SOLUTION)) for _ in range(3)]
        await asyncio.sleep(0.01)
        if cancel:
            asked[0].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    for cancel in (True, False):
        judge = Slow(verdict("infra"), verdict()) if cancel else Slow(verdict())
        sandbox = make(judge)
        sandbox.cache /= str(cancel)
        found = asyncio.run(at_once(sandbox, cancel))
        assert [one.status for one in found[1:]] == ["ok", "ok"] and judge.evaluations() == 1 + cancel
        assert isinstance(found[0], asyncio.CancelledError) == cancel
        assert not sandbox._asked


@pytest.mark.parametrize("other", ["compiler", "torch", "device"])
def test_a_verdict_of_another_machine_software_or_device_is_not_reused(
    make: Make, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    judge = Judge(verdict(message="first"), verdict(message="second"))
    assert asyncio.run(make(judge).evaluate(task(), SOLUTION)).message == "first"
    later = make(judge)
    if other == "compiler":
        monkeypatch.setattr(toolchain, "find_toolchain", lambda: toolchain.Toolchain("g++", "g++ 99"))
    elif other == "torch":
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == "torch" else version(name))
    else:
        later._identity = "another GPU, driver 999.9"
    assert asyncio.run(later.evaluate(task(), SOLUTION)).message == "second"


def test_a_machine_without_a_compiler_still_keeps_verdicts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise toolchain.CompilerMissing("no g++")

    monkeypatch.setattr(toolchain, "find_toolchain", missing)
    judge = Judge(verdict(message="first"), verdict(message="second"))
    for _ in range(2):
        assert asyncio.run(make(judge).evaluate(task(), SOLUTION)).message == "first"


@pytest.mark.parametrize("fault", [JudgeLost("gone"), OSError("full"), verdict("infra", message="sick")])
def test_a_fault_of_ours_is_tried_once_more_and_never_kept(make: Make, fault: Any) -> None:
    judge = Judge(fault, verdict())
    assert asyncio.run(make(judge).evaluate(task(), SOLUTION)).status == "ok"
    assert judge.evaluations() == 2
    judge = Judge(fault)
    sandbox = make(judge)
    other = Solution("python", {"model_new.py": CODE + "# another\n"})
    for _ in range(2):
        assert asyncio.run(sandbox.evaluate(task(), other)).status == "infra"
    assert judge.evaluations() == 4


def test_a_cancellation_during_the_end_leaves_no_folder(tmp_path: Path) -> None:
    """As when SIGTERM also ends a program for which the sandbox waits: the error is there before the cancellation."""
    folders: list[Path] = []

    async def fail() -> None:
        async with LocalSandbox(SandboxConfig(), tmp_path) as sandbox:
            assert sandbox._scratch
            folders.append(sandbox._scratch)
            task = asyncio.current_task()
            assert task
            task.cancel()
            raise OSError("the compiler was killed")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(fail())
    assert folders and not folders[0].exists()


def test_what_does_not_build_never_reaches_the_judge(make: Make) -> None:
    judge = Judge(verdict())
    found = asyncio.run(make(judge).evaluate(task(), Solution("python", {})))
    assert found.status == "build_error" and found.message and judge.evaluations() == 0


def test_a_tasks_own_error_comes_through(make: Make) -> None:
    with pytest.raises(TaskError, match="no Model"):
        asyncio.run(make(Judge(TaskError("no Model"))).evaluate(task(), SOLUTION))


def test_the_spec_of_a_task_is_asked_for_once(make: Make) -> None:
    judge = Judge(verdict())
    sandbox = make(judge)
    assert asyncio.run(sandbox.spec(task())) == asyncio.run(sandbox.spec(task())) == SPEC
    assert judge.asked == [JudgeRequest.SPEC]


def test_a_probe_whose_judge_is_lost_twice_says_so(make: Make) -> None:
    assert asyncio.run(make(Judge(JudgeLost("gone"), Probe(deterministic=True))).probe(task())).deterministic
    assert asyncio.run(make(Judge(JudgeLost("gone"))).probe(task())).error == "infrastructure: gone"


def test_a_task_always_has_the_same_judge(make: Make) -> None:
    sandbox = make(Judge(verdict()))
    sandbox._judges *= 3
    tasks = [task(name=name) for name in "abcdefgh"]
    assert all(0 <= sandbox.judge_of(one) < 3 for one in tasks)
    assert [sandbox.judge_of(one) for one in tasks] == [sandbox.judge_of(one) for one in tasks]


class _NoJudge(JudgeHandle):
    program = "tests.sandbox.no_such_judge"


def test_a_judge_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    handle = _NoJudge(settings_in(tmp_path), tmp_path)
    with pytest.raises(SandboxUnready, match=r"the judge does not start.*No module named"):
        asyncio.run(handle.begin())
    with pytest.raises(JudgeLost, match="No module named"):
        asyncio.run(handle.ask(JudgeRequest.SPEC, {}))


def test_a_judge_sees_the_gpus_that_this_process_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    given: list[dict[str, str]] = []
    start = judge_process.subprocess.Popen

    def popen(*command: Any, env: dict[str, str], **more: Any) -> Any:
        given.append(env)
        return start(*command, env=env, **more)

    monkeypatch.setattr(judge_process.subprocess, "Popen", popen)
    with pytest.raises(SandboxUnready):
        asyncio.run(_NoJudge(settings_in(tmp_path), tmp_path).begin())
    assert [env["CUDA_VISIBLE_DEVICES"] for env in given] == ["3"]


def test_a_quarantined_device_is_not_asked_and_a_killed_judge_stays_dead(tmp_path: Path) -> None:
    handle = _NoJudge(settings_in(tmp_path), tmp_path)
    handle._quarantine = (time.monotonic() + 60, "cuda: quarantined")
    for use in (lambda: handle.ask(JudgeRequest.SPEC, {}), handle.begin):
        with pytest.raises(JudgeLost, match="quarantined"):
            asyncio.run(use())
    handle._quarantine = (0.0, "")
    handle.kill()
    for use in (lambda: handle.ask(JudgeRequest.SPEC, {}), handle.begin):
        with pytest.raises(JudgeLost, match="was ended"):
            asyncio.run(use())
    assert not (tmp_path / "judge.log").exists(), "no process was started"


def test_a_judge_that_is_killed_while_it_starts_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = JudgeHandle(settings_in(tmp_path), tmp_path)
    monkeypatch.setattr(judge_process, "receive_frame", lambda _: handle.kill() or receive_frame(handle._socket))
    with pytest.raises(JudgeLost, match="was ended"):
        asyncio.run(handle.begin())


def test_a_judge_that_cannot_open_the_gpu_is_lost_for_a_while(tmp_path: Path) -> None:
    """The sandbox has opened the GPU before, so this is a fault of the driver, and the settings are right."""
    cuda = settings_in(tmp_path, device="cuda", clock="real", kernels=str(tmp_path / "none.cubin"))
    handle = JudgeHandle(cuda, tmp_path)
    try:
        with pytest.raises(JudgeLost, match="quarantined"):
            asyncio.run(handle.begin())
        assert handle.quarantined
    finally:
        handle.close()


@pytest.fixture
def on_gpu(make: Callable[[Any], LocalSandbox], tmp_path: Path) -> LocalSandbox:
    """A sandbox of a GPU with one prober, whose judge is busy."""
    judge: Any = Judge(verdict())
    judge.busy = True
    sandbox = make(judge)
    sandbox.config = sandbox.config.model_copy(update={"device": "cuda", "clock": "real"})
    sandbox._settings = settings_in(tmp_path, device="cuda", clock="real")
    prober: Any = Judge(Probe(deterministic=True))
    sandbox._probers = [prober]
    return sandbox


def asked_to_measure(sandbox: LocalSandbox, spec: TaskSpec = SPEC, wanted: bool = True, mode: Mode = "quick") -> bool:
    prober: Any = sandbox._probers[0]
    prober.asked.clear()
    sandbox._specs[task().digest] = spec
    asyncio.run(sandbox._measure(task(), mode, wanted))
    return bool(prober.asked == [JudgeRequest.MEASURE])


def test_a_prober_measures_the_baselines_of_a_small_task_while_the_judge_is_busy(on_gpu: LocalSandbox) -> None:
    judge: Any = on_gpu._judges[0]
    assert asked_to_measure(on_gpu)
    assert not asked_to_measure(on_gpu, wanted=False)
    assert not asked_to_measure(on_gpu, TaskSpec((Tensor((1 << 27,), "float32"),), SPEC.outputs, {}, (), ()))
    judge.busy = False
    assert not asked_to_measure(on_gpu), "an idle judge measures at once"
    judge.busy = True
    file = baselines_file(on_gpu._settings, task().digest, judge.torch)
    file.parent.mkdir()
    file.write_text('{"compile_tried": true}')
    assert not asked_to_measure(on_gpu), "they are known"
    assert asked_to_measure(on_gpu, mode="strict"), "strict mode needs more"
    file.write_text('{"compile_tried": true, "strict": {"seconds": {}}}')
    assert not asked_to_measure(on_gpu, mode="strict")


def test_a_quick_request_does_not_wait_while_baselines_of_strict_mode_are_measured(on_gpu: LocalSandbox) -> None:
    judge, prober = cast(Any, on_gpu._judges[0]), cast(Any, on_gpu._probers[0])
    file = baselines_file(on_gpu._settings, task().digest, judge.torch)
    file.parent.mkdir()
    file.write_text('{"compile_tried": true}')
    on_gpu._specs[task().digest] = SPEC

    async def work() -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def ask(*_: Any) -> None:
            begun.set()
            await over.wait()

        prober.ask = ask
        strict = asyncio.create_task(on_gpu._measure(task(), "strict", True))
        await begun.wait()
        await asyncio.wait_for(on_gpu._measure(task(), "quick", True), 5)
        assert not strict.done()
        over.set()
        await strict

    asyncio.run(work())


def test_baselines_that_the_judge_has_measured_are_not_measured_again(
    timed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed.probe(task())  # starts the judge
    prober: Any = Judge(Probe(deterministic=True))
    monkeypatch.setattr(timed.sandbox, "_probers", [prober])

    async def measure_beside_the_judge() -> None:
        async with timed.sandbox._judges[0]._turn:
            await timed.sandbox._measure(task(), "quick", True)

    timed.wait(timed.sandbox.spec(task()))
    timed.wait(measure_beside_the_judge())
    assert prober.asked == []


@pytest.mark.parametrize("failure", [JudgeLost("gone"), TaskError("too large"), SandboxUnready("no device")])
def test_a_prober_that_fails_costs_no_verdict(on_gpu: LocalSandbox, failure: Exception) -> None:
    prober: Any = on_gpu._probers[0]
    prober.answers = [failure]
    on_gpu._specs[task().digest] = SPEC
    asyncio.run(on_gpu._measure(task(), "quick", True))
    assert prober.asked == [JudgeRequest.MEASURE]


def test_a_task_goes_to_the_prober_with_the_fewest_requests_and_rather_to_the_one_that_knows_it(
    on_gpu: LocalSandbox,
) -> None:
    probers: Any = [Judge(Probe(deterministic=True)) for _ in range(3)]
    on_gpu._probers = probers
    probers[0].pending = probers[2].pending = 1
    asyncio.run(on_gpu.probe(task()))
    assert [len(one.asked) for one in probers] == [0, 1, 0]
    probers[0].pending = 0
    asyncio.run(on_gpu.probe(task()))
    assert [len(one.asked) for one in probers] == [0, 2, 0], "both are free, and one has the task"
    probers[1].pending = 1
    asyncio.run(on_gpu.probe(task()))
    assert [len(one.asked) for one in probers] == [1, 2, 0]
    probers[0].quarantined = True  # it would refuse at once, and so always be free
    probers[2].pending = 3
    asyncio.run(on_gpu.probe(task()))
    assert [len(one.asked) for one in probers] == [1, 3, 0]


def test_a_judge_counts_the_requests_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = JudgeHandle(settings_in(tmp_path), tmp_path)
    seen = []
    monkeypatch.setattr(handle, "_ask", lambda *_: seen.append(handle.pending))

    async def two() -> None:
        await asyncio.gather(*(handle.ask(JudgeRequest.SPEC, {}) for _ in range(2)))

    asyncio.run(two())
    assert seen == [2, 1] and handle.pending == 0


def test_a_judge_works_on_although_its_caller_was_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, go_on = JudgeHandle(settings_in(tmp_path), tmp_path), threading.Event()
    monkeypatch.setattr(handle, "_ask", lambda *_: go_on.wait(30))

    async def cancelled() -> None:
        working, waiting = (asyncio.ensure_future(handle.ask(JudgeRequest.SPEC, {})) for _ in range(2))
        await asyncio.sleep(0.05)
        for one in (working, waiting):
            one.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        assert handle.pending == 1
        go_on.set()
        while handle.pending:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancelled(), 30))


@pytest.mark.parametrize(
    "answer", [Probe(error="out of memory"), TaskError("too large"), JudgeLost("gone"), SandboxUnready("no")]
)
def test_the_judge_answers_for_a_prober_that_fails(on_gpu: LocalSandbox, answer: Any) -> None:
    judge: Any = on_gpu._judges[0]
    prober: Any = on_gpu._probers[0]
    judge.answers = [Probe(deterministic=True)]
    assert asyncio.run(on_gpu.probe(task())).deterministic and judge.asked == []
    prober.answers = [answer]
    assert asyncio.run(on_gpu.probe(task())).deterministic and judge.asked == [JudgeRequest.PROBE]
    judge.answers = [SandboxUnready("no device")]
    with pytest.raises(SandboxUnready):
        asyncio.run(on_gpu.probe(task()))
