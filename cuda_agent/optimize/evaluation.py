"""Implements the commands `evaluate` (judges one solution) and `benchmark` (scores a model on a task set)."""

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from cuda_agent.compose import compose
from cuda_agent.config import Config, SandboxConfig
from cuda_agent.errors import ConfigError, TaskError, UserError
from cuda_agent.format_names import Format
from cuda_agent.optimize.score_text import table_lines
from cuda_agent.optimize.shapes import ShapeResult, judge_shapes, variants
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.manifest import read_manifest
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import Mode, Solution, Verdict
from cuda_agent.storage import local_folder, open_store
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

T = TypeVar("T")

LARGEST = 1 << 20  # most bytes of one file of a solution
SMALL_VOCABULARY = 8192  # a policy with at most so many entries counts as trained from scratch: compact prompts


class BenchmarkError(UserError):
    """The benchmark cannot be run; the message says why."""


@dataclass(frozen=True)
class Player:
    """The model that a benchmark scores: a local policy (a Hugging Face folder), or a model at an OpenAI-compatible
    address.

    Raises:
        BenchmarkError: Both or neither of ``policy`` and ``base_url`` are given, or ``base_url`` without ``model``."""

    policy: Path | None = None  # the policy's folder, or None for a model at an address
    base_url: str | None = None  # the model's address
    model: str | None = None  # name of the model at the address
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the API key

    def __post_init__(self) -> None:
        if (self.policy is None) == (self.base_url is None):
            raise BenchmarkError("benchmark: expected either a POLICY folder or --base-url, one of the two.")
        if self.base_url is not None and not self.model:
            raise BenchmarkError("benchmark: --base-url needs --model, the name under which the address serves it.")

    @property
    def name(self) -> str:
        return self.model or (self.policy.name if self.policy else "")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` and returns its result.  On SIGTERM, cancels ``work``, lets it clean up, and exits with status
    143."""
    stopped: list[int] = []

    async def whole() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if not stopped:
                task.cancel()
            stopped.append(signal.SIGTERM)

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)  # the handler ends with the loop
        return await work

    try:
        return asyncio.run(whole())
    finally:
        if stopped:
            raise SystemExit(128 + signal.SIGTERM)


async def with_clock(work: Coroutine[Any, Any, T], what: str, screen: TextIO, pause: float = 1.0) -> T:
    """Awaits ``work`` and returns its result.  If it takes longer than some ``pause`` seconds, writes ``what`` to
    ``screen``: on a terminal with the seconds so far, and elsewhere once."""
    task, began, shown = asyncio.ensure_future(work), time.monotonic(), False
    live = screen.isatty()
    try:
        while not (await asyncio.wait({task}, timeout=pause if live else 5 * pause))[0]:
            if live:
                screen.write(f"\r{what}: {time.monotonic() - began:.0f} s ")
            elif not shown:
                screen.write(f"{what}\n")
            screen.flush()
            shown = True
    finally:
        if live and shown:
            screen.write("\r\x1b[K")
            screen.flush()
        task.cancel()
        await asyncio.wait({task})  # after a cancellation it cleans up
    return task.result()


def policy_folder(text: str, store_uri: str) -> Path:
    """Returns the folder of the policy that ``text`` names.  ``text`` is a Hugging Face folder, or has the form
    ``RUN/STAGE``, such as ``last/agentic``: the policy that a stage of a training run made.  That policy is copied from
    the store at ``store_uri`` into a local folder.

    Raises:
        BenchmarkError: ``text`` is no folder, and the store or the stage's policy does not exist.
        ConfigError: No run or several runs match ``RUN``."""
    folder = Path(text)
    if folder.is_dir():
        return folder
    run, _, stage = text.partition("/")
    local = local_folder(store_uri)
    if not run or not stage or "/" in stage:
        raise BenchmarkError(f"benchmark: there is no folder {text}; a policy of a run is named as in last/agentic.")
    if local is not None and not local.is_dir():
        raise BenchmarkError(
            f"benchmark: there is no folder {text}, and no store at {local} with a run that made it. "
            "Name one with run.store=..., or start a run."
        )
    store = open_store(store_uri)
    record = runs.find_run(store, run)
    manifest = read_manifest(store, record.name, stage)
    if manifest is None or "policy" not in manifest.outputs:
        raise BenchmarkError(f"benchmark: stage {stage} of run {record.name} has made no policy.")
    target = runs.local_home(store_uri) / "policies" / f"{record.name}-{stage}"
    shutil.rmtree(target, ignore_errors=True)
    store.get_folder(manifest.outputs["policy"], target)
    return target


def solution_files(folder: Path) -> dict[str, str]:
    """Returns the files of the solution in ``folder``, text by path.  Reads plan.json, model_new.py and the files in
    kernels/, as far as they exist, and ignores other files.

    Raises:
        TaskError: ``folder`` is no folder, or a file is too large or not text; the message names the file."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: expected a folder with plan.json and kernels/, or with model_new.py")
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not any(known.belongs(name) for known in FORMATS.values()):
            continue
        if path.stat().st_size > LARGEST:
            raise TaskError(f"{path}: larger than {LARGEST >> 20} MiB")
        try:
            files[name] = path.read_text()
        except UnicodeDecodeError:
            raise TaskError(f"{path}: is no text") from None
    return files


def format_of(files: Mapping[str, str]) -> Format:
    """Returns the format of a solution with ``files`` (text by path): ``plan`` if it has a plan.json or no file that is
    known, ``extension`` if its model_new.py imports the module ``cuda_extension``, and else ``python``."""
    entry = files.get(FORMATS["python"].entry)
    if FORMATS["plan"].entry in files or entry is None:
        return "plan"
    return "extension" if re.search(r"^\s*(import|from)\s+cuda_extension\b", entry, re.M) else "python"


def device_of(overrides: Sequence[str]) -> str:
    """Returns the device that the overrides name, else ``cuda`` on a machine with a GPU and ``cpu`` on others."""
    for word in overrides:
        if word.startswith("sandbox.device="):
            return word.partition("=")[2]
    found = subprocess.run([sys.executable, "-P", "-m", "cuda_agent.sandbox.driver"], capture_output=True, text=True)
    return "cuda" if '"architecture"' in found.stdout else "cpu"


def settings_for(
    files: Mapping[str, str], overrides: Sequence[str], format: Format | None, device: str | None
) -> tuple[Config, Path]:
    """Returns the configuration in which a solution with ``files`` is judged, and its cache folder on this machine.
    Without ``format`` or ``device``, and without an override of them, the format is that of the files, and the device
    is a GPU if there is one."""
    words = list(overrides)
    if format or not any(word.startswith("sandbox.format=") for word in words):
        words.append(f"sandbox.format={format or format_of(files)}")
    if device or not any(word.startswith(("sandbox.device=", "sandbox.servers=", "experiment=")) for word in words):
        words.append(f"sandbox.device={device or device_of(words)}")
    config = compose(words)
    return config, runs.cache_of(config)


def other_format(files: Mapping[str, str]) -> Format | None:
    """Returns the first format whose entry file is among ``files``, for the message about a missing entry file."""
    return next((name for name, known in FORMATS.items() if known.entry in files), None)


def checked_solution(files: Mapping[str, str], format: Format, where: str) -> Solution:
    """Returns the solution with ``files``, which come from ``where``.

    Raises:
        TaskError: The entry file of ``format`` (plan.json or model_new.py) is missing."""
    entry = FORMATS[format].entry
    if entry not in files:
        other = other_format(files)
        hint = f". It looks like format {other}: add sandbox.format={other}" if other else ""
        raise TaskError(f"{where}: no {entry}; format {format} needs {entry} and kernels/{hint}")
    return Solution(format, dict(files))


def read_solution(folder: Path, format: Format) -> Solution:
    """Returns the solution of ``format`` in ``folder``.  Raises the errors of ``solution_files`` and
    ``checked_solution``."""
    return checked_solution(solution_files(folder), format, str(folder))


async def evaluate(
    settings: SandboxConfig, cache: Path, task: Task, solution: Solution, mode: Mode, again: bool, shapes: Sequence[str]
) -> tuple[Verdict, list[ShapeResult]]:
    """Judges ``solution`` for ``task``.  If the solution is correct, also checks it at other shapes.  Returns the
    verdict and one result for each of these shapes.  The results are empty if the verdict's status is not ``ok``.

    Args:
        mode: "quick", "strict" (more checks, more careful times) or "check" (no times).
        again: Whether to ignore cached verdicts and baselines.
        shapes: The other shapes, in the form that ``optimize.shapes.variants`` takes.

    Raises:
        TaskError: The task cannot be run.
        ConfigError: ``shapes`` is invalid, or ``again`` is set with remote servers."""
    from cuda_agent.sandbox.client import open_sandbox
    from cuda_agent.sandbox.remote import RemoteSandbox

    chosen = variants(task, shapes)
    async with open_sandbox(settings, cache) as sandbox:
        if not isinstance(sandbox, RemoteSandbox):
            verdict = await sandbox.evaluate(task, solution, mode, again)
        elif again:
            why = "servers (sandbox.servers) keep what they said; only this machine measures anew."
            raise ConfigError(f"--again: {why}")
        else:
            verdict = await sandbox.evaluate(task, solution, mode)
        return verdict, await judge_shapes(sandbox, solution, chosen) if verdict.status == "ok" else []


async def benchmark(
    config: Config, cache: Path, player: Player, tasks: Path, output: Path | None, say: Callable[[str], None]
) -> Any:
    """Scores the model ``player`` on the task set ``tasks``.  Plays several episodes for each task; the setting
    ``evaluate.samples`` is their number.  Also checks which tasks accept deliberately wrong answers.  Returns the
    scores, an ``rl.scores.Scores`` object.

    Args:
        output: The folder for episodes.jsonl, scores.json and, for a local policy, tokenizer.json.  None: writes no
            files.
        say: A function that receives a line of progress after each episode.

    Raises:
        BenchmarkError: ``output`` cannot be made.
        TaskError: ``tasks`` cannot be read."""
    from cuda_agent.agent.loop import run_many, seed_of
    from cuda_agent.policy.episode import write_episodes
    from cuda_agent.rl.scores import score, write_scores
    from cuda_agent.sandbox.client import open_sandbox
    from cuda_agent.synthesis.lint import lint, names

    chosen = read_any(tasks)
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"--output {output}: cannot be made: {error.strerror}") from None
    done = 0
    async with open_sandbox(config.sandbox, cache) as sandbox, _playing(config, cache, player, sandbox) as play:

        async def job(task: Any, name: str) -> Any:
            nonlocal done
            episode = await play(task, seed_of(config.seed, name), name)
            done += 1
            say(f"{done}/{len(chosen) * config.evaluate.samples} {task.name}: {episode.ended}, reward {episode.reward}")
            return episode

        probes = await lint(chosen, sandbox)
        samples = [(task, f"benchmark/{task.name}/{n}") for n in range(config.evaluate.samples) for task in chosen]
        jobs = [partial(job, task, name) for task, name in samples]
        episodes = await run_many(jobs, config.agent.concurrency, lockstep=config.sandbox.clock == "model")
    scores = score(player.name, episodes, chosen, config.sandbox.clock, config.seed)
    scores.lets_through = {task: names(probe) for task, probe in probes.items() if probe.lets_through}
    if output is not None:
        write_episodes(output / "episodes.jsonl", episodes)
        write_scores(output / "scores.json", scores)
        if player.policy and (tokenizer := player.policy / "tokenizer.json").is_file():
            shutil.copyfile(tokenizer, output / "tokenizer.json")  # to decode the ids of the episodes
    return scores


@asynccontextmanager
async def _playing(config: Config, cache: Path, player: Player, sandbox: Any) -> Any:
    """Opens the policy or model of ``player`` for an ``async with`` block.  Yields a function that takes (task, seed,
    episode id), plays an episode and returns it."""
    from cuda_agent.agent.chat_rollout import run_chat_rollout
    from cuda_agent.agent.loop import run_episode
    from cuda_agent.policy.served import ServedModel
    from cuda_agent.rl.rollouts import episode_settings

    how, policy = config.evaluate, config.policy

    def settings(style: Literal["compact", "full"]) -> Any:
        return episode_settings(
            config, turns=how.turns, context=policy.context, temperature=how.temperature, mode=how.mode, style=style
        )

    if player.base_url and player.model:
        async with ServedModel(player.base_url, player.model, player.key_env) as served:
            yield lambda task, seed, name: run_chat_rollout(task, served, sandbox, settings("full"), seed, name)
        return
    from cuda_agent.policy.chat import Chat
    from cuda_agent.policy.engines.local import make_engine
    from cuda_agent.policy.model import load_policy

    assert player.policy is not None
    model, tokenizer = load_policy(player.policy)
    budgets = settings("compact" if len(tokenizer) <= SMALL_VOCABULARY else "full")
    chat = Chat(tokenizer, budgets.style)
    engine = make_engine(model, policy, cache / "lease")
    try:
        yield lambda task, seed, name: run_episode(task, engine, chat, sandbox, budgets, seed, name)
    finally:
        await engine.close()


def score_lines(scores: Any) -> list[str]:
    """Returns ``scores`` as lines of text: a summary, a table for the final solutions of the episodes, and a table for
    the best solutions.  If there are tasks whose check accepts deliberately wrong answers, a third table lists them."""
    played = f"{scores.episodes} episodes of {scores.tasks} tasks"
    lines = [f"{scores.policy}: {played}, {scores.infra} lost to faults of ours"]
    if scores.clock == "model":
        lines.append("sandbox.clock=model: times are a deterministic cost, not measured")
    if scores.mode == "strict":
        lines.append("the final answer was judged in strict mode, the best of the trajectory in quick mode")
    lines += table_lines("final answer", scores.final) + table_lines("best of trajectory", scores.best)
    if scores.lets_through:
        lines += ["", f"{'tasks with a weak check':28} {'pass':>7}  lets through (from which tolerance)"]
    for task, mutants in scores.lets_through.items():
        passed = [outcome.final.correct for outcome in scores.outcomes if outcome.task == task]
        share = format(sum(passed) / len(passed), ".1%") if passed else "–"
        lines.append(f"{task[:28]:28} {share:>7}  {', '.join(mutants)}")
    return lines
