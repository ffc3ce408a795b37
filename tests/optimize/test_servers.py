"""Servers that misbehave, over real HTTP: the search ends well with every one of them."""

import asyncio
import json
import time

import pytest
from chat_server import call, said, serve, turn_of
from optimizing import DONE, PROFILE, SANDBOX, WRITE, Run

from cuda_agent.agent.tools import TOOLS
from cuda_agent.policy.chat import written
from cuda_agent.policy.served import ContextTooLong, ServedModel, ServedModelError
from tests.sandbox.service.serving import Served as Sandboxes


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """A sandbox server for all of them: what is tried here is what the model's server does."""
    folder = tmp_path_factory.mktemp("optimize-sandbox")
    with Sandboxes(folder, "sandbox.clock=model", f"sandbox.memory_mb={SANDBOX.memory_mb}", token=None) as served:
        served.ready()
        yield SANDBOX.model_copy(update={"servers": [served.address]})


@pytest.fixture
def run(tmp_path, sandbox):
    return Run(tmp_path, tmp_path / "cache", sandbox)


def after(first, then=None):
    """A script that does ``first`` once, then works."""
    state = {"done": False}
    work = said([[WRITE], [PROFILE], DONE])

    def script(request):
        if not state["done"]:
            state["done"] = True
            return first
        return (then or work)(request)

    return script


def shifted(first):
    """``first`` is the first turn; the work follows."""
    work = [[WRITE], [PROFILE], DONE]
    return lambda request: first if turn_of(request) == 0 else work[min(turn_of(request) - 1, 2)]


@pytest.mark.parametrize(
    "first, told",
    [
        ([{"calls": [("Write", '{"path": "kernels/fused.cpp", "content": "unfinished')]}], "no JSON object"),
        ([{"calls": [("Write", '["a list"]'), ("Bash", "null")]}], "no JSON object"),
        ([{"calls": [call("Write", path=3, content=None), call("Edit", path="plan.json")]}], "needs"),
        ([{"calls": [call("FormatDisk", really=True), call("", x=1)]}], "no tool 'FormatDisk'; there are Bash"),
        ([{"calls": [call("Bash", command="echo hi", sudo=True)]}], "no parameter 'sudo'"),
        ([{"calls": [call("Bash", command="true")] * 40}], "at most 32 calls a turn"),
        ([{"calls": [call("Write", path="kernels/big.cpp", content="x" * 300_000)]}, {"finish": "tool_calls"}], "cut"),
        ([{"text": "<tool_call>\n<function=Bash>\n<parameter=command>\nls"}], "malformed tool call"),
        ([{"text": "a" * 500}, {"finish": "length"}], "was cut after"),
    ],
    ids=["unfinished", "no-object", "wrong-types", "unknown", "invented", "many", "huge", "malformed", "cut"],
)  # fmt: skip
def test_wrong_calls_are_answered_in_words_and_the_search_goes_on(run, first, told):
    outcome = run(shifted(first))
    assert told in run.results()
    assert run.kinds("void") or any(event["error"] for event in run.kinds("result")), "a person sees it, too"
    assert outcome.why == "target"
    for request in run.served.requests:
        well_formed(request["messages"])


def well_formed(messages):
    """As strict servers want it: every call answered, all arguments JSON objects."""
    open_calls = []
    for message in messages:
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
        else:
            assert not open_calls, message
        for asked in message.get("tool_calls", ()):
            assert isinstance(json.loads(asked["function"]["arguments"]), dict)
            open_calls.append(asked["id"])
    assert not open_calls


def test_a_megabyte_of_arguments_neither_stops_the_search_nor_comes_back_every_turn(run):
    huge = call("Bash", command="echo " + "x" * (1 << 20))
    outcome = run(shifted([{"calls": [huge]}]), answer_tokens=400_000, context=900_000)
    assert outcome.why == "target" and "too large" in run.results()
    assert max(len(json.dumps(request["messages"])) for request in run.served.requests) < 2 << 20


def test_endless_text_is_left_and_told_so(run):
    outcome = run(shifted([{"endless": "and so on, " * 20}]), answer_tokens=300)
    assert outcome.why == "target" and "was cut after" in run.results()


@pytest.mark.parametrize(
    "first",
    [
        [{"status": 429, "headers": {"Retry-After": "0"}, "body": b'{"error": {"message": "slow down"}}'}],
        [{"status": 500, "headers": {"Retry-After": "0"}}],
        [{"status": 503, "headers": {"Retry-After": "Fri, 01 Jan 2021 00:00:00 GMT"}}],
        [{"text": "I begin"}, {"cut": True}],
        [{"calls": [("Write", '{"path": "a", "cont')]}, {"cut": True}],
        [{"raw": b"data: {not json}\n\n"}],
        [{"raw": b'data: {"error": {"message": "out of memory"}}\n\n'}],
        [{"raw": b'data: {"choices": [{"delta": {"tool_calls": [7]}}]}\n\n'}],
    ],
    ids=["429", "500", "503-date", "cut", "cut-in-call", "no-json", "error-in-stream", "nonsense"],
)
def test_what_fails_once_is_asked_again(run, first):
    outcome = run(after(first))
    assert outcome.why == "target" and run.kinds("wait")
    assert run.served.requests[0]["messages"] == run.served.requests[1]["messages"]


def test_a_server_that_never_works_again_ends_the_attempt_with_what_was_found(run, monkeypatch):
    monkeypatch.setattr("cuda_agent.policy.served._LONGEST_PAUSE", 0.05)
    work = [[WRITE], [PROFILE]]
    outcome = run(lambda r: work[turn_of(r)] if turn_of(r) < 2 else [{"status": 500}], target=1000.0)
    assert outcome.why == "server" and outcome.best and "HTTP 500" in outcome.message


