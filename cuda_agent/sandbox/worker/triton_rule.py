"""Enforces the rule of the triton format: ``ModelNew.forward`` computes only with kernels of ``triton.jit``.

Outside of kernels, ``forward`` may use torch to create, view, convert and inspect tensors (the functions in
``wire.ALLOWED``), but not to compute. Each call of ``forward`` must launch a kernel. Triton's own interpreter and
autotuner may call any function of torch. For example, the autotuner resets arguments. The check runs in the same Python
process as the solution, so a deliberate attack can evade it."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name

from cuda_agent.sandbox.wire import ALLOWED
from cuda_agent.sandbox.worker.binding import Cheat, Outputs


def only_triton(outputs: Outputs) -> Callable[[], AbstractContextManager[Any]]:
    """Patches Triton so that it counts kernel launches. Returns a class of context managers that enforce the rule of
    this module. Each call of the solution needs a new instance. If ``outputs.watch`` is set, each launch calls it with
    the kernel's name, the kind ``own`` and the seconds of the launch. If ``TRITON_INTERPRET`` is 1, kernels run in
    Triton's interpreter. The interpreter then copies no arguments, and the autotuner takes its first configuration."""
    from triton.runtime import autotuner, interpreter, jit

    launches = [0]
    trusted = (vars(autotuner), vars(interpreter))

    class OnlyTriton(TorchFunctionMode):
        def __enter__(self) -> Any:
            self._before = launches[0]
            return super().__enter__()

        def __exit__(self, kind: Any, error: Any, where: Any) -> None:
            super().__exit__(kind, error, where)
            if kind is None and launches[0] == self._before:
                raise Cheat("ModelNew.forward launches no kernel of triton.jit")

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            caller = sys._getframe(1).f_globals
            if func.__name__ not in ALLOWED and not any(caller is module for module in trusted):
                name = resolve_name(func) or func.__name__
                raise Cheat(f"ModelNew.forward calls {name}: computing is the part of the kernels of triton.jit")
            return func(*args, **(kwargs or {}))

    for kind in (jit.JITFunction, interpreter.InterpretedFunction):
        _count(kind, launches, outputs)
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Skip the interpreter's copies: arguments are in host memory, and inputs cannot be written.
        executor: Any = interpreter.GridExecutor
        executor._init_args_hst = lambda self, args, options: (args, options)
        executor._restore_args_dev = lambda self, *args: None
        # The autotuner takes its first configuration, because all measure as equally fast.
        tuner: Any = autotuner.Autotuner
        tuner.do_bench = property(lambda self: lambda call, quantiles: [0.0] * len(quantiles))
    return OnlyTriton


def _count(kind: Any, launches: list[int], outputs: Outputs) -> None:
    launch = kind.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = launch(self, *args, **options)
        if not options.get("warmup"):
            launches[0] += 1
            if outputs.watch:
                outputs.watch(self.fn.__name__, "own", time.perf_counter() - begin)
        return result

    kind.run = run
