"""Finds suspicious code in the text of a solution by static rules. The rules do not run the code.

Suspicious code, for example, computes with torch, uses streams or threads, or patches other modules. Python is parsed
with ``ast``. C++ and CUDA are split into tokens, also inside strings of a Python file. Findings are advice for the
solution's author and for an audit. They do not decide the verdict (whether the solution passes). The rules miss names
that are written indirectly, such as by ``getattr`` or a macro, and some findings are harmless."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuda_agent import syntax
from cuda_agent.sandbox.wire import ALLOWED, Solution, printable

MEANING = {
    "torch": "torch computes here, not the solution's kernels",
    "library": "a vendor's library: allowed for matrix products (cuBLAS) and convolutions (cuDNN)",
    "foreign": "a library beyond cuBLAS for matrix products and cuDNN for convolutions",
    "native": "loads or reaches native code at run time, which no build has seen",
    "stream": "streams, events and graphs move work to where a clock may not look",
    "thread": "threads and processes work beside the call",
    "probe": "looks at its surroundings: time, environment, stack, memory, or the task's own module",
    "hook": "runs at another time than it is called",
    "patch": "changes a module of others",
    "precision": "changes the arithmetic that torch and its libraries compute in",
    "cache": "keeps data in the device's cache from one call to the next",
    "dynamic": "runs code that is made at run time",
    "long": "more text than these rules read",
}
_MOST_LINES = 20  # of advice
_MOST_TEXT = 1 << 18  # characters of a solution that are read: bounds the time of hostile text


@dataclass(frozen=True)
class Finding:
    """A place in a solution that breaks a static rule. ``rule`` is the rule's name (a key of ``MEANING``), and ``what``
    shows what was found, such as a function's name."""

    file: str
    line: int
    rule: str
    what: str


def findings(solution: Solution) -> list[Finding]:
    """Returns the places where a solution breaks a static rule, sorted by file and line. A Python file that does not
    parse has no findings in its code; the build of the solution reports the syntax error. Reads at most ``_MOST_TEXT``
    characters in all files together. Each file with unread text is a finding of the rule ``long``."""
    found: set[Finding] = set()
    left = _MOST_TEXT
    for name, whole in sorted(solution.files.items()):
        text, left = whole[:left], max(0, left - len(whole))
        if len(text) < len(whole):
            found.add(Finding(name, 1, "long", f"{len(whole)} characters"))
        if name.endswith(".py"):
            found.update(_python(name, text))
        elif name.endswith((".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh")):
            found.update(_native(name, text))
    return sorted(found, key=lambda f: (f.file, f.line, f.rule, f.what))


def advice(found: list[Finding]) -> list[str]:
    """Returns the findings as text: one line for each rule that a file breaks, at most ``_MOST_LINES`` lines."""
    places: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        places.setdefault((finding.file, finding.rule), []).append(finding)
    lines = []
    for (file, rule), here in places.items():
        names = Counter(finding.what for finding in here)
        named = ", ".join(name for name, _ in names.most_common(4)) + (", ..." if len(names) > 4 else "")
        lines.append(printable(f"{file}:{here[0].line}: {rule}: {named} ({MEANING[rule]})")[:300])
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"and {len(lines) - _MOST_LINES + 1} more files and rules"]
    return lines


# -------------------------------------------------------------------------------------------------------------- Python

_NEW_TENSORS = ALLOWED | {"Tensor", "tensor", "as_tensor", "device", "Size", "no_grad", "inference_mode"}
_NO_COMPUTING = {"cuda", "device", "jit", "nn.Module", "nn.Parameter", "nn.ParameterList", "nn.ModuleList", "nn.init"}
# Methods of tensors that compute; those of other objects seldom have these names.
_METHODS_TEXT = """
    abs add add_ addmm addmm_ amax amin argmax argmin argsort baddbmm bmm clamp clamp_ clamp_max clamp_min clip cos
    cumprod cumsum div div_ dot einsum eq erf exp exp_ expm1 floor gather index_add index_add_ index_select log log_
    log1p log2 log_softmax logsumexp masked_fill masked_fill_ matmul maximum mean minimum mm mul mul_ mv neg norm
    outer pow prod reciprocal relu relu_ round rsqrt scatter scatter_ scatter_add scatter_add_ sigmoid sigmoid_ sign
    sin softmax sqrt square std sub sub_ sum tanh tanh_ topk tril triu var where
"""
_METHODS = frozenset(_METHODS_TEXT.split())
_STREAMS = ("torch.cuda.Stream", "torch.cuda.stream", "torch.cuda.Event", "torch.cuda.CUDAGraph", "torch.cuda.graph",
            "torch.cuda.ExternalStream", "torch.cuda.make_graphed_callables")  # fmt: skip
