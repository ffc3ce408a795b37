"""What untrusted code can do to those who run it: their files, their messages, their handling of its end."""

import asyncio

import numpy
import pytest

from cuda_agent.sandbox.build import BuildError, first_errors
from cuda_agent.sandbox.check import mismatch
from cuda_agent.sandbox.wire import Solution, TaskError, Tensor
from tests.sandbox.conftest import CHAIN, KERNEL, Running, plan_solution, task


def test_a_death_by_a_signal_without_a_name_is_a_crash_and_not_our_fault(running: Running) -> None:
    suicide = "#include <signal.h>\n#include <unistd.h>\n" + KERNEL.replace("long low", "kill(getpid(), 35); long low")
    verdict = running.evaluate(task(), plan_solution(suicide))
    assert (verdict.status, verdict.reward) == ("crash", -1)
    assert "signal 35" in verdict.message


@pytest.mark.parametrize("name", ["@options.cpp", "-fplugin=x.cpp", "a/" + "b" * 300 + ".cpp", "kernels", "nul\0.cpp"])
def test_a_file_name_that_is_none_is_a_build_error(running: Running, name: str) -> None:
    solution = plan_solution()
    verdict = running.evaluate(task(), Solution("plan", {**solution.files, name: "int a;"}))
    assert (verdict.status, verdict.reward) == ("build_error", -1)


def test_text_that_is_no_text_is_a_build_error(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution(KERNEL + "// \ud800"))
    assert verdict.status == "build_error"


def test_messages_of_untrusted_code_are_one_line_that_can_be_shown(running: Running) -> None:
    code = "class ModelNew:\n    def __init__(self, *_):\n        raise ValueError('\\x1b[2J\\u202ecrash\\ud800')"
    verdict = running.evaluate(task(), Solution("python", {"model_new.py": code}))
    assert verdict.status == "build_error" and verdict.message.isprintable()
    assert first_errors("k.cpp:1:1: error: \x1b[2Jno\n").isprintable()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("x.to(torch.float8_e4m3fn)", "tensors of float8_e4m3fn, which are not supported"),
        ("x", "nonsense"),
    ],
)
def test_a_task_of_unknown_types_or_with_a_forged_description_is_a_task_error(
    running: Running, output: str, words: str
) -> None:
    code = CHAIN.replace("torch.relu(x) * self.scale", output)
    if words == "nonsense":
        code += (
            "\nimport os, struct, json\nbody = json.dumps({'inputs': 7}).encode()\n"
            "for d in range(3, 9):\n    try: os.write(d, struct.pack('<BBHI', 61, 0, 0, len(body)) + body)\n"
            "    except OSError: pass\n"
        )
    with pytest.raises(TaskError, match=words):
        running.evaluate(task(code), plan_solution())


def test_numbers_too_far_apart_leave_a_verdict_that_is_json() -> None:
    far = numpy.array([3e38], numpy.float32)
    message, error = mismatch([far], [-far], [Tensor((1,), "float32")], 1e-2)
    assert message and numpy.isfinite(error)


def test_inputs_of_other_generators_come_from_the_judges_seed(running: Running) -> None:
    """Workers are forked from one parent: a generator that nobody seeds has the same state in all of them."""
    code = CHAIN.replace("return [torch.randn(32, 128)]", "return [torch.from_numpy(numpy.random.rand(32, 128))]")
    code = "import numpy\n" + code
    guess = (
        "import numpy, torch\nguesses = [torch.from_numpy(numpy.random.rand(32, 128)) for _ in range(40)]\n"
        "class ModelNew(torch.nn.Module):\n    def __init__(self, scale):\n        super().__init__()\n"
        "        self.scale = scale\n    def forward(self, x):\n"
        "        assert not any(bool((x == guess).all()) for guess in guesses), 'guessed'\n"
        "        return torch.relu(x) * self.scale\n"
    )
    verdict = running.evaluate(task(code), Solution("python", {"model_new.py": guess}))
    assert (verdict.status, verdict.message) == ("ok", "")


def test_two_builds_at_once_of_a_name_that_cannot_be_written_both_fail(running: Running) -> None:
    async def both() -> list[object]:
        files = {"k.cpp": "int a;", "k.cpp/b.cpp": "int b;"}
        builds = [running.sandbox._builder.library(files, ["k.cpp"]) for _ in range(2)]
        return list(await asyncio.gather(*builds, return_exceptions=True))

    assert all(isinstance(error, BuildError) for error in running.wait(both()))
