"""Lists, selects and opens episodes of a run or of the command ``benchmark``, and attempts of the command ``optimize``.

An episode is one conversation in which a policy tries to solve a task.  A list keeps only a summary of each episode.
The full episode is read from its file when it is shown."""

import functools
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cuda_agent.agent.progress import Event, factor, read_events
from cuda_agent.errors import ConfigError
from cuda_agent.pages.episode_story import EpisodeEntry, EpisodeRow, Story, best_verdict, of_attempt, of_episode
from cuda_agent.pipeline.graph import ROWS
from cuda_agent.pipeline.manifest import Manifest
from cuda_agent.pipeline.runs import Run, run_manifests
from cuda_agent.policy.episode import Episode
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.storage import Store

FILE, TOKENIZER, TRANSCRIPT = "episodes.jsonl", "tokenizer.json", "transcript.jsonl"
PACKED = f"{FILE}.gz"  # name of the packed file in MLflow
MOST_BYTES = 64 << 20  # bytes of the newest episodes that a stage copies to MLflow, before packing
Sort = Literal["newest", "oldest", "best", "worst", "turns", "tokens", "task"]


@dataclass(frozen=True)
class Left:
    """A file with the episodes of one stage.  ``tokenizer`` is the file of the tokenizer that decodes the episodes'
    token ids, or None if there is no such file."""

    stage: str  # name of the stage; for the command ``benchmark``, name of the folder or file
    file: Path
    tokenizer: Path | None = None


def of_run(store: Store, run: Run, folder: Path) -> list[Left]:
    """Copies the episodes of ``run`` from the store into ``folder``.  Returns one ``Left`` (a file of episodes) for
    each stage that has episodes, in the order in which the stages run."""
    manifests = run_manifests(store, run, ROWS).items()
    return list(filter(None, (_fetched(store, manifest, folder / name) for name, manifest in manifests)))


def packed(store: Store, manifest: Manifest, folder: Path) -> list[Path]:
    """Writes a compressed file with the newest episodes of a finished stage into ``folder``, at most ``MOST_BYTES``
    before compression.  Also copies the file of the policy's tokenizer into ``folder``, if there is one.

    Args:
        store: The store with the stage's outputs.
        manifest: The record of the finished stage.
        folder: The folder to write to.

    Returns:
        The paths of the compressed file and the tokenizer's file, or an empty list if the stage has no episodes."""
    left = _fetched(store, manifest, folder)
    if left is None:
        return []
    with open(left.file, "rb") as lines:
        lines.seek(max(0, left.file.stat().st_size - MOST_BYTES))
        if lines.tell():
            lines.readline()  # the rest of a cut line
        (folder / PACKED).write_bytes(gzip.compress(lines.read(), compresslevel=5))
    return [folder / PACKED, *filter(None, [left.tokenizer])]


def _fetched(store: Store, manifest: Manifest, folder: Path) -> Left | None:
    def fetch(digest: str, name: str) -> Path | None:
        if (entry := store.tree(digest).get(name)) is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        store.get_file(f"cas/{entry['sha256']}", folder / name, entry["sha256"])
        return folder / name

    for digest in manifest.outputs.values():
        if (file := fetch(digest, FILE)) is not None:
            policy = manifest.inputs.get("policy")
            return Left(manifest.stage, file, fetch(policy, TOKENIZER) if policy else None)
    return None


def of_path(path: Path) -> list[EpisodeEntry]:
    """Returns the attempts or episodes in ``path``, which is a folder of the command ``optimize``, or a folder or file
    of the command ``benchmark``.

    Raises:
        ConfigError: ``path`` does not exist, or holds neither attempts nor episodes."""
    if (path / TRANSCRIPT).is_file():
        try:
            return attempts(read_events(path / TRANSCRIPT))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path / TRANSCRIPT}: no attempts ({type(error).__name__}: {error})") from None
    file = path / FILE if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"{path}: there is no such folder or file")
    if not file.is_file():
        raise ConfigError(no_result(path))
    tokenizer = file.with_name(TOKENIZER)
    return listed([Left(path.name.removesuffix(".jsonl"), file, tokenizer if tokenizer.is_file() else None)])


def no_result(path: Path) -> str:
    """Returns the error message for a ``path`` that holds neither attempts of ``optimize`` nor episodes."""
    return f"{path}: expected {TRANSCRIPT} of `optimize`, or {FILE} of `benchmark`, in this folder"


def listed(left: Sequence[Left]) -> list[EpisodeEntry]:
    """Returns the episodes of all files in ``left``, in the order of the files and of the lines in each file.

    Raises:
        ConfigError: A file holds a line that is not an episode."""
    entries: list[EpisodeEntry] = []
    for one in left:
        try:
            for offset, episode in _read(one.file):
                row = _row(episode, one.stage, len(entries) + 1)
                entries.append(EpisodeEntry(row, lambda one=one, at=offset: _story(one, at)))  # type: ignore[misc]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{one.file}: no episodes ({type(error).__name__}: {error})") from None
    return entries


