"""A task: a PyTorch problem in the form of KernelBench and CUDA-Agent-Ops-6K.

A task is Python source that defines ``Model`` (an ``nn.Module``), ``get_inputs()`` and ``get_init_inputs()``.  Nothing
here imports or runs that source: tasks are untrusted, and only the sandbox's workers may execute them."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One problem.  ``split`` is ``train`` or ``heldout``; ``family`` names its origin: ``teacher`` (the operator
    family of the scripted teacher), ``catalogue`` (the full operator catalogue), or a level of an imported set
    (``level1`` ...)."""

    name: str
    code: str
    ops: tuple[str, ...] = ()
    data_source: str = ""  # "torch#2": two fused torch operators; "transformers": a stand-alone layer
    family: str = "catalogue"
    split: str = "train"

    @property
    def digest(self) -> str:
        """Returns the sha256 of the source: the key of verdicts and baselines."""
        return hashlib.sha256(self.code.encode()).hexdigest()
