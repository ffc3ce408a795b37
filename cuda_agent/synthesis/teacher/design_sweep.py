"""Finds a task's best design on a GPU: draws designs, builds them and times them.

The tasks are those of ``family``: this project generates them, and the scripted teacher can solve them. A design is one
way to write a task's kernel (``cuda_kernels``). It is built from source files and a plan, the list of kernel launches.
``Sweep`` builds all designs of a task at once and asks a child process (``design_bench``) for their times. The child
needs no jail, because it runs only code that this project has made: ``family.parse`` refuses any other task."""

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
    """Finds the best design of each task that it is called with. One child process times the designs of all tasks. The
    object is an async context manager, which ends the child."""

    def __init__(self, sandbox: LocalSandbox, designs: int = DESIGNS) -> None:
        self._sandbox, self._designs = sandbox, designs
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "Sweep":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def judged(self, task: Task, swept: Swept) -> Optimum:
        """Lets the judge time the fastest designs in ``swept``, the result of the sweep of ``task``. Returns the best
        of them."""
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
            ValueError: The task is not of the teacher's family.
            SandboxUnready: The child process failed twice before it gave eager's time."""
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
        """Returns the program (the built plan) of each design, or the reason why the design does not build. Builds all
        designs together (``unit``). If that fails, builds each one alone."""
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
        """Returns eager's seconds and, for each program, its seconds or the reason why it failed. The result of a
        program is None if it is wrong only for the additional kinds of inputs in ``sandbox.input_kinds``: the teacher
        does not predict such failures. If a program kills the child process, a new child continues with the next."""
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
        """Sends a request to the child process; first starts the child if none is running. Returns eager's seconds, or
        the reason why the child did not time eager."""
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
    """Returns the files of one solution that joins all ``solutions``. It has the kernels of all, each in a separate
    namespace. Its plan (``plan.json``, the ordered list of kernel launches) has the launches of all plans, one solution
    after the other. For 48 solutions, this one build takes a tenth of the time of separate builds."""
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
    """Yields the program (the built plan) of each of ``solutions``. ``whole`` is the program that was built from their
    ``unit``. Each solution's program has that solution's part of the launches (nodes) and workspaces in ``whole``."""
    nodes = iter(whole["nodes"])
    for number, files in enumerate(solutions):
        own = {name: made for name, made in whole["workspaces"].items() if name.startswith(f"d{number}_")}
        yield {**whole, "workspaces": own, "nodes": list(islice(nodes, len(json.loads(files[PLAN])["nodes"])))}


def _result(line: Mapping[str, Any]) -> float | str:
    return float(line["seconds"]) if "seconds" in line else str(line.get("error") or line["wrong"])


def draw_designs(task: Task, designs: int = DESIGNS) -> tuple[Counter[Any], list[Worked]]:
    """Draws designs of ``task``. Returns how often each design was drawn, and the solutions that the teacher expects to
    be right. There are at most ``designs`` of these solutions, all with different designs.

    Raises:
        ValueError: The task is not of the teacher's family."""
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
    """Returns the result of a sweep. ``eager`` is eager's time in seconds. ``drawn`` counts the draws of each design.
    ``found`` maps a design to its seconds, or to the reason why it failed. A design that is not in ``found`` counts as
    wrong."""
    times = {design: seconds for design, seconds in found.items() if not isinstance(seconds, str)}
    surprises = tuple(f"{design}: {reason}" for design, reason in found.items() if isinstance(reason, str))
    if not times:
        return Swept(eager, None, None, 0.0, surprises=surprises)
    ordered = sorted(times, key=lambda design: times[design])
    right = sum(drawn[design] for design in times) / drawn.total()
    fastest = tuple(map(str, ordered[:_FINALISTS]))
    return Swept(eager, times[ordered[0]], statistics.median(times.values()), right, fastest, surprises)
