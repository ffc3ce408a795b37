"""Serves tasks (PyTorch models for which to write fast kernels) as an OpenEnv environment.

    python -m cuda_agent.environments.openenv TASKS [--port 8000] [OVERRIDE...]

TASKS is a task set, a KernelBench folder or one model.py. A session of the server plays one episode at a time.
``reset`` begins an episode: it picks a task and opens a work folder. ``step`` runs a tool call, or ends the episode if
no tool is named. The reward of the last step comes from the sandbox's verdict on the solution in the folder. A session
is a WebSocket, because OpenEnv's stateless HTTP routes would lose the folder between two requests. There are no
passwords: every client that reaches the port can run code in the sandbox."""

import argparse
import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import Field

from cuda_agent.agent.environment import KernelEnvironment, SandboxFault
from cuda_agent.agent.tools import TOOLS
from cuda_agent.compose import compose
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import TaskError
from cuda_agent.sandbox.client import Sandbox as OpenSandbox
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

DESCRIPTION = "Write kernels that make a PyTorch model faster. A sandbox checks and times the solution."


class KernelAction(Action):
    """The argument of ``step``: a call of the tool named ``tool``. An empty name ends the episode."""

    tool: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)


class KernelObservation(Observation):
    """The result of ``reset`` or ``step``. ``reset`` returns the first ``messages`` and the schemas of the ``tools``.
    ``step`` returns the tool's result as ``text``. The last step of an episode has ``done`` true. It also has the
    sandbox's ``verdict`` on the solution, and the verdict's ``reward``. ``flags`` names bad patterns in the episode's
    tool calls so far, such as "loop" (the same call is made repeatedly).

    A fault of the sandbox, of the work folder or of the task, or a timeout, ends the episode without a verdict. Then
    ``reward`` is None and ``flags`` is empty. A trainer must drop such an episode."""

    text: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    verdict: dict[str, Any] | None = None
    flags: list[str] = Field(default_factory=list)


class KernelState(State):
    task: str = ""
    done: bool = False


class Arena:
    """The state that all sessions of a server share.

    Attributes:
        tasks: The tasks by name.
        settings: The settings of the sandbox.
        steps: The maximum number of steps in an episode.
        sandbox: The sandbox that runs the tool calls and judges the solutions. It is None until the server starts."""

    def __init__(self, tasks: Sequence[Task], settings: SandboxConfig, steps: int) -> None:
        self.tasks, self.settings, self.steps = {task.name: task for task in tasks}, settings, steps
        self.sandbox: OpenSandbox | None = None  # open while the server runs


class KernelServer(Environment[KernelAction, KernelObservation, KernelState]):
    """One session of the server, which plays one episode at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._state = KernelState(done=True)
        self._environment: KernelEnvironment | None = None
        self._stack = contextlib.AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, task: str | None = None, **_: Any
    ) -> KernelObservation:
        """Begins an episode with the task named ``task``, or with a task that ``seed`` picks. Opens the work folder.
        Returns the first messages and the tools' schemas. An unfinished earlier episode ends without a verdict.

        Raises:
            ValueError: There is no such task."""
        tasks = self._arena.tasks
        if task is not None and task not in tasks:
            raise ValueError(f"there is no task {task}; there are {', '.join(list(tasks)[:10])} ...")
        chosen = tasks[task] if task else random.Random(seed).choice(list(tasks.values()))
        self._loop = asyncio.get_running_loop()
        self._environment = None
        await self._stack.aclose()
        assert self._arena.sandbox is not None, "the server runs"
        settings = self._arena.settings
        environment = KernelEnvironment(chosen, self._arena.sandbox, settings.format, settings.device)
        self._environment = await self._stack.enter_async_context(environment)
        self._state = KernelState(episode_id=episode_id, task=chosen.name)
        return KernelObservation(messages=environment.messages(), tools=TOOLS)

    async def step_async(self, action: KernelAction, timeout_s: float | None = None, **_: Any) -> KernelObservation:
        """Runs the tool that ``action`` names, and returns the tool's result. If no tool is named, or the step is the
        last one allowed, also judges the solution and ends the episode. A step that takes more than ``timeout_s``
        seconds counts as an infrastructure fault and ends the episode.

        Raises:
            ValueError: The episode is over."""
        if self._environment is None or self._state.done:
            raise ValueError("the episode is over: reset begins another one")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._play(self._environment, action)
        except (SandboxFault, WorkspaceLost, TaskError, TimeoutError) as error:
            return await self._end(KernelObservation(text=f"[ended by a fault of ours: {error}]", reward=None))

    async def _play(self, environment: KernelEnvironment, action: KernelAction) -> KernelObservation:
        self._state.step_count += 1
        said = (await environment.call(action.tool, action.arguments)).text if action.tool else ""
        seen = KernelObservation(text=said, flags=sorted(environment.flags))
        if action.tool and self._state.step_count < self._arena.steps:
            return seen
        verdict = await environment.finish()
        seen.reward, seen.verdict, seen.flags = verdict.reward, verdict.to_json(), sorted(environment.flags)
        return await self._end(seen)

    async def _end(self, last: KernelObservation) -> KernelObservation:
        last.done = self._state.done = True
        await self._stack.aclose()
        return last

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="cuda-agent", description=DESCRIPTION, version=version("cuda-agent"))

    @property
    def state(self) -> KernelState:
        return self._state

    def reset(self, *_: Any, **__: Any) -> KernelObservation:
        raise NotImplementedError("the server asks reset_async")

    def step(self, *_: Any, **__: Any) -> KernelObservation:
        raise NotImplementedError("the server asks step_async")

    def close(self) -> None:
        """Closes the session. Any thread may call it. The work folder is removed soon after."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._stack.aclose()))


def application(tasks: Sequence[Task], settings: SandboxConfig, cache: Path, steps: int = 40, sessions: int = 8) -> Any:
    """Returns the server as a FastAPI application with one sandbox, which all sessions use. At most ``sessions``
    episodes run at once, each with at most ``steps`` tool calls. If ``settings`` names no sandbox servers, the
    sandbox runs on this machine and caches verdicts and builds in the folder ``cache``."""
    arena = Arena(tasks, settings, steps)
    make = functools.partial(KernelServer, arena)
    app = create_app(make, KernelAction, KernelObservation, "cuda-agent", max_concurrent_envs=sessions)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(running: Any) -> AsyncIterator[Any]:
        async with open_sandbox(settings, cache) as arena.sandbox, inner(running) as state:
            yield state

    app.router.lifespan_context = lifespan
    return app


def main() -> None:
    import uvicorn

    from cuda_agent.pipeline.runs import cache_of

    parser = argparse.ArgumentParser(description="Serve tasks as an OpenEnv environment.")
    parser.add_argument("tasks", type=Path, help="a task set, a KernelBench folder, one model.py")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as in sandbox.clock=model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=40, help="most tool calls of an episode")
    parser.add_argument("--sessions", type=int, default=8, help="most episodes at once")
    options = parser.parse_args()
    config = compose(options.overrides)
    tasks, cache = read_any(options.tasks), cache_of(config)
    app = application(tasks, config.sandbox, cache, options.steps, options.sessions)
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
