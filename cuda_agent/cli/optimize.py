"""The command `cuda-agent optimize`: parses the arguments, runs the search and prints the outcome."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from typer import Argument, Context, Option

from cuda_agent.cli.options import (
    Device,
    Namespace,
    Release,
    TrainMode,
    command,
    command_group,
    composed,
    with_train_mode,
)
from cuda_agent.errors import EXIT_DONE, EXIT_GATE, EXIT_RETRY, ConfigError
from cuda_agent.format_names import Format

commands = command_group()


@command(
    commands,
    "export OPENAI_API_KEY=...",
    "cuda-agent optimize model.py --base-url https://api.example.com/v1 --model some-model",
    "cuda-agent optimize model.py --base-url http://127.0.0.1:8000/v1 --model qwen3-coder --attempts 4 --minutes 30",
    "cuda-agent optimize model.py --base-url ... --model ... --money 2 --price-in 0.5 --price-out 2.5",
    "cuda-agent optimize resnet.py --whole --base-url ... --model ... --minutes 240",
    "cuda-agent optimize --resume model-optimized --minutes 30",
    "cuda-agent optimize model.py --on my-cluster --model some-model --attempts 8",
)
def optimize(
    ctx: Context,
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL.py|OVERRIDE",
            help="a file with Model, get_inputs and get_init_inputs; and overrides of the sandbox, as in "
            "sandbox.threads=4",
        ),
    ] = None,
    base_url: Annotated[str | None, Option(help="OpenAI-compatible address of a server, including /v1")] = None,
    model: Annotated[str | None, Option(help="name of the language model on that server")] = None,
    key_env: Annotated[
        str | None, Option(help="environment variable that holds the API key [default: OPENAI_API_KEY]")
    ] = None,
    output: Annotated[Path | None, Option(help="folder for the result [default: MODEL-optimized]")] = None,
    resume: Annotated[
        Path | None, Option(help="continue the search in this folder, with its options; options given now replace them")
    ] = None,
    attempts: Annotated[int | None, Option(min=1, max=64, help="number of attempts [default: 1]")] = None,
    search: Annotated[
        bool | None,
        Option(
            "--search/--no-search",
            help="let later attempts start from solutions of earlier ones, at most four attempts at a time; or begin "
            "all at once and from nothing [default: --search]",
        ),
    ] = None,
    target: Annotated[
        float | None,
        Option(
            help="speed-up at which the search stops, over the faster of eager and torch.compile; inf: no target "
            "[default: 1.05]"
        ),
    ] = None,
    until: Annotated[
        float | None,
        Option(
            min=0.01,
            max=1.0,
            help="share of the speed of light at which the search stops, as in 0.9: the least time in which the device "
            "can move the bytes and do the arithmetic, divided by the solution's time; without --target it is the only "
            "target",
        ),
    ] = None,
    turns: Annotated[
        int | None,
        Option(min=1, help="limit of turns for each attempt, at least 2: the last one only sums up [default: 60]"),
    ] = None,
    minutes: Annotated[
        float | None, Option(min=0.01, help="time limit in minutes for all attempts together [default: 60]")
    ] = None,
    tokens: Annotated[
        int | None,
        Option(min=1, help="limit of prompt and answer tokens for all attempts together [default: no limit]"),
    ] = None,
    money: Annotated[
        float | None,
        Option(
            min=0,
            help="cost limit for all attempts together, in the currency of the prices; needs --price-in, --price-out "
            "or both [default: no limit]",
        ),
    ] = None,
    price_in: Annotated[float | None, Option(min=0, help="price of a million prompt tokens [default: 0]")] = None,
    price_out: Annotated[float | None, Option(min=0, help="price of a million answer tokens [default: 0]")] = None,
    format: Annotated[
        Format | None, Option(help="format of the solution; verdicts on plan are trusted most [default: plan]")
    ] = None,
    device: Device = None,
    context: Annotated[
        int | None, Option(min=512, help="limit of tokens in a conversation, answer included [default: 65536]")
    ] = None,
    answer_tokens: Annotated[int | None, Option(min=64, help="limit of tokens in one answer [default: 8192]")] = None,
    temperature: Annotated[float | None, Option(min=0, help="temperature of the sampling [default: 1]")] = None,
    seed: Annotated[int | None, Option(help="seed of the sampling, if the server takes one [default: 0]")] = None,
    style: Annotated[
        Literal["full", "compact"] | None,
        Option(help="compact: short prompts, for a policy that cuda-agent trained from scratch [default: full]"),
    ] = None,
    lessons: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Markdown file of lessons: the model is told those that fit the problem, and the search adds one; "
            "'' for none [default: ~/.local/share/cuda-agent/lessons.md]",
        ),
    ] = None,
    whole: Annotated[
        bool,
        Option(
            "--whole",
            help="for a model of several layers: optimize each submodule that has at least 5% of the time, and keep "
            "those that make the whole model faster; all share the limits",
        ),
    ] = False,
    train_mode: TrainMode = False,
    on: Annotated[
        str | None,
        Option(
            "--on",
            metavar="CONTEXT",
            help="play the search on a cluster, in one pod for each player: a context of your kubeconfig (`.`: the "
            "current one); the release there names the model's server, so --base-url is left out",
        ),
    ] = None,
    namespace: Namespace = None,
    release: Release = None,
    profile: Annotated[
        str | None, Option(help="with --on: profile of the chart, which sets the resources of the sandboxes")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="print a line of JSON for each event, and one for the outcome")
    ] = False,
) -> None:
    """Make one model.py faster, with the help of a language model.

    Any language model behind an OpenAI-compatible address will do. It works in a sandbox, where it writes, compiles,
    verifies and profiles code until it reaches the target, the budget is spent, or you press Ctrl-C. The best
    solution is then judged once more in strict mode, with careful measurements. The result folder holds its kernels,
    a model_new.py that does not need cuda-agent, the strict verdict, the transcript and report.html.

    The API key is read from the environment and written nowhere. Exit code 0: a correct solution was found; 79: none
    was found; 130: Ctrl-C came before one was found; 75: the language model's server could not be used."""
    from cuda_agent.optimize import folder as folders
    from cuda_agent.optimize.evaluation import device_of
    from cuda_agent.optimize.lessons import standard_path
    from cuda_agent.optimize.whole.folder import is_whole

    words = arguments or []
    overrides, sources = [w for w in words if "=" in w], [w for w in words if "=" not in w]
    where = ("on", "namespace", "release", "profile")
    others = ("arguments", "output", "resume", "whole", "train_mode", "as_json", *where)  # not fields of the order
    changes = {name: value for name, value in ctx.params.items() if value is not None and name not in others}
    if lessons:
        changes["lessons"] = str(Path(lessons).absolute())
    if resume is not None:
        if sources or output is not None:
            raise ConfigError("--resume takes MODEL.py and --output from the folder: leave them out")
        if {"format", "device", "style"} & changes.keys():
            raise ConfigError("--resume goes on with the format, device and style of before")
        order, sandbox = folders.read_order(resume)
        if whole and not is_whole(resume):
            raise ConfigError(f"{resume} was begun without --whole: leave it out, or begin anew in another folder")
        whole = is_whole(resume)
        folder, source = resume, resume / "model.py"
        overrides = [*_as_overrides(sandbox), *overrides]
    else:
        if len(sources) != 1:
            raise ConfigError(f"expected one MODEL.py, got {' and '.join(sources) or 'none'}")
        if (base_url is None and on is None) or model is None:
            raise ConfigError("--base-url and --model say which model works, as in --base-url http://127.0.0.1:8000/v1")
        source = Path(sources[0])
        folder = output or Path(f"{source.stem}-optimized")
        order = folders.SearchOrder(base_url or "", model)
        if device is None and on is not None:
            from cuda_agent.cli.searches import default_device

            changes["device"] = default_device(overrides, on, namespace, release, profile or "cpu")
        elif device is None:
            changes["device"] = device_of(overrides)
        changes = {"lessons": str(standard_path())} | changes
    order = folders.with_changes(order, changes)
    overrides = [w for w in overrides if not w.startswith(("sandbox.format=", "sandbox.device="))]
    overrides = with_train_mode(overrides, train_mode)
    overrides += [f"sandbox.format={order.terms.format}", f"sandbox.device={order.terms.device}"]
    if there := _cluster_of(on, namespace, release, profile, resume, changes, whole):
        changed = resume is not None and bool(changes.keys() | {*words})
        outcome = _run_there(there, order, overrides, source, folder, resume is not None, changed, as_json)
        _finish(outcome, as_json)
    if whole:
        _finish_whole(_run_whole(order, overrides, source, folder, resume is not None, as_json), as_json)
    _finish(_run(order, overrides, source, folder, resume is not None, as_json), as_json)


