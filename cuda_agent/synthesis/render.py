"""The source of a task, from its parts.  Pure text.  Not covered: choosing the parts (``compose``, ``layers``)."""

from collections.abc import Sequence


def render(
    arguments: Sequence[tuple[str, int]],
    init: Sequence[str],
    forward: Sequence[str],
    inputs: Sequence[tuple[str, str]],
    imports: Sequence[str] = (),
) -> str:
    """The source of a task in the published form."""
    names = "".join(f", {name}" for name, _ in arguments)
    body = "".join(f"        {line}\n" for line in ("super().__init__()", *init))
    uses_functional = any("F." in line for line in (*init, *forward))
    head = ["import torch", "import torch.nn as nn"]
    head += ["import torch.nn.functional as F"] if uses_functional else []
    lines = "".join(f"        {line}\n" for line in forward)
    sources = ", ".join(source for _, source in inputs)
    parameters = ", ".join(name for name, _ in inputs)
    values = ", ".join(str(value) for _, value in arguments)
    return (
        "\n".join((*head, *imports))
        + f"\n\n\nclass Model(nn.Module):\n    def __init__(self{names}):\n{body}\n"
        + f"    def forward(self, {parameters}):\n{lines}        return x\n\n\n"
        + f"def get_inputs():\n    return [{sources}]\n\n\ndef get_init_inputs():\n    return [{values}]\n"
    )
