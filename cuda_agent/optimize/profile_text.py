"""Writes what the command ``profile`` of a search says about a solution besides its speed-ups: rates, kernels, limiter.

Everything follows from the verdict: it needs no profiler, no privilege and no further run."""

from cuda_agent.agent.tools import limiter
from cuda_agent.pages.charts import amount
from cuda_agent.pages.optimize import shares_of_peak
from cuda_agent.sandbox.wire import KernelUse, Verdict

_NEAR = 0.6  # share of a peak from which it is called the limiter
_SLOWER = 0.8  # part of the solution's time in which a baseline must be done to rule out the device as the limiter
_LAUNCH_SECONDS = 4e-6  # a kernel with less time than this mostly starts
_LOW = 0.3  # occupancy that is called low
_KERNELS = 6  # most kernels that are shown


def profile_lines(verdict: Verdict) -> list[str]:
    """Returns lines about the rates against the device's peaks, about the resources of each kernel (on a GPU, of a
    plan or an extension), and about the limiter. The list is empty if the solution is not correct, or if times are
    simulated."""
    rates = shares_of_peak(verdict)
    if not rates:
        return []
    more = [f"{len(verdict.kernels) - _KERNELS} more kernels"] if len(verdict.kernels) > _KERNELS else []
    return [*rates, *map(_kernel, verdict.kernels[:_KERNELS]), *more, *_limiter(verdict)]


def _kernel(use: KernelUse) -> str:
    local = f"{use.local_bytes} bytes of local memory a thread (spills or arrays)" if use.local_bytes else "no spills"
    shared = f"{amount(use.shared_bytes, 'B')} of shared memory a block" if use.shared_bytes else "no shared memory"
    blocks = f"{use.grid} blocks fill it {use.waves:.2g} times" if use.occupancy else f"{use.grid} blocks do not fit"
    return (
        f"{use.name}: {use.registers} registers a thread, {local}, {shared}; occupancy {use.occupancy:.0%} "
        f"{'with' if use.grid else 'if launched with'} {use.block} threads a block, limited by {use.limit}"
    ) + (f"; {blocks}" if use.grid else "")


def _limiter(verdict: Verdict) -> list[str]:
    """Returns a line that names the limiter and the figures from which it follows, or none without a known peak."""
    name, least = limiter(verdict)
    if not name or not verdict.seconds:
        return []
    share = least / verdict.seconds
    baselines = {"eager": verdict.eager_seconds, "torch.compile": verdict.compile_seconds}
    faster = {label: seconds for label, seconds in baselines.items() if seconds and seconds < _SLOWER * verdict.seconds}
    if faster:  # also if the peak of a CPU was measured too low
        label = min(faster, key=lambda label: faster[label])
        first = f"not the device's peak rates, as {label} takes {faster[label] * 1e6:.1f} us"
    elif share > 1:
        return ["limiter: not known: less is done than is counted, or caches held a part"]
    elif share >= _NEAR:
        return [f"limiter: {name}, at {share:.0%} of the peak rate"]
    else:
        first = f"neither memory nor arithmetic ({name} is at {share:.0%} of the peak rate)"
    return [f"limiter: {first}; probably {_reason(verdict)}"]


def _reason(verdict: Verdict) -> str:
    """Returns the probable reason why a solution reaches no peak rate."""
    if verdict.device == "cpu":
        return "latency of the processor: cache misses, branches, unvectorized code, or threads that wait"
    assert verdict.seconds
    launches, kernels = sum(ran.calls for ran in verdict.ran), verdict.kernels
    launched = [use for use in kernels if use.grid]
    if launches and verdict.seconds / launches < _LAUNCH_SECONDS:
        return f"launches: {launches} in {verdict.seconds * 1e6:.1f} us, and each takes some microseconds to start"
    if kernels and (spilled := max(kernels, key=lambda use: use.local_bytes)).local_bytes:
        return f"local memory: {spilled.name} keeps {spilled.local_bytes} bytes a thread outside of registers"
    if launched and (small := min(launched, key=lambda use: use.waves)).waves < 1:
        return f"parallelism: the {small.grid} blocks of {small.name} fill {small.waves:.0%} of the device"
    if launched and (low := min(launched, key=lambda use: use.occupancy)).occupancy < _LOW:
        return f"occupancy: {low.name} reaches {low.occupancy:.0%}, limited by {low.limit}"
    return "latency: too few loads in flight, narrow or scattered accesses, or threads that wait"