def _finish(outcome: Any, as_json: bool) -> NoReturn:
    """Prints the outcome of a search, and ends the process with its exit code."""
    from cuda_agent.policy.served import ServedModelError

    nothing = outcome.best is None and outcome.why == "server"
    if as_json:
        print(json.dumps(outcome.to_json(), ensure_ascii=False), flush=True)
    elif not nothing:
        print("\n".join(_lines(outcome)))
    if nothing:
        raise ServedModelError(outcome.message)
    sys.exit(0 if outcome.best else 130 if outcome.why == "stopped" else 79)


def _cluster_of(
    on: str | None,
    namespace: str | None,
    release: str | None,
    profile: str | None,
    resume: Path | None,
    changes: dict[str, Any],
    whole: bool,
) -> Any:
    """Returns the place of a search on a cluster, or None for a search on this machine.  ``changes`` holds the options
    that set fields of the order.

    Raises:
        ConfigError: The options do not fit together."""
    from cuda_agent.cli.searches import Place, place_in

    there = place_in(resume) if resume else None
    named = [value for value in (on, namespace, release, profile) if value is not None]
    if resume and named:
        raise ConfigError(
            "--resume takes the cluster from the folder: leave out --on, --namespace, --release, --profile"
        )
    if there is None and on is None:
        if named:
            raise ConfigError("--namespace, --release and --profile go with --on")
        return None
    if whole:
        raise ConfigError("--whole works on this machine alone: leave out --on")
    for name in ("base_url", "key_env"):
        if name in changes:
            said = "the release names the model's server and its key (search.server, search.existingSecret)"
            raise ConfigError(f"--{name.replace('_', '-')}: on a cluster, {said}")
    return there or Place(on, namespace, release, profile or "cpu")


