"""Servers that answer otherwise than OpenAI's, over real HTTP: with each of them a whole search in the real sandbox
ends with the correct solution or, if there can be none, with one clear line."""

import json

import pytest
from chat_server import turn_of
from optimizing import KERNEL, PROFILE, WRITE
from quirks import ALONE, WAYS, chunk, stream

from cuda_agent.agent.progress import read_events
from cuda_agent.optimize.screen import plain
from tests import by_day

TURNS = [("I write.", WRITE["calls"]), ("I measure.", PROFILE["calls"]), ("Done.", [])]
SINGLE = [*((text, [call]) for text, calls in TURNS for call in calls), TURNS[-1]]


def playing(way, turns=TURNS, **how):
    """A script that plays ``turns`` in the way that a server streams."""

    def script(request):
        chunks = way(*turns[min(turn_of(request), len(turns) - 1)])
        return [{"raw": stream(chunks, **how)}, {"cut": True}]

    return script


def refusing(message, asks, then=None):
    """A script of a server that answers 400 with ``message`` to requests about which ``asks`` is true."""
    work = then or playing(WAYS["openai"])
    body = json.dumps({"error": {"message": message}}).encode()
    return lambda request: [{"status": 400, "body": body}] if asks(request) else work(request)


def once(status, headers, body=b"busy"):
    """A script of a server that answers with ``status`` the first time."""
    left = [{"status": status, "headers": headers, "body": body}]
    work = playing(WAYS["openai"])
    return lambda request: [left.pop()] if left else work(request)


def whole(request):
    """A server that does not stream."""
    message, finish = {"role": "assistant", "content": ""}, "stop"
    text, calls = TURNS[min(turn_of(request), 2)]
    if calls:
        message["tool_calls"] = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for n, (name, given) in enumerate(calls)
        ]
        finish = "tool_calls"
    body = {"object": "chat.completion", "choices": [{"message": message | {"content": text}, "finish_reason": finish}]}
    return [{"status": 200, "headers": {"Content-Type": "application/json"}, "body": json.dumps(body).encode()}]


def as_type(kind):
    def script(request):
        body = stream(WAYS["openai"](*TURNS[min(turn_of(request), 2)]))
        return [{"status": 200, "headers": {"Content-Type": kind}, "body": body}]

    return script


def signed(request):
    """Gemini's server refuses calls that come back without their signature."""
    calls = [call for message in request["messages"] for call in message.get("tool_calls", ())]
    if any(call.get("extra_content", {}).get("google", {}).get("thought_signature") is None for call in calls):
        return [{"status": 400, "body": b'{"error": {"message": "Function call is missing a thought_signature"}}'}]
    return playing(WAYS["gemini-thought-signature"])(request)


def has_system(request):
    return request["messages"][0]["role"] == "system"


SERVERS = {
    "gemma-no-system-role": refusing("System role not supported", has_system),
    "gemini-gemma-no-developer-instruction": refusing("Developer instruction is not enabled for gemma-3", has_system),
    "mistral-roles-must-alternate": refusing("Conversation roles must alternate user/assistant/...", has_system),
    "anthropic-bridge-system-is-a-parameter": refusing('messages: Unexpected role "system".', has_system),
    "o3-max-completion-tokens": refusing("Use 'max_completion_tokens' instead", lambda r: "max_tokens" in r),
    "gpt-5-default-temperature-alone": refusing("temperature does not support 0.5", lambda r: "temperature" in r),
    "strict-server-no-seed": refusing("Extra inputs are not permitted: seed", lambda r: "seed" in r),
    "old-server-no-stream-options": refusing("Unknown field: stream_options", lambda r: "stream_options" in r),
    "vllm-without-a-tool-parser": refusing(
        '"auto" tool choice requires --tool-call-parser', lambda r: "tools" in r,
        playing(WAYS["qwen3-coder-xml-calls-in-the-text"]),
    ),
    "ollama-model-without-tools": refusing(
        "m does not support tools", lambda r: "tools" in r, playing(WAYS["hermes-calls-in-the-text"])
    ),
    "server-that-does-not-stream": whole,
    "stream-as-plain-text": as_type("text/plain"),
    "stream-as-ndjson": as_type("application/x-ndjson"),
    "lines-that-end-with-cr-lf": playing(WAYS["openai"], end="\r\n\r\n"),
    "one-line-end-between-events": playing(WAYS["openai"], end="\n"),
    "gemini-wants-its-thought-signatures-back": signed,
    "rate-limit-429": once(429, {"Retry-After": "0"}),
    "gemini-quota-of-a-minute": once(429, {"Retry-After": "0"}, b'{"error": {"message": "You exceeded your current '
                                     b'quota, requests per minute. Please retry in 0.1s."}}'),
    "llama-cpp-loading-503": once(503, {"Retry-After": "0"}),
    "anthropic-overloaded-529": once(529, {"Retry-After": "0"}),
    "cloudflare-502-page": once(502, {"Retry-After": "0"}, b"<html>Bad gateway</html>"),
}  # fmt: skip
SERVERS |= {name: playing(way, done="no-done" not in name) for name, way in WAYS.items()}
SERVERS |= {name: playing(way, SINGLE) for name, way in ALONE.items()}


