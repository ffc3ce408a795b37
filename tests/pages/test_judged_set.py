"""The page and the CSV of a set: counts that add up, claims beside measurements, hostile text shown as text."""

import csv
import io
import re
from dataclasses import replace

from cuda_agent.pages.judged_set import OUTCOMES, JudgedRow, accounts, claims, fast_rows, render, to_csv
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.scores import score
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.tasks.task import Task

TASKS = [Task(f"level1/{n}", str(n), family="level1") for n in range(1, 5)]


def verdict(status="ok", seconds=1.0, eager=2.0, compile=1.5, **more):
    times = (seconds, eager, compile) if status == "ok" else (None, None, None)
    return Verdict(status, "python", "quick", "cpu", "real", more.pop("message", ""), *times, **more)


def row(record, outcome="ok", task="level1/1", **more):
    return JudgedRow(record, task, "level1", outcome, verdict=verdict(outcome), **more)


def scores(rows):
    episodes = [
        Episode(one.record, one.task, "single", [], [], [], [], [], 1.0, "answer", verdict=one.verdict.to_json())
        for one in rows
    ]
    return score("set", episodes, TASKS, "real")


def test_counts_of_outcomes_and_of_claims_add_up():
    rows = [
        row("a", claim_eager=2.1),  # measured: 2.0
        row("b", claim_eager=4.0),
        row("c", "wrong", claim_eager=3.0),
        replace(row("d", claim_eager=3.0), outcome="no_solution", verdict=None),
        replace(row("e", claim_eager=3.0), verdict=verdict(seconds=None)),
        row("f"),
    ]
    assert sum(count for _, count, _ in accounts(rows)) == len(rows)
    found = claims(rows)
    assert [found[key] for key in ("all", "confirmed", "lower", "untimed", "rejected", "unjudged")] == [
        5,
        1,
        1,
        1,
        1,
        1,
    ]
    assert abs(found["claimed"] - (2.1 * 4) ** 0.5) < 1e-9 and abs(found["measured"] - 2.0) < 1e-9
    assert claims([row("f")]) == {}


def test_fast_p_counts_tasks_by_the_share_of_their_samples():
    rows = [row("a"), row("b", "wrong"), row("c", task="level1/2")]
    found = dict(fast_rows(scores(rows), 4))
    assert found[0.0] == [0.75, 0.75, 0.375, 0.375] and found[1.5] == [0.75, 0.0, 0.375, 0.0]
    assert found[2.0] == [0.0] * 4, "more than p times, not p times"
    assert fast_rows(scores([]), 0)[0][1] == [None] * 4


def test_hostile_text_is_shown_as_text_in_page_and_csv():
    hostile = JudgedRow("<script>x</script>", "level1/1", "level1", "wrong", "\u202e<b>" + "y" * 999, verdict("wrong"))
    page = render("<i>", [hostile, row("b")], scores([row("b")]), 4, ["<u>.txt"], ["mode quick"])
    assert "<script>" not in page and "<b>y" not in page and "<u>" not in page and "⟨U+202E⟩" in page
    assert "1 of 2 judged solutions correct" in page
    cells = list(csv.reader(io.StringIO(to_csv([replace(hostile, record="=HYPERLINK(1)", message="-1\n,\ud800")]))))
    assert cells[1][0] == "'=HYPERLINK(1)" and cells[1][-1] == "'-1 , " and len(cells) == 2
    assert cells[0][:4] == ["record", "task", "family", "outcome"]


def test_the_page_shows_every_outcome_and_is_whole_without_verdicts_or_claims():
    rows = [
        JudgedRow(f"r{n}", "", "", outcome, f"because {n}") for n, outcome in enumerate(OUTCOMES) if outcome != "ok"
    ]
    page = render("set", rows, scores([]), 0, [], [])
    assert all(f"because {n}" in page for n in range(1, len(OUTCOMES)))
    assert f'<th scope="row">all</th><td class="figure">{len(rows)}</td>' in page
    assert "Nothing has been judged." in page and "No record claims a speed-up." in page and "<svg" not in page


def test_claims_are_drawn_beside_what_was_measured():
    rows = [row("a", claim_eager=4.0), row("b", "wrong", claim_eager=9.0, task="level1/2", message="check 1")]
    page = render("set", rows, scores(rows), 4, [], [])
    assert "a: claimed 4.00×, 2.00×" in page and "b: claimed 9.00×, wrong" in page
    assert "correct, but slower than claimed" in page and "Another reference" not in page
    assert "Another reference" in render("set", [replace(rows[0], other_reference=True)], scores(rows), 4, [], [])


def test_labels_of_an_axis_over_many_decades_do_not_overlap():
    def labels(claim: float) -> int:
        page = render("set", [replace(row("a"), claim_eager=claim)], scores([row("a")]), 1, [], [])
        return len(re.findall(r'class="tick"[^>]*text-anchor="middle"', page))

    assert labels(3.0) == 4, "1, 2, 5, 10"
    assert labels(9e3) == 5, "one for each decade"
