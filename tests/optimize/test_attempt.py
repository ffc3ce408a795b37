"""One attempt with a scripted model and a sandbox that is played: what the loop does with turns, calls and verdicts."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from cuda_agent.agent.progress import ENDS, NO_TARGET, Find, Findings, Goal, SearchBudget, State, replayed
from cuda_agent.optimize.attempt import Attempt
from cuda_agent.optimize.lessons import Lesson
from cuda_agent.optimize.search_environment import SearchEnvironment, Terms
from cuda_agent.policy.chat import written
from cuda_agent.policy.chat_stream import Reply
from cuda_agent.sandbox.wire import Solution, ToolResult, Verdict
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.task import Task

TASK = Task("relu", "class Model: ...\n", ("torch.relu",), "torch#1")
TERMS = Terms(turns=6, target=2.0)


def call(name, **arguments):
    return {"id": f"c{name}", "name": name, "arguments": arguments}


WRITE = call("Write", path="plan.json", content="{}")
PROFILE = call("Bash", command="profile")


class Model:
    """Says ``replies`` one after the other, then the last one again."""

    def __init__(self, *replies):
        self.replies, self.asked, self.form, self.lost = replies, [], "native", 0
        self.seeds = []

    async def chat(self, messages, tools, max_tokens, temperature, seed, **__):
        self.asked.append([dict(message) for message in messages])
        self.seeds.append(seed)
        return self.replies[min(len(self.asked), len(self.replies)) - 1]


class Sandbox:
    """Keeps files in memory; ``verdicts``: one for each evaluation, then the last one again."""

    def __init__(self, *verdicts, losses=0):
        self.verdicts, self.modes, self.opened, self.losses = verdicts, [], [], losses

    async def evaluate(self, task, solution, mode="quick"):
        self.modes.append(mode)
        return replace(self.verdicts[min(len(self.modes), len(self.verdicts)) - 1], mode=mode)

    @contextlib.asynccontextmanager
    async def workspace(self, files, protected, commands):
        self.held, self.commands = dict(files), commands
        self.opened.append(sorted(files))
        yield self

    async def call(self, name, arguments):
        if self.losses:
            self.losses -= 1
            raise WorkspaceLost("gone")
        if name == "Bash":
            return await self.commands(arguments["command"], [], await self.files())
        if name == "Write":
            self.held[arguments["path"]] = arguments["content"]
        return ToolResult("ok")

    async def files(self):
        return dict(self.held)


def verdict(status="ok", ratio=3.0):
    return Verdict(status, "plan", "quick", "cpu", "model", seconds=1.0, eager_seconds=ratio, compile_seconds=ratio)


def run(model, sandbox, terms=TERMS, state=None, budget=None, lessons=None):
    """Why it ended, the attempt and its events."""
    events = []
    attempt = Attempt(
        1, TASK, model, sandbox, terms, budget or SearchBudget(), Findings(),
        lambda kind, **facts: events.append({"kind": kind} | facts), state=state or State(), lessons=lessons,
    )  # fmt: skip
    return asyncio.run(attempt.run()), attempt, events


def said(*calls, **more):
    return Reply("", list(calls), tokens=1, prompt_tokens=10, **more)


def results(attempt):
    return [message["content"] for message in attempt.state.messages if message["role"] == "tool"]


def test_a_quick_verdict_at_the_target_counts_only_after_a_strict_one():
    sandbox = Sandbox(verdict(), verdict(ratio=1.5), verdict(), verdict())
    better = call("Write", path="kernels/k.cpp", content="x")
    ended, attempt, _ = run(Model(said(WRITE, PROFILE), said(better, PROFILE)), sandbox)
    assert ended == "target" and sandbox.modes == ["quick", "strict"] * 2
    assert "1.50 times as fast" in results(attempt)[1] and "target 2× is not reached" in results(attempt)[1]
    assert attempt.findings.reached.solution.files == {"plan.json": "{}", "kernels/k.cpp": "x"}


def test_a_resumed_attempt_restores_its_own_best_solution_of_before():
    findings = Findings()
    for ratio, attempt in ((1.2, 1), (1.5, 1), (1.1, 1), (1.9, 2)):
        findings.add(Solution("plan", {"plan.json": str(ratio)}), verdict(ratio=ratio), attempt, 0)
    environment = SearchEnvironment(TASK, Sandbox(verdict(ratio=1.4)), TERMS, findings, 1, lambda *_, **__: None)
    profiled = asyncio.run(environment.command("profile", [], {"plan.json": "1.4"}))
    assert "slower than the best solution so far: 1.50x eager" in profiled.text
    restored = asyncio.run(environment.command("restore", [], {"plan.json": "1.4", "kernels/k.cpp": "x", "note": ""}))
    assert restored.files == {"plan.json": "1.5", "kernels/k.cpp": None} and not restored.error


def test_calls_after_the_target_are_not_run_and_every_call_is_answered():
    ended, attempt, events = run(Model(said(WRITE, PROFILE, WRITE)), Sandbox(verdict()))
    assert ended == "target" and results(attempt)[2] == "[not run: the target is reached]"
    assert len([event for event in events if event["kind"] == "tool"]) == 2


def test_a_sandbox_that_fails_is_asked_twice_and_ends_the_attempt_when_it_goes_on():
    sandbox = Sandbox(verdict("infra"))
    ended, attempt, _ = run(Model(*[said(WRITE, PROFILE, call("Read", path=str(n))) for n in range(6)]), sandbox)
    assert ended == "infra" and len(sandbox.modes) == 6 and attempt.state.turn == 3
    assert "not the solution's fault" in results(attempt)[1]


def test_a_lost_folder_is_opened_again_with_the_files_of_the_last_whole_turn():
    sandbox = Sandbox(verdict(ratio=1.0), losses=1)
    state = State(messages=[{"role": "user", "content": "x"}], files={"plan.json": "old"}, turn=2)
    ended, attempt, events = run(Model(said(call("Read", path="a")), said()), sandbox, state=state)
    assert sandbox.opened == [["SKILL.md", "model.py", "plan.json"]] * 2
    assert ended == "answer" and "the work folder was lost" in next(e["text"] for e in events if e["kind"] == "note")
    assert not any(message.get("tool_calls") for message in attempt.state.messages), "the unanswered call is dropped"


@pytest.mark.parametrize("style, asked", [("full", 4), ("compact", 2)])
def test_a_model_that_stops_early_is_reminded_unless_it_is_a_compact_policy(style, asked):
    model = Model(said(WRITE, PROFILE), said())
    ended, _, _ = run(model, Sandbox(verdict(ratio=1.0)), replace(TERMS, style=style))
    assert (ended, len(model.asked)) == ("answer", asked)


def test_the_same_call_again_is_pointed_out_until_the_folder_changes():
    read = call("Read", path="a")
    turns = [said(read, read, read), said(call("Write", path="b", content="1"), read), said()]
    _, attempt, _ = run(Model(*turns), Sandbox(verdict("build_error")))
    assert ["again" if "the same call" in text else text for text in results(attempt)] == [
        "ok",
        "ok",
        "again",
        "ok",
        "ok",
    ]


def test_a_turn_that_says_the_same_again_and_again_is_the_end():
    ended, attempt, _ = run(Model(said(PROFILE)), Sandbox(verdict(ratio=1.0)), replace(TERMS, turns=50))
    assert ended == "stuck" and attempt.state.turn == 6
    assert len(results(attempt)) == 6, "a call without an answer would break a resumed attempt"


def test_the_last_turn_runs_no_tool():
    sandbox = Sandbox(verdict(ratio=1.0))
    model = Model(*[said(call("Read", path=str(n))) for n in range(6)])
    ended, attempt, events = run(model, sandbox, replace(TERMS, turns=3))
    assert ended == "turns" and attempt.state.turn == 3 and "last turn" in model.asked[-1][-1]["content"]
    assert [event["last"] for event in events if event["kind"] == "turn"] == [False, False, True]
    assert results(attempt) == ["ok", "ok", "[not run: the attempt ended]"]


def test_a_call_that_was_cut_is_not_run_and_the_model_is_told():
    broken = WRITE | {"arguments": None}
    ended, attempt, _ = run(Model(said(broken, cut=True), said()), Sandbox(verdict()))
    assert ended == "answer" and "was cut after 1 tokens" in results(attempt)[0] and not attempt.state.files


def test_complete_calls_of_a_cut_answer_are_run_and_the_model_is_told():
    ended, attempt, _ = run(Model(said(WRITE, cut=True), said()), Sandbox(verdict()))
    assert ended == "answer" and attempt.state.files == {"plan.json": "{}"}
    told = [message["content"] for message in attempt.state.messages if message["role"] == "user"]
    assert "[Your answer was cut. Only the calls above count.]" in told


def test_a_search_without_a_target_names_none():
    endless = replace(TERMS, target=NO_TARGET)
    ended, attempt, _ = run(Model(said(WRITE, PROFILE), said()), Sandbox(verdict(ratio=3.0)), terms=endless)
    told = " ".join(message["content"] for message in attempt.state.messages)
    assert ended == "answer" and "1e+06" not in told and "target is" not in told and str(Goal(NO_TARGET)) == "no target"


@pytest.mark.parametrize(("until", "ends"), [(0.7, "target"), (0.9, "answer")])
def test_a_share_of_the_speed_of_light_ends_a_search_after_a_strict_verdict(until, ends):
    terms = replace(TERMS, target=NO_TARGET, until=until)
    fast = replace(
        verdict(ratio=1.01), clock="real", bytes=800, peak_bytes_per_second=1000 / verdict(ratio=1.01).seconds
    )
    sandbox = Sandbox(fast)
    ended, attempt, _ = run(Model(said(WRITE, PROFILE), said()), sandbox, terms=terms)
    assert ended == ends and sandbox.modes[:2] == (["quick", "strict"] if ends == "target" else ["quick"])
    assert f"The target is {until:.0%} of what the device's limits allow" in attempt.state.messages[1]["content"]
    assert str(terms.goal) == f"target {until:.0%} of the speed of light"


def test_a_goal_of_two_parts_is_reached_by_either():
    slow = replace(verdict(ratio=1.1), clock="real", bytes=800, peak_bytes_per_second=1000.0)
    assert Goal(1.05).reached(slow) and Goal(2.0, 0.8).reached(slow) and not Goal(2.0, 0.9).reached(slow)
    assert not Goal(1.05, 0.1).reached(replace(slow, status="wrong"))
    assert not Goal(NO_TARGET, 0.5).reached(replace(slow, clock="model")), "simulated times have no share"
    assert str(Goal(2.0, 0.8)) == "target 2× or 80% of the speed of light"


def test_a_model_that_refuses_is_not_said_to_be_done():
    ended, _, events = run(Model(Reply("No.", tokens=1, refused="the model refuses: No.")), Sandbox(verdict()))
    assert ended == "refused" and "refuses" in ENDS[ended]
    assert {event["text"] for event in events if event["kind"] == "note"} == {"the model refuses: No."}


def test_tokens_without_room_end_the_attempt_and_what_is_left_is_judged():
    sandbox = Sandbox(verdict(ratio=1.2))
    model = Model(Reply("", [WRITE], tokens=1, prompt_tokens=30_000))
    ended, attempt, events = run(model, sandbox, budget=SearchBudget(tokens=31_000))
    assert (ended, len(model.asked)) == ("tokens", 1)
    assert [event["command"] for event in events if event["kind"] == "verdict"] == ["end"]
    assert attempt.findings.best.quick.status == "ok"


PARENT = Find(Solution("plan", {"plan.json": "p"}), verdict(ratio=1.5), 1, 1)


def started(style, sandbox, model):
    """An attempt of ``style`` that started from PARENT, and its events as a transcript has them."""
    events = []
    attempt = Attempt(
        3, TASK, model, sandbox, replace(TERMS, style=style), SearchBudget(),
        Findings({PARENT.solution.digest: PARENT}), lambda kind, **facts: events.append({"kind": kind} | facts),
    )  # fmt: skip
    attempt.start_from(PARENT)
    asyncio.run(attempt.run())
    return attempt, events


def test_an_attempt_starts_from_the_files_and_the_verdict_of_an_earlier_solution():
    sandbox, model = Sandbox(verdict(ratio=1.2)), Model(said(PROFILE), said())
    attempt, events = started("full", sandbox, model)
    assert sandbox.opened == [["SKILL.md", "model.py", "plan.json"]] and attempt.state.files == {"plan.json": "p"}
    first = model.asked[0]
    assert [message["role"] for message in first] == ["system", "user"], "some servers refuse two messages of a role"
    assert "an earlier attempt has written" in first[-1]["content"] and "1.50x" in first[-1]["content"]
    assert "slower than the best solution so far: 1.50x eager" in results(attempt)[0]
    assert any("starts from a solution of attempt 1, 1.50 times" in event.get("text", "") for event in events)


def test_a_compact_policy_begins_with_turns_that_write_and_judge_the_solution():
    sandbox, model = Sandbox(verdict(ratio=1.5)), Model(said())
    attempt, _ = started("compact", sandbox, model)
    first = model.asked[0]
    assert [m["role"] for m in first] == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    asked = [[{key: call[key] for key in ("name", "arguments")} for call in first[i]["tool_calls"]] for i in (2, 5)]
    commands = [{"name": "Bash", "arguments": {"command": command}} for command in ("verify", "profile")]
    assert asked == [[{"name": "Write", "arguments": {"path": "plan.json", "content": "p"}}, commands[0]], commands[1:]]
    assert first[2]["raw"] == written("", asked[0]), "in the form in which such policies write calls"
    said_by_tools = [message["content"] for message in first if message["role"] == "tool"]
    assert said_by_tools == ["ok", "verify: ok", "profile: 1.50x eager 1.50x compile, best"]
    assert sandbox.opened == [["SKILL.md", "model.py"]], "a file that the policy did not write would have to be read"
    assert attempt.state.turn == 3 and attempt.budget.sampled == len(model.asked), (
        "only the turns of the model cost tokens"
    )


def test_a_compact_policy_that_stops_at_once_is_asked_again_until_it_has_tried_something():
    change = call("Write", path="plan.json", content="other")
    model = Model(said(), said(), said(change, PROFILE), said())
    attempt, events = started("compact", Sandbox(verdict(ratio=1.5)), model)
    assert len(model.asked) == 4, "asked again twice, and not after it has tried something"
    assert model.asked[0] == model.asked[1] == model.asked[2], "its answers leave no trace in the conversation"
    assert len(set(model.seeds)) == 4, "an equal request would get an equal answer"
    assert sum("asked again" in event.get("text", "") for event in events) == 2 and attempt.budget.sampled == 4
    model = Model(said())
    attempt, _ = started("compact", Sandbox(verdict(ratio=1.5)), model)
    assert len(model.asked) == 9 and attempt.state.messages[-1]["role"] == "assistant", "then it has stopped"
    model = Model(said())
    run(model, Sandbox(verdict()), replace(TERMS, style="compact"))
    assert len(model.asked) == 1, "an attempt from nothing stops as in training"


def test_a_compact_policy_always_has_a_turn_of_its_own():
    model = Model(said())
    attempt = Attempt(
        3, TASK, model, Sandbox(verdict(ratio=1.5)), replace(TERMS, style="compact", turns=2), SearchBudget(),
        Findings({PARENT.solution.digest: PARENT}), lambda *_, **__: None,
    )  # fmt: skip
    attempt.start_from(PARENT)
    assert asyncio.run(attempt.run()) == "answer" and model.asked


@pytest.mark.parametrize("style", ["full", "compact"])
def test_a_resumed_search_knows_what_an_attempt_started_from(style):
    attempt, events = started(style, Sandbox(verdict(ratio=1.2)), Model(said(PROFILE), said()))
    state = replayed([{"attempt": 3} | event for event in events])[0][3]
    assert (state.messages, state.files, state.turn) == (
        attempt.state.messages, attempt.state.files, attempt.state.turn
    )  # fmt: skip
    assert state.parent == attempt.state.parent == PARENT.solution.digest
    cut = next(index for index, event in enumerate(events) if event["kind"] == "turn")
    begun = replayed([{"attempt": 3} | event for event in events[:cut]])[0][3]
    assert begun.files == ({"plan.json": "p"} if style == "full" else {}) and begun.turn == 0
    model = Model(said())
    resumed = Attempt(
        3, TASK, model, Sandbox(verdict(ratio=1.2)), replace(TERMS, style=style), SearchBudget(),
        Findings({PARENT.solution.digest: PARENT}), lambda *_, **__: None, state=begun,
    )  # fmt: skip
    asyncio.run(resumed.run())
    assert resumed.state.files == {"plan.json": "p"}
    assert ("opened again" in str(model.asked[0])) == (style == "full"), "a compact policy wrote the files just now"


LIMITED = replace(verdict(ratio=1.5), clock="real", bytes=100, peak_bytes_per_second=200.0)
SAME_OP = Lesson(("relu",), "", "cpu", 2.0, "Relu fuses with its neighbours.")
SAME_LIMIT = Lesson(("softmax",), "memory", "cpu", 2.0, "Read memory once.")
NEITHER = Lesson(("softmax",), "arithmetic", "cpu", 2.0, "Use the matrix units.")


def test_lessons_are_told_at_the_beginning_by_operator_and_at_the_first_profile_by_limit():
    model = Model(said(WRITE), said(PROFILE), said(PROFILE), said())
    _, attempt, _ = run(model, Sandbox(LIMITED), lessons=[NEITHER, SAME_LIMIT, SAME_OP])
    first = model.asked[0][-1]["content"]
    assert SAME_OP.text in first and SAME_LIMIT.text not in first
    told = [SAME_LIMIT.text in text for text in results(attempt)]
    assert told == [False, True, False] and NEITHER.text not in str(attempt.state.messages)
    again = replace(attempt.state, turn=0)
    _, resumed, _ = run(Model(said(PROFILE), said()), Sandbox(LIMITED), state=again, lessons=[SAME_LIMIT, SAME_OP])
    assert sum(SAME_LIMIT.text in text for text in results(resumed)) == 1, "a resumed attempt is not told again"


def test_an_attempt_that_starts_from_a_solution_is_told_lessons_of_its_limit_at_once():
    first = replace(LIMITED, mode="quick")
    parent = Find(Solution("plan", {"plan.json": "{}"}), first, 1, 0)
    attempt = Attempt(
        2, TASK, Model(said()), Sandbox(first), TERMS, SearchBudget(), Findings(), lambda *_, **__: None,
        lessons=[SAME_LIMIT],
    )  # fmt: skip
    attempt.start_from(parent)
    assert SAME_LIMIT.text in attempt.state.messages[-1]["content"]


@pytest.mark.parametrize(
    "budget, asked", [(SearchBudget(), True), (SearchBudget(seconds=0.0), True), (SearchBudget(tokens=100), False)]
)
def test_a_lesson_is_asked_for_without_tokens_left_never_and_after_the_time_is_up_still(budget, asked):
    model = Model(Reply(f"Lesson: {SAME_OP.text}", [], tokens=1, prompt_tokens=10))
    attempt = Attempt(
        1, TASK, model, Sandbox(verdict()), TERMS, budget, Findings(), lambda *_, **__: None, lessons=[]
    )  # fmt: skip
    attempt.state.messages = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [PROFILE]},
    ]  # fmt: skip
    assert asyncio.run(attempt.lesson(2.0)) == (SAME_OP.text if asked else "")
    assert len(model.asked) == asked
    if asked:
        assert [message["role"] for message in model.asked[0]] == ["user", "user"], "no call without an answer is sent"