_BY_NAME = {
    "thread": ("threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess", "os.fork",
               "os.forkpty", "os.system", "os.popen", "os.posix_spawn", "os.posix_spawnp", "os.execv", "os.execve",
               "os.execvp", "torch.multiprocessing", "signal"),
    "probe": ("time", "os.environ", "os.environb", "os.getenv", "os.getpid", "os.getppid", "os.listdir", "os.walk",
              "inspect", "gc", "sys.modules", "sys._getframe", "sys._current_frames", "sys.argv", "platform",
              "resource", "socket", "traceback", "tracemalloc", "psutil", "torch.cuda.memory_snapshot", "timeit",
              "model", "task", "__main__", "torch.cuda.synchronize"),
    "native": ("ctypes", "cffi", "torch.ops.load_library", "torch.classes.load_library", "cupy", "numba", "mmap",
               "torch.utils.cpp_extension", "torch.cuda._compile_kernel"),
    "hook": ("atexit", "weakref.finalize", "sys.settrace", "sys.setprofile", "sys.meta_path", "sys.path_hooks"),
    "dynamic": ("importlib", "types.CodeType", "types.FunctionType", "pickle", "marshal"),
}  # fmt: skip
_BUILTINS = {"exec": "dynamic", "eval": "dynamic", "compile": "dynamic", "__import__": "dynamic", "globals": "probe"}
_METHOD_HOOKS = ("__del__", "__torch_function__", "__torch_dispatch__", "__getattribute__")
_PRECISION = ("torch.backends.", "torch.set_float32_matmul_precision", "torch.set_default_dtype", "torch.autocast",
              "torch.use_deterministic_algorithms", "torch.amp.autocast", "torch.cuda.amp.autocast")  # fmt: skip
_KERNEL_IN_STRING = re.compile(r"__global__|#\s*include")


