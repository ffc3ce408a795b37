"""Options that several groups of commands share, and helpers to declare commands and print JSON."""

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option

Overrides = Annotated[
    list[str] | None, Argument(metavar="OVERRIDE", help="Hydra overrides, as in experiment=demo critic.lr=1e-4")
]
RunName = Annotated[str, Argument(metavar="RUN", help="a run, the beginning of its name, or `last`")]
Where = Annotated[
    str | None,
    Option("--on", metavar="local|CONTEXT", help="the store, or a cluster (`.`: the current one); else both"),
]
Namespace = Annotated[str | None, Option("--namespace", "-n", help="namespace; else that of the context")]
TrainMode = Annotated[bool, Option("--train-mode", help="leave models in train(), as KernelBench does; else eval()")]
Release = Annotated[str, Option(help="full name of the chart's release")]
AsJson = Annotated[bool, Option("--json", help="print JSON for a program")]
StoreOption = Annotated[str, Option("--store", envvar="CUDA_AGENT_STORE", help="a folder or s3://bucket/prefix")]
STORE = ".cuda-agent/store"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def command_group(help: str | None = None) -> typer.Typer:
    """Returns an empty command group.  Without ``help``, its commands become commands of ``cuda-agent`` itself."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)


def command(group: typer.Typer, *examples: str, name: str | None = None) -> Callable[[_Command], _Command]:
    """Returns a decorator that adds a function to ``group`` as a command, with ``examples`` below its help text."""
    title = "Examples" if len(examples) > 1 else "Example"
    return group.command(name, epilog="\b\n" + "\n  ".join([f"{title}:", *examples]))


def print_json(value: Any) -> None:
    """Prints ``value`` as JSON, for programs that read the output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))
