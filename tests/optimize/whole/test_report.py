from pathlib import Path

from cuda_agent.agent.progress import Goal
from cuda_agent.optimize.whole.folder import Spent
from cuda_agent.optimize.whole.parts import Module, Part
from cuda_agent.optimize.whole.report import PartResult, WholeOutcome, outcome_lines, part_lines
from cuda_agent.sandbox.wire import Verdict


def part(name, share, *more):
    return Part(Module(name, "Layer", "", 1.0, "", (), (), name), (name, *more), share)


PARTS = [part("blocks.0", 0.75, "blocks.1"), part("norm", 0.03)]


def verdict(speed, format="plan"):
    return Verdict("ok", format, "strict", "cpu", "real", "", 1.0, speed, speed, advice=["about the code that joins"])


def outcome(kept):
    first = PartResult(PARTS[0], "" if kept else "no gain in the model", None, None, verdict(3.0), verdict(1.6), kept)
    whole = verdict(1.6, "python") if kept else None
    results = [first, PartResult(PARTS[1], PARTS[1].left_out)]
    return WholeOutcome(Path("out"), results, whole, kept, "answer", Goal(1.5), Spent(10, 2.0, 0.5))


def test_the_table_of_parts_says_what_each_could_bring_and_what_is_left_out():
    head, blocks, norm, rest = part_lines(PARTS)
    assert head.split() == ["part", "class", "share", "model", "at", "most"]
    assert blocks.split() == ["blocks.0", "and", "1", "equal", "Layer", "75%", "4.00×"]
    assert "left out: less than 5% of the time" in norm and rest.split()[-1] == "22%"


def test_the_result_has_the_gain_of_a_part_beside_that_of_the_model():
    lines = outcome_lines(outcome(kept=True))
    row = next(line for line in lines if line.startswith("blocks.0"))
    assert row.split()[4:8] == ["75%", "3.00×", "2.00×", "1.60×"] and row.endswith("in the result")
    assert "torch.compile compiles the rest of the model" in lines
    assert "target 1.5× is reached" in lines and "out/model_new.py" in lines[-2]
    assert not any("about the code that joins" in line for line in lines)
    told = outcome(kept=True).to_json()
    assert told["reached"] is True and told["spent"] == {"tokens": 10, "seconds": 2.0, "money": 0.5}
    assert told["parts"][0]["integrated"] == 1.6 and told["parts"][1]["isolated"] is None


def test_without_a_gain_the_result_says_so():
    lines = outcome_lines(outcome(kept=False))
    assert any(line.startswith("blocks.0") and line.endswith("no gain in the model") for line in lines)
    assert (
        lines[-1].startswith("no part makes the whole model faster")
        and outcome(kept=False).to_json()["verdict"] is None
    )
