"""Scores against numbers worked out by hand, and the rules of what counts."""

import json
import math

import pytest

from cuda_agent.policy.episode import Episode
from cuda_agent.rl.scores import compare, read_scores, score, write_scores
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.tasks.task import Task


def task(i: int, family: str = "teacher", ops: tuple[str, ...] = ("relu",)) -> Task:
    return Task(f"t{i}", f"# {i}", ops, "torch#1", family, "heldout")


def verdict(status="ok", seconds=1.0, eager=2.0, compiled=1.5, clock="model", mode="quick") -> dict:
    ok = status == "ok"
    return Verdict(
        status,
        "plan",
        mode,
        "cpu",
        clock,
        seconds=seconds if ok else None,
        eager_seconds=eager if ok else None,
        compile_seconds=compiled if ok else None,
    ).to_json()


def episode(i: int, final: dict | None, best: dict | None = None, reward: float | None = 1.0, n: int = 0) -> Episode:
    return Episode(
        id=f"e/{i}/{n}",
        task=f"t{i}",
        kind="agent",
        ids=[1, 2, 3, 4],
        mask=[0, 1, 0, 1],
        logprobs=[0.0] * 4,
        versions=[-1, 0, -1, 0],
        turns=[0, 0, 1, 1],
        reward=reward,
        ended="answer",
        verdict=final,
        best=best,
    )


def test_rates_and_geometric_means_by_hand():
    tasks = [task(i) for i in range(4)]
    scores = score(
        "base",
        [
            episode(0, verdict(seconds=1.0, eager=4.0, compiled=2.0)),  # 4x, 2x
            episode(1, verdict(seconds=1.0, eager=1.0, compiled=0.5)),  # 1x (not faster), 0.5x
            episode(2, verdict("wrong"), reward=-1.0),
            episode(3, None, reward=-1.0),
        ],
        tasks,
        "model",
    )
    row = scores.final.overall
    assert (row.tasks, row.correct_tasks) == (4, 2)
    assert row.passed == 0.5 and row.faster_eager == 0.25 and row.faster_compile == 0.25
    assert row.speedup_eager == pytest.approx(2.0) and row.speedup_compile == pytest.approx(1.0)
    assert scores.statuses == {"no_answer": 1, "ok": 2, "wrong": 1}
    assert scores.mean_tokens == 2 and scores.mean_turns == 2


def test_faster_means_by_any_margin_but_correct():
    barely = verdict(seconds=1.0, eager=1.0001, compiled=0.9999)
    row = score("p", [episode(0, barely)], [task(0)], "model").final.overall
    assert row.faster_eager == 1.0 and row.faster_compile == 0.0


def test_best_of_trajectory_is_never_below_the_final_answer():
    good, better, broken = verdict(seconds=1.0), verdict(seconds=0.5), verdict("build_error")
    scores = score("p", [episode(0, broken, better), episode(1, better, good)], [task(0), task(1)], "model")
    assert scores.final.overall.passed == 0.5 and scores.best.overall.passed == 1.0
    assert scores.best.overall.speedup_eager == pytest.approx(4.0)


def test_episodes_lost_by_our_side_are_counted_apart():
    lost = [episode(0, None, reward=None), episode(1, verdict("infra"), reward=None)]
    scores = score("p", [*lost, episode(2, verdict())], [task(i) for i in range(3)], "model")
    assert scores.infra == 2 and scores.episodes == 1 and scores.unscored == ["t0", "t1"]
    assert scores.final.overall.passed == 1.0


def test_every_task_weighs_the_same_however_many_samples_it_has():
    episodes = [episode(0, verdict(), n=n) for n in range(3)] + [episode(1, verdict("wrong"), reward=-1.0)]
    assert score("p", episodes, [task(0), task(1)], "model").final.overall.passed == 0.5


def test_correct_without_a_baseline_passes_but_is_not_faster():
    untimed = verdict(compiled=None)
    row = score("p", [episode(0, untimed)], [task(0)], "model").final.overall
    assert row.passed == 1.0 and row.faster_compile == 0.0 and row.speedup_compile is None
    assert row.speedup_eager == pytest.approx(2.0)