def _python(file: str, text: str) -> list[Finding]:
    reader = _Reader(file)
    try:
        reader.visit(syntax.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return reader.found


class _Reader(ast.NodeVisitor):
    """Walks the syntax tree of a Python module, resolves imported names to full names, and records findings."""

    def __init__(self, file: str) -> None:
        self.found: list[Finding] = []
        self._file = file
        self._names: dict[str, str] = {}  # name in this module -> full name
        self._layers: set[str] = set()  # attributes of self that hold torch's own layers
        self._computes = False  # inside a function that is not a constructor

    def _add(self, node: ast.AST, rule: str, what: str) -> None:
        self.found.append(Finding(self._file, getattr(node, "lineno", 1), rule, what))

    def _full(self, node: ast.AST) -> str:
        """Returns the full name of the imported object at ``node``, such as ``torch.nn.Linear``. Returns an empty
        string if ``node`` is not an imported object."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return ""
        return ".".join([self._names[node.id], *reversed(parts)])

    def _named(self, node: ast.AST, full: str) -> None:
        """Adds a finding for each rule that lists the object ``full`` or a module that contains it. ``full`` is the
        full name of the object that ``node`` mentions, such as ``time.sleep``. An import or another use without a call
        also counts."""
        if full.startswith(_STREAMS):
            self._add(node, "stream", full)
        for rule, names in _BY_NAME.items():
            if any(full == name or full.startswith(name + ".") for name in names):
                self._add(node, rule, full)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._names[alias.asname or top] = alias.name if alias.asname else top
            self._named(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if node.module else alias.name
            self._names[alias.asname or alias.name] = full
            self._named(node, full)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in ast.walk(node):  # layers first: forward may precede the constructor
            if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
                full = self._full(part.value.func)
                if full.startswith("torch.nn.") and not full.startswith(("torch.nn.Parameter", "torch.nn.init")):
                    targets = [target for whole in part.targets for target in ast.walk(whole)]
                    self._layers.update(t.attr for t in targets if isinstance(t, ast.Attribute) and _is_self(t.value))
        self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _METHOD_HOOKS:
            self._add(node, "hook", node.name)
        decorators = [self._full(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
        if any(name.startswith("triton.") for name in decorators):
            return  # a kernel: its body is not torch code
        kept, self._computes = self._computes, node.name not in ("__init__", "get_inputs", "get_init_inputs")
        self.generic_visit(node)
        self._computes = kept

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Call(self, node: ast.Call) -> None:
        full = self._full(node.func)
        if full:
            self._called(node, full)
        elif isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            self._add(node, _BUILTINS[node.func.id], node.func.id)
        elif isinstance(node.func, ast.Name) and node.func.id == "setattr" and node.args:
            if owner := self._full(node.args[0]):
                self._add(node, "patch", f"setattr({owner}, ...)")
        elif isinstance(node.func, ast.Attribute) and self._computes:
            if _is_self(node.func.value):
                if node.func.attr in self._layers:
                    self._add(node, "torch", f"self.{node.func.attr}")
            elif node.func.attr in _METHODS:
                self._add(node, "torch", f".{node.func.attr}()")
        self.generic_visit(node)

    def _called(self, node: ast.Call, full: str) -> None:
        if full.startswith(_PRECISION):
            self._add(node, "precision", full)
        elif self._computes and full.startswith(("torch.", "torch.nn.functional.")):
            rest = full.removeprefix("torch.")
            if rest.startswith(("ops.", "_C.", "nn.functional.", "special.", "linalg.", "fft.")) or (
                rest.rpartition(".")[2] not in _NEW_TENSORS and not rest.startswith(tuple(_NO_COMPUTING))
            ):
                self._add(node, "torch", full)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and (full := self._full(node.value)):
                self._names[target.id] = full  # F = torch.nn.functional
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.MatMult) and self._computes:
            self._add(node, "torch", "@")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self._full(node)
        if full:
            self._named(node, full)
            if isinstance(node.ctx, ast.Store | ast.Del):
                self._add(node, "precision" if full.startswith(_PRECISION) else "patch", full)
        elif node.attr in ("__code__", "__globals__", "f_locals", "f_back", "__subclasses__"):
            self._add(node, "probe", f".{node.attr}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self._names.get(node.id, "").count("."):
            self._named(node, self._names[node.id])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            if node.value.startswith(("/proc", "/sys/", "/dev/")):
                self._add(node, "probe", node.value[:40])
            if _KERNEL_IN_STRING.search(node.value):
                for inner in _native(self._file, node.value):
                    self.found.append(Finding(inner.file, node.lineno + inner.line - 1, inner.rule, inner.what))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# -------------------------------------------------------------------------------------------------------- C++ and CUDA

_TOKEN = re.compile(  # an unclosed token ends with the text or line: a search for its end would be quadratic
    r"""
    (?P<comment> //(?:\\\n|[^\n])* | /\*.*?(?:\*/|\Z) )
  | R"(?P<mark>[^()\\\s]{0,16})\((?P<raw>.*?)(?:\)(?P=mark)"|\Z)
  | (?P<string> "(?:\\.|[^"\\\n])*"? )
  | (?P<character> '(?:\\.|[^'\\\n])+'? )
  | (?P<include> \#[ \t]*include[ \t]*[<"][^>"\n]*[>"]? )
  | (?P<name> [A-Za-z_]\w* (?: [ \t]*::[ \t]* [A-Za-z_]\w* )* )
  | (?P<number> \d[\w.']* )
  | (?P<sign> \S )
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """A token of C++ or CUDA source. ``kind`` is ``string``, ``include``, ``name``, or ``sign`` (a single other
    character). A qualified name, such as ``at::relu``, is one token."""

    kind: str
    text: str
    line: int


def tokens(text: str) -> Iterator[Token]:
    """Yields the tokens of C++ or CUDA source, without comments, numbers and character literals."""
    line, at = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        kind = match.lastgroup or "sign"
        if match["raw"] is not None:
            yield Token("string", match["raw"], line)
        elif kind == "string":
            yield Token("string", match[0].strip('"'), line)
        elif kind == "include":
            yield Token("include", re.split(r'[<"]', match[0])[1].rstrip('>"'), line)
        elif kind == "name":
            yield Token("name", re.sub(r"[ \t]", "", match[0]), line)
        elif kind == "sign":
            yield Token("sign", match[0], line)


_TORCH_TYPES = ALLOWED | {
    "Tensor", "TensorOptions", "ScalarType", "Scalar", "Device", "DeviceType", "IntArrayRef", "ArrayRef", "optional",
    "nullopt", "Half", "BFloat16", "kFloat", "kFloat32", "kFloat16", "kFloat64", "kDouble", "kHalf", "kBFloat16",
    "kInt", "kInt32", "kInt64", "kLong", "kCUDA", "kCPU", "kBool", "getCurrentCUDAStream", "Error",
    "cuda", "dtype", "device", "TensorList", "requires_grad", "TORCH_CHECK", "Layout", "kStrided",
    "CUDAGuard", "OptionalDeviceGuard", "str",
}  # fmt: skip
_NATIVE_TEXT = {
    "library": r"cublas\w*|cudnn\w*",
    "foreign": r"""(cusparse|cufft|cusolver|curand|nccl|nvjpeg|npp|cutensor|mkl|cblas|dnnl|sgemm|dgemm)\w*_?
        |(thrust|cub|cutlass|Eigen|oneapi|dnnl|xnnpack)::.*""",
    "native": r"""(dlopen|dlmopen|dlsym|dlvsym|dlinfo|dl_iterate_phdr|mprotect|mmap|mremap|memfd_create|syscall|ptrace
        |process_vm_\w+|cuModuleLoad\w*|cuLibraryLoad\w*|cuLink\w*|nvrtc\w*|nvJitLink\w*|cuGetProcAddress\w*
        |cudaGetDriverEntryPoint\w*|PyRun_\w+|PyImport_\w+|Py_CompileString\w*)""",
    "stream": r"""(cudaStreamCreate\w*|cuStreamCreate\w*|cudaEventCreate\w*|cuEventCreate\w*|cudaGraph\w+|cuGraph\w+
        |cudaStreamBeginCapture\w*|cudaStreamWaitEvent|cudaLaunchHostFunc\w*|cudaStreamAddCallback
        |cudaEventElapsedTime\w*|getStreamFromPool)""",
    "thread": r"""(pthread_create|std::(thread|jthread|async|packaged_task)|thrd_create|fork|vfork|clone|clone3|system
        |popen|execl|execlp|execle|execv|execvp|execve|posix_spawnp?|kill|raise|sigqueue)""",
    "probe": r"""(getenv|secure_getenv|environ|__environ|clock_gettime|gettimeofday|clock|time|times|timespec_get
        |nanosleep|usleep|getpid|getppid|gettid|getcwd|readlink|opendir|backtrace\w*|__rdtscp?|_rdtsc|getrusage|sched_\w+
        |std::chrono.*|std::this_thread.*|std::filesystem.*|socket|connect|cudaMemGetInfo|cuMemGetInfo\w*)""",
    "hook": r"(atexit|at_quick_exit|on_exit|pthread_atfork|std::atexit|signal|sigaction|setitimer|_exit)",
    "cache": r"""(cudaCtxResetPersistingL2Cache|cudaLimitPersistingL2CacheSize|cudaAccessPolicyWindow
        |cudaStreamAttributeAccessPolicyWindow|cudaAccessPropertyPersisting|CU_LIMIT_PERSISTING_L2_CACHE_SIZE)""",
    "precision": r"(cublasSetMathMode|cudnnSetConvolutionMathType|CUBLAS_TF32_TENSOR_OP_MATH)",
}
_NATIVE_NAMES = {rule: re.compile(text, re.VERBOSE) for rule, text in _NATIVE_TEXT.items()}
# A variable may share its name with one of these functions; only a call counts.
_CALLED = re.compile(r"clock|time|times|signal|kill|raise|system|clone|connect|socket|fork|mmap|environ")
_TORCH_HEADERS = ("torch/", "ATen/", "c10/")


def _native(file: str, text: str) -> Iterator[Finding]:
    stream = list(tokens(text))
    for index, token in enumerate(stream):
        if token.kind == "string":
            if token.text.startswith(("/proc", "/sys/", "/dev/")):
                yield Finding(file, token.line, "probe", token.text[:40])
        elif token.kind == "name":
            called = index + 1 < len(stream) and stream[index + 1].text in ("(", "<")
            yield from _native_name(file, token, called, stream[index - 1].text if index else "")
        elif token.kind == "include" and token.text.startswith(_TORCH_HEADERS) and file.endswith((".cu", ".cuh")):
            yield Finding(file, token.line, "torch", f"<{token.text}>")


def _native_name(file: str, token: Token, called: bool, before: str) -> Iterator[Finding]:
    name = token.text.removeprefix("::")
    top, _, last = name.partition("::")
    if top in ("torch", "at", "aten") and last:
        last = last.rpartition("::")[2]
        if called and last not in _TORCH_TYPES:
            yield Finding(file, token.line, "torch", name)
    if name in ("constructor", "destructor") and before == "(":
        yield Finding(file, token.line, "hook", f"__attribute__(({name}))")
    if before in (".", ">"):  # a member of an unknown object
        return
    for rule in _rules_of(name):
        if called or not _CALLED.fullmatch(name.removeprefix("std::")):
            yield Finding(file, token.line, rule, name)


@lru_cache(4096)
def _rules_of(name: str) -> tuple[str, ...]:
    names = {name, name.removeprefix("std::")}
    return tuple(rule for rule, pattern in _NATIVE_NAMES.items() if any(map(pattern.fullmatch, names)))
