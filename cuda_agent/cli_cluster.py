"""The commands of the cluster: render its manifests, submit a run, follow it, stop it, go on with it.

As in ``cli``, whatever a command needs is imported inside of it.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer


def render(
    root: Annotated[Path, typer.Argument(help="the repository")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit with 1 when something is not up to date")
    ] = False,
) -> None:
    """Bring what is made of the graph and the chart's values up to date: workflows/ and charts/cuda-agent."""
    from cuda_agent.pipeline import chart

    changed = chart.drift(root) if check else chart.write(root)
    for name in changed:
        print(name)
    if check and changed:
        print("not up to date: cuda-agent render", file=sys.stderr)
        sys.exit(1)


def add_to(app: typer.Typer) -> None:
    """Puts the commands into the one command line."""
    app.command(epilog="\b\nExamples:\n  cuda-agent render\n  cuda-agent render --check")(render)
