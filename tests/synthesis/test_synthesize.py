"""Filters, split, data card and the driver.

The prober here runs tasks in this process: what is composed in these tests is the project's own code.  Its times are
made up from the operators, so that the results do not depend on the machine; whether a task runs is real.
"""

import asyncio
import hashlib
import json
import random
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch

from cuda_agent.config import Synthesis
from cuda_agent.errors import TryAgain
from cuda_agent.sandbox.wire import LOST, Probe
from cuda_agent.synthesis import filters
from cuda_agent.synthesis.compose import as_task
from cuda_agent.synthesis.filters import (
    SourceFilter,
    TaskRefused,
    check_choice,
    check_compiled,
    check_eager,
    check_headroom,
    yields,
)
from cuda_agent.synthesis.synthesize import AHEAD, optima, synthesize
from cuda_agent.synthesis.teacher.family import (
    combination,
    ending,
    heldout_combinations,
    is_heldout,
    ops_combination,
    sample_task,
)
from cuda_agent.synthesis.teacher.optimum import Optimum, Swept
from tests.synthesis.test_similarity import CODE, RENAMED

GOOD = Probe(deterministic=True, eager_seconds=1e-3, compile_seconds=8e-4)
SMALL = Synthesis(train=4, heldout=6, catalogue=3, max_candidates=20)


class InProcess:
    """Probes for real on the meta device (shapes and errors), with times drawn from the task's digest."""

    def __init__(self, die_after: int | None = None) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.die_after = die_after

    async def probe(self, task, compile=True):
        if self.die_after is not None and len(self.calls) >= self.die_after:
            raise KeyboardInterrupt
        self.calls.append((task.digest, compile))
        names: dict = {}
        try:
            with torch.device("meta"), torch.no_grad():
                exec(task.code, names)
                names["Model"](*names["get_init_inputs"]()).eval()(*names["get_inputs"]())
        except Exception as error:
            return Probe(error=f"Traceback\n{error}")
        chance = hashlib.sha256(task.digest.encode()).digest()[0]
        return Probe(
            deterministic=chance != 0,
            mutants={"bf16": 1e-2, "zeros": 1e-2 if chance in (1, 2) else None},
            eager_seconds=2e-2 if chance < 30 else 1e-3,
            compile_seconds=1e-3 if compile else None,
        )


def make(config=SMALL, seed=0, prober=None, **more):
    return asyncio.run(synthesize(config, seed, prober or InProcess(), **more))


def test_as_many_tasks_of_each_kind_as_asked_for():
    seen = []
    tasks, card = make(progress=lambda done, total: seen.append((done, total)))
    kinds = Counter((task.family, task.split) for task in tasks)
    assert kinds == {("teacher", "train"): 4, ("teacher", "heldout"): 6, ("catalogue", "heldout"): 3}
    assert card["short"] == {} and seen[-1] == (13, 13)
    assert len({task.name for task in tasks}) == len({task.digest for task in tasks}) == 13


def test_a_set_without_the_teachers_family_is_whole():
    tasks, card = make(Synthesis(train=4, heldout=0, catalogue=3, catalogue_share=1, max_candidates=20))
    assert Counter((task.family, task.split) for task in tasks) == {
        ("catalogue", "train"): 4,
        ("catalogue", "heldout"): 3,
    }
    assert not card["short"]


def test_heldout_combinations_are_their_own_and_never_trained_on():
    tasks, _ = make(Synthesis(train=20, heldout=20, catalogue=0, max_candidates=60))
    family = [task for task in tasks if task.family == "teacher"]
    train = {combination(task) for task in family if task.split == "train"}
    heldout = [combination(task) for task in family if task.split == "heldout"]
    assert len(set(heldout)) == len(heldout) == 20
    assert not train & set(heldout)
    assert heldout_combinations(family, combination) == set(heldout)


@pytest.mark.parametrize("seed", range(3))
def test_each_ending_of_a_held_out_task_has_a_training_task(seed):
    config = Synthesis(train=20, heldout=16, catalogue=0, max_candidates=80)
    tasks, card = make(config, seed, device="cuda")
    trained, heldout = ({ending(task) for task in tasks if task.split == split} for split in ("train", "heldout"))
    assert len(tasks) == 36 and len(heldout) > 8 and heldout <= trained
    assert card["untrained_endings"] == []


