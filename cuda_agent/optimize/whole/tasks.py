"""Writes the tasks with which a model is traced, and those of its parts.

Both hold the model's source as a text, and run it only in the sandbox.  The trace crosses as the one argument of the
task's constructor, which every sandbox reports with the task's shapes (``TaskSpec.init``)."""

from dataclasses import replace
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.optimize.export import body, literal, sections
from cuda_agent.optimize.whole.parts import Part
from cuda_agent.sandbox.wire import Tensor
from cuda_agent.tasks.task import Task

_TRACE = """
_TRACE = trace(_LARGER, {device!r}, {train!r})


class Model(torch.nn.Module):
    def __init__(self, trace):
        super().__init__()

    def forward(self, x):
        return x + 1


def get_inputs():
    return [torch.zeros(1)]


def get_init_inputs():
    return [_TRACE]
"""
_PART = '''
_TASK = load(_LARGER, "larger_model.py")
_BEFORE = before_the_part(_TASK)


class Model(type(_BEFORE.get_submodule({name!r}))):
    """The submodule {name} alone."""

    def __init__(self):
        self.__dict__.update(built(_TASK).get_submodule({name!r}).__dict__)


def get_inputs():
    return inputs_of_the_part(_TASK, _BEFORE, {name!r})


def get_init_inputs():
    return []
'''


async def trace_of(task: Task, sandbox: Any, device: str, train: bool) -> Any:
    """Returns the trace of ``task``'s model (see ``tracing.trace``), as the sandbox reports it: not checked yet.

    Raises:
        TaskError: The model does not run.
        SandboxUnready: The sandbox does not work."""
    code = sections(
        ("", f"{body('whole/larger_model.py')}\n\n\n{body('whole/tracing.py')}"),
        ("The model.", f"_LARGER = {literal(task.code)}"),
        ("Its trace.", _TRACE.format(device=device, train=train).strip()),
    )
    spec = await sandbox.spec(replace(task, name=f"trace of {task.name}", code=code, ops=()))
    if len(spec.init) != 1 or "value" not in spec.init[0]:
        raise TaskError("the trace of the model cannot be read: it is no plain value")
    return spec.init[0]["value"]


def task_of(part: Part, code: str) -> str:
    """Returns the source of the task of ``part``, a submodule of the model with the source ``code``.

    ``Model()`` is the submodule with the weights of the larger model's constructor, under the submodule's names.
    ``get_inputs()`` runs the larger model up to the submodule."""
    module = part.module
    about = [
        f"The submodule `{module.name}` of a larger model: `Model` below is this submodule alone, and `Model()` takes",
        "no arguments.",
        *(["Equal submodules: " + ", ".join(part.names[1:])] if part.names[1:] else []),
        "",
        *module.text.splitlines(),
        "",
        f"Inputs of `forward`: {', '.join(map(_described, module.inputs))}",
        "Weights, by the names that `ModelNew` must keep:",
        *([f"  {name}: {_described(tensor)}" for name, tensor in module.state] or ["  none"]),
        "",
        "The larger model's source is the text `_LARGER`.",
    ]
    head = "".join(f"# {line}".rstrip() + "\n" for line in about)
    return head + sections(
        ("", f"{body('whole/larger_model.py')}\n\n\n{body('whole/part_model.py')}"),
        ("The larger model.", f"_LARGER = {literal(code)}"),
        ("The part.", _PART.format(name=module.name).strip()),
    )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
