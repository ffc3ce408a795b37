"""Implements the command `benchmark`, which scores a policy or a served model on a task set, such as KernelBench."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cuda_agent.config import Config
from cuda_agent.errors import UserError
from cuda_agent.format_names import Format
from cuda_agent.pages.charts import factor
from cuda_agent.pages.judged_set import THRESHOLDS
from cuda_agent.pages.page import plural
from cuda_agent.pipeline import runs
from cuda_agent.policy.episode import Episode, write_episodes
from cuda_agent.rl.scores import Scores, fast_p, score, write_scores
from cuda_agent.sandbox.wire import Verdict, printable
from cuda_agent.storage import local_folder, open_store
from cuda_agent.tasks.select import is_kernelbench
from cuda_agent.tasks.task import Task

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


def policy_folder(text: str, store_uri: str) -> tuple[Path, Format | None]:
    """Returns the folder of the policy that ``text`` names, and the solution format that it was trained for, if that is
    known.  ``text`` is a Hugging Face folder, or has the form ``RUN/STAGE``, such as ``last/agentic``: the policy that
    a stage of a training run made.  That policy is copied from the store at ``store_uri`` into a local folder.

    Raises:
        BenchmarkError: ``text`` is no folder, and the store does not exist.
        ConfigError: No run or several runs match ``RUN``, or the stage has made no policy."""
    folder = Path(text)
    if folder.is_dir():
        return folder, None
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
    target = runs.local_home(store_uri) / "policies" / f"{record.name}-{stage}"
    shutil.rmtree(target, ignore_errors=True)
    runs.fetch_output(store, record, stage, "policy", target)
    return target, runs.read_config(store, record.config).sandbox.format


def levels_in(text: str | None) -> list[int]:
    """Returns the levels in a text such as ``1,2``.  Raises BenchmarkError if it has another form."""
    words = text.split(",") if text else []
    if wrong := [word for word in words if not word.strip().isdecimal()]:
        raise BenchmarkError(f"benchmark: --levels: expected numbers, as in --levels 1,2, got {wrong[0]!r}.")
    return [int(word) for word in words]


def with_defaults(
    overrides: Sequence[str], tasks: Sequence[Task], trained: Format | None, samples: int | None
) -> list[str]:
    """Returns the overrides of a benchmark together with its defaults: the budgets of ``experiment=benchmark``, and a
    solution format.  The format is the one that a policy was trained for, if it is known, and else ``python``, that of
    KernelBench, for KernelBench's tasks."""
    words = list(overrides)
    if not any(word.startswith("experiment=") for word in words):
        words.insert(0, "experiment=benchmark")
        format = trained or ("python" if is_kernelbench(tasks) else None)
        if format and not any(word.startswith("sandbox.format=") for word in words):
            words.append(f"sandbox.format={format}")
    return [*words, *([f"evaluate.samples={samples}"] if samples else [])]


@dataclass(frozen=True)
class BenchmarkResult:
    """The result of ``benchmark``.  ``answers`` counts the samples by what became of them (see ``in_short``)."""

    scores: Scores
    answers: dict[str, int]
    fast: list[dict[str, Any]]  # the rows of ``fast_rows``

    def to_json(self) -> dict[str, Any]:
        return self.scores.to_json() | {"answers": self.answers, "fast_p": self.fast}