@pytest.mark.parametrize("seed", range(3))
def test_where_training_tasks_abound_each_ending_of_a_held_out_task_has_two(seed):
    tasks, card = make(Synthesis(train=40, heldout=16, catalogue=0, max_candidates=140), seed, device="cuda")
    trained, heldout = (Counter(ending(one) for one in tasks if one.split == split) for split in ("train", "heldout"))
    assert len(tasks) == 56 and len(heldout) > 8 and not card["short"]
    assert all(trained[kind] >= 2 for kind in heldout)


def test_an_ending_that_no_training_task_can_have_costs_no_task():
    class Refusing(InProcess):
        async def probe(self, task, compile=True):
            trained = not is_heldout(combination(task), 0, 16 / 36)
            if compile and trained and ending(task).endswith("norm"):
                return Probe(deterministic=True, eager_seconds=1e-3, error="refused")
            return await super().probe(task, compile)

    config = Synthesis(train=20, heldout=16, catalogue=0, max_candidates=200)
    tasks, card = make(config, prober=Refusing(), device="cuda")
    missing = {ending(task) for task in tasks if task.split == "heldout" and ending(task).endswith("norm")}
    assert missing and card["untrained_endings"] == sorted(missing)
    assert card["probes"]["compiled"] < 120 and len(tasks) == 36


def test_training_tasks_of_the_catalogue_keep_away_from_held_out_combinations():
    tasks, _ = make(Synthesis(train=8, heldout=3, catalogue=5, catalogue_share=0.5, max_candidates=40))
    own = [task for task in tasks if task.family == "catalogue"]
    assert Counter(task.split for task in own) == {"train": 4, "heldout": 5}
    train = {ops_combination(task) for task in own if task.split == "train"}
    assert not train & {ops_combination(task) for task in own if task.split == "heldout"}


def test_the_same_seed_gives_the_same_set_and_another_seed_another():
    assert make() == make()
    assert make()[0] != make(seed=1)[0]


def test_a_killed_synthesis_goes_on_without_repeating_a_probe():
    whole = InProcess()
    expected = make(prober=whole)
    kept: dict = {}
    first = InProcess(die_after=7)
    with pytest.raises(KeyboardInterrupt):
        make(prober=first, report=lambda key, value: kept.update({key: json.loads(json.dumps(value))}))
    assert len(kept) == 7
    second = InProcess()
    assert make(prober=second, known=kept) == expected
    assert sorted(first.calls + second.calls) == sorted(whole.calls)


def test_probes_of_the_next_candidates_run_beside_a_compilation_and_change_no_result():
    class Slow(InProcess):
        running = most = 0

        async def probe(self, task, compile=True):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(random.random() * 3e-3)
            self.running -= 1
            return await super().probe(task, compile)

    one, two = Slow(), Slow()
    assert make(prober=one) == make(prober=two) == make()
    assert 1 < one.most <= 1 + AHEAD["cpu"]
    assert len(set(one.calls)) == len(one.calls)


def test_what_a_composer_wrote_is_kept_when_it_does_not_repeat_itself():
    class Scribe:
        repeatable = False

        def __init__(self):
            self.written = 0

        async def compose(self, rng):
            self.written += 1
            size = f"{self.written}{id(self)}"
            return as_task(CODE.replace("* 0.5", f"* 0.{size}").replace("gelu", "silu"), "torch#3")

    config = Synthesis(train=1, heldout=1, catalogue=1, max_candidates=20)
    kept: dict = {}
    composer = Scribe()
    tasks, _ = make(
        config, composer=composer, report=lambda key, value: kept.update({key: json.loads(json.dumps(value))})
    )
    again = Scribe()
    assert make(config, composer=again, known=kept)[0] == tasks
    assert composer.written and not again.written


def test_no_more_candidates_are_compiled_than_allowed_and_the_card_says_what_is_missing():
    prober = InProcess()
    tasks, card = make(Synthesis(train=5, heldout=5, catalogue=5, max_candidates=6), prober=prober)
    assert sum(compiled for _, compiled in prober.calls) == 6 >= len(tasks)
    assert sum(card["short"].values()) == 15 - len(tasks)


def test_a_family_of_one_task_ends_and_is_short(monkeypatch):
    monkeypatch.setattr("cuda_agent.synthesis.stream.sample_task", lambda rng, device: sample_task(Random(3)))
    tasks, card = make()
    assert sum(task.family == "teacher" for task in tasks) <= 1
    assert card["yield"]["teacher"][2]["dropped"] > 10  # new bytes
    assert card["short"]


