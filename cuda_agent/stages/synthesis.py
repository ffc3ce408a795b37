"""Stage ``synthesis``: makes the tasks. Output: ``tasks``, which holds the training tasks, the held-out tasks and a
data card (a summary of the tasks).

The stage generates candidate tasks and filters them. A candidate runs only in the sandbox; its run without a solution
is called a probe. If the setting ``synthesis.headroom`` is above 0, a sweep times many kernel designs for the
candidates of the family ``teacher``, which are tasks that a program, the scripted teacher, can solve. The sandbox then
judges the fastest designs. In this case the output also holds the best design of each accepted task of this family.

The sandbox caches the times that a probe measures. A stage that is restarted repeats the probes, but takes their times
from the cache. The results of sweeps are not cached. With sweeps, the stage therefore saves a checkpoint with all
results after every ``RESULTS`` new ones and when it is stopped. If a language model writes the candidates, the stage
also saves a checkpoint after each candidate."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.context import StageContext
from cuda_agent.errors import BadConfiguration, TaskError, TryAgain
from cuda_agent.policy.served import ServedModelError
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.spans import opened
from cuda_agent.synthesis.card import refusals
from cuda_agent.synthesis.synthesize import optima, synthesize
from cuda_agent.synthesis.teacher.design_sweep import Sweep
from cuda_agent.synthesis.teacher.optimum import write_optima
from cuda_agent.tasks.io import write_tasks
from cuda_agent.tasks.task import Task

KNOWN = "known.json"
RESULTS = 200  # probes and sweeps between two checkpoints, if there are sweeps
_NONE_REFUSED = (
    "No task was refused: there are too few, or all their combinations of operators are in the other split. See "
    "synthesis.train, synthesis.heldout and synthesis.seed. A set with both splits keeps them."
)


def run(ctx: StageContext) -> None:
    try:
        asyncio.run(_run(ctx))
    except ServedModelError as error:
        raise TryAgain(str(error)) from error
    except TaskError as error:
        raise BadConfiguration(str(error)) from error


async def _run(ctx: StageContext) -> None:
    config = ctx.config
    known: dict[str, Any] = {}
    ctx.checkpoints.load(lambda folder: known.update(json.loads((folder / KNOWN).read_text())))

    def report(key: str, value: Any) -> None:
        known[key] = value
        stop = ctx.should_stop()
        due = config.synthesis.headroom and (stop or len(known) % RESULTS == 0)  # no cache keeps sweeps
        if due or key.startswith("candidate/"):
            ctx.checkpoints.save(len(known), lambda folder: _write(folder / KNOWN, known))
        if stop:
            raise TryAgain(f"stopped after {len(known)} probes")

    opening = opened("sandbox", open_sandbox(config.sandbox, ctx.cache))
    async with opening as sandbox, contextlib.AsyncExitStack() as stack:
        sweep = None
        if config.synthesis.headroom:
            assert isinstance(sandbox, LocalSandbox)  # by the schema
            sweep = await stack.enter_async_context(Sweep(sandbox))
        tasks, card = await synthesize(
            config.synthesis,
            config.synthesis.seed,
            sandbox,
            device=config.sandbox.device,
            threads=config.sandbox.threads,
            progress=lambda done, total: ctx.tracker.progress(done, total, unit="tasks"),
            known=known,
            report=report,
            sweep=sweep,
        )
    check_splits(tasks, card)
    for kind, missing in card["short"].items():
        ctx.tracker.note(f"synthesis is {missing} short of {kind} tasks: candidates or compilations ran out")
    if left_out := card["left_out"]:
        limits = "synthesis.train, and heldout and catalogue together, limit their number"
        ctx.tracker.note(f"{left_out} tasks of synthesis.tasks are left out: {limits}")
    if surprises := card["surprises"]:
        ctx.tracker.note(f"{len(surprises)} designs failed in a sweep, but should be right; first {surprises[0]}")
    folder = ctx.outputs["tasks"]
    write_tasks(folder, tasks)
    _write(folder / "card.json", card)
    if sweep:
        write_optima(folder, optima(tasks, known))


def check_splits(tasks: Sequence[Task], card: Mapping[str, Any]) -> None:
    """Raises BadConfiguration if there is no training task or no held-out task; later stages need both."""
    for split, kind in (("train", "training"), ("heldout", "held-out")):
        if not any(task.split == split for task in tasks):
            why = f"Refused: {refused}." if (refused := refusals(card)) else _NONE_REFUSED
            raise BadConfiguration(f"Synthesis has no {kind} task, and {len(tasks)} others. {why}")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True))