def _read(file: Path) -> Iterator[tuple[int, Episode]]:
    with open(file, "rb") as lines:
        offset = 0
        for line in lines:
            yield offset, Episode(**json.loads(line))
            offset += len(line)


def _story(left: Left, offset: int) -> Story:
    with open(left.file, "rb") as lines:
        lines.seek(offset)
        episode = Episode(**json.loads(lines.readline()))
    return of_episode(episode, left.tokenizer and _tokenizer(left.tokenizer))


@functools.cache
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _row(episode: Episode, stage: str, number: int) -> EpisodeRow:
    verdict = Verdict.from_json(episode.verdict) if episode.verdict else None
    logprobs = [logprob for logprob, sampled in zip(episode.logprobs, episode.mask, strict=True) if sampled]
    status = "lost" if episode.reward is None else verdict.status if verdict else "no_answer"
    return EpisodeRow(
        number=number,
        stage=stage,
        id=episode.id,
        task=episode.task,
        status=status,
        reward=episode.reward,
        speedup=factor(verdict) if verdict else None,
        turns=max(episode.turns, default=-1) + 1,
        tokens=len(logprobs),
        logprob=sum(logprobs) / len(logprobs) if any(logprobs) else None,
        ended=episode.ended,
        flags=list(episode.flags),
    )


def attempts(events: Sequence[Event]) -> list[EpisodeEntry]:
    """Returns the attempts of a search by the command ``optimize``.  The entry of an attempt has the sandbox's verdict
    on the best solution of this attempt.  ``events`` are the transcript of the search."""
    task = next((str(event["task"]) for event in events if event["kind"] == "begin"), "")
    numbers = sorted({int(event["attempt"]) for event in events if event["attempt"]})
    spent = [event for event in events if event["kind"] == "spent"]
    entries: list[EpisodeEntry] = []
    for number in numbers:
        own = [event for event in events if event["attempt"] == number]
        best = best_verdict(own)
        verdict = Verdict.from_json(best["verdict"]) if best else None
        row = EpisodeRow(
            number=len(entries) + 1,
            stage="optimize",
            id=f"attempt {number}",
            task=task,
            status=verdict.status if verdict else "no_answer",
            reward=None if verdict is None or verdict.reward is None else float(verdict.reward),
            speedup=best["factor"] if best else None,
            turns=sum(event["kind"] == "turn" for event in own),
            tokens=int(spent[-1]["sampled"]) if spent and len(numbers) == 1 else None,  # all attempts share one count
            logprob=None,
            ended=next((str(event["why"]) for event in reversed(own) if event["kind"] == "ended"), ""),
            flags=[],
        )
        entries.append(EpisodeEntry(row, lambda number=number: of_attempt(events, number)))  # type: ignore[misc]
    return entries


def chosen(
    entries: Sequence[EpisodeEntry],
    stage: str | None = None,
    task: str | None = None,
    status: str | None = None,
    min_reward: float | None = None,
    sort: Sort = "newest",
) -> list[EpisodeEntry]:
    """Returns the entries that fit all given conditions, ordered by ``sort``.  An entry fits if it has this ``stage``
    and ``status``, its task's name contains ``task``, and its reward is at least ``min_reward``.  A condition that is
    None does not count.

    Raises:
        ConfigError: No entry has this stage or status; the message lists the stages or statuses that exist."""
    rows = [entry.row for entry in entries]
    for what, asked, there in (("stage", stage, [r.stage for r in rows]), ("status", status, [r.status for r in rows])):
        if asked is not None and asked not in there:
            known = ", ".join(dict.fromkeys(there)) or "none"
            raise ConfigError(f"--{what} {asked}: there is no such episode; there are {known}.")

    def fits(row: EpisodeRow) -> bool:
        return (
            stage in (None, row.stage)
            and status in (None, row.status)
            and (task is None or task in row.task)
            and (min_reward is None or (row.reward is not None and row.reward >= min_reward))
        )

    return sorted((entry for entry in entries if fits(entry.row)), key=lambda entry: _place(entry.row, sort))


def _place(row: EpisodeRow, sort: Sort) -> tuple[Any, ...]:
    reward, speedup = -2.0 if row.reward is None else row.reward, row.speedup or 0.0
    first: dict[Sort, tuple[Any, ...]] = {
        "newest": (),
        "oldest": (row.number,),
        "best": (-reward, -speedup),
        "worst": (reward, speedup),
        "turns": (-row.turns,),
        "tokens": (-(row.tokens or 0),),
        "task": (row.task,),
    }
    return *first[sort], -row.number
