"""The command line.  Each command parses its arguments, calls the library and prints the result.

Commands import their dependencies inside their functions, so that ``--help`` answers at once.  An error that a person
can fix is printed without a traceback.  Exit codes: 75 try again later, 76 budget used, 78 wrong configuration
or input, 79 result not good enough."""

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from cuda_agent.cli.cluster import commands as cluster_commands
from cuda_agent.cli.episodes import commands as episodes_commands
from cuda_agent.cli.optimize import commands as optimize_commands
from cuda_agent.cli.options import (
    AsJson,
    Device,
    ModelFile,
    Overrides,
    SolutionFolder,
    SolutionFormat,
    TrainMode,
    command,
    composed,
    print_json,
    show,
    with_train_mode,
)
from cuda_agent.cli.pod import pod_app
from cuda_agent.cli.runs import commands as runs_commands
from cuda_agent.cli.sandbox import sandbox_app
from cuda_agent.cli.tasks import tasks_app
from cuda_agent.cli.tune import tune_commands
from cuda_agent.cli.upkeep import commands as upkeep_commands
from cuda_agent.errors import EXIT_DONE, EXIT_GATE, EXIT_RETRY, ConfigError

app = typer.Typer(
    name="cuda-agent",
    help="Teach a language model to write fast GPU kernels, and put it to work.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Runs the command line, and turns errors into messages and exit codes."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except Exception as error:
        if (code := getattr(error, "exit_code", None)) is None:
            raise
        print(f"cuda-agent: {error}", file=sys.stderr)
        sys.exit(code)


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[bool, Option("--version", help="print the version", is_eager=True)] = False,
) -> None:
    if show_version:
        from importlib.metadata import version

        print(f"cuda-agent {version('cuda-agent')}")
        raise typer.Exit


@command(app, "cuda-agent run experiment=demo", "cuda-agent run experiment=smoke critic.lr=1e-4 --new")
def run(
    overrides: Overrides = None,
    new: Annotated[bool, Option("--new", help="start a new run, even if one is unfinished")] = False,
    to: Annotated[str | None, Option("--to", help="run only this stage and the stages that it needs")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the workflow on this machine: all stages, or with --to a part of them.

    Continue the newest unfinished run of the same configuration, unless --new is given. Take results that exist
    already from the cache. After Ctrl-C the stages write a checkpoint, from which the same command continues."""
    from cuda_agent import machine
    from cuda_agent.compose import compose
    from cuda_agent.diagnostics.doctor import unsupported
    from cuda_agent.pipeline import screen
    from cuda_agent.pipeline.graph import stages_of, up_to
    from cuda_agent.pipeline.local import run_pipeline
    from cuda_agent.pipeline.schedule import require_base

    config = compose(overrides or [])
    rows = up_to(stages_of(config), to) if to else stages_of(config)
    if any(row.name == "bootstrap" for row in rows):  # bootstrap loads the base model
        require_base(config.policy.base)
    if sys.platform != "linux":
        print(unsupported(), file=sys.stderr)
    with screen.watching(as_json) as watch:
        outcome = run_pipeline(config, new=new, stages=rows, watch=watch, began=machine.began())
    report = str(outcome.report / "index.html") if outcome.report else None
    if as_json:
        facts = {name: getattr(outcome, name) for name in ("run", "code", "stage", "message", "resumed")}
        manifests = outcome.manifests.items()
        stages = {name: {"key": m.key, "outputs": m.outputs, "seconds": m.seconds} for name, m in manifests}
        print_json(facts | {"report": report, "stages": stages})
    elif outcome.code == 0:
        print(f"run {outcome.run} is done")
        if report:
            print(f"report: {report}")
    if outcome.code:
        where = f" in stage {outcome.stage}" if outcome.stage else ""
        print(f"cuda-agent: {outcome.message}\n(exit code {outcome.code}{where})", file=sys.stderr)
        if outcome.log and outcome.log.exists():
            lines = outcome.log.read_text(errors="replace").splitlines()
            if outcome.code == 1:
                print("\n".join(f"  | {line[:160]}" for line in lines[-12:]), file=sys.stderr)
            print(f"log: {outcome.log}", file=sys.stderr)
        sys.exit(outcome.code)


@command(app, "cuda-agent config experiment=paper", "cuda-agent config critic.lr=1e-4 --json")
def config(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the configuration and the schedule of a run.

    The configuration is validated, and printed with all defaults. The schedule estimates work, time and memory of
    each stage. No stage runs. If the base model (policy.base) is a folder that does not exist on this machine, print
    a note, because `run` would refuse it."""
    from cuda_agent.compose import compose, freeze
    from cuda_agent.pipeline.schedule import derived, require_base, schedule_lines

    composed = compose(overrides or [])
    text, sha256 = freeze(composed)
    schedule = derived(composed)
    if as_json:
        print_json({"config": json.loads(text), "sha256": sha256, "schedule": schedule})
    else:
        import yaml

        values = composed.model_dump(mode="json")
        print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None))
        print(f"sha256: {sha256}\n")
        print("\n".join(schedule_lines(schedule)))
    try:
        require_base(composed.policy.base)
    except ConfigError as error:  # the path may exist in a cluster's pods only
        print(f"note: {error}, on this machine", file=sys.stderr)


