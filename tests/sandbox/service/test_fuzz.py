"""Whatever is sent, the service answers with a verdict or a clear refusal, and goes on.

A few hundred examples here; thousands under the mark ``nightly``.
"""

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuda_agent.sandbox.wire import Verdict
from tests.sandbox.conftest import CHAIN, KERNEL, PLAN
from tests.sandbox.service.serving import ONE_JUDGE, QUICK, Served, body

ROUTES = (
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/v1/about"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs/{}"),
    ("GET", "/v1/jobs/{}/events"),
    ("DELETE", "/v1/jobs/{}"),
    ("POST", "/v1/evaluate"),
    ("POST", "/v1/probe"),
    ("POST", "/v1/spec"),
    ("POST", "/v1/build"),
    ("POST", "/v1/workspaces"),
    ("POST", "/v1/workspaces/{}/calls"),
    ("POST", "/v1/workspaces/{}/answers/{}"),
    ("GET", "/v1/workspaces/{}/files"),
    ("DELETE", "/v1/workspaces/{}"),
)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ("--workspaces", "2", "--idle-seconds", "1", "--queue", "64", *QUICK)
    with Served(tmp_path_factory.mktemp("fuzzed"), *arguments, wrapper=ONE_JUDGE) as served:
        yield served.ready()
        assert served.process.poll() is None, "it lived through all of it"


TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)  # lone surrogates too
WORDS = st.sampled_from(
    ["task", "code", "solution", "format", "files", "mode", "kind", "priority", "plan", "quick", "evaluate", "spec",
     "inputs", "shape", "dtype", "float32", "tool", "arguments", "Bash", "command", "protected", "text", "error"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | WORDS
ANY = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | TEXT, inner, max_size=6), max_leaves=20
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["evaluate", "probe", "spec", "build"]) | LEAVES,
        "task": st.fixed_dictionaries({"code": st.just("import nothing") | LEAVES}) | ANY,
        "solution": st.fixed_dictionaries(
            {"format": st.sampled_from(["plan", "extension", "python"]) | LEAVES, "files": ANY}
        ),
        "spec": st.fixed_dictionaries(
            {name: ANY | st.just([]) for name in ("inputs", "outputs", "arguments", "init")}
            | {"weights": ANY | st.just({})}
        ),
        "priority": st.integers(-200, 200),
        "files": st.dictionaries(TEXT, TEXT, max_size=3) | ANY,
        "tool": WORDS | TEXT,
        "arguments": ANY,
        "text": TEXT,
    },
)


def check_request(served: Served, route: tuple[str, str], value: object, names: tuple[str, str]) -> None:
    method, path = route
    address = path.format(*names)
    content = json.dumps(value).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json", "X-Workspace-Owner": "nobody"}
    answer = served.http.request(method, address, content=content, headers=headers)
    if answer.is_error:
        assert answer.status_code < 500, (route, value, answer.text)
        error = answer.json()["error"]
        assert error["kind"] and error["message"] and len(answer.content) < 4000
    elif address == "/v1/evaluate":
        check_verdict(answer)


