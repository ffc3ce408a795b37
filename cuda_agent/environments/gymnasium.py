"""Offers tasks (PyTorch models for which to write fast kernels) as a Gymnasium environment.

Observations and actions are texts. ``reset`` picks a task and returns the prompt. An action is a tool call, such as
``{"tool": "Bash", "arguments": {"command": "profile"}}``, or an answer. The result of a tool call is the next
observation. An answer ends the episode: the sandbox judges the files in the work folder together with the answer's
fenced blocks, and the reward comes from the verdict."""

import asyncio
import contextlib
import json
import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
from anyio.from_thread import start_blocking_portal
from gymnasium.spaces import Text

from cuda_agent.agent.environment import KernelEnvironment, SandboxFault
from cuda_agent.agent.prompt import agent_messages, one_shot_messages, parse_answer
from cuda_agent.agent.tools import Style, solution_of
from cuda_agent.compose import compose
from cuda_agent.errors import TaskError
from cuda_agent.pipeline.runs import cache_of
from cuda_agent.sandbox.client import Sandbox, open_sandbox
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

LENGTH = 1 << 20  # most characters of an observation or an action


class AnyText(Text):
    """The space of all texts of at most ``LENGTH`` characters. Samples consist of printable ASCII."""

    def __init__(self) -> None:
        super().__init__(LENGTH, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= LENGTH


class KernelEnv(gymnasium.Env[str, str]):
    """A Gymnasium environment with one sandbox, which is open until ``close``.

    If the sandbox, the work folder or the task fails, the step has ``truncated`` true, the reward NaN, and the error as
    ``info["fault"]``. A trainer must drop such an episode.

    Attributes:
        tasks: The tasks by name.
        prompts: The messages (system and user) that begin an episode, by the task's name."""

    def __init__(
        self,
        tasks: str | Path,
        overrides: Sequence[str] = (),
        style: Style = "full",
        tools: bool = True,
    ) -> None:
        """Reads the tasks and opens the sandbox.

        Args:
            tasks: A task set, a KernelBench folder or one model.py.
            overrides: Hydra overrides of the configuration, as in ``["sandbox.clock=model"]``.
            style: "full", or "compact" for a small model that was trained with compact prompts.
            tools: Whether there are tool calls. If not, each action is an answer, and the prompt says so.

        Raises:
            TaskError: The tasks cannot be read.
            ConfigError: An override is wrong.
            SandboxUnready: The sandbox cannot start, for example without a compiler."""
        self.observation_space, self.action_space = AnyText(), AnyText()
        config = compose(list(overrides))
        self._settings, self._style, self._tools = config.sandbox, style, tools
        self.tasks: dict[str, Task] = {task.name: task for task in read_any(Path(tasks))}
        ask = agent_messages if tools else one_shot_messages
        given = (style, config.sandbox.format, config.sandbox.device)
        self.prompts = {name: ask(task, *given) for name, task in self.tasks.items()}
        self._environment: KernelEnvironment | None = None  # None if no episode runs
        self._folder = contextlib.AsyncExitStack()  # closes the episode's work folder
        with contextlib.ExitStack() as opened:
            self._portal = opened.enter_context(start_blocking_portal())
            opening: contextlib.AbstractAsyncContextManager[Sandbox]
            opening = self._portal.call(open_sandbox, config.sandbox, cache_of(config))
            self._sandbox = opened.enter_context(self._portal.wrap_async_context_manager(opening))
            opened.callback(self._portal.call, self._end)
            self._opened = opened.pop_all()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode with the task named ``options["task"]``, or with a task that ``seed`` picks. Returns the
        prompt. ``info`` has the name of the ``task``.

        Raises:
            ValueError: There is no such task."""
        super().reset(seed=seed)
        names = list(self.tasks)
        name = (options or {}).get("task") or names[int(self.np_random.integers(len(names)))]
        if name not in self.tasks:
            raise ValueError(f"there is no task {name}; there are {', '.join(names[:10])} ...")
        self._portal.call(self._begin, self.tasks[name])
        return "\n\n".join(message["content"] for message in self.prompts[name]), {"task": name}

    async def _begin(self, task: Task) -> None:
        await self._end()
        self._environment = self._player(task)
        if self._tools:
            await self._folder.enter_async_context(self._environment)

    async def _end(self) -> None:
        self._environment = None
        await self._folder.aclose()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays a tool call or an answer. At the end of an episode, ``info`` has the ``status`` and the ``message`` of
        the verdict.

        Raises:
            ValueError: The episode is over."""
        if self._environment is None:
            raise ValueError("the episode is over: reset begins another one")
        return self._portal.call(self._play, self._environment, action)

    async def _play(self, environment: KernelEnvironment, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            if self._tools:
                if call := _tool_call(action):
                    return (await environment.call(*call)).text[:LENGTH], 0.0, False, False, {}
                await environment.collect()
            reward, info = await _judged(environment, action)
        except (SandboxFault, WorkspaceLost, TaskError) as error:
            reward, info = math.nan, {"fault": str(error)}
        await self._end()
        return "", reward, "fault" not in info, "fault" in info, info

    def score(self, tasks: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Returns the rewards of answers without tool calls, each for the task with the name at the same place in
        ``tasks``. The sandbox judges them side by side. The reward is NaN after a fault."""

        async def scored(task: str, answer: str) -> float:
            with contextlib.suppress(SandboxFault, TaskError):
                return (await _judged(self._player(self.tasks[task]), answer))[0]
            return math.nan

        async def all_scored() -> list[float]:
            return await asyncio.gather(*map(scored, tasks, answers))

        return self._portal.call(all_scored)

    def _player(self, task: Task) -> KernelEnvironment:
        return KernelEnvironment(task, self._sandbox, self._settings.format, self._settings.device, self._style)

    def close(self) -> None:
        """Closes the work folder and the sandbox. A second call does nothing."""
        self._opened.close()


async def _judged(environment: KernelEnvironment, answer: str) -> tuple[float, dict[str, Any]]:
    """Judges the environment's files together with those in ``answer``. Returns the reward and the step's ``info``."""
    verdict = await environment.judge(solution_of(environment.files | parse_answer(answer), environment.format))
    assert verdict.reward is not None, "judge raises an error if the sandbox fails"
    return float(verdict.reward), {"status": verdict.status, "message": verdict.message}


def _tool_call(action: str) -> tuple[str, dict[str, Any] | None] | None:
    """Returns the tool's name and arguments if ``action`` is a tool call, or None if it is an answer. The arguments are
    None if they are no JSON object."""
    try:
        found = json.loads(action)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("tool"), str):
        return None
    arguments = found.get("arguments")
    return found["tool"], arguments if isinstance(arguments, dict) else None