@command(
    app,
    "cuda-agent evaluate tasks/relu_sum/model.py my-solution/ sandbox.threads=4",
    "cuda-agent evaluate model.py my-solution/ --shapes auto --shapes batch_size=7,dim=1000",
)
def evaluate(
    task: ModelFile,
    solution: SolutionFolder,
    overrides: Overrides = None,
    format: SolutionFormat = None,
    device: Device = None,
    mode: Annotated[
        Literal["quick", "strict", "check"],
        Option(help="quick: fast, as in training; strict: careful numbers to report; check: no times"),
    ] = "quick",
    again: Annotated[
        bool, Option("--again", help="ignore cached results: judge again, and time eager and torch.compile again")
    ] = False,
    shapes: Annotated[
        list[str] | None,
        Option(
            help="check other shapes, too: auto, or new values of constants in model.py, as in batch_size=7,dim=1000; "
            "repeatable"
        ),
    ] = None,
    train_mode: TrainMode = False,
    as_json: AsJson = False,
) -> None:
    """Check and time one solution of one task in the sandbox.

    With --shapes, a correct solution is also checked at other shapes. --shapes auto takes them from SHAPES in
    model.py, a list of dicts of constants. Without SHAPES, two shapes are tried: the first dimension of the inputs
    with one row more, and with half of its rows. A solution that is wrong at another shape is called specialised.
    Exit code 0: the solution is correct at the task's own shape; 79: it is not; 75: the sandbox failed."""
    from cuda_agent.optimize import evaluation
    from cuda_agent.optimize.shapes import shape_lines
    from cuda_agent.optimize.verdict_text import verdict_lines
    from cuda_agent.tasks.io import task_from_file

    given, files = task_from_file(task), evaluation.solution_files(solution)
    settings, cache = evaluation.settings_for(files, with_train_mode(overrides, train_mode), format, device)
    judged = evaluation.checked_solution(files, settings.sandbox.format, str(solution))
    work = evaluation.evaluate(settings.sandbox, cache, given, judged, mode, again, shapes or ())
    what = "judging; the first verdict on a task also times eager and torch.compile"
    verdict, others = evaluation.run_to_end(evaluation.with_clock(work, what, sys.stderr))
    facts = verdict.to_json() | ({"shapes": [asdict(result) for result in others]} if shapes else {})
    show(as_json, facts, [*verdict_lines(verdict), *(shape_lines(others) if others else [])])
    sys.exit(EXIT_DONE if verdict.status == "ok" else EXIT_RETRY if verdict.status == "infra" else EXIT_GATE)


