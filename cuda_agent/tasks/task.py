"""Defines a task: a PyTorch problem in the form of KernelBench and CUDA-Agent-Ops-6K.

A task is Python source that defines ``Model`` (an ``nn.Module``), ``get_inputs()`` and ``get_init_inputs()``. This
module does not run the source: tasks are untrusted, and only the sandbox's workers may execute them."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task. ``split`` is ``train`` or ``heldout``. ``family`` names the task's origin, such as ``teacher`` (made
    for the scripted teacher, a program), ``catalogue`` (the operator catalogue) or ``level1`` (of KernelBench)."""

    name: str
    code: str  # source
    ops: tuple[str, ...] = ()  # torch operators that ``Model.forward`` uses
    data_source: str = ""  # "torch#2": two fused torch operators; "transformers": a stand-alone layer
    family: str = "catalogue"
    split: str = "train"

    @property
    def digest(self) -> str:
        """The sha256 of the source, a part of the keys under which verdicts and baselines are cached."""
        return hashlib.sha256(self.code.encode()).hexdigest()
