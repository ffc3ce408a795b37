import random

import pytest
from agent_cases import CODE, KERNEL, PLAN, TASK
from hypothesis import given
from hypothesis import strategies as st

from cuda_agent.agent.prompt import agent_messages, compact_source, one_shot_messages, parse_answer, write_answer
from cuda_agent.agent.tools import TOOLS, describe, failed, solution_of
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.sandbox.workspace.worker import _PARAMETERS
from cuda_agent.synthesis.teacher.family import sample_task


def test_the_compact_form_keeps_the_computation_and_drops_the_rest():
    assert compact_source(CODE) == (
        "forward(x):\n x = torch.relu(x)\n x = x + 0.5\n return x\ninputs: [torch.randn(128, 256)]"
    )


def test_the_compact_form_keeps_what_other_tasks_have():
    code = (
        'import torch\nN = 3\nclass Model(torch.nn.Module):\n    """Words."""\n'
        "    def __init__(self, a: int):\n        super(Model, self).__init__()\n        self.w = nn.Linear(a, a)\n"
        "    def forward(self, x: torch.Tensor) -> torch.Tensor:\n        # words\n        return self.w(x)\n"
        "def get_inputs():\n    x = torch.rand(N, 3)\n    return [x]\ndef get_init_inputs():\n    return [3]\n"
    )
    assert compact_source(code) == (
        "N = 3\n__init__(a):\n self.w = nn.Linear(a, a)\nforward(x):\n return self.w(x)\n"
        "get_inputs():\n x = torch.rand(N, 3)\n return [x]\ninit_inputs: [3]"
    )


@pytest.mark.parametrize("code", ["def (", "\0", "x = " + "(" * 500 + ")" * 500, "x = " + "-" * 30000 + "1"])
def test_code_that_cannot_be_read_is_shown_as_it_is(code):
    assert compact_source(code) == code


def test_different_tasks_stay_different_in_the_compact_form():
    tasks = {task.digest: task for task in (sample_task(random.Random(n)) for n in range(200))}
    assert len({compact_source(task.code) for task in tasks.values()}) == len(tasks)


def test_the_games_can_be_told_apart_and_are_short():
    single, agent = one_shot_messages(TASK, "compact"), agent_messages(TASK, "compact")
    assert single[0] != agent[0] and single[1] == agent[1]
    assert len(single[0]["content"]) < 10


@pytest.mark.parametrize("format", ["plan", "extension", "python"])
def test_the_full_form_holds_the_task_and_the_form_of_its_lane(format):
    for messages in (one_shot_messages(TASK, "full", format), agent_messages(TASK, "full", format)):
        assert CODE.rstrip() in messages[1]["content"]
        assert ("plan.json" if format == "plan" else "model_new.py") in messages[0]["content"]
    assert ("plan.json" in one_shot_messages(TASK, "full", format)[0]["content"]) == (format == "plan")


def test_an_answer_is_read_as_it_was_written():
    files = {"kernels/fused.cpp": KERNEL, "plan.json": PLAN + "\n"}
    assert parse_answer("Some words.\n" + write_answer(files) + "\nMore.") == files


@pytest.mark.parametrize(
    "text",
    [
        "",
        "```cpp\nint x;\n```",
        "```cpp kernels/a.cpp\nint x;",
        "```cpp /etc/a.cpp\nint x;\n```",
        "```cpp kernels/../../a.cpp\nint x;\n```",
        "```python model.py\nx\n```",
        "x ```cpp kernels/a.cpp\nint x;\n```",
    ],
)
def test_what_is_no_file_of_the_folder_is_none(text):
    assert parse_answer(text) == {}


def test_of_two_blocks_with_one_path_the_last_counts():
    assert parse_answer("```cpp a.cpp\n1\n```\n```cpp a.cpp\n2\n```") == {"a.cpp": "2\n"}


@given(st.text(alphabet="`\n cpe./x", max_size=200))
def test_any_text_can_be_read(text):
    for path in parse_answer(text):
        assert not path.startswith("/") and ".." not in path.split("/")


def verdict(status="ok", message="", **times):
    return Verdict(status, "plan", "quick", "cpu", "real", message, **times)


