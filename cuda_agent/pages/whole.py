"""Makes the page about `cuda-agent optimize --whole`: the parts of a model, and their gains alone and in the model."""

from collections.abc import Sequence
from typing import Any

from cuda_agent.pages.optimize import ratios_of, times_of
from cuda_agent.pages.page import page
from cuda_agent.sandbox.wire import Probe, Verdict


def render(
    name: str,
    code: str,
    parts: Sequence[dict[str, Any]],
    verdict: Verdict | None,
    compiled: bool,
    goal: str,
    where: str,
) -> str:
    """Returns the page as HTML.

    Args:
        name: Name of the model's file.
        code: The model's source.
        parts: What became of each part (``PartResult.to_json``).
        verdict: The strict verdict on the model with its parts replaced; None if none makes it faster.
        compiled: Whether torch.compile compiles what is not replaced.
        goal: What a person asked for, in words.
        where: Name and address of the language model, in words."""
    times = times_of(verdict, Probe()) if verdict else []
    return page(
        "whole.html.j2",
        styles=("optimize.css",),
        name=name,
        code=code,
        parts=parts,
        outside=max(0.0, 1 - sum(part["share"] for part in parts)),
        verdict=verdict,
        compiled=compiled,
        bars_of_times=times,
        ratios=ratios_of(verdict),
        goal=goal,
        where=where,
    )