def check_verdict(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    verdict = Verdict.from_json(answer.json())
    assert verdict.status in ("ok", "build_error", "wrong", "cheat", "timeout", "crash"), verdict.message
    assert len(verdict.message) <= 4000 and "/tmp/" not in verdict.message


NAMES = st.tuples(st.sampled_from(["x", "0", "%00", "..%2f", "1"]), st.sampled_from(["1", "-1", "x", "9" * 30]))


@examples(150)
@given(st.sampled_from(ROUTES), ANY | ALMOST, NAMES)
def test_arbitrary_json_to_every_route_is_refused_or_answered(served, route, value, names):
    check_request(served, route, value, names)


@pytest.mark.nightly
@examples(2500)
@given(st.sampled_from(ROUTES), ANY | ALMOST, NAMES)
def test_much_arbitrary_json_to_every_route_is_refused_or_answered(served, route, value, names):
    check_request(served, route, value, names)


EXPRESSIONS = st.sampled_from(
    ["in0", "out0", "in0.numel", "init0", "tmp", "in0.shape[0]", "in0.shape[-9]", "cdiv(in0.numel, 0)", "1 << 99",
     "w:x", "9" * 400, "(" * 300, "in0.shape[in0.numel]", "select(1, 2)", "min(1)", "out0 + 1", "__import__('os')",
     "lambda: 0", "in0.numel ** 9", "1.5", "-(-1)", "max(1,2,3)", "in0.numel // 0", "f'{in0}'", "[i for i in ()]", ""]
)  # fmt: skip
VALUES = EXPRESSIONS | st.integers() | st.floats() | st.none() | TEXT | st.booleans()
NODE = st.fixed_dictionaries(
    {},
    optional={
        "kernel": st.sampled_from(["kernels/chain.cpp", "plan.json", "kernels", "nothing.cpp"]) | VALUES,
        "function": st.sampled_from(["chain", "std::min<int>", "chain; int main", "operator new"]) | VALUES,
        "grid": VALUES | st.integers(1, 8),
        "args": st.lists(VALUES, max_size=5) | VALUES,
        "memset": VALUES,
        "value": VALUES,
        "library": VALUES,
        "block": VALUES,
    },
)
PLANS = st.fixed_dictionaries(
    {"nodes": st.lists(NODE | st.just(PLAN["nodes"][0]) | ANY, max_size=3) | ANY},
    optional={
        "workspaces": st.dictionaries(
            st.sampled_from(["tmp", "in0", "a b", "out9"]) | TEXT,
            st.fixed_dictionaries({"size": VALUES}, optional={"dtype": VALUES | WORDS, "init": VALUES}) | ANY,
            max_size=2,
        )
        | ANY,
        "guards": st.lists(VALUES, max_size=3) | ANY,
        "extra": ANY,
    },
)


def check_plan(served: Served, plan: object) -> None:
    """The kernel does not compile, so that what passes for a plan is over soon."""
    files = {"plan.json": json.dumps(plan), "kernels/chain.cpp": "#error no\n"}
    check_verdict(served.http.post("/v1/evaluate", json=body() | {"solution": {"format": "plan", "files": files}}))


@examples(150)
@given(PLANS | ANY)
def test_whatever_a_plan_says_there_is_a_verdict(served, plan):
    check_plan(served, plan)


@pytest.mark.nightly
@examples(2500)
@given(PLANS | ANY)
def test_whatever_many_plans_say_there_is_a_verdict(served, plan):
    check_plan(served, plan)


FILE_NAMES = st.sampled_from(
    ["plan.json", "model_new.py", "kernels", "kernels/a.cpp", "kernels/a.cpp/b.cpp", "kernels/a_binding.cpp", "b.h",
     "binding.cpp", "binding_registry.h", "x" * 199, "library.so", "trampoline.cpp", "kernels/-o", "@x", "runtime.cpp"]
)  # fmt: skip
CONTENTS = st.sampled_from(
    ["", "\0", "import torch", "class ModelNew: pass", "REGISTER_BINDING(f, f);", "#error no", '#include "/etc/passwd"',
     "#include <torch/extension.h>", "def f(:", "(" * 3000, "\ufeffx = 1", json.dumps(PLAN)]
) | st.text(max_size=40)  # fmt: skip
SOLUTIONS = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["plan", "extension"]),
        "files": st.dictionaries(FILE_NAMES, CONTENTS, max_size=6),
    }
)


def check_solution(served: Served, solution: dict) -> None:
    check_verdict(served.http.post("/v1/evaluate", json=body() | {"solution": solution}))


@examples(50)
@given(SOLUTIONS)
def test_whatever_files_a_solution_has_there_is_a_verdict(served, solution):
    check_solution(served, solution)


@pytest.mark.nightly
@examples(1000)
@given(SOLUTIONS)
def test_whatever_files_many_solutions_have_there_is_a_verdict(served, solution):
    check_solution(served, solution)


def test_after_all_of_it_an_honest_solution_is_ok(served):
    answer = served.http.post("/v1/evaluate", json=body(code=CHAIN + f"# {len(KERNEL)}\n"))
    assert answer.json()["status"] == "ok"
