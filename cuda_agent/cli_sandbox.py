"""The commands of ``cuda-agent sandbox``: parse, call, print, like ``cli``."""

import sys
from typing import Annotated, Literal

import typer

sandbox_app = typer.Typer(help="Test the sandbox of this installation.", no_args_is_help=True, rich_markup_mode=None)


@sandbox_app.callback()
def _group() -> None:
    """A group, even of one command."""


@sandbox_app.command(
    epilog="\b\nExamples:\n  cuda-agent sandbox selftest\n  cuda-agent sandbox selftest --lane python --json\n"
    "  cuda-agent sandbox selftest --only by_address"
)
def selftest(
    lane: Annotated[Literal["plan", "extension", "python"] | None, typer.Option(help="only this lane")] = None,
    only: Annotated[str | None, typer.Option(metavar="NAME", help="one exploit, honest solution or wall")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for a program")] = False,
) -> None:
    """Try every known exploit and many honest solutions on this installation, and every wall without itself.

    Exits with 79 when an exploit got through or an honest solution was refused.
    """
    import asyncio
    import json

    from cuda_agent.sandbox.exploits import selftest as test

    report = asyncio.run(
        test.run(lane, only, (lambda line: None) if as_json else (lambda line: print(line, flush=True)))
    )
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print("\n".join(test.lines(report)))
    sys.exit(79 if report["failed"] else 0)
