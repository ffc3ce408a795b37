"""What a search knows after the events of its transcript."""

import math

from cuda_agent.agent.progress import SearchBudget, replayed
from cuda_agent.sandbox.wire import Verdict


def event(kind, **facts):
    return {"kind": kind, "attempt": 1} | facts


def message(role, **facts):
    return event("message", message={"role": role, "content": ""} | facts)


def test_an_attempt_that_was_cut_off_in_a_turn_goes_on_from_the_turn_before():
    call = {"id": "c0", "name": "Read", "arguments": {}}
    whole = [message("user"), event("turn", turn=0), message("assistant", tool_calls=[call])]
    whole += [message("tool", tool_call_id="c0"), event("files", changed={}, gone=[])]
    cut = [event("turn", turn=1), message("assistant", tool_calls=[call]), event("ended", why="minutes")]
    resumed = [message("user", content="opened again")]
    states, _, _ = replayed([*whole, *cut, *resumed])
    assert states[1].turn == 1
    assert [said["role"] for said in states[1].messages] == ["user", "assistant", "tool", "user"]


def test_an_answer_is_as_long_as_the_budget_affords():
    assert SearchBudget().affordable(10) == math.inf
    budget = SearchBudget(tokens=1000, money=0.01, price_in=1.0, price_out=10.0, prompt=300, sampled=100)
    assert budget.affordable(200) == 400 and budget.affordable(900) == 0
    assert SearchBudget(money=0.01, price_in=1.0, price_out=10.0, prompt=1000).affordable(4000) == 500


def test_time_after_the_last_answer_counts():
    used = event("spent", prompt=5, sampled=6, estimated=True, seconds=60.0, at=60.0)
    assert replayed([used, event("note", text="judging", at=90.0)])[2] == {
        "prompt": 5, "sampled": 6, "estimated": True, "seconds": 90.0,
    }  # fmt: skip
    assert replayed([event("turn", turn=0, at=3.0)])[2]["seconds"] == 3.0 and replayed([event("turn", turn=0)])[2] == {}


def test_a_fault_of_the_sandbox_is_no_strict_verdict_on_a_solution():
    def judged(status, mode):
        verdict = Verdict(status, "plan", mode, "cpu", "real", seconds=1.0, eager_seconds=2.0)
        return event("verdict", verdict=verdict.to_json(), files={"plan.json": "{}"}, command="verify")

    (_, findings, *_) = replayed([event("turn", turn=0), judged("ok", "quick"), judged("infra", "strict")])
    assert findings.best and findings.best.strict is None
