"""The commands of the sandbox, which judges solutions: serve it, measure it, test it, print its schemas."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from cuda_agent.cli.options import AsJson, command, command_group, composed, show
from cuda_agent.errors import ConfigError
from cuda_agent.format_names import Format

sandbox_app = command_group("Serve, measure and test the sandbox; print its schemas.")
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="OVERRIDE", help="Hydra overrides of the configuration, as in sandbox.clock=model"),
]


@command(
    sandbox_app,
    "cuda-agent sandbox serve sandbox.threads=4",
    "CUDA_AGENT_SANDBOX_TOKEN=... cuda-agent sandbox serve --host 0.0.0.0 --roles evaluate",
)
def serve(
    overrides: Overrides = None,
    roles: Annotated[str, Option(help="any of workspace, build and evaluate, separated by commas")] = (
        "workspace,build,evaluate"
    ),
    host: Annotated[str, Option(help="address to listen on; without a token it is always 127.0.0.1")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="port to listen on; 0: any free port")] = 8750,
    queue: Annotated[
        int, Option(min=1, help="limit of waiting jobs; a job beyond it is refused, with a time to try again")
    ] = 256,
    workspaces: Annotated[int, Option(min=1, help="limit of open work folders")] = 64,
    idle_seconds: Annotated[float, Option(min=1, help="seconds until an unused work folder is closed")] = 600.0,
    drain_seconds: Annotated[float, Option(min=0, help="seconds that running work may take after SIGTERM")] = 60.0,
    recycle_after: Annotated[int, Option(min=0, help="end after this many new verdicts; 0: never")] = 0,
    recycle_on_cheat: Annotated[bool, Option("--recycle-on-cheat", help="end after a solution that cheats")] = False,
    open_metrics: Annotated[bool, Option("--open-metrics", help="serve /metrics without a token")] = False,
    cache: Annotated[
        Path | None,
        Option(
            help="folder of builds, baselines and verdicts [default: cache beside run.store; without a store "
            "~/.cache/cuda-agent/cache]"
        ),
    ] = None,
) -> None:
    """Serve the sandbox over HTTP until SIGTERM.

    After SIGTERM, the server finishes the running jobs. At its start, it reads an access token from the file that
    sandbox.token_file names, or from the environment variable that sandbox.token_env names. Clients must send the
    same token. Without a token, the server listens on 127.0.0.1 only."""
    import asyncio
    import logging

    from cuda_agent.sandbox.service.service import ROLES, ServiceLimits

    try:
        from cuda_agent.sandbox.service.app import serve as serving
    except ModuleNotFoundError as missing:
        raise ConfigError(f"sandbox serve needs {missing.name}: pip install 'cuda-agent[serve]'") from None
    wanted = {role.strip() for role in roles.split(",") if role.strip()}
    chosen = tuple(role for role in ROLES if role in wanted)
    if not chosen or wanted - set(chosen):
        raise ConfigError(f"--roles: expected any of {', '.join(ROLES)}, got {roles!r}")
    config, usual = composed(overrides)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = ServiceLimits(
        queue, workspaces, idle_seconds, drain_seconds, recycle_after, recycle_on_cheat, open_metrics
    )
    asyncio.run(serving(config.sandbox, cache or usual, chosen, limits, host, port))


@command(sandbox_app, "cuda-agent sandbox bench --solutions 5 --formats plan --json")
def bench(
    overrides: Overrides = None,
    tasks: Annotated[int, Option(min=1, help="number of tasks")] = 4,
    solutions: Annotated[int, Option(min=1, help="solutions per task and format in each of three rounds")] = 5,
    formats: Annotated[
        str | None, Option(help="any of plan, extension (not on a GPU) and python, separated by commas [default: all]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine judges solutions.

    Print the seconds of each phase of a judgement (such as build, check and time). Also print how many solutions are
    judged per minute, both one at a time and all at once."""
    import asyncio

    from cuda_agent.diagnostics import sandbox_bench

    config = composed(overrides)[0].sandbox
    wanted = sandbox_bench.formats_of(formats, config.device)
    answer = asyncio.run(sandbox_bench.measure(config, tasks, solutions, wanted))
    print(json.dumps(answer, indent=1) if as_json else "\n".join(sandbox_bench.lines(answer)))


@command(sandbox_app, "cuda-agent sandbox schema plan > plan.schema.json")
def schema(which: Annotated[Literal["verdict", "plan"], Argument(help="verdict or plan")]) -> None:
    """Print the JSON schema of a verdict, or of plan.json."""
    from cuda_agent.sandbox.formats.schema import SCHEMAS

    print(json.dumps(SCHEMAS[which](), indent=2))


@command(
    sandbox_app,
    "cuda-agent sandbox selftest",
    "cuda-agent sandbox selftest --format python --json",
    "cuda-agent sandbox selftest --only by_address",
    "cuda-agent sandbox selftest --device cuda",
)
def selftest(
    format: Annotated[Format | None, Option(help="test only this format")] = None,
    only: Annotated[str | None, Option(metavar="NAME", help="test only this exploit, honest solution or wall")] = None,
    device: Annotated[Literal["cpu", "cuda"], Option(help="device that runs the solutions")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Judge all known exploits and many honest solutions.

    An exploit is a solution that tries to cheat the sandbox or to break out of it. After the judging, switch off each
    wall (a protection of the sandbox) in turn, to see whether an exploit succeeds without it. With --format, do not
    test the walls. Exit code 79: an exploit succeeded or got a verdict that it must not get, or an honest solution
    was refused."""
    import asyncio

    from cuda_agent.exploits import selftest as test

    say = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    report = asyncio.run(test.run(format, only, say, device))
    show(as_json, report, test.lines(report))
    sys.exit(79 if report["failed"] else 0)
