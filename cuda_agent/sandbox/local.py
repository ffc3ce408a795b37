"""Runs the sandbox on this machine: builds solutions, sends them to judges, and caches the verdicts.

A solution is code that a language model wrote for a task. A judge is a process that checks and times solutions, which
run in isolated workers. Builds run in parallel; timed calls run one after the other. If the sandbox itself fails, the
evaluation is repeated once. After a second failure, the verdict has the status ``infra`` and no reward. This process
runs no code that a language model wrote."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import SandboxUnready, TaskError
from cuda_agent.machine import cores, processor_facts
from cuda_agent.sandbox import verdict_key
from cuda_agent.sandbox.build import builder, toolchain
from cuda_agent.sandbox.formats import first_pass, plan, rules
from cuda_agent.sandbox.formats.first_pass import FirstPass, FirstPassFailed
from cuda_agent.sandbox.formats.solution_format import FirstPassTime, SolutionError, Toolchain
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.jail import scratch
from cuda_agent.sandbox.judge.baselines import baselines_file, read_baselines
from cuda_agent.sandbox.judge.memory.buffers import call_bytes
from cuda_agent.sandbox.judge.timing.roofline import keep
from cuda_agent.sandbox.judge_process import JudgeHandle, JudgeLost
from cuda_agent.sandbox.messages import (
    FRAME_LIMIT,
    MOST_BESIDE,
    EvaluateRequest,
    FrameTooLarge,
    JudgeRequest,
    JudgeSettings,
    TaskSource,
)
from cuda_agent.sandbox.wire import LOST, Mode, Probe, Solution, TaskSpec, Verdict
from cuda_agent.sandbox.workspace.client import Commands, Workspace, Workspaces
from cuda_agent.tasks.task import Task

_HERE = Path(__file__).parent
_ONLY_CHECKED = "mode check only checks"
_MOST_SPECS = 4096  # kept in memory
_MOST_OF_A_TASK = FRAME_LIMIT // 4  # bytes as JSON
_MOST_PROBERS = 8  # on a GPU; each has a CUDA context, and uses one core


class LocalSandbox:
    """Judges solutions on this machine. An async context manager. ``cache`` is a permanent folder that all processes of
    this machine may share. Entering the context raises ``SandboxUnready`` if the cache or a temporary folder cannot be
    written, or if the GPU or its compiler does not work. If ``compiled`` is false, solutions are compared with eager
    PyTorch alone, which saves the time that ``torch.compile`` needs for the task's model."""

    def __init__(self, config: SandboxConfig, cache: Path, compiled: bool = True) -> None:
        self.config, self._compiled = config, compiled
        self.cache = Path(cache).absolute() / "sandbox"
        self.lease_folder = Path(cache).absolute() / "lease"
        self._scratch: Path | None = None
        self._judges: list[JudgeHandle] = []
        self._workspaces = Workspaces()
        self._specs: dict[str, TaskSpec] = {}
        self._asked: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()  # one per verdict asked for now
        self._probers: list[JudgeHandle] = []  # on a GPU: they run tasks without solutions beside each other
        self._prober_of: dict[str, JudgeHandle] = {}  # digest of a task -> the prober that last answered
        self._measuring: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by digest of a task
        self._architecture = self._identity = ""  # of the GPU; the latter with its driver

    async def __aenter__(self) -> "LocalSandbox":
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.cache).close()
            self._scratch = scratch.make_folder("sandbox")
        except OSError as error:
            raise SandboxUnready(f"the sandbox needs its cache and a temporary folder: {error}") from None
        config = self.config
        on_cpu = config.device == "cpu"
        parallel = 2 if on_cpu else max(2, cores() - 2)
        self._builder = builder.Builder(
            self.cache / "builds", self._scratch, self.lease_folder if on_cpu else None, config.build_seconds,
            config.memory_mb, parallel,
        )  # fmt: skip
        self._first_pass = FirstPass(
            self.cache / "passes", self._scratch, self.lease_folder, config.first_pass_seconds, config.memory_mb,
            config.device, config.threads, config.train_mode, 2 if on_cpu else max(2, cores() // 2),
        )  # fmt: skip
        settings = JudgeSettings(
            threads=config.threads, checks=config.checks, tolerance=config.tolerance, timed_calls=config.timed_calls,
            input_kinds=config.input_kinds, train_mode=config.train_mode,
            run_seconds=config.run_seconds, memory_mb=config.memory_mb, clock=config.clock,
            required_walls=config.required_walls, cache=str(self.cache), scratch="",
            lease=str(self.lease_folder), device=config.device, compiled=self._compiled,
        )  # fmt: skip
        count = min(2, cores())
        if config.device == "cuda":
            count = 1  # solutions are alone on their device
            kernels, self._identity = await self._device()
            settings = replace(settings, kernels=kernels, identity=self._identity)
        self._settings = settings
        self._judges = [self._handle(settings, f"judge-{number}") for number in range(count)]
        probers = min(_MOST_PROBERS, max(1, cores() // 2)) if config.device == "cuda" else 0
        prober = replace(settings, prober=True)
        self._probers = [self._handle(prober, f"prober-{number}") for number in range(probers)]
        return self

    def _handle(self, settings: JudgeSettings, name: str) -> JudgeHandle:
        """Creates the folder ``name`` for a new judge, and returns the judge's handle. Each judge has its own folder,
        because its test of the jail (the limits on untrusted processes) writes a file there."""
        assert self._scratch
        folder = self._scratch / name
        folder.mkdir()
        folder.chmod(0o711)
        return JudgeHandle(replace(settings, scratch=str(folder)), folder)

    async def _device(self) -> tuple[str, str]:
        """Identifies the GPU and compiles the judge's own kernels (``check.cu``) for it. Returns the path of the cubin,
        and a text that names the GPU and its driver. A child process queries the driver. This process forks, so it must
        not open the GPU itself. Raises ``SandboxUnready`` if the GPU or its compiler does not work."""
        program = [sys.executable, "-P", "-m", "cuda_agent.sandbox.driver"]
        environment = os.environ | {"PYTHONPATH": str(_HERE.parents[1])}
        answer = await asyncio.to_thread(subprocess.run, program, capture_output=True, env=environment)
        found = json.loads(answer.stdout or b'{"error": "the CUDA driver does not start"}')
        if "error" in found:
            raise SandboxUnready(f"sandbox.device=cuda: {found['error']}")
        self._architecture = found["architecture"]
        source = {"check.cu": (_HERE / "judge" / "memory" / "check.cu").read_text()}
        try:
            image, _ = await self._builder.kernels(source, "check.cu", [], self._architecture)
        except (builder.BuildError, toolchain.CompilerMissing) as error:
            raise SandboxUnready(f"the CUDA compiler does not work in the sandbox: {error}") from None
        return str(image), found["identity"]

    async def ready(self) -> None:
        """Starts the judges and tests the compiler. At its start, a judge tests the jail (the limits on untrusted
        processes) and the device. A judge that already runs does not repeat these tests. Raises ``SandboxUnready`` with
        a message that names the part that fails."""
        try:
            await asyncio.gather(*(judge.begin() for judge in self._judges))
        except JudgeLost as faulty:  # it was killed, or its device failed the health probe
            raise SandboxUnready(str(faulty)) from None
        await self.prove_compiler()

    async def prove_compiler(self) -> None:
        """Tests the compiler with a small source. The source contains a random number, so the result cannot come from
        the build cache. Raises ``SandboxUnready`` if the build fails."""
        proof = secrets.token_hex(16)
        try:
            if self.config.device == "cuda":
                source = {"proof.cu": f"__device__ int proof_{proof};"}
                built, _ = await self._builder.kernels(source, "proof.cu", [], self._architecture)
            else:
                await plan.runtime(self._builder)
                source = {"proof.cpp": f'extern "C" const char proof[] = "{proof}";'}
                built = await self._builder.library(source, ["proof.cpp"])
            shutil.rmtree(built.parent)
        except (builder.BuildError, toolchain.CompilerMissing) as error:
            raise SandboxUnready(f"the compiler does not work in the sandbox: {error}") from None

    async def __aexit__(self, *_: object) -> None:
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # a cancellation that arrives now must leave nothing behind, either
            await ending
            raise

    async def _end(self) -> None:
        await self._workspaces.close()
        for prober in self._probers:
            prober.kill()  # it may compile for minutes a model that no request waits for
        for judge in (*self._judges, *self._probers):
            await asyncio.to_thread(judge.close)
        await asyncio.to_thread(self._builder.close)
        if self._scratch:
            await asyncio.to_thread(self._first_pass.close)
            for _attempt in range(50):
                await asyncio.to_thread(scratch.remove, self._scratch)
                if not self._scratch.exists():
                    break
                await asyncio.sleep(0.1)  # a compiler that is about to end wrote a file meanwhile

    async def evaluate(self, task: Task, solution: Solution, mode: Mode = "quick", again: bool = False) -> Verdict:
        """Returns the verdict on ``solution``, from the cache if possible. If ``again`` is true, ignores the cache: the
        solution is judged again, and the baselines (the task's own model, eager and compiled) are timed again. Raises
        ``TaskError`` if the task itself cannot be run, and ``SandboxUnready`` if the sandbox does not work."""
        file = self._verdict_file(task, solution, mode)
        async with self._asked.setdefault(file, asyncio.Lock()):  # equal requests wait for the first one's verdict
            if not again and (found := _read_json(file)) is not None:
                verdict = Verdict.from_json(found)
                verdict.cached = self.config.clock == "real"
                return verdict
            for _ in (1, 2):
                try:
                    verdict = await self._evaluate(task, solution, mode, again)
                except (JudgeLost, OSError) as lost:  # OSError: a full disk, a cache that cannot be written
                    verdict = self._refusal(solution, mode, "infra", str(lost))
                if verdict.status != "infra":
                    await asyncio.to_thread(keep, file, verdict.to_json())
                    break
            return verdict

    async def _evaluate(self, task: Task, solution: Solution, mode: Mode, again: bool = False) -> Verdict:
        clock, judge = time.monotonic, self._judge(task)
        spec = await self.spec(task)
        found = await asyncio.to_thread(rules.findings, solution)
        advice = rules.advice(found)
        format, device = FORMATS[solution.format], self.config.device
        first_pass_time = format.first_pass(solution.files, device)
        untimed = format.untimed.get(device, "") or (_ONLY_CHECKED if mode == "check" else "")
        traits = replace(format.traits, untimed=untimed)
        try:
            wanted = not untimed and not again
            made = self._load(task, solution, spec, first_pass_time), self._measure(task, mode, wanted)
            (load, built), _ = await asyncio.gather(*made)
            request: EvaluateRequest = {
                "task": _source(task), "format": solution.format, "traits": asdict(traits), "mode": mode,
                "load": load, "files": solution.files, "observe": bool(found), "again": again,
            }  # fmt: skip
            verdict = Verdict.from_json(await judge.ask(JudgeRequest.EVALUATE, request))
            if first_pass_time == "when refused" and first_pass.was_refused(verdict):
                begin = clock()
                load["place"] = await self._place(task, solution)
                built += clock() - begin
                verdict = Verdict.from_json(await judge.ask(JudgeRequest.EVALUATE, request))
            if first_pass.is_in_doubt(verdict, load.get("place")):
                begin = clock()
                load["place"] = await self._place(task, solution, own_headers=True)
                built += clock() - begin
                verdict = Verdict.from_json(await judge.ask(JudgeRequest.EVALUATE, request))
        except (SolutionError, builder.BuildError) as error:
            verdict = self._refusal(solution, mode, "build_error", str(error))
            verdict.advice = advice
            return verdict
        except FrameTooLarge as error:
            return self._refusal(solution, mode, "build_error", f"the solution is {error}")
        except toolchain.CompilerMissing as error:
            raise SandboxUnready(str(error)) from None
        except FirstPassFailed as failure:
            return self._refusal(solution, mode, failure.status, str(failure))
        verdict.advice = [*advice, *verdict.advice]
        if self.config.clock == "real":
            verdict.phases = {"build": built} | verdict.phases
        return verdict

    async def _load(
        self, task: Task, solution: Solution, spec: TaskSpec, first_pass_time: FirstPassTime
    ) -> tuple[dict[str, Any], float]:
        """Builds the solution. If ``first_pass_time`` is ``before``, also runs the solution's first pass, an unjudged
        run in which the solution may start compilers. Returns the request that makes a worker process load the
        solution, and the seconds that this method took."""
        begin = time.monotonic()
        if self.config.device == "cpu":
            await plan.runtime(self._builder)
        load = await self.prepare(solution, spec)
        if first_pass_time == "before":
            load["place"] = await self._place(task, solution)
        return load, time.monotonic() - begin

    async def _measure(self, task: Task, mode: Mode, wanted: bool) -> None:
        """Measures the baselines of ``task`` (the times of the task's model) for ``mode`` early, while the task's judge
        is busy with another request. A prober (a judge that runs only tasks, without solutions) measures them. Does
        nothing if the judge is idle, ``wanted`` is false, the baselines are known, the task is large (see
        ``MOST_BESIDE``), or there are no probers (on a CPU). The task's judge then measures missing baselines when it
        needs them."""
        if not wanted or not self._probers:
            return
        file = baselines_file(self._settings, task.digest, self._judge(task).torch)
        if read_baselines(file).known(mode):  # a request in quick mode does not wait for baselines of strict mode
            return
        async with self._measuring.setdefault(task.digest, asyncio.Lock()):  # once for all solutions of a task
            if (
                self._judge(task).busy
                and not read_baselines(file).known(mode)
                and call_bytes(await self.spec(task)) <= MOST_BESIDE
            ):
                with contextlib.suppress(TaskError, JudgeLost, SandboxUnready):
                    await self._prober(task).ask(JudgeRequest.MEASURE, {"task": _source(task), "mode": mode})

    async def prepare(self, solution: Solution, spec: TaskSpec) -> dict[str, Any]:
        """Builds the solution. Returns the request that makes a worker process load the solution. Raises
        ``SolutionError`` or ``BuildError`` if the solution does not build."""
        format = FORMATS[solution.format]
        load = await format.build(solution.files, spec, Toolchain(self._builder, self._architecture))
        return load | {"environment": dict(format.environment.get(self.config.device, {}))}

    async def _place(self, task: Task, solution: Solution, own_headers: bool = False) -> dict[str, Any]:
        """Runs the first pass of ``solution``, unless its results are cached. A first pass is an unjudged run in which
        the solution may start compilers. If ``own_headers`` is true, these compilers get torch's own headers, else
        short headers that replace them. Returns a dictionary: ``folder`` is the folder of the results, and
        ``environment`` holds the environment variables with which the judged run finds the results."""
        more = FORMATS[solution.format].environment.get(self.config.device, {})
        return await self._first_pass(task, solution.files, self._architecture, more, own_headers)

    async def spec(self, task: Task) -> TaskSpec:
        """Returns the shapes and dtypes of the tensors of ``task``, and its arguments that are not tensors. Raises
        ``TaskError`` if the task cannot be run."""
        if task.digest not in self._specs:
            spec = TaskSpec.from_json(await self._judge(task).ask(JudgeRequest.SPEC, {"task": _source(task)}))
            if len(self._specs) >= _MOST_SPECS:
                self._specs.pop(next(iter(self._specs)))
            self._specs[task.digest] = spec
        return self._specs[task.digest]

    async def build(self, solution: Solution, spec: TaskSpec) -> str:
        """Builds a solution into the cache, without a judge. Returns an error message for the author, or an empty text
        on success."""
        try:
            await self.prepare(solution, spec)
        except (SolutionError, builder.BuildError) as error:
            return str(error)
        return ""

    def kill(self) -> None:
        """Kills the judges at once, even while they judge. Later requests do not start them again."""
        for judge in (*self._judges, *self._probers):
            judge.kill()

    async def probe(self, task: Task, compile: bool = True) -> Probe:
        """Runs the model of ``task`` without a solution. If ``compile`` is true, also times the model under
        torch.compile. If the model does not run or the judge is lost, ``Probe.error`` says why. Raises
        ``SandboxUnready`` if the task's judge cannot start."""
        first, last = self._prober(task), self._judge(task)
        for judge in (first, last):  # a prober may lack memory that the judge has
            try:
                request = {"task": _source(task), "compile": compile}
                probe = Probe.from_json(await judge.ask(JudgeRequest.PROBE, request))
            except TaskError as error:
                probe = Probe(error=str(error))
            except (JudgeLost, SandboxUnready) as lost:
                if isinstance(lost, SandboxUnready) and judge is last:
                    raise
                probe = Probe(error=f"{LOST}{lost}")
                continue
            if judge is last or not probe.error:
                break
        if self._probers and judge is first:
            if len(self._prober_of) >= _MOST_SPECS:
                self._prober_of.clear()
            self._prober_of[task.digest] = first
        return probe

    def workspace(
        self, files: dict[str, str], protected: frozenset[str], commands: Commands
    ) -> AbstractAsyncContextManager[Workspace]:
        return self._workspaces.open(files, protected, commands)

    @property
    def judges(self) -> int:
        """The number of tasks that can be judged at the same time."""
        return len(self._judges)

    def judge_of(self, task: Task) -> int:
        """Returns the index of the judge for ``task``. A task always has the same judge, because a judge keeps a task
        loaded for later requests."""
        return int(task.digest, 16) % len(self._judges)

    def _judge(self, task: Task) -> JudgeHandle:
        return self._judges[self.judge_of(task)]

    def _prober(self, task: Task) -> JudgeHandle:
        """Returns the judge that runs ``task`` without a solution. This is a prober (a judge that runs no solutions),
        or the task's own judge if there are no probers. Prefers probers whose device is not faulty, then those with the
        fewest open requests, then the one that last answered for this task and may still have it loaded."""
        if not self._probers:
            return self._judge(task)
        last = self._prober_of.get(task.digest)
        return min(self._probers, key=lambda one: (one.quarantined, one.pending, one is not last))

    def _refusal(self, solution: Solution, mode: Mode, status: Any, message: str) -> Verdict:
        advisory = FORMATS[solution.format].traits.advisory
        return Verdict(status, solution.format, mode, self.config.device, self.config.clock, message, advisory=advisory)

    @property
    def machine(self) -> str:
        """The name of the hardware that runs solutions: the GPU with its driver, or the processor."""
        return self._identity or processor_facts().get("model name", "")

    @cached_property
    def _software(self) -> list[str]:
        return verdict_key.software(self.config.device)

    def verdict_key(self, task: Task, solution: Solution, mode: Mode) -> str:
        """Returns the sha256 of everything that a verdict depends on. The verdict is cached under this key."""
        made = [self._identity, *self._software, *([] if self._compiled else ["eager alone"])]
        return verdict_key.verdict_key(self.config, made, task, solution, mode)

    def _verdict_file(self, task: Task, solution: Solution, mode: Mode) -> Path:
        name = self.verdict_key(task, solution, mode)
        return self.cache / "verdicts" / name[:2] / f"{name}.json"


def _source(task: Task) -> TaskSource:
    """Returns the digest and the code of a task. Raises ``TaskError`` if the code is too large to fit into one message
    together with a solution."""
    if len(json.dumps(task.code)) > _MOST_OF_A_TASK:
        raise TaskError(f"the task is too large: at most {_MOST_OF_A_TASK} bytes as JSON")
    return {"digest": task.digest, "code": task.code}


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
