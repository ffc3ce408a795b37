"""Finds a task's best design on a GPU: draws designs, builds them and times them.

A design is one way to write the task's kernel (``cuda_kernels``). A solution with this design consists of a source file
and a plan, the list of kernel launches. The task must be of the teacher's family: this project generates these tasks
(``family``), and the scripted teacher, a program, can solve them.

``Sweep`` builds all drawn designs of a task at once. A child process (``design_bench``) times them. The child runs
outside the sandbox's jail. This is safe, because it runs only code that this project generated: ``family.parse``
refuses all other tasks."""

import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from cuda_agent.errors import SandboxUnready
from cuda_agent.sandbox.build.builder import BuildError
from cuda_agent.sandbox.formats.solution_format import SolutionError
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Solution, TaskSpec
from cuda_agent.synthesis.teacher.cuda_kernels import KERNEL, PLAN
from cuda_agent.synthesis.teacher.family import parse, task_spec
from cuda_agent.synthesis.teacher.optimum import Optimum, Swept
from cuda_agent.synthesis.teacher.teacher import Worked, solve
from cuda_agent.tasks.task import Task

DESIGNS = 48  # designs that are timed for a task, if there are so many
_DRAWS = 4  # most draws for each of them
_FINALISTS = 2  # fastest designs of the sweep that the judge times
_ANSWER_SECONDS = 120.0  # limit for one line of the child; it may wait for the timing lease as long as it takes
COMMAND = [sys.executable, "-P", "-m", "cuda_agent.synthesis.teacher.design_bench"]


class Sweep:
    """Finds the best design of a task. A call of the object times many designs of the task. ``judged`` then lets the
    judge time the fastest of them. One child process times the designs of all tasks. The object is an async context
    manager: its exit ends the child."""

    def __init__(self, sandbox: LocalSandbox, designs: int = DESIGNS) -> None:
        self._sandbox, self._designs = sandbox, designs
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "Sweep":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def judged(self, task: Task, swept: Swept) -> Optimum:
        """Lets the judge time the fastest designs in ``swept``, the result of a call for ``task``. Returns the fastest
        design that the judge accepts. If it accepts none, the result has no times."""
        files = {str(worked.design): worked.files for worked in draw_designs(task, self._designs)[1]}
        best, surprises = Optimum(), []
        for design in swept.fastest:
            verdict = await self._sandbox.evaluate(task, Solution("plan", files[design]))
            if verdict.status not in ("ok", "infra"):
                surprises.append(f"{design}: {verdict.status}: {verdict.message}")
            elif verdict.seconds and verdict.seconds < (best.seconds or math.inf):
                best = Optimum(design, verdict.seconds, verdict.eager_seconds)
        return replace(best, surprises=tuple(surprises))

    async def __call__(self, task: Task) -> Swept:
        """Times designs of ``task`` and returns the result. For equal tasks, draws the same designs.

        Raises:
            ValueError: The task is not of the teacher's family (``family.make_task`` did not make it).
            SandboxUnready: The child process failed twice before it had timed the task's model in eager PyTorch."""
        drawn, right = draw_designs(task, self._designs)
        built = await self._built(right, task_spec(parse(task)))
        async with self._turn:
            eager, times = await self._times(task, [program for program in built if isinstance(program, dict)])
        answers = iter(times)
        found = {
            worked.design: next(answers) if isinstance(program, dict) else program
            for worked, program in zip(right, built, strict=True)
        }
        return summary(eager, drawn, {design: result for design, result in found.items() if result is not None})

    async def _built(self, designs: Sequence[Worked], spec: TaskSpec) -> list[dict[str, Any] | str]:
        """Returns the program (the built plan) of each design, or the reason why the design does not build. First
        builds all designs as one solution, which the function ``unit`` makes. If that fails, builds each design
        alone."""
        try:
            whole = await self._sandbox.prepare(Solution("plan", unit([worked.files for worked in designs])), spec)
        except (SolutionError, BuildError):
            return list(await asyncio.gather(*(self._alone(worked, spec) for worked in designs)))
        return list(programs(whole, [worked.files for worked in designs]))

    async def _alone(self, worked: Worked, spec: TaskSpec) -> dict[str, Any] | str:
        try:
            return await self._sandbox.prepare(Solution("plan", worked.files), spec)
        except (SolutionError, BuildError) as error:
            return f"does not build: {error}"

    async def _times(self, task: Task, programs: Sequence[dict[str, Any]]) -> tuple[float, list[float | str | None]]:
        """Times the task's model in eager PyTorch and each program (a built design). Returns the model's seconds, and
        for each program its seconds or the reason why it failed. If a program kills the child process, a new child
        continues with the next program.

        A program's result is None if its outputs are right for normal inputs and wrong for another kind of inputs
        (setting ``sandbox.input_kinds``). The teacher does not predict such failures, so they are not reported as
        surprises."""
        eager: float | None = None
        found: list[float | str | None] = []
        failures = 0
        while eager is None or len(found) < len(programs):
            answer = await self._ask({
                "code": task.code, "tolerance": self._sandbox.config.tolerance,
                "kinds": self._sandbox.config.input_kinds,
                "lease": str(self._sandbox.lease_folder), "programs": programs[len(found) :],
            })  # fmt: skip
            if isinstance(answer, str):
                failures += 1
                if failures == 2:
                    raise SandboxUnready(f"the sweep over designs of {task.name} fails: {answer}")
                continue
            eager = answer
            while self._child and len(found) < len(programs):
                line = await self._line(_ANSWER_SECONDS)
                found.append(None if "kind" in line else _result(line))
        return eager, found

    async def _ask(self, request: Mapping[str, Any]) -> float | str:
        """Sends a request to the child process; first starts the child if none is running. Returns the seconds of the
        task's model in eager PyTorch, or the reason why the child did not time the model."""
        if self._child is None:
            folders = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
            pipe = asyncio.subprocess.PIPE
            self._child = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, env=environment)
            if "error" in (line := await self._line(_ANSWER_SECONDS)):
                return _result(line)
        assert self._child.stdin
        with contextlib.suppress(ConnectionError):  # a child that has died gives no answer
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            await self._child.stdin.drain()
        if "error" in (line := await self._line(None)):
            return _result(line)
        return _result(await self._line(_ANSWER_SECONDS))

    async def _line(self, seconds: float | None) -> dict[str, Any]:
        """Returns the child's next line, a JSON object. If no valid line comes within ``seconds`` (None: no limit),
        returns {"error": reason}. After any line with an error, ends the child."""
        assert self._child and self._child.stdout
        line: dict[str, Any]
        try:
            text = await asyncio.wait_for(self._child.stdout.readline(), seconds)
            line = json.loads(text) if text else {"error": f"the child ended with {await self._child.wait()}"}
        except TimeoutError:
            line = {"error": f"the child gave no answer in {seconds:g} s"}
        except ValueError as error:  # half a line
            line = {"error": f"the child's answer is damaged: {error}"}
        if "error" in line:
            await self._end()
        return line

    async def _end(self) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()
            self._child = None