def _run_there(
    there: Any, order: Any, overrides: list[str], source: Path, folder: Path, resume: bool, changed: bool, as_json: bool
) -> Any:
    from cuda_agent.cli import searches

    settings, _ = composed(overrides)
    if resume:
        outcome = searches.go_on(there, order, settings.sandbox, folder, changed, as_json)
    else:
        outcome = searches.begin(there, order, settings.sandbox, source, folder, as_json)
    if outcome is None:
        sys.exit(130)
    return outcome


def _run(order: Any, overrides: list[str], source: Path, folder: Path, resume: bool, as_json: bool) -> Any:
    import asyncio

    from cuda_agent.optimize import screen, search

    settings, cache = composed(overrides)

    async def work() -> Any:
        stop = asyncio.Event()
        with search.on_interrupt(asyncio.get_running_loop(), stop), screen.watching(as_json) as watch:
            return await search.optimize(order, settings.sandbox, cache, source, folder, resume, watch, stop)

    return asyncio.run(work())


def _run_whole(order: Any, overrides: list[str], source: Path, folder: Path, resume: bool, as_json: bool) -> Any:
    import asyncio
    from collections.abc import Iterator
    from contextlib import contextmanager

    from cuda_agent.optimize import screen, search
    from cuda_agent.optimize.whole.run import Command, optimize_whole

    settings, cache = composed(overrides)

    def show(event: dict[str, Any], lines: Sequence[str]) -> None:
        print(json.dumps(event, ensure_ascii=False) if as_json else "\n".join(lines), flush=True)

    @contextmanager
    def watching(part: str) -> Iterator[Any]:
        with screen.watching(as_json) as watch:
            yield lambda event: watch(event | {"part": part})

    async def work() -> Any:
        stop = asyncio.Event()
        with search.on_interrupt(asyncio.get_running_loop(), stop):
            given = Command(order, settings.sandbox, cache, folder, show, watching, stop)
            return await optimize_whole(given, source, resume)

    return asyncio.run(work())


def _finish_whole(outcome: Any, as_json: bool) -> NoReturn:
    from cuda_agent.optimize.whole.report import outcome_lines

    print(
        json.dumps(outcome.to_json(), ensure_ascii=False) if as_json else "\n".join(outcome_lines(outcome)), flush=True
    )
    failed = {"stopped": 130, "server": EXIT_RETRY}.get(outcome.why, EXIT_GATE)
    sys.exit(EXIT_DONE if outcome.verdict else failed)


def _as_overrides(sandbox: dict[str, Any]) -> list[str]:
    """Returns Hydra overrides for those settings in ``sandbox`` (name -> value) that differ from their defaults."""
    from cuda_agent.config import SandboxConfig

    standard = SandboxConfig().model_dump(mode="json")
    return [f"sandbox.{name}={json.dumps(value)}" for name, value in sandbox.items() if value != standard.get(name)]


def _lines(outcome: Any) -> list[str]:
    from cuda_agent.agent.progress import ENDS
    from cuda_agent.optimize.verdict_text import verdict_lines

    lines = ["", ENDS.get(outcome.why, outcome.why)]
    if outcome.best is None:
        return [*lines, f"no solution was confirmed to be correct; {outcome.folder}/report.html tells what was tried"]
    reached = "reached" if outcome.reached else "not reached"
    return [
        *lines,
        *verdict_lines(outcome.best.strict or outcome.best.quick),
        *([] if outcome.goal.is_none else [f"{outcome.goal} is {reached}"]),
        "",
        f"{outcome.folder}/model_new.py   from model_new import ModelNew",
        f"{outcome.folder}/report.html",
    ]