def test_the_card_is_plain_json_and_adds_up():
    tasks, card = make()
    assert json.loads(json.dumps(card)) == card
    for split in ("by_split", "by_family", "by_data_source", "by_family_and_split"):
        assert sum(card[split].values()) == len(tasks) == sum(card["eager_ms"]["counts"])
    for family, rows in card["yield"].items():
        assert [row["filter"] for row in rows] == list(filters.FILTERS)
        assert all(row["entered"] == row["passed"] + row["dropped"] for row in rows)
        assert all(above["passed"] == below["entered"] for above, below in pairwise(rows))
        assert rows[-1]["passed"] == card["by_family"][family]
    assert card["ops"] == Counter(op for task in tasks for op in task.ops)


def test_what_resembles_the_evaluation_set_is_dropped(tmp_path):
    free, _ = make()
    for task in free:
        (tmp_path / f"{task.name}.py").write_text(task.code)
    tasks, card = make(SMALL.model_copy(update={"evaluation_set": str(tmp_path)}))
    assert not {task.digest for task in tasks} & {task.digest for task in free}
    assert card["evaluation_set"]["tasks"] == 13 and card["evaluation_set"]["largest_similarity"] == 1.0
    dropped = {row["filter"]: row["dropped"] for rows in card["yield"].values() for row in rows}
    assert dropped["unlike the evaluation set"] > 0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"error": "Traceback\nValueError: x"}, "runs in eager"),
        ({"eager_seconds": None}, "runs in eager"),
        ({"deterministic": False}, "deterministic"),
        ({"mutants": {"zeros": None, "inputs ignored": 1e-3}}, "rejects wrong answers"),
        ({"eager_seconds": 1e-6}, "time window"),
        ({"eager_seconds": 1.0}, "time window"),
    ],
)
def test_the_published_filters_on_a_probe(change, name):
    check_eager(GOOD, (1e-4, 5e-3))
    with pytest.raises(TaskRefused) as refused:
        check_eager(Probe(**(GOOD.__dict__ | change)), (1e-4, 5e-3))
    assert refused.value.filter == name


def test_what_does_not_compile_is_refused_with_its_last_line():
    check_compiled(GOOD)
    with pytest.raises(TaskRefused, match="compiles: Unsupported"):
        check_compiled(Probe(error="a\nUnsupported\n", deterministic=True, eager_seconds=1e-3))


@pytest.mark.parametrize(
    ("median", "right", "kept"),
    [(1.4, 0.8, False), (1.5, 0.8, True), (1.0, 0.69, True), (1.0, 0.7, False), (None, 0.0, False)],
)
def test_the_choice_of_a_design_must_matter_to_speed_or_correctness(median, right, kept):
    swept = Swept(2.0, median and 1.0, median, right)
    if kept:
        check_choice(swept)
    else:
        with pytest.raises(TaskRefused, match="choice matters"):
            check_choice(swept)


def test_headroom_compares_speedups_over_eager():
    optimum = Optimum("d", seconds=2.0, eager_seconds=6.0)  # 3 times as fast as eager
    probe = Probe(eager_seconds=20.0, compile_seconds=8.0)  # torch.compile: 2.5 times
    check_headroom(optimum.speedup, probe, headroom=1.19)
    with pytest.raises(TaskRefused, match="headroom: torch"):
        check_headroom(optimum.speedup, probe, headroom=1.21)
    with pytest.raises(TaskRefused, match="headroom: the judge"):
        check_headroom(Optimum().speedup, probe, headroom=1.19)


class FakeSweep:
    """Draws a result from the task's digest. Of five tasks, one is refused because its design does not matter, one by
    the sweep's headroom, and one by the judge's."""

    def __init__(self):
        self.tasks, self.timed = [], []

    async def __call__(self, task):
        self.tasks.append(task)
        kind = int(task.digest, 16) % 5
        surprises = ("design: wrong",) if kind == 2 else ()
        fast = 0.25 if kind else 0.9
        return Swept(1.0, fast, 0.5 if kind > 1 else 0.26, 0.9 if kind == 1 else 0.5, ("d",), surprises)

    async def judged(self, task, swept):
        self.timed.append(task)
        kind = int(task.digest, 16) % 5
        return Optimum("d", 0.9 if kind == 4 else 0.3, 1.0, ("d: refused",) if kind == 3 else ())


