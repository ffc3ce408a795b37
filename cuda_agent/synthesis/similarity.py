"""Computes how similar two tasks are, by the subtrees of their syntax trees (Baxter et al., "Clone Detection Using
Abstract Syntax Trees", 1998).

Each task's class ``Model`` gives a multiset of subtrees; the similarity is Dice's coefficient of two multisets. The
subtrees ignore local names, docstrings and the values of constants. Different code for the same function, such as
``x**2`` and ``torch.square(x)``, is not similar. ``duplicate_key`` also compares constants and the rest of the file."""

import ast
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

from cuda_agent import syntax
from cuda_agent.tasks.inspect import Aliases, dotted, import_aliases, is_docstring

Shingles = Counter[int]


def shingles(code: str) -> Shingles:
    """Returns the multiset of hashed subtrees of the class ``Model``. Without this class, returns the subtrees of the
    whole file. For invalid Python, returns an empty multiset."""
    try:
        tree = syntax.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return Counter()
    model = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None)
    found: Shingles = Counter()
    _fold(model or tree, import_aliases(tree), found)
    return found


def similarity(left: Shingles, right: Shingles) -> float:
    total = left.total() + right.total()
    return 2.0 * (left & right).total() / total if total else 1.0


def nearest(code: str, references: Sequence[tuple[str, Shingles]]) -> tuple[str, float]:
    """Returns (name, similarity) of the reference most similar to ``code``, or ("", 0.0) without references."""
    mine = shingles(code)
    scores = [(name, similarity(mine, theirs)) for name, theirs in references]
    return max(scores, key=lambda score: score[1], default=("", 0.0))


def duplicate_key(code: str) -> str:
    """Returns the SHA-256 of the structure of ``code``. It does not depend on local names, formatting, comments,
    docstrings or type annotations. The name of a top-level constant (``N = 4``) is replaced by its value. All
    constants are compared, so tasks with equal keys have equal operators and equal shapes."""
    tree = syntax.parse(code)
    aliases = import_aliases(tree)
    constants: dict[str, ast.expr] = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names: dict[str, str] = {}
    kept = [
        _canonical(node, aliases, constants, names)
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
        and not is_docstring(node)
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def _fold(node: ast.AST, aliases: Aliases, found: Shingles) -> tuple[int, int]:
    """Returns (hash, height) of the tree ``node``, ignoring local names. Adds the hashes of this tree and of all its
    subtrees, except leaves, to ``found``."""
    if isinstance(node, ast.Name | ast.Attribute) and (path := dotted(node, aliases)):
        return _hash(path), 0
    label, height, parts = type(node).__name__, 0, []
    if isinstance(node, ast.Constant):
        label += type(node.value).__name__
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr_context) or is_docstring(child):
            continue
        part, depth = _fold(child, aliases, found)
        parts.append(part)
        height = max(height, depth + 1)
    if _is_method(node):
        label += node.attr
    value = _hash((label, *parts))
    if height:
        found[value] += 1
    return value, height


def _hash(value: object) -> int:
    """Returns a hash that is the same in every process, unlike ``hash`` of a string."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big")


def _is_method(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Returns whether ``node`` is an attribute of an object other than ``self``, such as ``x.softmax``. Comparisons use
    the names of these attributes, but not those of attributes of ``self``, such as ``self.fc1``."""
    return isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")


def _canonical(node: ast.AST, aliases: Aliases, constants: dict[str, ast.expr], names: dict[str, str]) -> str:
    """Returns the subtree ``node`` as text. Names that were not imported become n0, n1, ... as they first appear."""
    if isinstance(node, ast.Name | ast.Attribute) and (path := dotted(node, aliases)):
        return path
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    if isinstance(node, ast.Constant):
        return repr(node.value)
    parts = []
    for field, value in ast.iter_fields(node):
        if field in ("ctx", "type_comment", "type_params", "annotation", "returns"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                if not is_docstring(item):
                    parts.append(_canonical(item, aliases, constants, names))
            elif isinstance(item, str):
                is_local = not _is_method(node) and not isinstance(node, ast.keyword)
                parts.append(names.setdefault(item, f"n{len(names)}") if is_local else item)
            elif item is not None:
                parts.append(repr(item))
    return f"{type(node).__name__}({','.join(parts)})"