def test_the_gap_is_to_the_best_known_design_by_way_of_eager():
    fastest = {"t0": 4.0, "t1": 3.0, "t2": 5.0}  # speed-ups over eager; the best design of t3 is unknown
    episodes = [
        episode(0, verdict(seconds=1.0, eager=2.0), verdict(seconds=0.5, eager=2.0)),  # 2x, and on the way 4x
        episode(1, verdict(seconds=0.5, eager=2.0)),  # 4x: faster than the best design that the sweep drew
        episode(2, verdict("wrong")),
        episode(3, verdict(seconds=0.1, eager=2.0)),
    ]
    tasks = [task(i) for i in range(4)]
    scores = score("p", episodes, tasks, "model", fastest=fastest)
    assert [o.final.gap for o in scores.outcomes] == [2.0, 0.75, None, None]
    assert scores.final.overall.gap == pytest.approx((2.0 * 0.75) ** 0.5)
    assert scores.best.overall.gap == pytest.approx((1.0 * 0.75) ** 0.5)
    plain = score("p", episodes, tasks, "model")
    assert plain.final.overall.gap is None and plain.final.overall.speedup_eager == scores.final.overall.speedup_eager


def test_scores_without_a_gap_can_still_be_read(tmp_path):
    scores = score("p", [episode(0, verdict())], [task(0)], "model")
    write_scores(tmp_path / "scores.json", scores)
    older = json.loads((tmp_path / "scores.json").read_text(), object_hook=lambda o: {k: o[k] for k in o if k != "gap"})
    (tmp_path / "scores.json").write_text(json.dumps(older))
    assert read_scores(tmp_path / "scores.json").final.overall.gap is None


def test_families_and_operators_have_their_own_rows():
    tasks = [task(0, ops=("relu", "sum")), task(1, family="catalogue", ops=("sum",))]
    table = score("p", [episode(0, verdict()), episode(1, verdict("wrong"))], tasks, "model").final
    assert {row.group: row.passed for row in table.families} == {"teacher": 1.0, "catalogue": 0.0}
    assert {row.group: row.passed for row in table.operators} == {"sum": 0.5, "relu": 1.0}


def test_intervals_are_seeded_and_hold_the_value():
    tasks = [task(i) for i in range(20)]
    episodes = [episode(i, verdict(seconds=1 + i / 7) if i % 3 else verdict("wrong")) for i in range(20)]
    first, second = (score("p", episodes, tasks, "model", seed=5) for _ in range(2))
    assert first == second
    row = first.final.overall
    for metric in ("passed", "faster_eager", "speedup_eager", "speedup_compile"):
        low, high = row.intervals[metric]
        assert low < getattr(row, metric) < high


def test_unanimous_rates_do_not_claim_certainty_and_few_tasks_claim_nothing():
    tasks = [task(i) for i in range(24)]
    row = score("p", [episode(i, verdict("wrong")) for i in range(24)], tasks, "model").final.overall
    assert row.intervals["passed"] == (0.0, pytest.approx(1 - 0.025 ** (1 / 24))), "two-sided, as all the others"
    assert row.speedup_eager is None and row.intervals["speedup_eager"] is None
    few = score("p", [episode(i, verdict()) for i in range(3)], tasks, "model").final.overall
    assert few.intervals["passed"] is None


def test_tasks_that_all_agree_give_no_interval_of_width_zero():
    tasks = [task(i) for i in range(6)]
    half = score(
        "a", [episode(i, verdict() if n else verdict("wrong"), n=n) for i in range(6) for n in (0, 1)], tasks, "model"
    )
    assert (half.final.overall.passed, half.final.overall.intervals["passed"]) == (0.5, None)
    none, every = (score(w, [episode(i, verdict(w)) for i in range(6)], tasks, "model") for w in ("wrong", "ok"))
    passed = compare(none, every)[0]
    assert (passed.metric, passed.change, passed.interval) == ("passed", 1.0, None)


def test_paired_differences_are_sharper_than_unpaired_and_have_the_right_sign():
    tasks = [task(i) for i in range(30)]
    base = score("a", [episode(i, verdict() if i % 2 else verdict("wrong")) for i in range(30)], tasks, "model")
    rft = score("b", [episode(i, verdict() if i % 2 or i < 8 else verdict("wrong")) for i in range(30)], tasks, "model")
    passed = compare(base, rft)[0]
    assert passed.metric == "passed" and passed.tasks == 30
    assert passed.change == pytest.approx(4 / 30)
    assert passed.interval[0] >= 0.0, "no task got worse, so a paired resample cannot be negative"
    same = compare(base, base)
    assert [d.change for d in same] == [0.0, 0.0, 0.0, 1.0, 1.0], "no best design is known, so there is no gap"
    assert all(d.interval is None for d in same), "no spread is not certainty"


def test_paired_differences_use_common_tasks_only():
    tasks = [task(i) for i in range(3)]
    a = score("a", [episode(0, verdict()), episode(1, verdict("wrong"))], tasks, "model")
    b = score("b", [episode(1, verdict()), episode(2, verdict())], tasks, "model")
    passed = compare(a, b)[0]
    assert (passed.tasks, passed.before, passed.after) == (1, 0.0, 1.0)
    assert passed.interval is None