def test_a_sweep_refuses_tasks_whose_design_does_not_matter_or_that_leave_no_headroom():
    config = Synthesis(train=8, heldout=6, catalogue=3, max_candidates=60, headroom=1.15)
    prober, sweep, kept = InProcess(), FakeSweep(), {}
    tasks, card = make(config, seed=1, prober=prober, sweep=sweep, report=kept.__setitem__)
    family = [task for task in tasks if task.family == "teacher"]
    assert len(tasks) == 17 and {int(task.digest, 16) % 5 for task in family} == {2, 3}
    assert all(task.family == "teacher" for task in sweep.tasks)
    compiled = {digest for digest, compile in prober.calls if compile}
    swept = {task.digest for task in sweep.tasks}
    assert not [digest for digest in compiled & swept if int(digest, 16) % 5 == 1], "its choice does not matter"
    assert {int(task.digest, 16) % 5 for task in sweep.timed} == {2, 3, 4}, "one without headroom is not judged"
    dropped = {row["filter"]: row["dropped"] for row in card["yield"]["teacher"]}
    assert dropped["choice matters"] > 0 and dropped["headroom"] > 0
    assert {line.partition(": ")[2] for line in card["surprises"]} == {"design: wrong", "d: refused"}
    found = optima(tasks, kept)
    assert found.keys() == {task.name for task in family} and {one.seconds for one in found.values()} == {0.3}


def test_a_task_whose_best_design_the_sandbox_cannot_time_is_refused_as_lost_and_judged_again_later():
    class Failing(FakeSweep):
        async def judged(self, task, swept):
            await super().judged(task, swept)
            return Optimum()

    kept = {}
    config = Synthesis(train=4, heldout=2, catalogue=0, max_candidates=20, headroom=1.15)
    tasks, card = make(config, sweep=Failing(), report=kept.__setitem__)
    assert tasks == [] and not [key for key in kept if key.startswith("optimum/")]
    assert card["reasons"]["teacher"]["headroom: the judge could not time the best designs"] > 0


def test_a_sandbox_that_fails_again_and_again_ends_synthesis_and_a_single_failure_refuses_a_task():
    class Failing(InProcess):
        probes = 0

        def __init__(self, fails):
            super().__init__()
            self.fails = fails

        async def probe(self, task, compile=True):
            self.probes += 1
            if self.fails(self.probes):
                return Probe(error=f"{LOST}the judge was lost")
            return await super().probe(task, compile)

    kept = {}
    tasks, card = make(prober=Failing(lambda number: number % 4 == 0), report=kept.__setitem__)
    assert tasks and any(f"{LOST}the judge was lost" in reason for reason in card["reasons"]["teacher"])
    assert not any("judge was lost" in str(value) for value in kept.values())
    prober = Failing(lambda number: number > 3)
    with pytest.raises(TryAgain, match="the judge was lost"):
        make(prober=prober)
    assert prober.probes < 20


def test_known_sweeps_are_not_repeated_and_without_a_sweep_no_filter_changes():
    config = Synthesis(train=4, heldout=4, catalogue=0, max_candidates=60, headroom=1.15)
    sweep, kept = FakeSweep(), {}
    expected = make(config, sweep=sweep, report=lambda key, value: kept.update({key: json.loads(json.dumps(value))}))
    again = FakeSweep()
    assert make(config, sweep=again, known=kept) == expected and not again.tasks and not again.timed
    _, card = make(config)
    dropped = {row["filter"]: row["dropped"] for row in card["yield"]["teacher"]}
    assert dropped["choice matters"] == dropped["headroom"] == 0 and card["surprises"] == []


def test_copies_and_renamed_copies_are_refused():
    source = SourceFilter([], 0.9)
    source.check(as_task(CODE, ""))
    with pytest.raises(TaskRefused, match="new bytes"):
        source.check(as_task(CODE, ""))
    with pytest.raises(TaskRefused, match="new structure"):
        source.check(as_task(RENAMED, ""))
    source.check(as_task(CODE.replace("N = 16", "N = 32"), ""))


def test_yields_chain():
    rows = yields(Counter({"runs in eager": 3, "composed": 1}), passed=6)
    assert rows[0]["entered"] == 10 and rows[-1]["passed"] == 6


def test_the_split_depends_on_seed_and_combination_alone():
    sides = [is_heldout(f"c{number}", 0, 0.3) for number in range(2000)]
    assert sides == [is_heldout(f"c{number}", 0, 0.3) for number in range(2000)]
    assert 500 < sum(sides) < 700
    assert sides != [is_heldout(f"c{number}", 1, 0.3) for number in range(2000)]
    assert not any(is_heldout(f"c{number}", 0, 0.0) for number in range(50))
    assert all(is_heldout(f"c{number}", 0, 1.0) for number in range(50))
