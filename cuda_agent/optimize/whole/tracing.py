"""Part of the task with which ``tasks`` traces a model in the sandbox: runs the model, and records its submodules.

For each submodule, the record says whether it can be a task alone, what it takes, and its time.  On the CPU
this is the processor's time of one thread, which other work on the machine hardly changes.  On a GPU it is the device's
time."""

import hashlib
import json
import time
from typing import Any

import torch

from cuda_agent.optimize.whole.larger_model import leaves, load, placed

_CALLS, _SECONDS = 50, 2.0  # most timed calls of the model, and most seconds for them
_MOST_MODULES, _MOST_STATE, _TEXT = 4000, 64, 1500
_PLAIN = (bool, int, float, str, type(None))


def trace(code: str, device: str, train: bool) -> dict[str, Any]:
    """Returns what one call of a model runs.

    Args:
        code: The source of a task with ``Model``, ``get_inputs`` and ``get_init_inputs``.
        device: ``cpu`` or ``cuda``.
        train: Whether the model stays in ``train()``.

    Returns:
        ``seconds``: of the fastest call, and ``modules``: a record of each submodule.  Its ``why`` is empty if
        the submodule can be a task alone, and the reason if it cannot."""
    task = load(code, "model.py")
    torch.manual_seed(0)
    model = task.Model(*task.get_init_inputs()).train(train).to(device)
    with torch.device(device):
        given = task.get_inputs()
    given = placed(device, given)
    modules = [(name, module) for name, module in model.named_modules() if name][:_MOST_MODULES]
    records = {name: _record(name, module) for name, module in modules}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        hooks = [hook for name, module in modules for hook in _watch(module, records[name])]
        model(*given)
        for hook in hooks:
            hook.remove()
        seconds = _timed(model, given, modules, records, device)
    torch.set_num_threads(threads)
    return {"seconds": seconds, "modules": [_told(record) for record in records.values()]}


def _record(name: str, module: torch.nn.Module) -> dict[str, Any]:
    state = [[key, *_described(value)] for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)]
    plain = {
        place: {key: value for key, value in vars(part).items() if isinstance(value, _PLAIN)}
        for place, part in module.named_modules()
    }
    return {
        "name": name, "kind": type(module).__name__, "text": repr(module)[:_TEXT], "calls": 0, "why": "", "inputs": [],
        "state": state[:_MOST_STATE], "seconds": 0.0, "same": [str(type(module)), repr(module), state, str(plain)],
    }  # fmt: skip


def _watch(module: torch.nn.Module, record: dict[str, Any]) -> list[Any]:
    """Adds hooks to ``module`` that record a call.  Returns the hooks."""
    versions: list[tuple[torch.Tensor, int]] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        record["calls"] += 1
        tensors = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
        versions[:] = [(tensor, tensor._version) for tensor in tensors]
        record["inputs"] = [_described(tensor) for tensor in tensors]
        record["same"].append(str([leaf for leaf in leaves(args) if isinstance(leaf, _PLAIN)]))
        if kwargs:
            record["why"] = "is called with keyword arguments"
        elif other := [leaf for leaf in leaves(args) if not isinstance(leaf, (torch.Tensor, *_PLAIN))]:
            record["why"] = f"is called with a {type(other[0]).__name__}"
        elif not tensors:
            record["why"] = "takes no tensor"

    def after(_: Any, args: Any, result: Any) -> None:
        found = leaves(result)
        if any(tensor._version != version for tensor, version in versions):
            record["why"] = record["why"] or "changes its inputs in place"
        elif not any(isinstance(leaf, torch.Tensor) for leaf in found):
            record["why"] = record["why"] or "returns no tensor"
        elif other := [leaf for leaf in found if not isinstance(leaf, (torch.Tensor, *_PLAIN))]:
            record["why"] = record["why"] or f"returns a {type(other[0]).__name__}"
        versions.clear()

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def _timed(model: torch.nn.Module, given: Any, modules: Any, records: dict[str, Any], device: str) -> float:
    """Times calls of ``model``.  Returns the seconds of the fastest call, and writes those of the submodules in this
    call to their records, so that the shares add up."""
    marks: dict[str, list[Any]] = {}

    def mark(name: str) -> None:
        if device == "cpu":
            marks.setdefault(name, []).append(time.thread_time())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.setdefault(name, []).append(event)

    for name, module in modules:
        if records[name]["calls"] == 1:
            module.register_forward_pre_hook(lambda *_, name=name: mark(name))
            module.register_forward_hook(lambda *_, name=name: mark(name))
    best: dict[str, float] = {}
    end = time.perf_counter() + _SECONDS
    for count in range(_CALLS):
        if count and time.perf_counter() > end:
            break
        marks.clear()
        if device == "cuda":
            torch.cuda._sleep(1_000_000 + 100_000 * len(modules))  # the device does not wait for the host in between
        mark("")
        model(*given)
        mark("")
        if device == "cuda":
            torch.cuda.synchronize()
            seconds = {name: begin.elapsed_time(after) / 1e3 for name, (begin, after) in marks.items()}
        else:
            seconds = {name: after - begin for name, (begin, after) in marks.items()}
        if not best or seconds[""] < best[""]:
            best = seconds
    for name in best.keys() & records.keys():
        records[name]["seconds"] = best[name]
    return best[""]


def _told(record: dict[str, Any]) -> dict[str, Any]:
    if record["calls"] != 1:
        record["why"] = f"is called {record['calls']} times" if record["calls"] else "is not called"
    same = hashlib.sha256(json.dumps([record["same"], record["inputs"]]).encode()).hexdigest()
    return record | {"same": same}


def _described(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