def test_speed_ups_are_compared_over_the_tasks_that_both_solved():
    """The second policy is twice as fast on what both solve, and also solves slow tasks that the first one does not."""
    tasks = [task(i) for i in range(14)]
    fast, faster, slow = (verdict(eager=speed, compiled=speed) for speed in (4.0, 8.0, 0.25))
    a = score("a", [episode(i, fast if i < 7 else verdict("wrong")) for i in range(14)], tasks, "model")
    b = score("b", [episode(i, faster if 1 <= i < 7 else slow) for i in range(14)], tasks, "model")
    found = {row.metric: row for row in compare(a, b)}
    assert (found["passed"].tasks, found["passed"].change) == (14, 0.5)
    for metric in ("speedup_eager", "speedup_compile"):
        row, ratios = found[metric], [1 / 16] + [2.0] * 6
        assert (row.tasks, row.before) == (7, pytest.approx(4.0))
        assert row.change == pytest.approx(math.prod(ratios) ** (1 / 7)) == pytest.approx(row.after / row.before)
        assert row.interval[0] < row.change < row.interval[1] == pytest.approx(2.0)
    few = score("c", [episode(i, faster if i < 4 else verdict("wrong")) for i in range(14)], tasks, "model")
    assert [(row.tasks, row.interval) for row in compare(a, few)[3:]] == [(4, None)] * 2


def test_without_a_task_that_both_solved_no_speed_is_compared():
    tasks = [task(i) for i in range(12)]
    a = score("a", [episode(i, verdict() if i < 6 else verdict("wrong")) for i in range(12)], tasks, "model")
    b = score("b", [episode(i, verdict("wrong") if i < 6 else verdict()) for i in range(12)], tasks, "model")
    assert [(row.tasks, row.before, row.after, row.change) for row in compare(a, b)[3:]] == [(0, None, None, None)] * 2


def test_two_clocks_never_meet():
    with pytest.raises(ValueError, match="clock"):
        score("p", [episode(0, verdict(clock="real"))], [task(0)], "model")
    real = score("a", [episode(0, verdict(clock="real"))], [task(0)], "real")
    model = score("b", [episode(0, verdict())], [task(0)], "model")
    with pytest.raises(ValueError, match="clock"):
        compare(real, model)


def test_strict_final_answers_and_quick_best_states_are_scored_apart():
    tasks = [task(i) for i in range(3)]
    episodes = [
        episode(0, verdict(seconds=0.5, mode="strict"), verdict(seconds=1.0)),  # quick mode took a longer time
        episode(1, verdict(seconds=1.0, mode="strict"), verdict("wrong")),
        episode(2, verdict("wrong", mode="strict"), verdict(seconds=0.25)),
    ]
    scores = score("p", episodes, tasks, "model")
    assert scores.mode == "strict"
    assert scores.final.overall.passed == scores.best.overall.passed == pytest.approx(2 / 3)
    assert [o.best.speedup_eager for o in scores.outcomes] == [2.0, None, 8.0]


def test_two_modes_never_meet():
    strict = score("a", [episode(0, verdict(mode="strict"))], [task(0)], "model")
    quick = score("b", [episode(0, verdict())], [task(0)], "model")
    with pytest.raises(ValueError, match="a was judged in strict mode, b in quick mode"):
        compare(strict, quick)
    with pytest.raises(ValueError, match="quick, strict"):
        score("p", [episode(0, verdict()), episode(1, verdict(mode="strict"))], [task(0), task(1)], "model")
    assert compare(strict, score("c", [episode(0, None, reward=-1.0)], [task(0)], "model"))[0].change == -1.0


def test_an_unknown_task_is_an_error():
    with pytest.raises(ValueError, match="t7"):
        score("p", [episode(7, verdict())], [task(0)], "model")


def test_nothing_scored_gives_empty_rows():
    scores = score("p", [], [task(0)], "model")
    assert scores.final.overall.passed is None and scores.final.families == []
    assert compare(scores, scores)[0].change is None


def test_scores_json_round_trips(tmp_path):
    scores = score("p", [episode(i, verdict()) for i in range(6)], [task(i) for i in range(6)], "model")
    write_scores(tmp_path / "scores.json", scores)
    assert read_scores(tmp_path / "scores.json") == scores
    text = (tmp_path / "scores.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isfinite(scores.final.overall.speedup_eager)
    (tmp_path / "scores.json").write_text('{"policy": "p"}')
    with pytest.raises(ValueError, match="outcomes"):
        read_scores(tmp_path / "scores.json")
