"""Defines a task: a PyTorch problem in the form of KernelBench and CUDA-Agent-Ops-6K.

A task is Python source that defines ``Model`` (an ``nn.Module``), ``get_inputs()`` and ``get_init_inputs()``. This
module does not run the source: tasks are untrusted, and only the sandbox's workers may execute them."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task. ``split`` is ``train`` for training tasks and ``heldout`` for evaluation tasks. ``family`` names the
    task's origin. Examples are ``teacher`` (tasks that the scripted teacher, a program, can solve), ``catalogue``
    (tasks composed from the catalogue of torch operators) and ``level1`` (tasks of level 1 of KernelBench)."""

    name: str
    code: str  #: source
    ops: tuple[str, ...] = ()  #: torch operators that ``Model.forward`` uses
    data_source: str = ""  #: "torch#2" for two fused torch operators, "transformers" for a stand-alone layer
    family: str = "catalogue"
    split: str = "train"

    @property
    def digest(self) -> str:
        """The sha256 of the source, as hexadecimal digits. The sandbox caches verdicts and baselines (measurements of
        the task's own model) under keys that depend on this digest."""
        return hashlib.sha256(self.code.encode()).hexdigest()