def test_what_the_commands_say_in_few_words():
    fast = verdict(seconds=1e-3, eager_seconds=1.424e-3, compile_seconds=0.968e-3)
    assert [describe(fast, command, "compact") for command in ("compile", "verify", "profile")] == [
        "compile: ok", "verify: ok", "profile: 1.42x eager 0.97x compile, best",
    ]  # fmt: skip
    faster = verdict(seconds=1e-5, eager_seconds=3.14159e-5, compile_seconds=1e-3)
    assert describe(faster, "profile", "compact", fast) == "profile: 3.1x eager 100x compile, best"
    assert describe(fast, "profile", "compact", faster) == "profile: 1.42x eager 0.97x compile, slower"
    assert describe(fast, "profile", "compact", fast) == "profile: 1.42x eager 0.97x compile, best"


def test_profile_compares_a_solution_with_the_best_one_so_far():
    slow, fast = (verdict(seconds=1e-3, eager_seconds=e, compile_seconds=1e-3) for e in (0.9e-3, 2e-3))
    text = describe(slow, "profile", "full", fast)
    assert text.splitlines()[:2] == [
        "profile: 0.90x eager 1.00x compile", "slower than the best solution so far: 2.0x eager 1.00x compile",
    ]  # fmt: skip
    assert describe(fast, "profile", "full", slow).splitlines()[1] == "the best solution so far"
    assert "best" not in describe(slow, "verify", "full", fast)


def test_a_mistake_in_few_words_does_not_depend_on_the_inputs():
    wrong = verdict(
        "wrong", "check 2 of 5: output 0[3, 4]: 3 of 12 values differ, first at (0, 1): 0.25 instead of 1.5"
    )
    assert describe(wrong, "verify", "compact") == "verify: wrong"
    assert describe(wrong, "profile", "compact") == "profile: wrong"
    assert "0.25 instead of 1.5" in describe(wrong, "verify", "full")
    assert describe(wrong, "compile", "compact") == "compile: ok"


def test_a_build_error_in_few_words_is_the_first_one():
    text = (
        "kernels/fused.cpp: In function 'void f()':\n"
        "kernels/fused.cpp:3:12: error: 'u' was not declared in this scope\n"
        "    3 |   u = 1;\nkernels/fused.cpp:9:1: error: another"
    )
    for command in ("compile", "verify", "profile"):
        assert describe(verdict("build_error", text), command, "compact") == (
            "build error: kernels/fused.cpp:3: 'u' was not declared in this scope"
        )
        assert failed(verdict("build_error", text), command)
    assert describe(verdict("build_error", "there is no plan.json"), "verify", "compact") == (
        "build error: there is no plan.json"
    )
    column = "kernels/fused.cpp:3: error: 'u' was not declared in this scope"
    assert describe(verdict("build_error", column), "verify", "compact").endswith(
        ".cpp:3: 'u' was not declared in this scope"
    )
    nvrtc = 'kernels/fused.cu(2): error: identifier "u" is undefined\n    u = tanh(v);'
    assert describe(verdict("build_error", nvrtc), "verify", "compact") == (
        'build error: kernels/fused.cu:2: identifier "u" is undefined'
    )


def test_commands_fail_where_they_should():
    assert [failed(verdict("wrong"), command) for command in ("compile", "verify", "profile")] == [False, True, True]
    assert not failed(verdict(), "verify")


def test_only_the_files_of_the_lane_are_the_solution():
    files = {"model.py": "", "SKILL.md": "", "notes.md": "", "plan.json": "{}", "kernels/a.cpp": "", "model_new.py": ""}
    assert set(solution_of(files, "plan").files) == {"plan.json", "kernels/a.cpp"}
    assert set(solution_of(files, "extension").files) == {"model_new.py", "kernels/a.cpp"}
    assert set(solution_of(files, "python").files) == {"model_new.py"}


def test_the_schemas_are_what_the_workspace_checks():
    assert set(_PARAMETERS) == {tool["function"]["name"] for tool in TOOLS}
    for tool in TOOLS:
        schema = tool["function"]["parameters"]
        checked = _PARAMETERS[tool["function"]["name"]]
        assert set(schema["properties"]) <= {name.rstrip("?") for name in checked}
        assert set(schema["required"]) == {name for name in checked if not name.endswith("?")}
