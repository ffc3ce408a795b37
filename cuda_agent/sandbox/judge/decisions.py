"""Makes the decisions of a trial that need no worker: why a candidate is refused, and when enough calls were timed."""

import statistics
from collections.abc import Sequence

from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.wire import Status, Verdict

LOADING = "while it was loaded"


class CandidateRefused(Exception):
    """Ends a trial because its candidate is refused. ``status`` becomes the verdict's status. If ``retryable``, the
    cause may lie outside the candidate, and the candidate gets a second trial."""

    def __init__(self, status: Status, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


def refusal(error: WorkerDied | WorkerError, loaded: bool, when: str) -> CandidateRefused:
    """Converts a worker's death or error to a refusal of its candidate. If ``loaded`` is false, the solution had not
    begun to load: no untrusted code had run, so the sandbox is at fault. ``when`` ends the message ("in check 3")."""
    if isinstance(error, WorkerDied):
        if not loaded:
            return CandidateRefused("infra", f"a worker {error} before the solution was loaded", retryable=True)
        killed = error.reason == "killed"  # by the system, by an operator, or by itself
        status: Status = "timeout" if error.reason == "timeout" else "crash"
        return CandidateRefused(status, f"the solution {error} {when}".strip(), killed)
    if not loaded:
        return CandidateRefused("infra", f"a worker, before the solution was loaded: {error}", retryable=True)
    if when == LOADING:
        return CandidateRefused("build_error", str(error))
    return CandidateRefused("cheat" if error.cheat else "crash", f"{error} {when}".strip())


def is_clear(samples: Sequence[float], anchors: Sequence[float], compile_share: float | None) -> bool:
    """Returns whether more timed calls could hardly change the reward. ``samples`` are the seconds of the candidate's
    calls, and ``anchors`` the seconds of the calls of eager between them. ``compile_share`` is the time of
    torch.compile divided by the time of eager."""
    mine, anchor = statistics.median(samples), statistics.median(anchors)
    spread = statistics.median(abs(s - mine) for s in samples) / mine
    spread += statistics.median(abs(s - anchor) for s in anchors) / anchor
    rivals = [anchor] if compile_share is None else [anchor, compile_share * anchor]
    return all(abs(mine / (0.95 * rival) - 1) > 0.03 + 2 * spread for rival in rivals)


def scale_baselines(verdict: Verdict, share: float) -> None:
    """Multiplies all baseline times of ``verdict`` by ``share``, which is below 1 if eager is faster alone."""
    if verdict.eager_seconds is not None:
        verdict.eager_seconds *= share
    if verdict.compile_seconds is not None:
        verdict.compile_seconds *= share
    if verdict.strict:
        for name in verdict.strict["baselines"]:
            verdict.strict["baselines"][name] *= share
        verdict.strict["interval"] = [share * bound for bound in verdict.strict["interval"]]
