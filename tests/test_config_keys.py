"""Every configuration key does something: code reads it, and it is in a cache key or listed as one that says where."""

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

import cuda_agent
from cuda_agent.compose import key_paths, section_values
from cuda_agent.config import Config
from cuda_agent.pipeline.graph import STAGES

PACKAGE = Path(cuda_agent.__file__).parent
KEYS = key_paths()
LEAVES = [path for path in KEYS if not any(other.startswith(f"{path}.") for other in KEYS)]

# Keys that are in no cache key, and why.  A path or the beginning of paths.
IN_NO_CACHE_KEY = {
    "graph": "which stages there are; it changes their inputs, or removes them",
    "run.": "where a run lives and how it is executed",
    "training.": "how a trainer computes; the result is the same up to rounding",
    "sandbox.servers": "where solutions are judged",
    "sandbox.token_env": "a secret's name",
    "sandbox.token_file": "a secret's place",
    "policy.vllm.servers": "where the policy is served",
    "ray.address": "where Ray runs",
    "ray.trainers": "how a trainer is spread over machines",
    "ray.trainer_cpus": "what Ray sets aside",
    "ray.trainer_gpus": "what Ray sets aside",
    "ray.worker_cpus": "what Ray sets aside",
    "ray.worker_gpus": "what Ray sets aside",
}

SECTIONS: dict[str, set[str]] = defaultdict(set)  # name of a section's class -> names of its sections
for path, info in KEYS.items():
    if path not in LEAVES:
        SECTIONS[info.annotation.__name__].add(path.rsplit(".", 1)[-1])
SECTION_NAMES = {name for names in SECTIONS.values() for name in names}


def reads(tree: ast.AST) -> set[tuple[str, str]]:
    """(section, attribute) of every attribute that a file reads, directly or with ``getattr``.

    An attribute belongs to the sections that its own expression names, or a function around it: by name
    (``ctx.config.rft``) or by class (``settings: Sft``)."""
    found: set[tuple[str, str]] = set()

    def sections_named(node: ast.AST) -> set[str]:
        names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return (names & SECTION_NAMES) | {section for name in names for section in SECTIONS.get(name, ())}

    def visit(node: ast.AST, around: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            here = around
            match child:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                    here = around | sections_named(child)
                case ast.Attribute(value=base, attr=name, ctx=ast.Load()):
                    found.update((section, name) for section in (around | sections_named(base) | {""}))
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    found.update((section, name) for section in around)
            visit(child, here)

    visit(tree, set())
    return found


@pytest.fixture(scope="module")
def read_somewhere() -> set[tuple[str, str]]:
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "config.py"]
    return set().union(*(reads(ast.parse(file.read_bytes())) for file in files))


def is_read(path: str, found: set[tuple[str, str]]) -> bool:
    section, _, key = path.rpartition(".")
    return (section.rsplit(".", 1)[-1], key) in found


@pytest.mark.parametrize("path", LEAVES)
def test_some_code_reads_every_key(read_somewhere, path):
    assert is_read(path, read_somewhere)


@pytest.mark.parametrize("path", ["rft.nothing_reads_this", "rft.clip_low", "collect.gate", "lora.steps"])
def test_a_key_that_no_code_reads_is_found(read_somewhere, path):
    assert not is_read(path, read_somewhere)


def test_how_a_read_is_recognised():
    found = reads(ast.parse("def f(settings: Sft):\n    return settings.lr\ndef g(x):\n    return x.epochs\n"))
    assert ("rft", "lr") in found and ("rft", "epochs") not in found
    assert ("rft", "epochs") in reads(ast.parse("print(ctx.config.rft.epochs)"))
    assert ("rft", "epochs") not in reads(ast.parse("ctx.config.rft.epochs = 1"))


def changed(value: Any, annotation: Any) -> Any:
    """Another value; validators are not asked."""
    if get_origin(annotation) is Literal:
        return next(choice for choice in annotation.__args__ if choice != value)
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list() | tuple():
            return [*value, "other"]
        case None if annotation != (str | None):
            return 5
        case _:
            return f"{value} other"


def with_other(config: Config, path: str) -> Config:
    names = path.split(".")
    models = [config]
    for name in names[:-1]:
        models.append(getattr(models[-1], name))
    value: Any = changed(getattr(models[-1], names[-1]), KEYS[path].annotation)
    for model, name in zip(reversed(models), reversed(names), strict=True):
        value = model.model_copy(update={name: value})
    return value


@pytest.mark.parametrize("path", LEAVES)
def test_every_key_is_in_the_cache_key_of_a_stage_or_listed(path):
    config = Config(runtime="ray")  # the sections that are in a cache key in this case alone are, too
    other = with_other(config, path)
    assert other != config
    stages = [row for row in STAGES if section_values(config, row.config) != section_values(other, row.config)]
    listed = [beginning for beginning in IN_NO_CACHE_KEY if path.startswith(beginning)]
    assert bool(stages) != bool(listed)


def test_the_list_holds_no_key_that_is_gone():
    for beginning in IN_NO_CACHE_KEY:
        assert any(path.startswith(beginning) for path in LEAVES), beginning