def unit(solutions: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Joins ``solutions`` into one solution and returns its files. The kernels of each solution get a separate
    namespace. The joint plan (``plan.json``, the ordered list of kernel launches) has the launches of the first
    solution, then those of the second, and so on. To build 48 joined solutions takes a tenth of the time of 48 separate
    builds."""
    sources, nodes = [], []
    workspaces: dict[str, Any] = {}
    for number, files in enumerate(solutions):
        plan = json.loads(files[PLAN])
        own = {name: f"d{number}_{name}" for name in plan.get("workspaces", {})}
        workspaces |= {own[name]: plan["workspaces"][name] for name in own}
        sources.append(f"namespace d{number} {{\n{files[KERNEL]}}}\n")
        for node in plan["nodes"]:
            arguments = [own.get(argument, argument) for argument in node["args"]]
            nodes.append(node | {"function": f"d{number}::{node['function']}", "args": arguments})
    return {KERNEL: "".join(sources), PLAN: json.dumps({"workspaces": workspaces, "nodes": nodes})}


def programs(whole: Mapping[str, Any], solutions: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Yields the program (the built plan) of each of ``solutions``. ``whole`` is the program of ``unit(solutions)``,
    which joins them. A solution's program is a copy of ``whole`` with only this solution's launches (``nodes``) and
    workspaces."""
    nodes = iter(whole["nodes"])
    for number, files in enumerate(solutions):
        own = {name: made for name, made in whole["workspaces"].items() if name.startswith(f"d{number}_")}
        yield {**whole, "workspaces": own, "nodes": list(islice(nodes, len(json.loads(files[PLAN])["nodes"])))}


def _result(line: Mapping[str, Any]) -> float | str:
    return float(line["seconds"]) if "seconds" in line else str(line.get("error") or line["wrong"])


def draw_designs(task: Task, designs: int = DESIGNS) -> tuple[Counter[Any], list[Worked]]:
    """Draws random designs of ``task``. Stops when the teacher expects ``designs`` different ones to be right, or after
    ``_DRAWS * designs`` draws. Returns how often each design was drawn, and one solution for each design that the
    teacher expects to be right. The counts include designs that it expects to be wrong.

    Raises:
        ValueError: The task is not of the teacher's family (``family.make_task`` did not make it)."""
    rng = Random(f"sweep/{task.digest}")
    drawn: Counter[Any] = Counter()
    right: dict[Any, Worked] = {}
    while len(right) < designs and drawn.total() < _DRAWS * designs:
        worked = solve(task, rng, "cuda")
        drawn[worked.design] += 1
        if worked.status == "ok":
            right[worked.design] = worked
    return drawn, list(right.values())


def summary(eager: float, drawn: Counter[Any], found: Mapping[Any, float | str]) -> Swept:
    """Returns the result of a sweep. ``eager`` is the time of the task's model in eager PyTorch, in seconds. ``drawn``
    counts the draws of each design. ``found`` maps a design to its seconds, or to the reason why it failed. A design
    that is not in ``found`` counts as wrong."""
    times = {design: seconds for design, seconds in found.items() if not isinstance(seconds, str)}
    surprises = tuple(f"{design}: {reason}" for design, reason in found.items() if isinstance(reason, str))
    if not times:
        return Swept(eager, None, None, 0.0, surprises=surprises)
    ordered = sorted(times, key=lambda design: times[design])
    right = sum(drawn[design] for design in times) / drawn.total()
    fastest = tuple(map(str, ordered[:_FINALISTS]))
    return Swept(eager, times[ordered[0]], statistics.median(times.values()), right, fastest, surprises)
