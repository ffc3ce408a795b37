import math

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.optimize.whole.parts import parts_of


def module(name, seconds, same="", why="", **more):
    tensor = [[8, 4], "float32"]
    facts = {"kind": "Layer", "text": "Layer()", "calls": 1, "inputs": [tensor], "state": [["weight", *tensor]]}
    return facts | {"name": name, "seconds": seconds, "same": same or name, "why": why} | more


def shares(seconds, *modules):
    return {part.names: round(part.share, 3) for part in parts_of({"seconds": seconds, "modules": list(modules)})}


def test_the_highest_submodules_are_parts_in_the_order_of_their_times():
    small, large = module("small", 1), module("large", 5)
    assert list(shares(10, small, large, module("large.inner", 5)).items()) == [(("large",), 0.5), (("small",), 0.1)]


def test_a_submodule_with_most_of_the_time_is_split_if_its_own_submodules_have_it():
    inner = [module("net.0", 5), module("net.1", 3)]
    assert shares(10, module("net", 9), *inner) == {("net.0",): 0.5, ("net.1",): 0.3}
    assert shares(10, module("net", 9), module("net.0", 1)) == {("net",): 0.9}, "its own code has the time"


def test_what_cannot_be_a_task_is_replaced_by_its_submodules():
    blocks = module("blocks", 0, why="is not called")
    assert shares(10, blocks, module("blocks.0", 2), module("blocks.1", 3, why="is called 2 times")) == {
        ("blocks.0",): 0.2
    }


def test_equal_submodules_are_one_part():
    blocks = [module(f"blocks.{number}", 3, same="block") for number in range(3)]
    (part,) = parts_of({"seconds": 10, "modules": [module("blocks", 0, why="is not called"), *blocks]})
    assert part.names == ("blocks.0", "blocks.1", "blocks.2") and part.title == "blocks.0 and 2 equal"
    assert part.share == pytest.approx(0.9)
    assert part.bound == pytest.approx(10), "Amdahl's law, if the part took no time"
    assert part.expected(3.0) == pytest.approx(1 / (0.1 + 0.3)), "if it were three times as fast"


@pytest.mark.parametrize(
    "trace",
    [
        None,
        [],
        {"seconds": 1.0},
        {"seconds": 0.0, "modules": []},
        {"seconds": math.nan, "modules": []},
        {"seconds": 1.0, "modules": [{"name": "a"}]},
        {"seconds": 1.0, "modules": [module("../../etc", 1)]},
        {"seconds": 1.0, "modules": [module("a/b", 1)]},
        {"seconds": 1.0, "modules": [module("", 1)]},
        {"seconds": 1.0, "modules": [module("a" * 300, 1)]},
        {"seconds": 1.0, "modules": [module("a", math.inf)]},
        {"seconds": 1.0, "modules": [module("a", -1.0)]},
        {"seconds": 1.0, "modules": [module("a", 1, inputs=[["x", "float32"]])]},
    ],
)
def test_a_trace_is_checked_because_the_model_may_write_it(trace):
    with pytest.raises(TaskError, match="the trace of the model cannot be read"):
        parts_of(trace)


def test_text_of_a_trace_is_printable():
    (part,) = parts_of({"seconds": 1.0, "modules": [module("a", 1, kind="\x1b[2J", text="x\x1b]0;y\x07\nz")]})
    assert "\x1b" not in part.module.kind + part.module.text and part.module.text.count("\n") == 1
