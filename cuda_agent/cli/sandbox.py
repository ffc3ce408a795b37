"""The commands of the sandbox: serve it, measure it, test it, print its schemas."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from cuda_agent.cli.options import AsJson, command, command_group
from cuda_agent.errors import ConfigError
from cuda_agent.format_names import Format

sandbox_app = command_group("Serve the sandbox, measure it, test it, print its formats.")
Overrides = Annotated[list[str] | None, Argument(metavar="OVERRIDE", help="Hydra overrides, as in sandbox.clock=model")]


@command(
    sandbox_app,
    "cuda-agent sandbox serve sandbox.threads=4",
    "CUDA_AGENT_SANDBOX_TOKEN=... cuda-agent sandbox serve --host 0.0.0.0 --roles evaluate",
)
def serve(
    overrides: Overrides = None,
    roles: Annotated[str, Option(help="any of workspace, build, evaluate, with commas")] = ("workspace,build,evaluate"),
    host: Annotated[str, Option(help="address to listen on; without a token always 127.0.0.1")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free")] = 8750,
    queue: Annotated[int, Option(min=1, help="jobs that may wait; more are told when to come back")] = 256,
    workspaces: Annotated[int, Option(min=1, help="work folders that may be open at once")] = 64,
    idle_seconds: Annotated[float, Option(min=1, help="until an unused work folder is closed")] = 600.0,
    drain_seconds: Annotated[float, Option(min=0, help="for running work, after SIGTERM")] = 60.0,
    recycle_after: Annotated[int, Option(min=0, help="verdicts after which it ends; 0: never")] = 0,
    recycle_on_cheat: Annotated[bool, Option("--recycle-on-cheat", help="end after a cheat")] = False,
    open_metrics: Annotated[bool, Option("--open-metrics", help="/metrics asks for no token")] = False,
    cache: Annotated[Path | None, Option(help="folder of builds, baselines and verdicts")] = None,
) -> None:
    """Serve the sandbox over HTTP until SIGTERM, then finish the running jobs.

    Clients must send a token, which is read from sandbox.token_file or from the variable that sandbox.token_env names.
    """
    import asyncio
    import logging

    from cuda_agent.compose import compose
    from cuda_agent.pipeline.runs import local_home
    from cuda_agent.sandbox.service.service import ROLES, ServiceLimits

    try:
        from cuda_agent.sandbox.service.app import serve as serving
    except ModuleNotFoundError as missing:
        raise ConfigError(f"sandbox serve needs {missing.name}: pip install 'cuda-agent[serve]'") from None
    wanted = {role.strip() for role in roles.split(",") if role.strip()}
    chosen = tuple(role for role in ROLES if role in wanted)
    if not chosen or wanted - set(chosen):
        raise ConfigError(f"--roles: expected any of {', '.join(ROLES)}, got {roles!r}")
    config = compose(overrides or [])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = ServiceLimits(
        queue, workspaces, idle_seconds, drain_seconds, recycle_after, recycle_on_cheat, open_metrics
    )
    folder = cache or local_home(config.run.store) / "cache"
    asyncio.run(serving(config.sandbox, folder, chosen, limits, host, port))


@command(sandbox_app, "cuda-agent sandbox bench --solutions 5 --json sandbox.format=plan")
def bench(
    overrides: Overrides = None,
    tasks: Annotated[int, Option(min=1)] = 4,
    solutions: Annotated[int, Option(min=1, help="a task and format, and again as many for the second round")] = 5,
    formats: Annotated[str | None, Option(help="some of them, with commas, as in plan,python")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure evaluations on this machine: seconds per phase, and how many per minute, one by one and all at once."""
    import asyncio

    from cuda_agent.compose import compose
    from cuda_agent.diagnostics import sandbox_bench

    wanted = sandbox_bench.formats_of(formats)
    answer = asyncio.run(sandbox_bench.measure(compose(overrides or []).sandbox, tasks, solutions, wanted))
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
    format: Annotated[Format | None, Option(help="only this format")] = None,
    only: Annotated[str | None, Option(metavar="NAME", help="one exploit, honest solution or wall")] = None,
    device: Annotated[Literal["cpu", "cuda"], Option(help="what the solutions run on")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Judge all known exploits and many honest solutions here. Then switch off each wall, to see whether it was needed.

    Exits with 79 when an exploit got through or an honest solution was refused."""
    import asyncio

    from cuda_agent.exploits import selftest as test

    say = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    report = asyncio.run(test.run(format, only, say, device))
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print("\n".join(test.lines(report)))
    sys.exit(79 if report["failed"] else 0)
