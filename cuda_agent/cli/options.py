"""Options that several groups of commands share, and helpers to declare commands and print JSON."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer import Argument, Option

from cuda_agent.format_names import Format

if TYPE_CHECKING:
    from cuda_agent.config import Config

Overrides = Annotated[
    list[str] | None,
    Argument(metavar="OVERRIDE", help="Hydra overrides of the configuration, as in experiment=demo critic.lr=1e-4"),
]
RunName = Annotated[str, Argument(metavar="RUN", help="name of a run, the beginning of its name, or `last`")]
Where = Annotated[
    str | None,
    Option(
        "--on",
        metavar="local|CONTEXT",
        help="where to look: local (the store), or a context of your kubeconfig (`.`: the current one) "
        "[default: first the store, then the current context]",
    ),
]
Namespace = Annotated[
    str | None, Option("--namespace", "-n", help="Kubernetes namespace [default: that of the context]")
]
ModelFile = Annotated[Path, Argument(help="a model.py with Model, get_inputs and get_init_inputs")]
SolutionFolder = Annotated[Path, Argument(help="a folder with plan.json and kernels/, or with model_new.py")]
SolutionFormat = Annotated[
    Format | None, Option("--format", help="format of the solution [default: that of the folder's files]")
]
TrainMode = Annotated[
    bool, Option("--train-mode", help="run models in train() mode, as KernelBench does, not in eval() mode")
]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    Option("--device", help="device that runs the solution [default: cuda if there is a GPU, else cpu]"),
]
Release = Annotated[
    str | None,
    Option(help="full name of the Helm release: the prefix of its objects' names [default: the namespace's only one]"),
]
AsJson = Annotated[bool, Option("--json", help="print JSON, for programs")]
StoreOption = Annotated[
    str, Option("--store", envvar="CUDA_AGENT_STORE", help="store of the runs: a folder or s3://bucket/prefix")
]
STORE = ".cuda-agent/store"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def command_group(help: str | None = None) -> typer.Typer:
    """Returns an empty command group with the help text ``help``.  A group whose commands become direct commands of
    ``cuda-agent`` needs no help text."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)


def command(group: typer.Typer, *examples: str, name: str | None = None) -> Callable[[_Command], _Command]:
    """Returns a decorator that adds a function to ``group`` as a command, with ``examples`` below its help text."""
    title = "Examples" if len(examples) > 1 else "Example"
    return group.command(name, epilog="\b\n" + "\n  ".join([f"{title}:", *examples]))


def with_train_mode(overrides: Sequence[str] | None, train_mode: bool) -> list[str]:
    """Returns ``overrides``.  With ``train_mode``, adds the override ``sandbox.train_mode=true``."""
    return [*(overrides or []), *(["sandbox.train_mode=true"] if train_mode else [])]


def composed(overrides: Sequence[str] | None, train_mode: bool = False) -> "tuple[Config, Path]":
    """Returns the configuration with ``overrides``, and the cache folder on this machine for the configured store
    (``run.store``).  With ``train_mode``, adds the override ``sandbox.train_mode=true``."""
    from cuda_agent.compose import compose
    from cuda_agent.pipeline.runs import cache_of

    config = compose(with_train_mode(overrides, train_mode))
    return config, cache_of(config)


def print_json(value: Any) -> None:
    """Prints ``value`` as indented JSON."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def show(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """Prints the result of a command: ``value`` as JSON if ``as_json`` is set, otherwise ``lines``."""
    print_json(value) if as_json else print("\n".join(lines))
