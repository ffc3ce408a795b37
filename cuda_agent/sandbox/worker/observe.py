"""Reports what one call of a model runs: torch's operators, GPU kernels, and their shares of the call's time.

This module runs in a worker, the process that runs a solution or a task's own model. Operators are reported by torch's
dispatcher, kernels by torch's profiler (CUPTI). A solution runs in the same process and may forge the report, so the
report is advice only. Operators of other threads are not seen. On the CPU, NumPy and native code are not seen, with two
exceptions: functions of a solution in the extension format (Python with C++ or CUDA files), and kernels of a solution
in the triton format. Further functions count the floating-point operations of a call, and describe the memory of its
results."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MOST = 64  # most names in a report
_LONGEST = 200  # most characters of a name

# Operators that create, view or copy tensors but are not marked as views in their schema.
_NO_COMPUTING_TEXT = """
    empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full
    full_like new_full scalar_tensor _to_copy copy_ copy clone contiguous lift_fresh lift_fresh_copy _unsafe_view
    _reshape_alias alias detach resize_ set_ _local_scalar_dense is_same_size sym_size sym_stride
"""
_NO_COMPUTING = frozenset(_NO_COMPUTING_TEXT.split())
_FILLS = frozenset(("fill_", "zero_"))
_HIDDEN_PRODUCTS = ("rnn", "lstm", "gru", "linalg", "cdist", "fft", "quantized")  # in names of uncounted operators


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns false. If it returned true, the first operator would import all of torch's compiler, which takes
        seconds."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns true. If it returned false, a compiled model would be compiled anew while it is watched, which needs
        files that the jail hides."""
        return True


class Operators(_Mode):
    """Records which operators of torch run inside this context, and the seconds of each call. Leaves out views, copies
    and allocations. ``self.ran`` maps (name, kind) to a list of seconds. The kind is ``memset`` for fills, and
    otherwise ``torch``. ``add`` records a call of another function. The seconds are valid on the CPU only, because a
    GPU works asynchronously."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[tuple[str, str], list[float]] = {}  # seconds of each call, by (name, kind)

    def add(self, name: str, kind: str, seconds: float) -> None:
        self.ran.setdefault((name, kind), []).append(seconds)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in _NO_COMPUTING:
            kind = "memset" if name in _FILLS else "torch"
            self.add(func._schema.name.replace("::", "."), kind, time.perf_counter() - begin)
        return result


def told(ran: dict[tuple[str, str], list[float]], total: float | None) -> list[list[Any]]:
    """Returns a record ``[name, kind, calls, share]`` for each operator or kernel in ``ran``, in descending order of
    total time. Keeps at most 64 records. ``ran`` maps (name, kind) to the seconds of each call. The kind is ``torch``,
    ``memset``, ``own`` (the solution's own function) or empty (unknown). ``calls`` is the number of calls. ``share`` is
    the sum of their seconds divided by ``total``, or ``None`` if ``total`` is unknown."""
    rows = sorted(ran.items(), key=lambda item: -sum(item[1]))[:_MOST]
    return [[name[:_LONGEST], kind, len(calls), sum(calls) / total if total else None] for (name, kind), calls in rows]


def operators(call: Callable[[Operators], Any], device: str) -> list[list[Any]]:
    """Runs ``call`` and returns records (see ``told``) of the operators of torch that ran. ``call`` gets the recorder,
    an instance of ``Operators``. It may record other functions with the recorder's method ``add``. On a GPU, the shares
    of the time in the records are ``None``."""
    with Operators() as seen:
        begin = time.perf_counter()
        call(seen)
        total = time.perf_counter() - begin
    return told(seen.ran, total if device == "cpu" else None)


def kernels(call: Callable[[], Any]) -> list[list[Any]]:
    """Runs ``call`` and returns records (see ``told``) of its GPU kernels, and of fills and copies of GPU memory. The
    kind of a fill or a copy is ``memset``. The kind of a kernel is empty, because the judge (the process that checks
    solutions) classifies kernels by their names. Raises ``RuntimeError`` if the profiler sees none of these."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler import profile  # torch.profiler would import torch's compiler, which needs a folder

    torch.cuda.synchronize()
    with profile(use_device="cuda", use_kineto=True, use_cpu=False) as profiler:
        call()
        torch.cuda.synchronize()
    ran: dict[tuple[str, str], list[float]] = {}
    for event in profiler.function_events or ():
        if event.device_type == DeviceType.CUDA:
            kind = "memset" if event.name.startswith(("Memset", "Memcpy")) else ""
            ran.setdefault((event.name, kind), []).append(event.time_range.elapsed_us() / 1e6)
    if not ran:
        raise RuntimeError("the profiler saw no kernel")
    return told(ran, sum(map(sum, ran.values())))


def seconds_of(steps: Sequence[Callable[[], Any]], device: str) -> list[float]:
    """Runs the functions ``steps`` one after the other. Returns the seconds that each of them takes on ``device``
    (``cpu`` or ``cuda``)."""
    if device == "cpu":
        times = [time.perf_counter()]
        for step in steps:
            step()
            times.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    torch.cuda._sleep(1_000_000 + 40_000 * len(steps))  # keeps the device from waiting for this loop between two steps
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


class _Flops(_Mode):
    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry, sdpa_flop_count

        self.count = 0
        self.all = True
        self._formulas = flop_registry
        self._attention = sdpa_flop_count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.count += int(formula(*args, **(kwargs or {}), out_val=result))
        elif name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.count += int(self._attention(*(tensor.shape for tensor in args[:3])))
        elif any(word in name for word in _HIDDEN_PRODUCTS):
            self.all = False
        return result


def flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """Runs ``call``. Returns the number of floating-point operations in its matrix products, convolutions and
    attention, and the result of ``call``. The number is 0 if there are no such operations or if some cannot be
    counted."""
    with _Flops() as counter:
        result = call()
    return counter.count if counter.all else 0, result


def views(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[list[int] | None]:
    """Returns one item per result of a call: ``None`` if the call wrote the result, or the strides of the result if it
    counts as a view. Three kinds of results count as views:

    - A result in the memory of a tensor in ``given``.
    - A result with stride 0, whose elements share memory.
    - All but one of several other results in the same memory. The largest contiguous result counts as written, or the
      largest if none is contiguous."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    found: dict[int, list[int] | None] = {}
    for index in sorted(range(len(results)), key=lambda i: (not results[i].is_contiguous(), -results[i].numel())):
        result, strides = results[index], list(results[index].stride())
        repeated = any(size > 1 and not stride for size, stride in zip(result.shape, strides, strict=True))
        pointer = result.untyped_storage().data_ptr()
        found[index] = strides if repeated or pointer in seen else None
        if not repeated:
            seen.add(pointer)
    return [found[index] for index in range(len(results))]


def written_bytes(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that a call had to write for its ``results``. Views of tensors in ``given`` count as 0. Results
    in the same memory together count at most the size of this memory."""
    foreign = {tensor.untyped_storage().data_ptr() for tensor in given}
    sizes: dict[int, list[int]] = {}
    for result in results:
        storage = result.untyped_storage()
        if storage.data_ptr() not in foreign:
            count = result.element_size()
            for size, stride in zip(result.shape, result.stride(), strict=True):
                count *= size if stride or not size else 1
            sizes.setdefault(storage.data_ptr(), [storage.nbytes()]).append(count)
    return sum(min(whole, sum(parts)) for whole, *parts in sizes.values())
