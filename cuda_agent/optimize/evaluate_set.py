"""The command `evaluate-set`: judges a set of finished solutions and writes the results to a folder.

    verdicts.jsonl   a line for each verdict, written at once; after a kill, the next call continues from it
    results.csv      a line for each record of the input
    scores.json      the scores, in the form of `cuda-agent benchmark`
    report.html      a page about the results

A record is an entry of the input: a solution and its task.  Each verdict has a key, which depends on solution, task and
settings.  A changed record has a new key, and is judged again.  Equal records have the same key, and are judged once.
If the sandbox fails on a record, the record is tried again in the same call and, if needed, in the next call."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cuda_agent.agent.loop import run_many
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import TaskError
from cuda_agent.optimize.folder import OptimizeError, alone
from cuda_agent.optimize.score_text import table_lines
from cuda_agent.optimize.solution_set import SolutionRecord, SolutionSet
from cuda_agent.pages.charts import clock_time, factor
from cuda_agent.pages.judged_set import JUDGED, LOST, JudgedRow, accounts, claims, fast_rows, render, to_csv
from cuda_agent.pages.page import plural
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.scores import Scores, score, write_scores
from cuda_agent.sandbox.client import Sandbox, open_sandbox
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Mode, Verdict, printable
from cuda_agent.tracking import write_whole

VERDICTS = "verdicts.jsonl"
FILES = {"page": "report.html", "csv": "results.csv", "scores": "scores.json"}
IN_FLIGHT = 16  # solutions that each machine has to build, check and time at once; its sandbox orders them
PAUSES = (5.0, 65.0)  # seconds before faults are tried again; a device that failed rests for a minute

Say = Callable[[str], None]


@dataclass(frozen=True)
class SetResult:
    """The result of ``evaluate_set``: a row for each record, and the scores of the judged records.  A record is a
    solution of the set.  ``tasks`` is the number of tasks that fast_p counts.  fast_p is the share of tasks whose
    solution is more than p times as fast as a baseline."""

    rows: list[JudgedRow]
    scores: Scores
    tasks: int

    def to_json(self) -> dict[str, Any]:
        shares = fast_rows(self.scores, self.tasks)
        return {
            "records": len(self.rows),
            "outcomes": {outcome: count for outcome, count, _ in accounts(self.rows)},
            "claims": claims(self.rows),
            "tasks": self.tasks,
            "fast_p": [{"p": p, "eager": of[2], "compile": of[3]} for p, of in shares],
            "fast_p_of_judged": [{"p": p, "eager": of[0], "compile": of[1]} for p, of in shares],
        }


async def evaluate_set(
    settings: SandboxConfig, cache: Path, given: SolutionSet, mode: Mode, output: Path, say: Say
) -> SetResult:
    """Judges all records and writes the results to the folder ``output``.  An interrupted call writes the results so
    far.  ``say`` receives progress lines.

    Raises:
        OptimizeError: ``output`` cannot be used; nothing in it was changed.
        SandboxUnready: No sandbox can judge; the verdicts so far are kept."""
    with _opened(output):
        async with open_sandbox(settings, cache) as sandbox:
            local = sandbox if isinstance(sandbox, LocalSandbox) else None
            work = _Work(sandbox, given, mode, output / VERDICTS, say)
            try:
                await work.run(IN_FLIGHT * max(1, len(settings.servers)))
            except asyncio.CancelledError:
                if local:
                    local.kill()  # a judge may need minutes to answer
                raise
            finally:
                result = _result(given, work.rows(), settings)
                where = local.machine if local else plural(len(settings.servers), "server")
                _write(output, given, result, settings, mode, where)
    return result


def _opened(output: Path) -> Any:
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()) and not (output / VERDICTS).exists():
            raise OptimizeError(f"--output {output}: holds other files; name a new folder, or one of this command")
        (output / VERDICTS).touch()
    except OSError as error:
        raise OptimizeError(f"--output {output}: cannot be used: {error.strerror}") from None
    return alone(output, "cuda-agent evaluate-set")


class _Work:
    """Judges the records of a set, and appends each verdict to ``file``."""

    def __init__(self, sandbox: Sandbox, given: SolutionSet, mode: Mode, file: Path, say: Say) -> None:
        self._sandbox, self._records, self._mode, self._file, self._say = sandbox, given.records, mode, file, say
        self._verdicts = _read_verdicts(file)
        self._keys = [  # of the records' verdicts; empty if a record cannot be judged
            "" if one.why or not one.task or not one.solution else sandbox.verdict_key(one.task, one.solution, mode)
            for one in given.records
        ]
        self._failed: dict[str, tuple[str, str]] = {}  # key -> outcome and message where there is no verdict
        self._task_errors: dict[str, str] = {}  # digest of a task -> why it cannot be run
        self._done, self._all, self._begun = 0, 0, time.monotonic()

    async def run(self, in_flight: int) -> None:
        """Judges every record that can be judged and has no verdict yet, ``in_flight`` at a time."""
        named = dict(zip(reversed(self._keys), reversed(self._records), strict=True))  # the first of equal records
        waiting = {key: named[key] for key in self._keys if key and key not in self._verdicts}
        self._all = len(waiting)
        before, cannot = sum(key in self._verdicts for key in self._keys), self._keys.count("")
        said = f"{self._all} to judge, {before} judged before, {cannot} without a solution or a task"
        self._say(f"{plural(len(self._keys), 'record')}: {said}")
        for pause in (0.0, *PAUSES):
            if pause and waiting:
                self._say(f"the sandbox failed for {len(waiting)}: they are tried again in {clock_time(pause)}")
                await asyncio.sleep(pause)
            await run_many([partial(self._judge, *one) for one in waiting.items()], in_flight)
            waiting = {key: record for key, record in waiting.items() if self._failed.get(key, ("",))[0] == "infra"}

    async def _judge(self, key: str, record: SolutionRecord) -> None:
        assert record.task and record.solution
        digest = record.task.digest
        try:
            if digest in self._task_errors:
                raise TaskError(self._task_errors[digest])
            verdict = await self._sandbox.evaluate(record.task, record.solution, self._mode)
        except TaskError as error:
            self._task_errors[digest] = str(error)
            self._failed[key] = ("task_error", str(error))
            self._tell(record, f"the task cannot be run: {error}")
            return
        if verdict.status == "infra":
            self._failed[key] = ("infra", verdict.message)
            self._say(f"{printable(record.name)}: a fault of the sandbox: {printable(verdict.message)[:160]}")
            return
        self._failed.pop(key, None)
        self._verdicts[key] = verdict
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "record": record.name, "verdict": verdict.to_json()}) + "\n")
        self._tell(record, _in_short(verdict, record.claim_eager))

    def _tell(self, record: SolutionRecord, what: str) -> None:
        self._done += 1
        left = (time.monotonic() - self._begun) / self._done * (self._all - self._done)
        ends = f" ({clock_time(left)} left)" if self._done < self._all else ""
        self._say(f"{self._done}/{self._all} {printable(record.name)}: {printable(what)[:200]}{ends}")

    def rows(self) -> list[JudgedRow]:
        """Returns a row for each record, with the outcome so far."""
        return [self._row(key, record) for key, record in zip(self._keys, self._records, strict=True)]

    def _row(self, key: str, record: SolutionRecord) -> JudgedRow:
        verdict = self._verdicts.get(key)
        outcome, message = (record.why, record.message) if record.why else self._failed.get(key, ("pending", ""))
        if verdict is not None:
            outcome, message = verdict.status, verdict.message
        return JudgedRow(
            record=record.name,
            task=record.task.name if record.task else "",
            family=record.task.family if record.task else "",
            outcome=outcome,
            message=message,
            verdict=verdict,
            claim_eager=record.claim_eager,
            claim_compile=record.claim_compile,
            other_reference=record.other_reference,
        )


def _read_verdicts(file: Path) -> dict[str, Verdict]:
    """Returns the verdicts in ``file`` by key.  Removes an incomplete last line, which a killed process left.  Raises
    OptimizeError if any other line is not a verdict."""
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        found = {str(row["key"]): Verdict.from_json(row["verdict"]) for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptimizeError(f"{file}: holds no verdicts to go on with ({type(error).__name__}: {error})") from None
    if len(whole) < len(data):
        with open(file, "r+b") as torn:
            torn.truncate(len(whole))
    return found


def _in_short(verdict: Verdict, claim: float | None) -> str:
    if verdict.status != "ok":
        return f"{verdict.status.replace('_', ' ')}: {verdict.message}"
    claimed = f" (claimed {factor(claim)})" if claim else ""
    return f"ok, {factor(verdict.speedup_eager)} eager{claimed}, {factor(verdict.speedup_compile)} compile"


def _result(given: SolutionSet, rows: list[JudgedRow], settings: SandboxConfig) -> SetResult:
    """Returns the rows with their scores.  A task's final score is the mean over its samples; its best score is the
    score of its best sample.  A sample without code has failed, unless its task has no other samples.
    ``SetResult.tasks`` counts all tasks except lost ones.  A task is lost if it has no score and one of its records has
    an outcome in ``LOST``, such as a failure of the sandbox."""
    judged = [row for row in rows if row.outcome in (*JUDGED, "infra")]
    best: dict[str, Verdict] = {}
    for row in judged:
        if row.verdict and (row.task not in best or _rank(row.verdict) > _rank(best[row.task])):
            best[row.task] = row.verdict
    sampled = {row.task for row in judged}
    without_code = [row for row in rows if row.outcome == "no_solution" and row.task in sampled]
    episodes = [
        Episode(
            id=row.record, task=row.task, kind="single", ids=[], mask=[], logprobs=[], versions=[], turns=[],
            reward=row.verdict.reward if row.verdict else None if row.outcome == "infra" else -1.0,
            ended="infra" if row.outcome == "infra" else "answer",
            verdict=row.verdict.to_json() if row.verdict else None,
            best=best[row.task].to_json() if row.task in best else None,
        )
        for row in [*judged, *without_code]
    ]  # fmt: skip
    scores = score(given.name, episodes, given.tasks, settings.clock)
    scored = {outcome.task for outcome in scores.outcomes}
    lost = {row.task for row in rows if row.outcome in LOST} - scored
    return SetResult(rows, scores, scores.tasks - len(lost))


def _rank(verdict: Verdict) -> tuple[bool, float, float]:
    return verdict.status == "ok", verdict.speedup_compile or 0.0, verdict.speedup_eager or 0.0


def _write(
    output: Path, given: SolutionSet, result: SetResult, settings: SandboxConfig, mode: Mode, where: str
) -> None:
    facts = [
        plural(len(given.tasks), "task"),
        f"format {settings.format} on {settings.device}",
        f"mode {mode}",
        "models in train()" if settings.train_mode else "",
        where,
    ]
    page = render(given.name, result.rows, result.scores, result.tasks, given.skipped, facts)
    write_whole(output / FILES["csv"], to_csv(result.rows))
    write_scores(output / FILES["scores"], result.scores)
    write_whole(output / FILES["page"], page)


def result_lines(result: SetResult) -> list[str]:
    """Returns the result as lines for a terminal: how many records had each outcome and, for records without a verdict,
    the most frequent reason; how many claimed speed-ups were confirmed or not; the scores."""
    lines = []
    for outcome, count, says in accounts(result.rows):
        lines.append(f"{count:6} {outcome.replace('_', ' '):12} {says}")
        messages = Counter(row.message for row in result.rows if row.outcome == outcome and outcome not in JUDGED)
        if reason := max(messages, key=messages.__getitem__, default=""):
            lines.append(f"       {'':12} such as: {printable(reason)[:160]}")
    lines.append(f"{len(result.rows):6} records; fast_p in report.html counts {plural(result.tasks, 'task')}")
    if found := claims(result.rows):
        parts = ("confirmed", "lower", "untimed", "rejected", "unjudged")
        lines.append(f"{found['all']} claims: " + ", ".join(f"{found[part]} {part}" for part in parts))
    if result.scores.clock == "model":
        lines.append("sandbox.clock=model: times are a deterministic cost, not measured")
    if result.scores.outcomes:
        lines += table_lines("every sample", result.scores.final)
        lines += table_lines("the best sample of each task", result.scores.best)
    return lines
