import asyncio
import json

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.optimize.folder import OptimizeError, SearchOrder
from cuda_agent.optimize.whole.folder import Spent, is_whole, opened, order_for, read_search
from cuda_agent.optimize.whole.parts import Module, Part
from cuda_agent.optimize.whole.report import PartResult
from cuda_agent.optimize.whole.run import keep_fastest
from cuda_agent.sandbox.wire import Solution, Verdict
from cuda_agent.tasks.task import Task

ORDER = SearchOrder("http://127.0.0.1:1/v1", "m", tokens=1000, minutes=60.0, money=10.0, price_in=1.0)
TASK = Task("model", "code of the model")


def part(name, share=0.5):
    return Part(Module(name, "Layer", "", 1.0, "", (), (), name), (name,), share)


def result(name, isolated=2.0):
    solution = Solution("plan", {"plan.json": name})
    return PartResult(part(name), "", solution, None, Verdict("ok", "plan", "strict", "cpu", "real", "", 1.0, isolated))


def chosen(results, speeds):
    """Lets ``keep_fastest`` choose. ``speeds`` maps names of parts in the model to its speed-up, or to a status."""
    asked = []

    async def judge(parts):
        names = "".join(one.part.module.name for one in parts)
        asked.append(names)
        match speeds[names]:
            case None:
                return None
            case str(status):
                return Verdict(status, "python", "strict", "cpu", "real", "no")
            case speed:
                return Verdict("ok", "python", "strict", "cpu", "real", "", 1.0, speed)

    verdict = asyncio.run(keep_fastest(results, judge))
    return verdict and verdict.speedup_eager, [one.part.module.name for one in results if one.kept], asked


def test_solutions_are_kept_as_long_as_they_make_the_model_faster():
    results = [result(name) for name in "abcd"]
    speeds = {"a": 1.2, "b": 0.9, "c": 1.5, "d": 1.1, "ca": 1.9, "cad": 1.895}
    assert chosen(results, speeds) == (1.9, ["a", "c"], ["a", "b", "c", "d", "ca", "cad"])
    notes = {one.part.module.name: one.note for one in results}
    assert notes == {"a": "", "b": "no gain in the model", "c": "", "d": "no gain beside the others"}


def test_a_solution_that_is_wrong_in_the_model_is_left_out():
    results = [result("a"), result("b")]
    assert chosen(results, {"a": "wrong", "b": 1.3}) == (1.3, ["b"], ["a", "b"])
    assert results[0].note == "wrong in the model: no"


def test_without_a_gain_nothing_is_kept():
    assert chosen([result("a"), result("b")], {"a": 1.0, "b": 1.004}) == (None, [], ["a", "b"])
    assert chosen([], {}) == (None, [], [])


def test_a_person_who_stops_the_judge_keeps_the_best_so_far():
    assert chosen([result("a"), result("b")], {"a": 1.3, "b": None}) == (1.3, ["a"], ["a", "b"])
    assert chosen([result("a"), result("b")], {"a": 1.3, "b": 1.5, "ba": None}) == (1.5, ["b"], ["a", "b", "ba"])


def test_each_part_gets_its_share_of_the_rest_of_the_budget():
    parts = [part("a", 0.75), part("b", 0.25)]
    first = order_for(ORDER, parts, Spent(), Spent())
    assert (first.tokens, first.minutes, first.money) == (750, 45.0, 7.5)
    second = order_for(ORDER, parts[1:], Spent(tokens=300, seconds=600, money=1.0), Spent())
    assert (second.tokens, second.minutes, second.money) == (700, 50.0, 9.0), "what the first one has left over, too"
    again = order_for(ORDER, parts, Spent(200, 1200, 2.0), Spent(100, 600, 1.0))
    assert again.tokens == 100 + 600, "a search counts what it used before it is resumed"
    assert order_for(ORDER, parts[1:], Spent(tokens=1000), Spent()) is None
    assert order_for(SearchOrder("u", "m", minutes=None), parts, Spent(9, 9, 9), Spent()).minutes is None


def test_a_new_command_that_fails_early_leaves_nothing(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), opened(ORDER, SandboxConfig(), TASK, folder, False):
        assert is_whole(folder) and json.loads((folder / "run.json").read_text())["order"]["tokens"] == 1000
        (folder / "parts").mkdir()
        (folder / "parts" / "a.py").write_text("task")
        1 / 0  # noqa: B018
    assert not folder.exists()


def test_a_folder_with_anything_else_stays_as_it_is(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(OptimizeError, match="is there already"), opened(ORDER, SandboxConfig(), TASK, tmp_path, False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_with_a_played_turn_is_resumed_only_for_the_same_model(tmp_path):
    with opened(ORDER, SandboxConfig(), TASK, tmp_path, False):
        (tmp_path / "parts" / "a").mkdir(parents=True)
        (tmp_path / "parts" / "a" / "transcript.jsonl").write_text("")
    with pytest.raises(OptimizeError, match="--resume"), opened(ORDER, SandboxConfig(), TASK, tmp_path, False):
        pass
    with opened(ORDER, SandboxConfig(), TASK, tmp_path, True):
        pass
    other = Task("model", "another model")
    with pytest.raises(OptimizeError, match="has changed"), opened(ORDER, SandboxConfig(), other, tmp_path, True):
        pass


def test_a_folder_that_is_no_search_gets_a_clear_message(tmp_path):
    assert not read_search(tmp_path / "none", ORDER).begun
    (tmp_path / "transcript.jsonl").write_text('{"kind": "spent", "attempt": "x"}\n')
    with pytest.raises(OptimizeError, match="not the search of a part"):
        read_search(tmp_path, ORDER)
