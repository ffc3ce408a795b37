"""Puts solutions of a model's parts together as one solution of the model, in the format ``python``."""

from collections.abc import Sequence

from cuda_agent.optimize.export import body, literal, module_code, sections, without_program
from cuda_agent.optimize.whole.parts import Part
from cuda_agent.sandbox.wire import Solution, TaskSpec

_GIVEN = "# `Model` is the class of the submodule that is replaced; it is set before this code runs."
_END = '''
class ModelNew(Model):
    """The model, with parts of it replaced.  For inference."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _replace_parts(self, _PARTS, compiled={compiled})
'''


def joined(code: str, parts: Sequence[tuple[Part, Solution, TaskSpec]], device: str, compiled: bool) -> Solution:
    """Returns a solution of the model with the source ``code``: its ``ModelNew`` is the model, in which solutions
    replace parts.  ``parts`` holds the parts, with their solutions and the facts about their tasks.  With ``compiled``,
    torch.compile compiles the rest of the model."""
    rows = []
    for part, solution, spec in parts:
        text = module_code(_GIVEN, solution, spec, device)
        rows.append(f"    ({list(part.names)!r}, {solution.format == 'plan'!r}, {literal(text)}),\n")
    return Solution("python", {"model_new.py": sections(
        ("The model as it was given.", without_program(code)),
        ("The solutions of its parts.", f"_PARTS = [\n{''.join(rows)}]"),
        ("What puts them in.", body("whole/joined_model.py")),
        ("", _END.format(compiled=compiled).strip()),
    )})  # fmt: skip
