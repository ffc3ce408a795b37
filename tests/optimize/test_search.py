"""`optimize` in the real sandbox, with a server that is scripted and real HTTP."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import call, said, serve, turn_of
from optimizing import DONE, KERNEL, MODEL, PROFILE, WRITE, plan

from cuda_agent.agent.progress import NO_TARGET, Findings, Goal, Transcript, factor, read_events, replayed
from cuda_agent.agent.tools import TOOLS
from cuda_agent.errors import TaskError
from cuda_agent.errors import TaskError as NoTask
from cuda_agent.optimize import search
from cuda_agent.optimize.folder import OptimizeError, SearchOrder, opened, read_order
from cuda_agent.optimize.search_environment import Terms
from cuda_agent.policy.served import ServedModelRefused
from cuda_agent.sandbox.wire import Solution, Verdict
from cuda_agent.tasks.task import Task
from tests import made_once

ROOT = Path(__file__).parents[2]


def test_a_model_that_works_gets_a_folder_with_everything(run):
    outcome = run(said([[{"thought": "Hm."}, {"text": "I begin."}, WRITE, {"usage": (900, 40)}], [PROFILE], DONE]))
    assert outcome.why == "target" and outcome.reached and outcome.best.strict.mode == "strict"
    assert run.served.turns() == 2, "nobody is asked when the target is reached"
    out = run.folder / "out"
    assert {path.name for path in out.iterdir()} == {
        "model.py", "model_new.py", "report.html", "run.json", "solution", "transcript.jsonl", "verdict.json",
    }  # fmt: skip
    assert (out / "solution" / "kernels" / "fused.cpp").read_text() == KERNEL
    assert json.loads((out / "verdict.json").read_text())["mode"] == "strict"
    assert "class ModelNew" in (out / "model_new.py").read_text() and MODEL in (out / "model_new.py").read_text()
    page = (out / "report.html").read_text()
    assert "Model clock" in page and "fused.cpp" in page and "<script" not in page
    kinds = {event["kind"] for event in run.events}
    assert kinds >= {"text", "thought", "tool", "diff", "verdict", "spent", "ended", "outcome"}
    first = run.served.requests[0]
    names = {tool["function"]["name"] for tool in first["tools"]}
    assert names == {tool["function"]["name"] for tool in TOOLS} and first["stream"] is True
    assert "torch.compile takes" in first["messages"][1]["content"]


def test_the_fastest_of_the_way_is_kept_not_the_last(run):
    slow = call("Write", path="plan.json", content=plan(1))
    turns = [[WRITE], [PROFILE], [{"calls": [call("Read", path="plan.json"), slow, call("Bash", command="profile")]}]]
    outcome = run(said([*turns, DONE]), target=1000.0)
    assert outcome.why == "answer" and not outcome.reached
    assert json.loads(outcome.best.solution.files["plan.json"])["nodes"][0]["grid"] == 8
    assert len([event for event in run.kinds("verdict") if event["factor"]]) >= 3


def test_what_was_left_unjudged_is_judged_at_the_end(run):
    outcome = run(said([[WRITE], DONE]), target=1000.0, turns=2)
    assert outcome.best and run.kinds("verdict")[0]["command"] == "end"


def test_a_solution_without_a_strict_verdict_has_not_reached_the_target(run, monkeypatch):
    async def stopped(task, sandbox, findings, *_):
        return findings.best

    monkeypatch.setattr(search, "confirm", stopped)
    outcome = run(said([[WRITE], DONE]), turns=2)
    assert factor(outcome.best.quick) >= outcome.goal.target and outcome.best.strict is None
    assert not outcome.reached


QUICK = Verdict("ok", "plan", "quick", "cpu", "model", seconds=1.0, eager_seconds=3.0)


@pytest.mark.parametrize("answers, confirmed", [(["wrong"] * 7, None), (["wrong", "ok", *["wrong"] * 5], 5)])
def test_only_solutions_that_strict_mode_confirms_are_results(tmp_path, answers, confirmed):
    """Seven solutions are correct in quick mode; number 6 is the fastest, and strict mode measures all as slow."""
    findings, events, left = Findings(), [], list(answers)
    for number in range(7):
        solution = Solution("plan", {"plan.json": str(number)})
        findings.add(solution, replace(QUICK, eager_seconds=3.0 + number), 1, number)

    class Strict:
        async def evaluate(self, task, solution, mode):
            return replace(QUICK, status=left.pop(0), mode=mode, eager_seconds=1.5)

    async def confirm():
        transcript = Transcript(tmp_path / "transcript.jsonl", lambda: 0.0, events.append)
        return await search.confirm(Task("t", "", (), ""), Strict(), findings, transcript, asyncio.Event())

    best = asyncio.run(confirm())
    assert (best and best.turn) == confirmed and len(left) == 2
    assert any("confirmed none of the 5" in event.get("text", "") for event in events) == (confirmed is None)


@pytest.mark.parametrize("first", ["ok", "infra"])
def test_a_fault_of_the_strict_judge_hides_no_solution_that_is_confirmed(tmp_path, first):
    """Number 2 is the fastest in quick mode; strict mode confirms number 0 first, unless it fails at once."""
    findings = Findings()
    for number in range(3):
        solution = Solution("plan", {"plan.json": str(number)})
        findings.add(solution, replace(QUICK, eager_seconds=3.0 + number), 1, number)
    if first == "ok":
        findings.by_digest[Solution("plan", {"plan.json": "0"}).digest].strict = replace(QUICK, mode="strict")

    class Strict:
        async def evaluate(self, task, solution, mode):
            return replace(QUICK, status="infra", mode=mode)

    async def confirm():
        transcript = Transcript(tmp_path / "transcript.jsonl", lambda: 0.0, lambda event: None)
        return await search.confirm(Task("t", "", (), ""), Strict(), findings, transcript, asyncio.Event())

    best = asyncio.run(confirm())
    assert best and best.turn == (0 if first == "ok" else 2)
    assert (best.strict is None) == (first == "infra")


def test_the_last_turn_asks_for_an_answer_and_runs_no_tool(run):
    outcome = run(said([[WRITE]]), target=1000.0, turns=3)
    last = run.served.requests[-1]
    assert outcome.why == "turns" and run.served.turns() == 3
    assert last["tool_choice"] == "none" and "last turn" in last["messages"][-1]["content"]
    assert len(run.kinds("tool")) == 4, "of two turns"


@pytest.mark.parametrize(
    "budget, why",
    [
        ({"tokens": 9000}, "tokens"),
        ({"money": 0.06, "price_in": 2.0, "price_out": 4.0}, "money"),
        ({"minutes": 0.002}, "minutes"),
    ],
)
def test_every_budget_ends_the_search_and_keeps_what_was_found(run, budget, why):
    spend = {"usage": (2000, 500)}

    def script(request):  # the same call again and again would end the search before a minute does
        turn = turn_of(request)
        commands = "profile", f"echo {turn}"
        return [WRITE if turn == 0 else {"calls": [call("Bash", command=command) for command in commands]}, spend]

    outcome = run(script, target=1000.0, turns=1000, **budget)
    assert outcome.why == why
    assert outcome.best is not None or why == "minutes"
    if "tokens" in budget:
        assert outcome.spent["prompt"] + outcome.spent["sampled"] <= 9000
    if "money" in budget:
        assert 0 < outcome.spent["cost"] <= 0.06


def test_attempts_work_side_by_side_and_the_first_that_reaches_the_target_ends_all(run):
    def script(request):
        mine = request.get("seed", 0) // 100_000  # every attempt has seeds of its own
        if mine == 2:
            return [[WRITE], [PROFILE]][min(turn_of(request), 1)]
        return [{"calls": [call("Bash", command=f"echo {turn_of(request)}")]}]

    outcome = run(script, attempts=3, turns=1000, search=False)
    assert outcome.why == "target" and outcome.best.attempt == 2
    assert {event["attempt"]: event["why"] for event in run.kinds("ended")} == {1: "stopped", 2: "target", 3: "stopped"}


def test_later_attempts_start_from_solutions_of_earlier_ones_and_a_resumed_search_goes_on_so(run):
    faster = KERNEL.replace("+ 1.0f", "+ 1.0f + 0.0f")
    change = {
        "calls": [call("Read", path="kernels/fused.cpp"), call("Write", path="kernels/fused.cpp", content=faster)]
    }
    begun = []

    def script(request):
        number, turn = request.get("seed", 0) // 100_000, turn_of(request)
        begun.extend([number] * (turn == 0))
        return [[WRITE] if number <= 2 else [change], [PROFILE], DONE][min(turn, 2)]

    outcome = run(script, attempts=4, target=1000.0, stop_at=lambda event: len(begun) == 4 and event["kind"] == "turn")
    assert outcome.why == "stopped" and sorted(begun) == [1, 2, 3, 4] and set(begun[:2]) == {1, 2}
    parents = {event["attempt"]: event["of"] for event in run.kinds("parent")}
    assert set(parents) == {3, 4} and set(parents.values()) <= {1, 2}
    asked = [request["messages"] for request in run.served.requests if turn_of(request) == 0]
    assert sum("an earlier attempt has written" in messages[-1]["content"] for messages in asked) == 2

    resumed = run(script, attempts=4, target=1000.0, resume=True)
    assert not run.kinds("parent"), "no attempt starts twice"
    assert resumed.why == "answer" and {event["attempt"] for event in run.kinds("ended")} == {1, 2, 3, 4}
    assert any("+ 0.0f" in text for event in run.kinds("verdict") for text in event["files"].values())


def test_places_open_while_the_first_attempts_go_on_as_soon_as_there_is_a_solution(run):
    begun = set()

    def script(request):
        number, turn = request.get("seed", 0) // 100_000, turn_of(request)
        begun.add(number)
        if number == 1:
            on = [{"calls": [call("Bash", command=f"sleep 0.1; echo {turn}")]}]
            return [[WRITE], [PROFILE], DONE if 3 in begun else on][min(turn, 2)]
        return DONE if 3 in begun else [{"calls": [call("Bash", command=f"sleep 0.1; echo {turn}")]}]

    run(script, attempts=6, target=1000.0, turns=200, stop_at=lambda event: event["kind"] == "ended")
    order = [(event["kind"], event["attempt"]) for event in run.events if event["kind"] in ("parent", "turn", "ended")]
    before = order[: order.index(("parent", 3))]
    assert {number for kind, number in before if kind == "turn"} == {1, 2}, "two begin from nothing"
    assert not [number for kind, number in before if kind == "ended"], "the third does not wait for their end"


def test_a_resumed_search_keeps_attempts_that_began_although_fewer_are_asked_for(run):
    found = threading.Event()

    def script(request):
        if request.get("seed", 0) // 100_000 == 1 and not found.is_set():
            found.wait(20)  # the second attempt finds a solution before the first one has an answer
        return [[WRITE], [PROFILE], DONE][min(turn_of(request), 2)]

    def stop(event):
        if event["kind"] == "turn" and event["attempt"] == 2 and event["turn"] == 1:
            found.set()
        return found.is_set()

    assert run(script, attempts=2, target=1000.0, search=False, stop_at=stop).why == "stopped"
    assert run(script, attempts=1, target=1000.0, resume=True).why == "answer"
    assert {event["attempt"] for event in run.kinds("ended")} == {1, 2}


def test_a_search_whose_budget_is_spent_begins_no_more_attempts(run):
    outcome = run(said([[WRITE, {"usage": (3000, 500)}], [PROFILE], DONE]), attempts=8, target=1000.0, tokens=9000)
    assert outcome.why in ("tokens", "answer") and outcome.best
    assert {event["attempt"] for event in run.kinds("ended")} < set(range(1, 9))


def test_a_stopped_run_keeps_the_best_and_is_gone_on_with(run):
    script = said([[WRITE], [PROFILE], [{"calls": [call("Bash", command="echo on")]}]])
    seen = [0]

    def third_turn(event):
        seen[0] += event["kind"] == "turn"
        return seen[0] == 4

    first = run(script, target=1000.0, stop_at=third_turn)
    assert first.why == "stopped" and first.best and (run.folder / "out" / "model_new.py").exists()
    states, findings, spent = replayed(read_events(run.folder / "out" / "transcript.jsonl"))
    assert states[1].turn == 3 and len(findings.by_digest) == 1 and spent["sampled"] > 0
    assert states[1].files["kernels/fused.cpp"] == KERNEL
    assert states[1].messages[-1]["content"] == "on"

    better = KERNEL.replace("+ 1.0f", "+ 1.0f + 0.0f")
    read, rewritten = call("Read", path="kernels/fused.cpp"), call("Write", path="kernels/fused.cpp", content=better)
    on = said([*[[WRITE]] * 3, [{"calls": [read]}], [{"calls": [rewritten, *PROFILE["calls"]]}], DONE])
    second = run(on, target=1000.0, resume=True)
    asked = run.served.requests[0]["messages"]
    assert turn_of(run.served.requests[0]) == 3 and "opened again" in asked[-1]["content"]
    assert any("+ 0.0f" in text for event in run.kinds("verdict") for text in event["files"].values())
    assert second.spent["sampled"] > first.spent["sampled"] and second.best


def test_a_transcript_that_broke_off_in_a_turn_is_gone_on_with_from_the_turn_before(run):
    run(said([[WRITE], [PROFILE], DONE]), target=1000.0)
    path = run.folder / "out" / "transcript.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"kind": "tool"' in line or '"turn": 1' in line) + 2
    path.write_text("".join(lines[:cut]) + '{"kind": "mess')
    states, _, _ = replayed(read_events(path))
    assert states[1].turn == 1 and states[1].messages[-1]["role"] == "tool"
    asked = {call["id"] for m in states[1].messages for call in m.get("tool_calls", ())}
    answered = {m["tool_call_id"] for m in states[1].messages if m["role"] == "tool"}
    assert asked == answered


def test_nothing_is_written_over_and_what_cannot_be_resumed_says_why(run):
    run(said([[WRITE], DONE]), target=1000.0, turns=2)
    with pytest.raises(OptimizeError, match="there already"):
        run(said([DONE]))
    with pytest.raises(OptimizeError, match="nothing to go on"):
        read_order(run.folder)
    (run.folder / "model.py").write_text(MODEL + "\n")
    with pytest.raises(OptimizeError, match="has changed"):
        run(said([DONE]), resume=True)


@pytest.mark.parametrize(
    "code, why",
    [
        ("x = 1\n", "no class Model"),
        (MODEL.replace("torch.abs(x)", "torch.abs(x) * torch.rand(1)"), "other outputs"),
        (MODEL.replace("def forward(self, x):", "def forward(self, x):\n        raise OSError('no')"), "does not run"),
    ],
)
def test_a_problem_that_cannot_be_optimised_costs_no_token(run, code, why):
    (run.folder / "model.py").write_text(code)
    with pytest.raises((TaskError, NoTask), match=why):
        run(said([DONE]))
    assert run.served.turns() == 0
    assert not (run.folder / "out").exists()


def test_a_folder_without_a_turn_is_begun_anew_and_can_be_gone_on_with(run):
    lost = [{"status": 404, "body": b'{"error": {"message": "no such model"}}'}]
    out = run.folder / "out"
    for resume in (False, True, False):
        assert run(lambda request: lost, resume=resume).why == "server"
    (run.folder / "model.py").write_text(MODEL + "\n# mended\n")
    assert run(said([[WRITE], [PROFILE], DONE])).best
    assert "# mended" in (out / "model.py").read_text()
    assert len([e for e in read_events(out / "transcript.jsonl") if e["kind"] == "begin"]) == 1


@pytest.mark.parametrize("other", ["notes.txt", "run.json", "model.py"])
def test_a_folder_of_somebody_else_is_never_begun_anew(run, other):
    out = run.folder / "out"
    out.mkdir(parents=True)
    (out / other).write_text("{}")
    with pytest.raises(OptimizeError, match="there already"):
        run(said([DONE]))
    assert [path.read_text() for path in out.iterdir()] == ["{}"]


@pytest.mark.parametrize(
    "output, resume",
    [("/proc/x", False), ("file", False), ("file/below", False), ("half", False), ("nosuch", True), ("half", True)],
)
def test_a_folder_that_cannot_be_used_is_one_clear_line(tmp_path, cache, output, resume):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_bytes(b"\xff")
    asked = ["--resume", output] if resume else ["model.py", "--output", output]
    process = command(
        tmp_path,
        cache,
        *asked,
        "--base-url",
        "http://127.0.0.1:1/v1",
        "--model",
        "m",
        *["--device", "cpu"] * (not resume),
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 78 and len(err.splitlines()) == 1 and output in err and not out, err
    assert "Errno" not in err and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", [b'{"kind": "note", "text": "\xff"}\n', b'{"kind": "spent", "attempt": 1}\n'])
def test_a_transcript_that_is_none_is_not_gone_on_with_or_written_over(run, content):
    run(said([[WRITE], DONE]), target=1000.0, turns=2)
    path = run.folder / "out" / "transcript.jsonl"
    path.write_bytes(content)
    with pytest.raises(OptimizeError, match="not a transcript"):
        run(said([DONE]), resume=True)
    with pytest.raises(OptimizeError, match="there already"):
        run(said([DONE]))
    assert path.read_bytes() == content


def test_two_searches_do_not_share_a_folder(run):
    begun = []

    def begin_another(event):
        if event["kind"] == "begin" and not begun:
            begun.append(event)
            order = SearchOrder("http://127.0.0.1:1/v1", "m")
            folder = opened(order, run.sandbox, None, run.folder / "out", False)
            with pytest.raises(OptimizeError, match="works in there"), folder:
                pass

    assert run(said([[WRITE], [PROFILE], DONE]), stop_at=begin_another).best and begun


def test_what_fails_in_a_folder_that_a_person_made_leaves_it_empty(run):
    (run.folder / "out").mkdir(parents=True)
    (run.folder / "model.py").write_text(MODEL.replace("torch.abs(x)", "torch.abs(x) * torch.rand(1)"))
    with pytest.raises(TaskError):
        run(said([DONE]))
    assert list((run.folder / "out").iterdir()) == []


def test_an_address_without_a_model_ends_with_its_refusal_and_no_result(run):
    outcome = run(lambda request: [{"status": 404, "body": b'{"error": {"message": "no such model"}}'}])
    assert outcome.why == "server" and outcome.best is None and "404" in outcome.message
    assert not (run.folder / "out" / "model_new.py").exists()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7101/v1", "localhost/v1", "http://[::1/v1", "http://host:many/v1", "http://"]
)
def test_a_malformed_address_is_refused_before_anything_is_made(run, address):
    with pytest.raises(OptimizeError, match="expected an address such as"):
        run(said([DONE]), base_url=address)
    assert not (run.folder / "out").exists() and not run.events


def test_an_address_without_the_model_is_found_before_the_baselines_are_measured(run):
    lost = [{"status": 404, "body": b'{"error": {"message": "no such model"}}'}]
    with pytest.raises(ServedModelRefused, match="no such model; it has scripted, m, other"):
        run(lambda request: lost, model="scripte")
    assert [event["text"] for event in run.kinds("note")] == [f"asking {run.served.url} for scripte"]
    assert run.served.turns() == 1 and not (run.folder / "out").exists()


@pytest.mark.parametrize(("target", "told"), [(1.5, 1.5), (NO_TARGET, None)])
def test_programs_are_not_told_a_number_that_stands_for_no_target(tmp_path, target, told):
    outcome = search.SearchOutcome(tmp_path, "turns", None, Goal(target), False, {})
    assert outcome.to_json()["target"] == told


def test_a_search_needs_a_turn_for_tools_beside_the_last_one():
    with pytest.raises(OptimizeError, match="--turns must be at least 2"):
        SearchOrder("http://127.0.0.1:1/v1", "m", terms=Terms(turns=1))
    SearchOrder("http://127.0.0.1:1/v1", "m", terms=Terms(turns=1, style="compact"))


def test_tokens_without_room_for_a_turn_are_refused_at_once_and_a_few_more_play_one(run):
    with pytest.raises(OptimizeError, match=r"--tokens 3000 .* --answer-tokens 2000: .* about (\d+)") as refused:
        run(said([DONE]), tokens=3000)
    assert not (run.folder / "out").exists() and not run.events
    least = int(str(refused.value).split()[-1])
    run(said([[WRITE]]), tokens=least)
    assert run.kinds("tool") and run.kinds("turn")[0]["last"] is False


def test_a_budget_of_money_needs_one_price():
    with pytest.raises(OptimizeError, match="needs a price: --price-in, --price-out or both"):
        SearchOrder("http://127.0.0.1:1/v1", "m", money=1.0)
    for price in ("price_in", "price_out"):
        SearchOrder("http://127.0.0.1:1/v1", "m", money=1.0, **{price: 2.0})


def test_a_policy_of_this_project_is_played_in_its_own_form(run):
    from cuda_agent.agent.prompt import agent_messages
    from cuda_agent.policy.chat import written
    from cuda_agent.tasks.io import task_from_file

    turns = [WRITE["calls"], PROFILE["calls"]]
    calls = [[{"name": name, "arguments": arguments} for name, arguments in turn] for turn in turns]
    outcome = run(said([[{"text": written("", turn)}] for turn in calls] + [DONE]), style="compact", context=2000)
    assert outcome.why == "target"
    first, second = run.served.requests[:2]
    (run.folder / "task.py").write_text(MODEL)
    wanted = agent_messages(task_from_file(run.folder / "task.py"), "compact")
    assert first["messages"] == wanted and "tools" not in first
    assert second["messages"][2] == {"role": "assistant", "content": written("", calls[0])}
    assert [m["role"] for m in second["messages"][3:]] == ["tool", "tool"]


def test_a_policy_of_this_project_can_change_the_solution_that_it_starts_from(run):
    from cuda_agent.policy.chat import written

    def text(turn):
        return written("", [{"name": name, "arguments": arguments} for name, arguments in turn["calls"]])

    faster = {"calls": [call("Write", path="kernels/fused.cpp", content=KERNEL + "// again\n"), *PROFILE["calls"]]}

    def script(request):
        first = request.get("seed", 0) // 100_000 == 1
        turns = [text(WRITE), text(PROFILE)] if first else ["(not sampled)", "(not sampled)", text(faster)]
        return [{"text": [*turns, "done"][min(turn_of(request), len(turns))]}]

    outcome = run(script, style="compact", context=4000, attempts=2, target=1000.0)
    assert outcome.why == "answer" and [event["of"] for event in run.kinds("parent")] == [1]
    assert "read kernels/fused.cpp first" not in run.results()
    assert [find["attempt"] for find in run.kinds("verdict") if "// again" in str(find["files"])][:1] == [2]


def command(tmp_path, cache, *arguments, **environment):
    """``cache``: the folder of this name in what is the command's home."""
    homes = {"CUDA_AGENT_HOME": str(cache.parent), "XDG_DATA_HOME": str(tmp_path / "data")}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI")} | homes
    (tmp_path / "model.py").write_text(MODEL)
    program = [sys.executable, "-m", "cuda_agent.cli", "optimize", *arguments]
    return subprocess.Popen(
        program, cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)} | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_the_command_prints_lines_of_json_for_programs(tmp_path, cache):
    with serve(said([[WRITE], [PROFILE], DONE])) as served:
        process = command(
            tmp_path, cache, "model.py", "--base-url", served.url, "--model", "m", "--json", "--target",
            "1.01", "--device", "cpu", "sandbox.clock=model", OPENAI_API_KEY="canary-of-the-key",
        )  # fmt: skip
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["kind"] == "outcome" and events[-1]["reached"] is True
    assert served.headers[0]["Authorization"] == "Bearer canary-of-the-key"
    everything = out + err + "".join(p.read_text() for p in (tmp_path / "model-optimized").rglob("*") if p.is_file())
    assert "canary-of-the-key" not in everything
    asked = served.requests[-1]["messages"][-1]["content"]
    assert "Lesson:" in asked and any("no lesson is kept" in event.get("text", "") for event in events)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_server_that_refuses_gives_an_outcome_and_an_error(tmp_path, cache, as_json):
    with serve(lambda request: [{"status": 401, "body": b'{"error": {"message": "who are you"}}'}]) as served:
        process = command(
            tmp_path, cache, "model.py", "--base-url", served.url, "--model", "m", "--device", "cpu",
            "sandbox.clock=model", *["--json"] * as_json,
        )  # fmt: skip
        out, err = process.communicate(timeout=300)
    assert process.returncode == 75 and "who are you" in err and len(err.splitlines()) == 1
    if as_json:
        outcome = json.loads(out.splitlines()[-1])
        assert (outcome["kind"], outcome["why"], outcome["verdict"]) == ("outcome", "server", None)
        assert "who are you" in outcome["message"]


