"""Options, and the helpers for examples and JSON, that several groups of commands share."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="OVERRIDE", help="Hydra overrides, as in experiment=demo critic.lr=1e-4")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run, the beginning of its name, or `last`")]
Where = Annotated[
    str | None,
    typer.Option("--on", metavar="local|CONTEXT", help="the store, or a cluster (`.`: the current one); else both"),
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="namespace; else that of the context")]
Release = Annotated[str, typer.Option(help="full name of the chart's release")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for a program")]
StoreOption = Annotated[
    str, typer.Option("--store", envvar="CUDA_AGENT_STORE", help="a folder or s3://bucket/prefix, as in run.store")
]
STORE = ".cuda-agent/store"


def add_commands(app: typer.Typer, examples: Mapping[Callable[..., None], tuple[str, ...]]) -> None:
    """Adds commands with their examples, under the names of their functions."""
    for command, lines in examples.items():
        title = "Examples" if len(lines) > 1 else "Example"
        app.command(epilog="\b\n" + "\n  ".join([f"{title}:", *lines]))(command)


def print_json(value: Any) -> None:
    """Prints JSON for a program."""
    print(json.dumps(value, indent=1, ensure_ascii=False))
