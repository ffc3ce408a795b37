"""Decides the status of a refused candidate, and whether a trial must time more calls.

A candidate is the solution under judgement. A trial is one run of a candidate. A speed-up is a baseline's time divided
by the candidate's. Baselines are the task's model in eager PyTorch ("eager") and with ``torch.compile``."""

import math
import statistics
from collections.abc import Sequence

from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.wire import Status, Verdict

LOADING = "while it was loaded"
TOO_BUSY = "the machine is too busy to tell a reward"
FASTER = 1 / 0.95  # speed-up above which the reward grows: more than 5 % less time (paper, Eq. 1)
_MARGIN = 1.03  # distance of a clear speed-up from that bound: the baselines have errors, too
_FEWEST, _FEW = {"cpu": 5, "cuda": 20}, 8  # fewest timed calls; GPU calls are cheap compared with a worker's start
_NARROW = 1.01  # ratio of an interval's ends below which ``_FEW`` calls suffice
_ENOUGH_SECONDS = 0.2
_WIDE = 1.2  # ratio of an interval's ends above which the calls disagree
BELIEVED: tuple[Status, ...] = ("wrong", "build_error", "infra")  # of a used context that proves itself afterwards
Interval = tuple[float, float]  # lower and upper end
Spread = tuple[float, float, float]  # lower end of an interval, middle, upper end


class CandidateRefused(Exception):
    """A candidate (the solution under judgement) is refused. This ends its trial, one run of the candidate. ``status``
    becomes the verdict's status. If ``retryable`` is true, the candidate gets a second trial, because the cause may lie
    outside the candidate."""

    def __init__(self, status: Status, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


def refusal(error: WorkerDied | WorkerError, loaded: bool, when: str) -> CandidateRefused:
    """Converts a worker's death or error to a refusal. If ``loaded`` is false, the candidate's code has not run yet,
    and the status is ``infra``. Otherwise the status is ``timeout`` or ``crash`` after a death, and ``build_error``,
    ``cheat`` or ``crash`` after an error. ``when`` is the end of the message, such as "in check 3"."""
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


def spread(samples: Sequence[float]) -> Spread:
    """Returns the median of ``samples`` with its 95 % confidence interval: (lower end, median, upper end). The ends
    come from the sign test, which assumes no distribution. Fewer than 6 samples are too few for 95 %; the ends are then
    the least and the greatest sample."""
    ordered, count = sorted(samples), len(samples)
    left_out, tail = 0, 1  # samples below the interval; number of outcomes of the sign test with at most so many
    while 40 * (tail := tail + math.comb(count, left_out + 1)) <= 2**count:
        left_out += 1
    return ordered[left_out], statistics.median(ordered), ordered[-1 - left_out]


def quotient(*over: Spread, under: Spread = (1.0, 1.0, 1.0)) -> Interval:
    """Returns an interval (lower end, upper end) for the product of ``over`` divided by ``under``. Each argument is
    (lower end, value, upper end). Treats their errors as independent: the logarithmic error of the result is the root
    of the sum of the squared logarithmic errors."""
    middle = math.prod(middle for _, middle, _ in over) / under[1]
    down = math.hypot(*(math.log(middle / low) for low, middle, _ in over), math.log(under[2] / under[1]))
    up = math.hypot(*(math.log(high / middle) for _, middle, high in over), math.log(under[1] / under[0]))
    return middle * math.exp(-down), middle * math.exp(up)


def share_of(part: Sequence[float], whole: Sequence[float]) -> Spread:
    """Returns the median of ``part`` divided by the median of ``whole``, with an interval: (lower end, value, upper
    end)."""
    over, under = spread(part), spread(whole)
    low, high = quotient(over, under=under)
    return low, over[1] / under[1], high


def speedups_of(samples: Sequence[float], anchors: Sequence[float], share: Spread | None) -> list[Interval]:
    """Returns a list with the interval (lower end, upper end) of the candidate's speed-up over the task's model in
    eager PyTorch. If ``share`` is given, the list also holds the interval of the speed-up over ``torch.compile``.

    Args:
        samples: Seconds of each call of the candidate.
        anchors: Seconds of each call of the model in eager PyTorch, timed in turn with the candidate.
        share: The model's time with ``torch.compile`` divided by its eager time: (lower end, value, upper end)."""
    mine, eager = spread(samples), spread(anchors)
    over = [quotient(eager, under=mine)]
    return [*over, quotient(eager, share, under=mine)] if share else over


def is_clear(speedups: Sequence[Interval]) -> bool:
    """Returns whether each interval in ``speedups`` lies on one side of ``FASTER`` (the speed-up above which the reward
    grows), at a distance of more than 3 %."""
    return all(low > _MARGIN * FASTER or _MARGIN * high < FASTER for low, high in speedups)


def fewest_calls(device: str, elapsed: float, speedup: Interval) -> int:
    """Returns the least number of calls of a candidate that a trial must time. Few calls suffice if the interval
    ``speedup`` is narrow, or if the calls so far took long (``elapsed`` seconds), because slow calls vary less."""
    if elapsed > _ENOUGH_SECONDS:
        return min(_FEWEST.values())
    low, high = speedup
    return min(_FEW, _FEWEST[device]) if high < _NARROW * low else _FEWEST[device]


def is_undecided(speedups: Sequence[Interval], anchor: Spread) -> bool:
    """Returns whether the times are too noisy to determine the reward. This is so if both of these hold:

    - An interval in ``speedups`` contains ``FASTER``, the speed-up above which the reward grows, and is wider than
      20 %.
    - ``anchor``, the interval of the model's time in eager PyTorch, is wider than 20 %, too."""
    return disagree(anchor[0], anchor[2]) and any(low < FASTER < high and disagree(low, high) for low, high in speedups)


def too_busy(speedups: Sequence[Interval]) -> CandidateRefused:
    """Returns the refusal of a candidate whose times are too noisy to determine the reward. At least one interval in
    ``speedups`` must contain ``FASTER``, the speed-up above which the reward grows. The message shows such an
    interval."""
    low, high = next(ends for ends in reversed(speedups) if ends[0] < FASTER < ends[1])
    what = f"this solution may be {low:.2f} or {high:.2f} times as fast as a baseline"
    return CandidateRefused("infra", f"{TOO_BUSY}: {what}")


def disagree(low: float, high: float) -> bool:
    """Returns whether the ends of an interval are more than 20 % apart."""
    return high > _WIDE * low


def scale_baselines(verdict: Verdict, share: float) -> None:
    """Multiplies the baselines' times in ``verdict`` by the factor ``share``, and with them the intervals of the
    speed-ups over the baselines."""
    if verdict.eager_seconds is not None:
        verdict.eager_seconds *= share
    if verdict.compile_seconds is not None:
        verdict.compile_seconds *= share
    if verdict.interval:
        verdict.interval = [share * bound for bound in verdict.interval]
    if verdict.compile_interval:
        verdict.compile_interval = [share * bound for bound in verdict.compile_interval]
    if verdict.strict:
        for ends in verdict.strict["intervals"].values():
            ends[:] = [share * bound for bound in ends]
        for name in verdict.strict["baselines"]:
            verdict.strict["baselines"][name] *= share