async def benchmark(
    config: Config, cache: Path, player: Player, tasks: Sequence[Task], output: Path | None, say: Callable[[str], None]
) -> BenchmarkResult:
    """Scores the model ``player`` on ``tasks``.  Plays several episodes for each task; the setting ``evaluate.samples``
    is their number.  Also checks which tasks accept deliberately wrong answers.

    Args:
        output: The folder for episodes.jsonl, scores.json and, for a local policy, tokenizer.json.  None: writes no
            files.
        say: A function that receives a line of progress after each check of a task and after each episode.

    Raises:
        BenchmarkError: ``output`` cannot be made.
        ServedModelError: The model's address does not answer, or does not have the model."""
    from cuda_agent.agent.loop import run_many, seed_of
    from cuda_agent.sandbox.client import open_sandbox
    from cuda_agent.synthesis.lint import lint, names

    samples, sandbox_settings = config.evaluate.samples, config.sandbox
    each = f"{plural(samples, 'sample')} of each" if samples > 1 else "one sample of each"
    say(f"{plural(len(tasks), 'task')}, {each}, format {sandbox_settings.format} on {sandbox_settings.device}")
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"--output {output}: cannot be made: {error.strerror}") from None
    done, finished = 0, list[Episode]()
    async with open_sandbox(config.sandbox, cache) as sandbox, _playing(config, cache, player, sandbox) as play:

        async def job(task: Task, number: int) -> Episode:
            nonlocal done
            name = f"benchmark/{task.name}/{number}"
            episode = await play(task, seed_of(config.seed, name), name)
            finished.append(episode)
            done += 1
            sample = f", sample {number}" if samples > 1 else ""
            what, why = in_short(episode)
            say(printable(f"{done}/{len(tasks) * samples} {task.name}{sample}: {what}{why and ': '}{why}")[:300])
            return episode

        probes = await lint(tasks, sandbox, lambda line: say(f"check of task {line}"))
        jobs = [partial(job, task, number) for number in range(samples) for task in tasks]
        try:
            episodes = await run_many(jobs, config.agent.concurrency, lockstep=config.sandbox.clock == "model")
        except BaseException:  # also Ctrl-C
            if output is not None and finished:
                write_episodes(output / "episodes.jsonl", finished)
                kept = f"{plural(len(finished), 'episode')} of {len(jobs)}"
                say(f"{kept} are in {output / 'episodes.jsonl'}, without scores")
            raise
    scores = score(player.name, episodes, tasks, config.sandbox.clock, config.seed)
    scores.lets_through = {task: names(probe) for task, probe in probes.items() if probe.lets_through}
    if output is not None:
        write_episodes(output / "episodes.jsonl", episodes)
        write_scores(output / "scores.json", scores)
        if player.policy and (tokenizer := player.policy / "tokenizer.json").is_file():
            shutil.copyfile(tokenizer, output / "tokenizer.json")  # to decode the ids of the episodes
    return BenchmarkResult(scores, dict(Counter(in_short(one)[0] for one in episodes)), fast_rows(scores, tasks))


def in_short(episode: Episode) -> tuple[str, str]:
    """Returns what became of an episode, and why.  The first text is the status of the final verdict, ``no answer`` for
    an episode without files, or ``lost`` for one that a fault or the deadline ended.  The second text has the speed-ups
    of a correct solution, and else the reason; it may be empty."""
    if episode.reward is None or episode.verdict is None:
        return "lost", "its time limit" if episode.ended == "deadline" else str(episode.messages[-1].get("content"))
    if not episode.files:
        if episode.ended != "answer":
            return "no answer", f"its {episode.ended} were used up"
        said = (str(message.get("content") or "").strip() for message in reversed(episode.messages))
        return "no answer", f"the model ended with: {next(filter(None, said), 'nothing')}"
    verdict = Verdict.from_json(episode.verdict)
    if verdict.status == "ok":
        return "ok", f"{factor(verdict.speedup_eager)} eager, {factor(verdict.speedup_compile)} torch.compile"
    return verdict.status.replace("_", " "), verdict.message


def fast_rows(scores: Scores, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Returns rows of fast_p.

    A row has ``group``, ``samples``, ``baseline``, ``tasks`` (the divisor) and ``fast_p`` (p, as text -> share).  Rows
    with ``samples`` "first" count as KernelBench does: the first sample of each task, and a task without a verdict as
    failed.  Rows with "all" have the mean over all samples of the tasks with a verdict.  If there are several families
    (KernelBench's levels), each has rows as KernelBench counts."""
    first = [outcome for outcome in scores.outcomes if outcome.episode.endswith("/0")]
    families = Counter(task.family for task in tasks)
    groups = [("all", "first", first, len(tasks)), ("all", "all", scores.outcomes, scores.tasks - len(scores.unscored))]
    if len(families) > 1:
        for family, count in families.items():
            groups.append((family, "first", [outcome for outcome in first if outcome.family == family], count))
    return [
        {
            "group": group,
            "samples": samples,
            "baseline": baseline,
            "tasks": count,
            "fast_p": {f"{p:g}": fast_p(outcomes, p, baseline, count) for p in THRESHOLDS},
        }
        for group, samples, outcomes, count in groups
        for baseline in ("eager", "compile")
    ]


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
            await served.check()
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