def test_a_model_that_says_the_same_forever_is_left(run):
    outcome = run(said([[{"calls": [call("Bash", command="compile")]}]]), turns=100)
    assert outcome.why == "stuck" and run.served.turns() < 10


def test_a_server_without_tool_calls_gets_them_as_text(run):
    calls = [[{"name": n, "arguments": a} for n, a in step["calls"]] for step in (WRITE, PROFILE)]

    def script(request):
        if "tools" in request:
            return [{"status": 400, "body": b'{"error": {"message": "\\"auto\\" tool choice requires a parser"}}'}]
        return [{"text": f"I do it.\n{written('', calls[turn_of(request)])}"}]

    outcome = run(script)
    assert outcome.why == "target" and "as text" in run.kinds("form")[0]["text"]
    last = run.served.requests[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
    assert "<tool_response>" in last[3]["content"] and "## KillBash" in last[0]["content"]


def test_a_server_that_drops_tools_without_a_word_is_found_out(run):
    calls = [[{"name": n, "arguments": a} for n, a in step["calls"]] for step in (WRITE, PROFILE)]

    def script(request):
        if "## Bash" not in request["messages"][0]["content"]:
            return [{"text": "Which tools? I see none."}]
        return [{"text": written("", calls[turn_of(request) - 1])}]

    assert run(script).why == "target"


def test_a_conversation_that_outgrows_the_context_is_cut_and_goes_on(run):
    """A server with a small context that says so, and a model that reads much."""
    answered = []

    def script(request):
        if len(json.dumps(request["messages"])) > 40_000:
            return [{"status": 400, "body": b'{"error": {"message": "maximum context length is 8192 tokens"}}'}]
        answered.append(request)
        number = len(answered)
        return [{"calls": [call("Bash", command=f"echo {number}; seq 1200")]}] if number < 12 else (
            [WRITE] if number == 12 else [PROFILE]
        )  # fmt: skip

    outcome = run(script, context=60_000, turns=40)
    assert outcome.why == "target"
    assert len(answered) == 13 and len(run.served.requests) > 13
    for request in run.served.requests:
        well_formed(request["messages"])
        assert request["messages"][0]["role"] == "system" and "Optimise the model" in request["messages"][1]["content"]


def ask(url, **options):
    async def inside():
        async with ServedModel(url, "m", **options) as model:
            return await model.chat([{"role": "user", "content": "x"}], TOOLS, 500, 1.0, 7)

    return asyncio.run(inside())


def test_what_a_server_does_not_know_is_left_out_once_and_for_all():
    refused = []

    def script(request):
        for name, message in (
            ("stream_options", "Unknown field: stream_options"),
            ("max_tokens", "Unsupported parameter: use 'max_completion_tokens' instead"),
            ("temperature", "temperature does not support 1.0 with this model"),
            ("seed", "Extra inputs are not permitted: seed"),
        ):
            if name in request:
                refused.append(name)
                return [{"status": 400, "body": json.dumps({"error": {"message": message}}).encode()}]
        return [{"text": "hello"}]

    with serve(script) as served:
        assert ask(served.url).content == "hello"
    assert refused == ["stream_options", "max_tokens", "temperature", "seed"]
    assert served.requests[-1]["max_completion_tokens"] == 500


def test_the_pause_that_a_server_asks_for_is_kept():
    failures = [[{"status": 429, "headers": {"Retry-After": "1"}}], [{"text": "now"}]]
    with serve(lambda request: failures.pop(0)) as served:
        began = time.monotonic()
        assert ask(served.url, pause=0.0).content == "now"
    assert time.monotonic() - began >= 1.0


def test_too_long_a_conversation_is_an_error_of_its_own():
    body = b'{"error": {"message": "This model\'s maximum context length is 10 tokens"}}'
    with serve(lambda request: [{"status": 400, "body": body}]) as served, pytest.raises(ContextTooLong):
        ask(served.url)


def test_a_key_stays_in_the_environment_and_out_of_errors_and_answers(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-canary-123456")

    def script(request):
        return [{"text": "your key is sk-canary-123456"}] if turns else [turns.append(1) or refusal]

    refusal = {"status": 401, "body": b'{"error": {"message": "Incorrect key: sk-canary-123456"}}'}
    turns: list[int] = []
    with serve(script) as served:
        with pytest.raises(ServedModelError) as caught:
            ask(served.url, key_env="SOME_KEY")
        assert "canary" not in str(caught.value) and "SOME_KEY" in str(caught.value)
        assert "canary" not in ask(served.url, key_env="SOME_KEY").content
    with pytest.raises(ServedModelError, match="environment"):
        ServedModel("http://user:sk-canary@host/v1", "m")


def test_thoughts_are_told_apart_from_what_is_said():
    for steps in ([{"thought": "hm"}, {"text": "so"}], [{"text": "<think>hm</think>\nso"}]):
        with serve(lambda request, steps=steps: steps) as served:
            reply = ask(served.url)
        assert (reply.thought, reply.content) == ("hm", "so")


def test_tokens_are_counted_by_the_server_or_estimated():
    with serve(said([[{"text": "x" * 400}, {"usage": (11, 5)}]])) as served:
        reply = ask(served.url)
        assert (reply.prompt_tokens, reply.tokens, reply.estimated) == (11, 5, False)
    with serve(said([[{"text": "x" * 400}]])) as served:
        reply = ask(served.url)
        assert (reply.tokens, reply.estimated) == (100, True) and reply.prompt_tokens > 0
