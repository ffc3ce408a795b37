"""Writes what the command ``profile`` of a search says about a solution besides its speed-ups: rates, kernels, limiter.

Everything follows from the verdict: it needs no profiler, no privilege and no further run."""

from cuda_agent.agent.tools import limiter
from cuda_agent.pages.charts import amount
from cuda_agent.pages.optimize import shares_of_peak
from cuda_agent.sandbox.wire import KernelUse, Verdict

_NEAR = 0.6  # share of a peak from which it is called the limiter
_LAUNCH_SECONDS = 4e-6  # a kernel with less time than this mostly starts
_LOW = 0.3  # occupancy that is called low
_KERNELS = 6  # most kernels that are shown


def profile_lines(verdict: Verdict) -> list[str]:
    """Returns lines about the rates against the device's peaks, about the resources of each kernel (on a GPU, in the
    plan format), and about the limiter. The list is empty if the solution is not correct, or if times are simulated."""
    rates = shares_of_peak(verdict)
    if not rates:
        return []
    more = [f"{len(verdict.kernels) - _KERNELS} more kernels"] if len(verdict.kernels) > _KERNELS else []
    return [*rates, *map(_kernel, verdict.kernels[:_KERNELS]), *more, *_limiter(verdict)]


def _kernel(use: KernelUse) -> str:
    local = f"{use.local_bytes} bytes of local memory a thread (spills or arrays)" if use.local_bytes else "no spills"
    shared = f"{amount(use.shared_bytes, 'B')} of shared memory a block" if use.shared_bytes else "no shared memory"
    fill = "do not fit on the device" if not use.occupancy else f"fill it {use.waves:.2g} times"
    return (
        f"{use.name}: {use.registers} registers a thread, {local}, {shared}; occupancy {use.occupancy:.0%} with "
        f"{use.block} threads a block, limited by {use.limit}; {use.grid} blocks {fill}"
    )


def _limiter(verdict: Verdict) -> list[str]:
    """Returns a line that names the limiter and the figures from which it follows, or none without a known peak."""
    name, least = limiter(verdict)
    if not name or not verdict.seconds:
        return []
    share = least / verdict.seconds
    if share > 1:
        return ["limiter: not known: less is done than is counted, or caches held a part"]
    if share >= _NEAR:
        return [f"limiter: {name}, at {share:.0%} of the device's peak"]
    launches, kernels = sum(ran.calls for ran in verdict.ran), verdict.kernels
    first = f"neither memory nor arithmetic ({name} is at {share:.0%} of the peak)"
    why = "latency of the processor: cache misses, branches, unvectorized code, or threads that wait"
    if verdict.device == "cuda":
        why = "latency: too few loads in flight, narrow or scattered accesses, or threads that wait"
        low = min(kernels, key=lambda use: use.occupancy, default=None)
        small = min(kernels, key=lambda use: use.waves, default=None)
        spilled = max(kernels, key=lambda use: use.local_bytes, default=None)
        if launches and verdict.seconds / launches < _LAUNCH_SECONDS:
            why = f"launches: {launches} in {verdict.seconds * 1e6:.1f} us, and each takes some microseconds to start"
        elif spilled and spilled.local_bytes:
            why = f"local memory: {spilled.name} keeps {spilled.local_bytes} bytes a thread outside of registers"
        elif small and small.waves < 1:
            why = f"parallelism: the {small.grid} blocks of {small.name} fill {small.waves:.0%} of the device"
        elif low and low.occupancy < _LOW:
            why = f"occupancy: {low.name} reaches {low.occupancy:.0%}, limited by {low.limit}"
    return [f"limiter: {first}; probably {why}"]