def test_control_c_reaches_nobody_but_the_search(tmp_path, cache):
    """To the whole process group, as a terminal sends it."""

    def script(request):
        return [[WRITE], [PROFILE], [{"calls": [call("Bash", command="sleep 2")]}]][min(turn_of(request), 2)]

    with serve(script) as served:
        process = command(
            tmp_path, cache, "model.py", "--base-url", served.url, "--model", "m", "--target", "inf",
            "--device", "cpu", "--turns", "1000", "sandbox.clock=model",
        )  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "sleep 2" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, "".join([*lines[-6:], out, err])
    assert "Traceback" not in err and "stopped" in out and "model_new.py" in out
    assert (tmp_path / "model-optimized" / "verdict.json").exists()


def test_control_c_ends_at_once_while_baselines_are_measured(tmp_path):
    """A cache of its own, in which no baseline is known yet."""
    fresh = made_once.share(tmp_path / "home" / "cache")
    with serve(said([DONE])) as served:
        process = command(
            tmp_path, fresh, "model.py", "--base-url", served.url, "--model", "m", "--device", "cpu",
        )  # fmt: skip
        for line in process.stdout:
            if "timing eager" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err and served.turns() == 0
    assert not (tmp_path / "model-optimized").exists()


def test_a_solution_that_strict_mode_has_refused_since_leaves_the_folder(tmp_path, monkeypatch):
    (tmp_path / "solution").mkdir()
    for name in ("solution/plan.json", "verdict.json", "model_new.py", "model.py"):
        (tmp_path / name).write_text("before")
    monkeypatch.setattr(search, "read_events", lambda _: [])
    monkeypatch.setattr("cuda_agent.pages.optimize.render", lambda *_: "page")
    order = SimpleNamespace(model="m", base_url="http://u", terms=Terms(target=1.0))
    outcome: Any = SimpleNamespace(folder=tmp_path, best=None, why="turns")
    search.write_result(outcome, SimpleNamespace(name="t", code=""), *[None] * 2, order, None)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"model.py", "report.html"}
