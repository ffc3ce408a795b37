"""Offers tasks (PyTorch models for which to write fast kernels) as a taskset of the library ``verifiers``, which
prime-rl and ``vf-eval`` use. The module uses the library's API ``verifiers.v1``.

The library's harness talks to the model. In each rollout, a server process (``KernelTools``) runs the tool calls in a
work folder. After each call, the process copies the solution from the folder to the rollout's state (``KernelState``).
At the end of the rollout, ``KernelTask`` opens another sandbox and judges the last solution. The library finds a
taskset by the name of a top-level module; docs/environments.md shows how to write this module."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import verifiers.v1 as vf
from pydantic import Field, WithJsonSchema

from cuda_agent.agent.environment import KernelEnvironment
from cuda_agent.agent.tools import TOOLS, solution_of
from cuda_agent.compose import compose
from cuda_agent.pipeline.runs import cache_of
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.wire import Solution
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

__all__ = ["KernelTaskset"]


class KernelState(vf.State):
    """The state of one rollout. ``KernelTools`` writes it after each tool call, and ``KernelTask`` reads it."""

    files: dict[str, str] = Field(default_factory=dict)  # the solution: path -> content
    flags: list[str] = Field(default_factory=list)  # bad patterns in calls: "malformed_call", "unknown_tool", "loop"


class KernelToolsConfig(vf.ToolsetConfig):
    overrides: list[str] = Field(default_factory=list)
    """Hydra overrides of the sandbox, as in ``sandbox.clock=model``."""


class KernelTaskConfig(vf.TaskConfig):
    tools: KernelToolsConfig = KernelToolsConfig()


class KernelConfig(vf.TasksetConfig):
    tasks: Path = Path("tasks")
    """Path of a task set, of a KernelBench folder or of one model.py."""
    split: str = ""
    """Only tasks of this split, ``train`` or ``heldout``; empty: all tasks."""
    task: KernelTaskConfig = KernelTaskConfig()


class KernelData(vf.TaskData):
    code: str = ""

    def task(self) -> Task:
        return Task(self.name or "task", self.code)


class KernelTools(vf.Toolset[KernelToolsConfig, KernelState]):
    """The tool server of one rollout. ``TOOL_PREFIX`` is None, so that the tools have the plain names that SKILL.md
    (the instructions for the model) uses."""

    TOOL_PREFIX = None

    async def setup_task(self, task: KernelData) -> None:
        environment = await self._exit_stack.enter_async_context(opened(task.task(), self.config))
        self.environment = await self._exit_stack.enter_async_context(environment)

    def register(self, mcp: "MCPServer") -> None:
        for tool in TOOLS:
            facts = tool["function"]
            fn = self._with_state(self._call(facts["name"], facts["parameters"]))
            mcp.add_tool(fn, name=facts["name"], description=facts["description"], structured_output=False)

    def _call(self, name: str, schema: dict[str, Any]) -> Callable[..., Any]:
        """Returns a function that calls the tool ``name`` and returns the result's text. The function's signature
        gives the tool's ``schema`` to the library ``verifiers``."""

        async def call(**arguments: Any) -> str:
            given = {key: value for key, value in arguments.items() if value is not None}
            said = await self.environment.call(name, given)
            self.state.files = (await self.environment.collect()).files
            self.state.flags = sorted(self.environment.flags)
            return said.text

        def parameter(key: str, shape: dict[str, Any]) -> inspect.Parameter:
            # Declare text explicitly: the server would parse other values as JSON, such as the content of plan.json.
            of_text, of_more = Annotated[str, WithJsonSchema(shape)], Annotated[Any, WithJsonSchema(shape)]
            kind = of_text if shape.get("type") == "string" else of_more
            default = inspect.Parameter.empty if key in schema["required"] else None
            return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

        listed = [parameter(key, shape) for key, shape in schema["properties"].items()]
        call.__name__ = name
        call.__signature__ = inspect.Signature(listed, return_annotation=str)  # type: ignore[attr-defined]
        return call


class KernelTask(vf.Task[KernelData, KernelState, KernelTaskConfig]):
    @classmethod
    def toolsets(cls, config: KernelTaskConfig) -> list[vf.Toolset]:
        return [KernelTools(config.tools)]

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Judges the task's own model as a solution in the format ``python``, without times. Returns whether it is
        correct. ``vf-validate`` calls this method to find tasks that no solution can pass.

        Raises:
            SandboxFault: The sandbox failed twice.
            TaskError: The task cannot be run."""
        own = Solution("python", {"model_new.py": f"{self.data.code}\n\nclass ModelNew(Model):\n    pass\n"})
        async with opened(self.data.task(), self.config.tools) as environment:
            verdict = await environment.judge(own, "check")
        return verdict.status == "ok"

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """Judges the rollout's last solution, records metrics in ``trace``, and returns the reward. The reward is -1
        for a wrong solution and 1 for a correct one. It is 2 if a correct solution is more than 5 % faster than eager
        PyTorch, and 3 if it is also more than 5 % faster than ``torch.compile``.

        Raises:
            SandboxFault: The sandbox failed twice, so there is no reward.
            TaskError: The task cannot be run."""
        async with opened(self.data.task(), self.config.tools) as environment:
            verdict = await environment.judge(solution_of(trace.state.files, environment.format))
        metrics = {
            "correct": float(verdict.status == "ok"),
            "speedup_eager": verdict.speedup_eager or 0.0,
            "speedup_compile": verdict.speedup_compile or 0.0,
            "bad_patterns": float(len(trace.state.flags)),
        }
        trace.record_metrics(metrics)
        return float(verdict.reward or 0)


class KernelTaskset(vf.Taskset[KernelTask, KernelConfig]):
    def load(self) -> Iterator[KernelTask]:
        config = compose(self.config.task.tools.overrides)
        for task in read_any(self.config.tasks):
            if self.config.split in ("", task.split):
                system, user = KernelEnvironment(task, None, config.sandbox.format, config.sandbox.device).messages()  # type: ignore[arg-type]
                messages = {"prompt": user["content"], "system_prompt": system["content"]}
                yield KernelTask(KernelData(name=task.name, code=task.code, **messages), self.config.task)


@contextlib.asynccontextmanager
async def opened(task: Task, config: KernelToolsConfig) -> Any:
    """Opens a sandbox and yields a ``KernelEnvironment`` for ``task``, without opening the work folder. Entering the
    environment with ``async with`` opens the folder."""
    composed = compose(config.overrides)
    async with open_sandbox(composed.sandbox, cache_of(composed)) as sandbox:
        yield KernelEnvironment(task, sandbox, composed.sandbox.format, composed.sandbox.device)


if __name__ == "__main__":
    # The harness gives tool servers a private temporary folder, which the sandbox's users could not enter.
    os.environ.pop("TMPDIR", None)
    KernelTools.run()
