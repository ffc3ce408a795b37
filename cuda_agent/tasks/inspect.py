"""Analyses a task's source without running it: ``problems`` checks its form, ``recompute_ops`` finds its operators.

Both functions only read the syntax tree, so they are safe on untrusted source. They miss names that are made at run
time (``getattr(torch, name)``) and operators inside layers of other packages."""

import ast
import builtins
from collections.abc import Iterator

from cuda_agent import syntax

DEEPEST = 150  # most levels of a syntax tree; normal code has about twenty
Aliases = dict[str, str]  # local name -> dotted path from which it was imported


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These names are not operators: containers, module infrastructure, and functions that create or inspect tensors.
_NOT_LAYERS = _words("Module Parameter Buffer Sequential ModuleList ModuleDict ParameterList ParameterDict")
_MAKES_TENSORS = _words("""
    tensor as_tensor from_numpy zeros ones empty full rand randn randint randperm arange linspace logspace eye
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like normal bernoulli
""")
_NOT_OPS = _MAKES_TENSORS | _words("""
    manual_seed device dtype no_grad inference_mode set_grad_enabled is_tensor numel finfo iinfo get_default_dtype
    set_default_dtype use_deterministic_algorithms set_num_threads is_floating_point result_type promote_types
""")
# Tensor methods that return no tensor or do no work, without a function of the same name in ``torch``.
_NOT_TENSORS = _words("size dim numel item tolist stride is_contiguous element_size data_ptr get_device nelement")
_NO_WORK = _words("to float half double bfloat16 long int bool cpu cuda type type_as detach requires_grad_")
_TENSOR_ONLY = _words("view view_as contiguous expand expand_as repeat fill_ copy_ new_zeros new_ones new_full")
_OPERATORS: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder", ast.Pow: "pow", ast.MatMult: "matmul", ast.USub: "neg",
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip


_ALONE = "A task is one file that stands alone: copy what it needs into it; only installed packages can be imported."
_ADVICE = {
    "No module named": _ALONE,
    "attempted relative import": _ALONE,
    "0 active drivers": "Triton's kernels run on a GPU only, and here tasks run on a CPU.",
}  # words of an error -> advice


def problems(code: str) -> list[str]:
    """Returns what is wrong with the form of ``code`` as a task: one message for each problem, with a line number where
    there is one. If the form is right, the list is empty."""
    try:
        tree = syntax.parse(code)
    except SyntaxError as error:
        return [f"line {error.lineno}: syntax error: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, extremely deep nesting
        return [f"cannot be parsed: {error}"]
    if _depth(tree) > DEEPEST:  # the analysis is recursive
        return [f"nested more than {DEEPEST} levels deep"]
    found = []
    definitions, assigned = _definitions(tree), _assigned(tree)
    model = definitions.get("Model")
    if model is None and "Model" not in assigned:
        found.append("no class Model")
    elif isinstance(model, ast.ClassDef) and "forward" not in _methods(model) and len(model.bases) == 0:
        found.append(f"line {model.lineno}: class Model has no forward and no base class")
    for name in ("get_inputs", "get_init_inputs"):
        function = definitions.get(name, assigned.get(name))
        arguments = function.args if isinstance(function, ast.FunctionDef | ast.Lambda) else None
        if function is None:
            found.append(f"no function {name}")
        elif arguments and len(arguments.args) > len(arguments.defaults):
            found.append(f"line {function.lineno}: {name} must be callable without arguments")
    return found


def with_advice(error: str) -> str:
    """Returns ``error``, the message about a task that does not run, with advice if its cause is a common one."""
    return error + next((f". {advice}" for words, advice in _ADVICE.items() if words in error), "")


def import_aliases(tree: ast.AST) -> Aliases:
    """Returns the dotted path of every name that is imported anywhere in ``tree``, except by a relative import. For
    example, ``import torch.nn.functional as F`` maps ``F`` to ``torch.nn.functional``."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                name = item.asname or item.name.split(".")[0]
                aliases[name] = item.name if item.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
    return aliases


def dotted(node: ast.AST, aliases: Aliases) -> str | None:
    """Returns the dotted path of ``node`` (``F.relu`` -> ``torch.nn.functional.relu``), or None if ``node`` does not
    begin with an imported name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, aliases)):
        return f"{base}.{node.attr}"
    return None


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def op_name(path: str) -> str | None:
    """Returns the name by which ``Task.ops`` lists the torch operator with the dotted ``path``. For example, the name
    of ``torch.nn.functional.relu`` is ``F.relu``. Returns None if ``path`` is not a torch operator."""
    parts = path.split(".")
    if parts[0] != "torch" or len(parts) < 2:
        return None
    last = parts[-1]
    if parts[1] == "nn":
        if parts[2:3] == ["functional"]:
            return f"F.{last}" if len(parts) == 4 else None
        rest = parts[3:] if parts[2:3] == ["modules"] else parts[2:]
        return f"nn.{last}" if rest and last[:1].isupper() and last not in _NOT_LAYERS else None
    if parts[1] in ("linalg", "fft", "special") and len(parts) == 3:
        return f"torch.{parts[1]}.{last}"
    if len(parts) != 2 or last in _NOT_OPS or last[:1].isupper():
        return None
    return f"torch.{last}"


