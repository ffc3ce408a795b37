"""Part of every exported ``model_new.py``: refuses inputs that require a gradient and, if the file is run as a program,
compares ``ModelNew`` with the original and prints the times.

The times include the call through Python, and are taken in a few seconds.  They are no verdict: the sandbox's judge
measures more carefully, and checks that a solution does not cheat."""

import functools as _functools
import linecache as _linecache
import statistics as _statistics
import sys as _sys
import time as _time
import types as _types
from typing import Any as _Any

import torch


def _for_inference(forward: _Any) -> _Any:
    """Returns ``forward``, a method of a model, for contiguous inputs.  It raises ValueError if it is asked for
    gradients of its inputs."""

    @_functools.wraps(forward)
    def checked(self: _Any, *args: _Any, **kwargs: _Any) -> _Any:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors([*args, *kwargs.values()])):
            raise ValueError(
                "an input requires a gradient, and ModelNew computes none, because it is made for inference: call it "
                "inside torch.no_grad(), or give it tensor.detach()"
            )
        return forward(self, *_contiguous(args), **_contiguous(kwargs))

    return checked


def _contiguous(value: _Any) -> _Any:
    """Returns ``value`` with contiguous tensors, also in lists, tuples and dicts: only such were judged."""
    if isinstance(value, torch.Tensor):
        return value.contiguous() if value.layout == torch.strided else value
    if type(value) in (list, tuple):
        return type(value)(map(_contiguous, value))
    return {key: _contiguous(item) for key, item in value.items()} if type(value) is dict else value


def _tensors(value: _Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _on(device: str, value: _Any) -> _Any:
    """Returns ``value`` with its tensors, also those in lists, on ``device``."""
    if isinstance(value, list | tuple):
        return [_on(device, item) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _names(code: str) -> dict[str, _Any]:
    """Runs ``code``, the source of the original, and returns the names that it defines."""
    module = _sys.modules["original"] = _types.ModuleType("original")  # dataclasses look it up here
    _linecache.cache["model.py"] = (len(code), None, code.splitlines(True), "model.py")  # Triton reads sources
    exec(compile(code, "model.py", "exec"), module.__dict__)
    return module.__dict__


def _compare(original: dict[str, _Any], new_model: type, device: str, train: bool, tolerance: float) -> int:
    """Compares ``new_model`` with the original, whose names are in ``original``: the outputs on five draws of inputs,
    then the times.  Prints the outcome.  Returns the exit code: 1 if outputs differ by more than ``tolerance``
    (absolute and relative), else 0.  ``train`` says whether the models are compared in ``train()``."""

    def made(model: _Any) -> _Any:
        torch.manual_seed(0)
        return model(*original["get_init_inputs"]()).to(device).train(train)

    def drawn(seed: int) -> _Any:
        torch.manual_seed(seed)
        return _on(device, original["get_inputs"]())

    def median(model: _Any, inputs: _Any) -> float:
        """Returns the median seconds of calls one after the other: five or more, for a quarter of a second."""
        times, end = list[float](), _time.perf_counter() + 0.25
        while len(times) < 5 or _time.perf_counter() < end:
            began = _time.perf_counter()
            model(*inputs)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(_time.perf_counter() - began)
        return _statistics.median(times)

    old, new = made(original["Model"]), made(new_model)
    if old.state_dict().keys() == new.state_dict().keys():
        new.load_state_dict(old.state_dict())
    with torch.no_grad():
        for seed in range(1, 6):
            wanted, got = old(*drawn(seed)), new(*drawn(seed))
            try:
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                print(f"ModelNew is wrong on draw {seed} of inputs: {error}")
                return 1
        inputs = drawn(1)  # many calls in turn: the threads of one model may still spin when the other one begins
        rounds = [(median(old, inputs), median(new, inputs)) for _ in range(7)]
    before, after = (min(times) for times in zip(*rounds, strict=True))
    print(f"ModelNew is correct on 5 draws of inputs, within {tolerance:g}")
    print(f"original {before * 1e6:10.1f} µs")
    print(f"ModelNew {after * 1e6:10.1f} µs   {before / after:.2f} times as fast")
    print(f"(eager PyTorch on {device}; the best of seven medians each)")
    return 0
