"""The untrusted side: the warm parent and the workers it forks.

``python -m cuda_agent.sandbox.worker FD`` is the warm parent: it imports torch, starts no thread, runs no tensor
operation, and forks a worker for every request of the judge.  A worker closes the jail around itself and then serves
the judge over one socket: a *reference* worker runs the task's ``Model`` and ``get_inputs`` and may live on; a
*candidate* worker runs one solution and dies.  Tensors cross in shared memory that the judge made; inputs map
read-only.

Nothing a worker says is believed: seeds, buffers, clock and verdict are the judge's.  This module imports nothing of
the package but its wire format, the jail and its own side (``binding``, ``compiling``).
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cuda_agent.sandbox import jail
from cuda_agent.sandbox.binding import OnlyTheExtension, load_module
from cuda_agent.sandbox.wire import Frame, receive_frame, send_frame

_SOURCES = ("model.py", "model_new.py")  # names under which untrusted Python runs

# ---------------------------------------------------------------------------------------------------------- warm parent


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        __import__(name)
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    send_frame(control, "=", {"threads": threads, "torch": torch.__version__})
    children: set[int] = set()
    while True:
        try:
            frame = receive_frame(control, max_fds=8)
        except ConnectionError:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return
        if frame.kind == "F":
            pid = os.fork()
            if pid == 0:
                control.detach()
                _child(frame)
            children.add(pid)
            for descriptor in frame.fds:
                os.close(descriptor)
            send_frame(control, "=", {"pid": pid})
        elif frame.kind == "W":
            _, status = os.waitpid(frame.body["pid"], 0)
            children.discard(frame.body["pid"])
            send_frame(control, "=", {"status": os.waitstatus_to_exitcode(status)})


def _child(frame: Frame) -> None:
    """A freshly forked worker; never returns."""
    try:
        options = frame.body
        null = os.open("/dev/null", os.O_RDWR)
        keep = sorted((*frame.fds, null))
        os.dup2(null, 0)
        os.dup2(null, 1)
        low = 3
        for descriptor in (*keep, 4096):
            os.closerange(low, descriptor)
            low = descriptor + 1
        os.chdir(options["folder"])
        os.environ.update(options["environment"])
        tempfile.tempdir = options["folder"]  # libraries ask for one, even where nothing can be written
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        jail.enter(jail.Policy.from_json(options["policy"]))
        os.dup2(null, 2)
        os.close(null)  # until here a fault is ours, and goes to the log
        channel = socket.socket(fileno=frame.fds[0])
        send_frame(channel, "=")
        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        serve = Reference if options["role"] == "reference" else Candidate
        serve(channel, options, frame.fds[1:]).serve()
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


# -------------------------------------------------------------------------------------------------------------- buffers


class Slots:
    """The calls' buffers: ``layout`` is a list of slots, each ``{"in": [offsets], "out": [offsets]}``; inputs, and the
    weights, lie in memory that this process cannot write."""

    def __init__(
        self, spec: dict[str, Any], layout: list[dict[str, list[int]]], weights: list[int], fds: list[int]
    ) -> None:
        base_in = _map(fds[0], os.fstat(fds[0]).st_size, writable=False)
        base_out = self.written = _map(fds[1], os.fstat(fds[1]).st_size, writable=True)
        for descriptor in fds:
            os.close(descriptor)
        self.layout = layout
        self.inputs = [[base_in + offset for offset in slot["in"]] for slot in layout]
        self.outputs = [[base_out + offset for offset in slot["out"]] for slot in layout]
        self.weights = [base_in + offset for offset in weights]
        self._spec = spec

    def input_tensors(self, slot: int) -> list[torch.Tensor]:
        return [_tensor(a, t) for a, t in zip(self.inputs[slot], self._spec["inputs"], strict=True)]

    def output_tensors(self, slot: int) -> list[torch.Tensor]:
        return [_tensor(a, t) for a, t in zip(self.outputs[slot], self._spec["outputs"], strict=True)]

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        spec = self._spec["weights"]
        return {name: _tensor(a, spec[name]) for a, name in zip(self.weights, spec, strict=True)}


def _map(descriptor: int, size: int, writable: bool) -> int:
    """The address of ``size`` bytes of shared memory (of fresh private memory when the descriptor is -1).  Unlike
    ``mmap.mmap`` it keeps no descriptor."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    kind |= mmap.MAP_POPULATE  # a first touch must not be timed
    address = _libc.mmap(None, size, protection, kind, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"{size} bytes cannot be mapped")
    return int(address)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _tensor(address: int, tensor: dict[str, Any]) -> torch.Tensor:
    """A tensor over foreign memory, which must outlive it."""
    dtype: torch.dtype = getattr(torch, tensor["dtype"])
    count = 1
    for extent in tensor["shape"]:
        count *= extent
    if count == 0:
        return torch.empty(tensor["shape"], dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(tensor["shape"])


def _flatten(value: Any) -> list[torch.Tensor]:
    """The tensors of an output in order; numbers count as tensors of no dimension."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, bool | int | float):
        return [torch.tensor(value)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _flatten(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _flatten(item)]
    if value is None:
        return []
    raise TypeError(f"an output of type {type(value).__name__}")


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _store(results: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if len(results) != len(targets):
        raise ValueError(f"{len(results)} outputs instead of {len(targets)}")
    for index, (result, target) in enumerate(zip(results, targets, strict=True)):
        if result.shape != target.shape or result.dtype != target.dtype:
            raise ValueError(
                f"output {index} is {result.dtype} {list(result.shape)} instead of {target.dtype} {list(target.shape)}"
            )
        target.copy_(result)


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _argument(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as JSON, its tensors moved to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if _plain(value):
        return {"value": value}
    if isinstance(value, list | tuple):
        return [_argument(item, tensors) for item in value]
    raise TypeError(f"get_inputs() gives a {type(value).__name__}; tensors, numbers and lists of them are supported")


def _rebuild(argument: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(argument, list):
        return [_rebuild(item, tensors) for item in argument]
    return tensors[argument["tensor"]] if "tensor" in argument else argument["value"]


# -------------------------------------------------------------------------------------------------------------- workers


class Worker:
    """Serves the judge: one frame in, one frame out.  ``=`` is a good answer, ``!`` an error with its message."""

    def __init__(self, channel: socket.socket, options: dict[str, Any], fds: list[int]) -> None:
        self._channel = channel
        self._options = options
        self._fds = fds
        self._commands: dict[str, Callable[[Frame], Any]] = {}

    def serve(self) -> None:
        while True:
            frame = receive_frame(self._channel, max_fds=4)
            try:
                answer = self._commands[frame.kind](frame)
            except MemoryError:
                send_frame(self._channel, "!", {"message": "out of memory"})
            except BaseException as error:
                message = _explain(error)
                send_frame(self._channel, "!", {"message": message, "cheat": type(error).__name__ == "Cheat"})
            else:
                send_frame(self._channel, "=", answer)


def _explain(error: BaseException) -> str:
    """Type and first line of the message, with the last line of the untrusted source that took part."""
    lines = [str(line) for line in str(error).strip().splitlines() if line.strip()]
    where = ""
    for entry in traceback.extract_tb(error.__traceback__):
        if entry.filename in _SOURCES:
            where = f" ({entry.filename} line {entry.lineno})"
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({os.path.basename(error.filename)} line {error.lineno})"
        lines = [error.msg]
    message = lines[0] if lines else ""
    if message.startswith("[enforce fail at") or "DefaultCPUAllocator" in message:
        message = "out of memory: " + message.rpartition("DefaultCPUAllocator:")[2].strip()
    return f"{type(error).__name__}: {message}"[:600] + where


class Reference(Worker):
    """Runs the task."""

    def __init__(self, channel: socket.socket, options: dict[str, Any], fds: list[int]) -> None:
        super().__init__(channel, options, fds)
        self._commands = {
            "T": self.load, "M": self.map, "G": self.generate, "R": self.run, "N": self.null, "C": self.compile,
            "O": self.count,
        }  # fmt: skip
        self._last: list[torch.Tensor] = []

    def load(self, frame: Frame) -> dict[str, Any]:
        """Import the task, build its model, run it once on inputs of its own; answers with its spec."""
        torch.manual_seed(frame.body["seed"])
        module = _module("task", frame.body["code"], "model.py")
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not hasattr(module, name):
                raise AttributeError(f"the task defines no {name}")
        init = module.get_init_inputs()
        if not isinstance(init, list | tuple):
            raise TypeError("get_init_inputs() must give a list")
        self._model = module.Model(*init)
        if not isinstance(self._model, torch.nn.Module):
            raise TypeError("Model is no torch.nn.Module")
        self._model.eval()
        self._call: Callable[..., Any] = self._model
        self._get_inputs = module.get_inputs
        tensors: list[torch.Tensor] = []
        self._arguments = self._draw(tensors)
        given = [t.clone() for t in tensors]
        versions = [t._version for t in given]
        outputs = _flatten(self._model(*_rebuild(self._arguments, given)))
        if versions != [t._version for t in given]:
            raise ValueError("forward() changes its inputs in place, which a task may not")
        if not outputs:
            raise TypeError("forward() gives no tensor")
        self._state = {k: v for k, v in self._model.state_dict().items() if isinstance(v, torch.Tensor)}
        self._spec: dict[str, Any] = {
            "inputs": [_describe(t) for t in tensors],
            "outputs": [_describe(t) for t in outputs],
            "weights": {name: _describe(t) for name, t in self._state.items()},
            "arguments": self._arguments,
            "init": [{"value": v} if _plain(v) else {"opaque": type(v).__name__} for v in init],
            "parameter_count": sum(p.numel() for p in self._model.parameters()),
        }
        return self._spec

    def _draw(self, tensors: list[torch.Tensor]) -> list[Any]:
        values = self._get_inputs()
        if not isinstance(values, list | tuple):
            raise TypeError("get_inputs() must give a list")
        arguments = [_argument(value, tensors) for value in values]
        for index, tensor in enumerate(tensors):
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise TypeError("get_inputs() gives a sparse or quantized tensor")
            tensors[index] = tensor.detach().contiguous().resolve_conj().resolve_neg()
        return arguments

    def map(self, frame: Frame) -> None:
        """Take the buffers; answers once the weights are written to the first output slot region named for them."""
        self._slots = Slots(self._spec, frame.body["layout"], [], frame.fds)
        self._values = frame.body["values"]
        self._weights = frame.body["weights"]
        base = self._slots.written
        for offset, tensor in zip(self._weights, self._state.values(), strict=True):
            _tensor(base + offset, _describe(tensor)).copy_(tensor)

    def generate(self, frame: Frame) -> None:
        """Fresh inputs under the judge's seed, written where the judge copies them from."""
        torch.manual_seed(frame.body["seed"])
        tensors: list[torch.Tensor] = []
        self._draw(tensors)
        base = self._slots.written
        _store(tensors, [_tensor(base + o, t) for o, t in zip(self._values, self._spec["inputs"], strict=True)])

    def run(self, frame: Frame) -> None:
        arguments = _rebuild(self._arguments, self._slots.input_tensors(frame.slot))
        self._last = _flatten(self._call(*arguments))
        _store(self._last, self._slots.output_tensors(frame.slot))

    def null(self, frame: Frame) -> None:
        """Everything that ``run`` does but the call: what the clock subtracts."""
        _rebuild(self._arguments, self._slots.input_tensors(frame.slot))
        if not self._last:
            self._last = [torch.zeros_like(t) for t in self._slots.output_tensors(frame.slot)]
        _store(self._last, self._slots.output_tensors(frame.slot))

    def compile(self, frame: Frame) -> None:
        """From here on ``run`` calls the compiled model.  ``known``: where a warm-up left its answers, if it did."""
        from cuda_agent.sandbox import compiling

        home = Path(os.environ["TMPDIR"])
        with contextlib.suppress(AttributeError):
            if frame.body["known"]:
                compiling.use(Path(frame.body["known"]), home)
            else:
                compiling.record(home)
        self._call = torch.compile(self._model)
        self.run(frame)

    def count(self, frame: Frame) -> dict[str, int]:
        """Operators of one forward pass and the bytes they touch, for the model clock."""
        total = {"operators": 0, "bytes": 0}

        class Counter(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                seen = [t for t in _leaves((*args, *(kwargs or {}).values(), result)) if isinstance(t, torch.Tensor)]
                if isinstance(result, torch.Tensor) and result._base is None:  # a view costs nothing
                    total["operators"] += 1
                    total["bytes"] += sum(t.numel() * t.element_size() for t in seen)
                return result

        arguments = _rebuild(self._arguments, self._slots.input_tensors(frame.slot))
        with Counter():
            self._model(*arguments)
        return total


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _module(name: str, code: str, filename: str) -> types.ModuleType:
    import linecache

    module = types.ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)  # inspect.getsource works
    exec(compile(code, filename, "exec"), module.__dict__)
    return module


class Candidate(Worker):
    """Runs one solution, which is loaded only once the empty call has been timed."""

    def __init__(self, channel: socket.socket, options: dict[str, Any], fds: list[int]) -> None:
        super().__init__(channel, options, fds)
        self._slots = Slots(options["spec"], options["layout"], options["weights"], fds)
        if options["lane"] == "plan":
            self._commands = {"N": lambda frame: None, "L": self.load_plan}
        else:
            self._commands = {"N": self.null, "L": self.load_model}
        self._last: list[torch.Tensor] = []

    def load_plan(self, frame: Frame) -> None:
        run = bind_plan(frame.body, self._slots, self._options["threads"])
        self._commands["R"] = lambda call: run(call.slot)

    def load_model(self, frame: Frame) -> None:
        """``ModelNew`` of the extension lane, with its library and the rule to compute with it alone; or of the python
        lane, free to use torch.  Built with the random numbers that built the reference, and given its weights."""
        spec, restricted = self._options["spec"], self._options["lane"] == "extension"
        if restricted:
            sys.modules["cuda_extension"] = load_module(frame.body["library"], frame.body["names"])
        torch.manual_seed(frame.body["seed"])
        module = _module("model_new", frame.body["code"], "model_new.py")
        if not hasattr(module, "ModelNew"):
            raise AttributeError("model_new.py defines no ModelNew")
        model = module.ModelNew(*[item["value"] for item in spec["init"]]).eval()
        weights = self._slots.weight_tensors()
        if restricted or model.state_dict().keys() == weights.keys():  # KernelBench's own solutions may rename them
            model.load_state_dict(weights, strict=True)
        arguments = spec["arguments"]

        def run(call: Frame) -> None:
            given = _rebuild(arguments, self._slots.input_tensors(call.slot))
            with OnlyTheExtension() if restricted else contextlib.nullcontext():
                results = _flatten(model(*given))
            _store(results, self._slots.output_tensors(call.slot))

        self._commands["R"] = run

    def null(self, frame: Frame) -> None:
        _rebuild(self._options["spec"]["arguments"], self._slots.input_tensors(frame.slot))
        if not self._last:
            self._last = [torch.zeros_like(t) for t in self._slots.output_tensors(frame.slot)]
        _store(self._last, self._slots.output_tensors(frame.slot))


# ----------------------------------------------------------------------------------------------------------- plan lane


class _Node(ctypes.Structure):
    """Mirrors ``struct node`` of runtime.cpp: a kernel, or a memset when ``kernel`` is null."""

    _fields_ = [
        ("kernel", ctypes.c_void_p), ("grid", ctypes.c_long), ("args", ctypes.c_void_p),
        ("target", ctypes.c_void_p), ("bytes", ctypes.c_long), ("value", ctypes.c_int),
    ]  # fmt: skip


def bind_plan(program: dict[str, Any], slots: Slots, threads: int) -> Callable[[int], None]:
    """Load the libraries and resolve the program's arguments to addresses, once a slot.  ``program`` is
    ``plan.Program`` as JSON.  A scalar argument is an 8-byte cell; a buffer argument is its address."""
    runtime = ctypes.CDLL(program["runtime"])
    library = ctypes.CDLL(program["library"]) if program["library"] else None
    keep: list[Any] = []
    workspaces: dict[str, int] = {}
    for name, workspace in program["workspaces"].items():
        workspaces[name] = _map(-1, max(workspace["bytes"], 1), writable=True)
        if workspace["pattern"].strip("0"):
            pattern = bytes.fromhex(workspace["pattern"])
            content = pattern * (workspace["bytes"] // len(pattern))
            ctypes.memmove(workspaces[name], content, len(content))

    def bind(slot: int) -> Any:
        def address(buffer: str) -> int:
            kind, _, rest = buffer.partition(":")
            if kind == "in":
                return slots.inputs[slot][int(rest)]
            if kind == "out":
                return slots.outputs[slot][int(rest)]
            return slots.weights[int(rest)] if kind == "w" else workspaces[rest]

        nodes = (_Node * len(program["nodes"]))()
        for node, item in zip(nodes, program["nodes"], strict=True):
            if "memset" in item:
                node.target, node.bytes, node.value = address(item["memset"]), item["bytes"], item["value"]
                continue
            pointers = (ctypes.c_void_p * max(1, len(item["args"])))()
            for position, argument in enumerate(item["args"]):
                if "buffer" in argument:
                    pointers[position] = address(argument["buffer"])
                else:
                    kind = ctypes.c_double if "float" in argument else ctypes.c_long
                    cell = kind(argument.get("float", argument.get("int", 0)))
                    keep.append(cell)
                    pointers[position] = ctypes.addressof(cell)
            keep.append(pointers)
            node.kernel = ctypes.cast(getattr(library, item["symbol"]), ctypes.c_void_p).value
            node.grid, node.args = item["grid"], ctypes.addressof(pointers)
        return nodes

    bound = [bind(slot) for slot in range(len(slots.layout))]
    runtime.start(ctypes.c_long(threads))
    execute = runtime.run
    execute.argtypes = [ctypes.c_void_p, ctypes.c_long]
    execute.restype = None
    count = len(program["nodes"])

    def run(slot: int) -> None:
        execute(ctypes.addressof(bound[slot]), count)

    run.keep = keep  # type: ignore[attr-defined]
    return run


if __name__ == "__main__":
    main()