def recompute_ops(code: str) -> tuple[str, ...]:
    """Returns the torch operators that ``Model.forward`` uses, each one once, in order of first use.

    Names are as in the data set CUDA-Agent-Ops-6K: ``nn.Linear``, ``F.gelu``, ``torch.sum``, ``Tensor.view``. A layer
    made in ``__init__`` counts only if ``forward`` uses it. A Python operator (such as ``+``, named ``torch.add``) or a
    tensor method counts only if an operand certainly is a tensor: an argument of ``forward``, a parameter, or the
    result of an operator. Layers of ``transformers`` have their class name: ``transformers.LlamaRMSNorm``.

    Raises:
        SyntaxError: ``code`` is not valid Python.
        ValueError, RecursionError, MemoryError: ``code`` cannot be parsed for another reason (see ``syntax.parse``)."""
    tree = syntax.parse(code)
    reader = _Reader(import_aliases(tree), _definitions(tree))
    model = reader.definitions.get("Model")
    if isinstance(model, ast.ClassDef):
        reader.read_class(model)
    return tuple(dict.fromkeys(reader.ops))


def _depth(tree: ast.AST) -> int:
    """Returns the height of ``tree``, at most ``DEEPEST`` + 1. Deep trees are safe, because there is no recursion."""
    level, depth = [tree], 0
    while level and depth <= DEEPEST:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Returns the classes and functions of the module by name, also by other names that it gives them (``Model =
    Net``)."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    found: dict[str, ast.stmt] = {node.name: node for node in tree.body if isinstance(node, kinds)}
    for name, value in _assigned(tree).items():
        if isinstance(value, ast.Name) and value.id in found:
            found[name] = found[value.id]
    return found


