"""Conversations that are made shorter."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.agent.compaction import compacted, cut, size

HEAD = [{"role": "system", "content": "rules"}, {"role": "user", "content": "the problem"}]


def turn(number, text, results):
    calls = [{"id": f"{number}-{i}", "name": "Write", "arguments": {"content": text}} for i in range(len(results))]
    said = {"role": "assistant", "content": f"turn {number} {text}", "tool_calls": calls}
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    return [said, *answers]


lengths = st.sampled_from([0, 30, 700, 5_000, 20_000])
conversations = st.lists(st.tuples(lengths, st.lists(lengths, max_size=3)), max_size=8)


def conversation(turns):
    """``turns``: the length of what is said and written, and those of the results."""
    return HEAD + [m for n, (said, told) in enumerate(turns) for m in turn(n, "x" * said, ["y" * n for n in told])]


@settings(deadline=None, max_examples=40)
@given(conversations, st.integers(6_000, 100_000))
def test_whatever_is_cut_calls_keep_their_results_and_the_task_stays(turns, limit):
    messages = conversation(turns)
    before = [dict(message) for message in messages]
    short = compacted(messages, limit)
    assert messages == before, "the conversation itself is not changed"
    assert short[0]["content"] == "rules" and short[1]["content"].startswith("the problem")
    if size(messages) <= limit:
        assert short == messages
    else:
        assert size(short) < size(messages)
    pending = []
    for message in short:
        if message["role"] == "tool":
            pending.remove(message["tool_call_id"])
        else:
            assert not pending
            pending = [call["id"] for call in message.get("tool_calls", ())]
    assert not pending


@settings(deadline=None, max_examples=40)
@given(conversations, st.integers(16_000, 100_000))
def test_it_fits_afterwards(turns, limit):
    assert size(compacted(conversation(turns), limit)) <= limit


def test_what_is_missed_least_goes_first():
    messages = [*HEAD, *(m for n in range(5) for m in turn(n, f"file {n} ", ["r" * 2000]))]
    short = compacted(messages, size(messages) - 100)
    assert "left out" in short[3]["content"], "an old result"
    assert short[2] == messages[2] and short[-1] == messages[-1], "not an old call, and not the newest result"
    shorter = compacted(messages, 5000)
    assert "earlier turns were dropped" in shorter[1]["content"] and shorter[-1]["tool_call_id"] == "4-0"


def test_the_middle_is_cut():
    assert cut("short", 10) == "short"
    assert cut("a" * 500 + "b" * 500, 100) == "a" * 50 + "\n[900 characters left out]\n" + "b" * 50