@pytest.mark.parametrize("name", by_day.every(4, SERVERS))
def test_a_search_ends_with_the_correct_solution(run, name):
    outcome = run(SERVERS[name])
    assert (outcome.why, outcome.reached, outcome.message) == ("target", True, ""), outcome.message
    assert outcome.best.solution.files["kernels/fused.cpp"] == KERNEL
    assert (run.folder / "out" / "model_new.py").exists()


def test_there_are_sixty_of_them():
    assert len(SERVERS) >= 60


def error(status, message, **more):
    body = json.dumps({"error": {"message": message} | more}).encode()
    return [{"status": status, "body": body}]


def ends(*chunks):
    return [{"raw": stream(list(chunks))}, {"cut": True}]


SPENT = "You exceeded your current quota, please check your plan and billing details."
REFUSALS = {
    "openai-refusal": (
        ends(chunk(refusal="I cannot "), chunk(refusal="help with that."), chunk("stop")),
        "refused", "the model refuses: I cannot help with that.",
    ),
    "azure-content-filter": (
        ends(chunk(content="I "), chunk("content_filter")), "refused", "filter ended the answer (content_filter)",
    ),
    "gemini-safety": (ends(chunk("SAFETY")), "refused", "filter ended the answer (SAFETY)"),
    "gemini-prohibited-content": (ends(chunk("PROHIBITED_CONTENT")), "refused", "(PROHIBITED_CONTENT)"),
    "anthropic-bridge-refusal": (ends(chunk("refusal")), "refused", "filter ended the answer (refusal)"),
    "azure-filter-of-the-prompt": (
        error(400, "The response was filtered", code="content_filter"),
        "server", "the request is refused: HTTP 400: The response was filtered",
    ),
    "ollama-no-such-model": (error(404, "model 'm' not found"), "server", "model 'm' not found; it has scripted, m"),
    "openai-quota": (error(429, SPENT, code="insufficient_quota"), "server", "has no quota or credit left (HTTP 429"),
    "deepseek-no-balance": (error(402, "Insufficient Balance"), "server", "has no quota or credit left (HTTP 402"),
    "anthropic-credit": (error(400, "Your credit balance is too low"), "server", "has no quota or credit left"),
    "openrouter-402-in-the-stream": (
        [{"raw": b'data: {"error": {"code": 402, "message": "more credits"}}\n\n'}, {"cut": True}],
        "server", "refused: in the answer: more credits",
    ),
    "surrogate-in-an-error": (error(400, "bad \ud800 field"), "server", "HTTP 400: bad � field"),
    "wrong-key": (error(401, "Incorrect API key"), "server", "(the key in OPENAI_API_KEY is not set)"),
    "no-chat-completion": (
        [{"status": 200, "headers": {"Content-Type": "text/html"}, "body": b"<html>Sign in</html>"}],
        "server", "no chat completion in its answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_can_have_no_solution_ends_with_one_clear_line_here_in_the_transcript_and_on_the_page(
    run, name, monkeypatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    steps, why, said = REFUSALS[name]
    outcome = run(lambda request: steps)
    assert outcome.why == why and outcome.best is None
    assert said in outcome.message and len(outcome.message.splitlines()) == 1
    lines: list[str] = []
    watch = plain(lines.append)
    for event in run.events:
        watch(event)
    assert any(said in line for line in lines)
    notes = [event for event in read_events(run.folder / "out" / "transcript.jsonl") if event["kind"] == "note"]
    assert any(said in event["text"] for event in notes)
    page = (run.folder / "out" / "report.html").read_text()
    assert said.replace("'", "&#39;") in page and "model said that it is done" not in page


@pytest.mark.parametrize("name", [name for name in WAYS if "surrogate" in name])
def test_a_search_with_surrogates_can_be_gone_on_with(run, name):
    assert run(SERVERS[name], target=1000.0, turns=2).best
    assert run(SERVERS[name], target=1000.0, turns=4, resume=True).best