def _assigned(tree: ast.Module) -> dict[str, ast.expr | ast.stmt]:
    """Returns the values that the module assigns to names, and its imports by the names that they bind."""
    found: dict[str, ast.expr | ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {item.asname or item.name: node for item in node.names}
    return found


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


class _Reader:
    """Follows the code that ``Model.forward`` runs, in order of evaluation, and adds each operator to ``self.ops``."""

    def __init__(self, aliases: Aliases, definitions: dict[str, ast.stmt]) -> None:
        self.aliases = aliases
        self.definitions = definitions
        self.ops: list[str] = []
        self.under_way: set[str] = set()

    def read_class(self, node: ast.ClassDef) -> None:
        if node.name in self.under_way:
            return
        self.under_way.add(node.name)
        methods = _methods(node)
        attributes = {
            name: value
            for statement in _walk(methods.get("__init__"))
            if isinstance(statement, ast.Assign | ast.AnnAssign) and (value := statement.value)
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            if (name := _self_attribute(target))
        }
        if forward := methods.get("forward"):
            self.read_function(forward, attributes, methods, skip_first=True)
        else:  # class Model(nn.Linear): the base class does the work
            for base in node.bases:
                self.note(base)
        self.under_way.discard(node.name)

    def read_function(self, node: ast.FunctionDef, attributes: dict, methods: dict, skip_first: bool = False) -> None:
        key = f"{node.name}:{node.lineno}"
        if key in self.under_way:
            return
        self.under_way.add(key)
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        scope = _Scope(self, attributes, methods, set(arguments[1:] if skip_first else arguments))
        for statement in node.body:
            scope.statement(statement)
        self.under_way.discard(key)

    def note(self, node: ast.AST) -> bool:
        """Adds the operator that ``node`` names to ``self.ops``. If ``node`` names a class that the task defines, adds
        the operators of this class instead. Returns whether ``node`` names an operator or such a class."""
        if isinstance(node, ast.Name) and isinstance(local := self.definitions.get(node.id), ast.ClassDef):
            self.read_class(local)
            return True
        path = dotted(node, self.aliases)
        if path is None:
            return False
        last = path.rsplit(".", 1)[-1]
        name = f"transformers.{last}" if path.startswith("transformers.") and last[:1].isupper() else op_name(path)
        if name is not None:
            self.ops.append(name)
        return name is not None

    def note_layers(self, value: ast.AST | None) -> None:
        """Adds the layers that the expression ``value`` constructs, including those in containers (``Sequential``)."""
        for call in _walk(value):
            if isinstance(call, ast.Call):
                self.note(call.func)
            elif isinstance(call, ast.Subscript) and (dotted(call.value, self.aliases) or "").endswith(".ACT2FN"):
                self.ops.append(f"transformers.ACT2FN[{ast.unparse(call.slice)}]")


class _Scope:
    """Reads the body of one function and adds its operators to ``self.reader.ops``. ``self.tensors`` holds the local
    names that certainly are tensors."""

    def __init__(self, reader: _Reader, attributes: dict, methods: dict, tensors: set[str]) -> None:
        self.reader, self.attributes, self.methods, self.tensors = reader, attributes, methods, tensors

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            tensor = self.value(node.value) if node.value else False
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node, ast.AugAssign) and (tensor or self.value(node.target)):
                tensor = True
                self.operator(node.op)
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        (self.tensors.add if tensor else self.tensors.discard)(name.id)
            return
        if isinstance(node, ast.For):
            self.reader.note_layers(self.attributes.get(_self_attribute(node.iter)))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.withitem):
                self.value(child.context_expr)

    def operator(self, op: ast.AST) -> None:
        if name := _OPERATORS.get(type(op)):
            self.reader.ops.append(f"torch.{name}")

    def value(self, node: ast.expr) -> bool:
        """Adds the operators of the expression ``node`` to ``self.reader.ops``, operands first. Returns whether the
        value of the expression certainly is a tensor."""
        match node:
            case ast.Name():
                return node.id in self.tensors
            case ast.Attribute():
                if name := _self_attribute(node):
                    made = self.attributes.get(name)
                    path = dotted(made.func, self.reader.aliases) if isinstance(made, ast.Call) else None
                    return (path or "").endswith(("nn.Parameter", "nn.Buffer"))
                return self.value(node.value) and node.attr in ("T", "mT", "data")
            case ast.BinOp():
                left, right = self.value(node.left), self.value(node.right)
                if left or right:
                    self.operator(node.op)
                return left or right
            case ast.UnaryOp():
                if tensor := self.value(node.operand):
                    self.operator(node.op)
                return tensor
            case ast.Compare():
                tensor = any([self.value(part) for part in (node.left, *node.comparators)])
                if tensor:
                    self.operator(node.ops[0])
                return tensor
            case ast.Subscript():
                tensor = self.value(node.value)
                self.value(node.slice)
                return tensor
            case ast.IfExp():
                self.value(node.test)
                return any([self.value(node.body), self.value(node.orelse)])
            case ast.Call():
                return self.call(node)
        return any([self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)])

    def call(self, node: ast.Call) -> bool:
        reader, function = self.reader, node.func
        method = function.attr if isinstance(function, ast.Attribute) and not dotted(function, reader.aliases) else None
        tensor = isinstance(function, ast.Attribute) and not _self_attribute(function) and self.value(function.value)
        given = any([self.value(argument) for argument in (*node.args, *(word.value for word in node.keywords))])
        if name := _self_attribute(function):
            if name in self.attributes:
                reader.note_layers(self.attributes[name])
                return True
            if name in self.methods:
                reader.read_function(self.methods[name], self.attributes, self.methods, skip_first=True)
            return True
        if isinstance(function, ast.Call):  # nn.Softmax(dim=-1)(x)
            reader.note_layers(function)
            return True
        if isinstance(function, ast.Subscript) and (name := _self_attribute(function.value)):
            reader.note_layers(self.attributes.get(name))
            return True
        if isinstance(function, ast.Name) and isinstance(local := reader.definitions.get(function.id), ast.FunctionDef):
            reader.read_function(local, {}, {})
            return given
        if method:
            if not tensor or method in _NOT_TENSORS or method.startswith("is_"):
                return False
            if method not in _NO_WORK:
                plain = method if method.startswith("__") else method.removesuffix("_")
                reader.ops.append(f"Tensor.{method}" if method in _TENSOR_ONLY else f"torch.{plain}")
            return True
        if reader.note(function):
            return True
        if path := dotted(function, reader.aliases):  # torch.zeros(...) is a tensor, math.sqrt(...) is none
            return path.startswith("torch.") and path.rsplit(".", 1)[-1] in _MAKES_TENSORS
        return given and isinstance(function, ast.Name) and not hasattr(builtins, function.id)


def _walk(tree: ast.AST | None) -> Iterator[ast.AST]:
    return ast.walk(tree) if tree else iter(())


def _self_attribute(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None