@command(
    app,
    "cuda-agent evaluate-set runs/my-run/ --tasks KernelBench/level1 sandbox.device=cuda",
    "cuda-agent evaluate-set h100.json --mode strict --train-mode sandbox.device=cuda",
    name="evaluate-set",
)
def evaluate_set(
    solutions: Annotated[Path, Argument(help="the set: a folder, a file of JSON lines, or a JSON file")],
    overrides: Overrides = None,
    tasks: Annotated[
        Path | None,
        Option(help="a KernelBench folder or any task set [default: the reference that each record contains]"),
    ] = None,
    mode: Annotated[
        Literal["quick", "strict"], Option(help="quick: fast, as in training; strict: careful numbers to report")
    ] = "quick",
    train_mode: TrainMode = False,
    output: Annotated[Path | None, Option(help="folder for the result [default: SOLUTIONS-evaluated]")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a set of existing solutions, and write a report.

    The report is an HTML page and a CSV file. It shows scores and rejected solutions, and compares the speed-ups that
    the set claims with the measured ones. Each solution is Python code with a class ModelNew (model_new.py), unless
    sandbox.format names another format. After Ctrl-C or a kill, the same command keeps the existing verdicts and
    judges the rest. Exit code 75: the sandbox failed for some solutions."""
    from cuda_agent.optimize import evaluate_set as sets
    from cuda_agent.optimize.evaluation import run_to_end
    from cuda_agent.optimize.solution_set import read_set
    from cuda_agent.tasks.io import read_any

    settings, cache = composed(["sandbox.format=python", *(overrides or [])], train_mode)
    given = read_set(solutions, None if tasks is None else read_any(tasks), settings.sandbox.format)
    folder = output or Path(f"{given.name}-evaluated")
    say = partial(print, file=sys.stderr, flush=True)
    result = run_to_end(sets.evaluate_set(settings.sandbox, cache, given, mode, folder, say))
    files = {name: str(folder / file) for name, file in sets.FILES.items()}
    show(as_json, result.to_json() | files, [*sets.result_lines(result), "", *files.values()])
    sys.exit(75 if any(row.outcome == "infra" for row in result.rows) else 0)


@command(
    app,
    "cuda-agent benchmark my-policy/ --tasks KernelBench/ --levels 1,2 --samples 4",
    "cuda-agent benchmark last/agentic --tasks KernelBench/level1 evaluate.turns=6 policy.context=1024",
    "cuda-agent benchmark --base-url http://127.0.0.1:8000/v1 --model m --tasks KernelBench/ --only '19,*Conv2D*'",
)
def benchmark(
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="POLICY|OVERRIDE", help="the policy (a Hugging Face folder, or RUN/STAGE), and overrides"),
    ] = None,
    base_url: Annotated[
        str | None, Option(help="OpenAI-compatible address of a model to measure instead of a policy")
    ] = None,
    model: Annotated[str | None, Option(help="name of the model behind --base-url")] = None,
    key_env: Annotated[str, Option(help="environment variable that holds the API key")] = "OPENAI_API_KEY",
    tasks: Annotated[
        Path, Option(help="KernelBench (a clone, or its data set as parquet or JSON lines), or any task set")
    ] = Path("tasks"),
    levels: Annotated[str | None, Option(metavar="1,2", help="only KernelBench's levels [default: all]")] = None,
    only: Annotated[
        str | None,
        Option(metavar="NAME,...", help="only these tasks: names, numbers, or patterns such as *ReLU* [default: all]"),
    ] = None,
    samples: Annotated[int | None, Option(min=1, help="episodes of each task [default: 1]")] = None,
    output: Annotated[Path | None, Option(help="folder for episodes and scores [default: they are not kept]")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a policy or a served model on a task set.

    Print pass rates, speed-ups over eager PyTorch and torch.compile, and KernelBench's fast_p. A policy is a language
    model in a Hugging Face folder, or the one that a stage of a run made (RUN/STAGE). A served model is any model
    behind an OpenAI-compatible address (--base-url). The preset experiment=benchmark sets the limits of turns, tokens
    and time. A policy of a run answers in the run's solution format. Otherwise the format is python for KernelBench's
    tasks, as in KernelBench, and plan for other tasks. Overrides change these and other settings, as in
    sandbox.format=plan evaluate.turns=20."""
    from cuda_agent.optimize import benchmark as bench
    from cuda_agent.optimize.evaluation import run_to_end
    from cuda_agent.optimize.score_text import benchmark_lines
    from cuda_agent.tasks.io import read_any
    from cuda_agent.tasks.select import select

    policies = [text for text in arguments or [] if "=" not in text]
    overrides = [text for text in arguments or [] if "=" in text]
    if len(policies) > 1:
        raise bench.BenchmarkError(f"benchmark: expected one POLICY, got {' and '.join(policies)}.")
    folder, trained = bench.policy_folder(policies[0], composed(overrides)[0].run.store) if policies else (None, None)
    who = bench.Player(folder, base_url, model, key_env)
    chosen = select(read_any(tasks), bench.levels_in(levels), only.split(",") if only else ())
    settings, cache = composed(bench.with_defaults(overrides, chosen, trained, samples))
    say = (lambda line: None) if as_json else (lambda line: print(line, file=sys.stderr))
    result = run_to_end(bench.benchmark(settings, cache, who, chosen, output, say))
    show(as_json, result.to_json(), benchmark_lines(result.scores, result.answers, result.fast))


for group in (runs_commands, episodes_commands, cluster_commands, upkeep_commands, optimize_commands, tune_commands):
    app.add_typer(group)
app.add_typer(tasks_app, name="tasks")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(pod_app, name="pod", hidden=True)
