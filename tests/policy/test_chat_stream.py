"""Turns as real servers stream them. Each case is named after a server or a kind of proxy that sends it."""

import asyncio
import json

import httpx
import pytest

from cuda_agent.agent.tools import TOOLS
from cuda_agent.policy.chat_stream import Again, NoTurn, Reply, Turn

LS, WC = {"command": "ls"}, {"command": "wc -l model.py"}
L, W = json.dumps(LS), json.dumps(WC)
ONE, BOTH = [("Bash", LS)], [("Bash", LS), ("Bash", WC)]


def part(index=None, id=None, name=None, arguments=None, **more):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    head = {key: value for key, value in (("index", index), ("id", id)) if value is not None}
    return head | {"function": function} | more


def calls(*parts):
    return delta(tool_calls=list(parts))


def delta(finish=None, **fields):
    return {"choices": [{"delta": fields, "finish_reason": finish}]}


END = delta("tool_calls")


def read(*chunks, done=True, kind="text/event-stream", end="\n\n") -> Reply:
    lines = [f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}{end}" for chunk in chunks]
    content = "".join(lines + [f"data: [DONE]{end}"] * done)
    turn = Turn(str, lambda what, piece: None)
    if kind == "text/event-stream":
        asyncio.run(turn.stream(httpx.Response(200, content=content), 1 << 20))
    else:
        turn.whole(content.encode())
    return turn.reply(TOOLS, "native", 100)


def called(reply: Reply) -> list[tuple[str, dict | None]]:
    return [(call["name"], call["arguments"]) for call in reply.calls]


CALLS = {
    "openai": ([calls(part(0, "a", "Bash", "")), calls(part(0, arguments=L)), END], ONE),
    "openai-parallel-interleaved": (
        [calls(part(0, "a", "Bash", "")), calls(part(1, "b", "Bash", "")), calls(part(1, arguments=W[:5])),
         calls(part(0, arguments=L)), calls(part(1, arguments=W[5:])), END], BOTH,
    ),
    "ollama-all-at-index-0": ([calls(part(0, "a", "Bash", L)), calls(part(0, "b", "Bash", W)), END], BOTH),
    "ollama-all-at-index-0-in-one-chunk": ([calls(part(0, "a", "Bash", L), part(0, "b", "Bash", W)), END], BOTH),
    "dynamo-index-0-in-pieces": (
        [calls(part(0, "a", "Bash", L[:4])), calls(part(0, arguments=L[4:])), calls(part(0, "b", "Bash", W[:4])),
         calls(part(0, arguments=W[4:])), END], BOTH,
    ),
    "gateway-index-0-without-ids": ([calls(part(0, None, "Bash", L)), calls(part(0, None, "Bash", W)), END], BOTH),
    "gateway-one-id-for-all": ([calls(part(0, "a", "Bash", L)), calls(part(0, "a", "Bash", W)), END], BOTH),
    "gemini-without-index-in-one-chunk": (
        [calls(part(id="a", name="Bash", arguments=L), part(id="b", name="Bash", arguments=W))], BOTH,
    ),
    "gemini-without-index-in-chunks": (
        [calls(part(id="a", name="Bash", arguments=L)), calls(part(id="b", name="Bash", arguments=W))], BOTH,
    ),
    "gemini-pieces-without-index": (
        [calls(part(id="a", name="Bash", arguments="")), calls(part(arguments=L[:6])), calls(part(arguments=L[6:]))],
        ONE,
    ),
    "local-without-index-and-id": (
        [calls(part(name="Bash", arguments=L)), calls(part(name="Bash", arguments=W))], BOTH,
    ),
    "cerebras-other-index-for-pieces": (
        [calls(part(0, "a", "Bash", "")), calls(part(1, arguments=L[:6])), calls(part(2, arguments=L[6:])), END], ONE,
    ),
    "minimax-name-in-every-chunk": (
        [calls(part(0, "a", "Bash", "")), calls(part(0, "a", "Bash", L[:6])), calls(part(0, "a", "Bash", L[6:])),
         calls(part(0, "a", "Bash", "")), END], ONE,
    ),
    "kimi-name-in-every-chunk-without-id": (
        [calls(part(0, None, "Bash", L[:6])), calls(part(0, None, "Bash", L[6:])), calls(part(0, None, "Bash", "")),
         END], ONE,
    ),
    "lm-studio-empty-name-in-pieces": ([calls(part(0, "a", "Bash", "")), calls(part(0, "", "", L)), END], ONE),
    "old-vllm-new-id-in-every-chunk": (
        [calls(part(0, "a", "Bash", L[:6])), calls(part(0, "b", None, L[6:])), END], ONE,
    ),
    "name-in-pieces": ([calls(part(0, "a", "Ba", "")), calls(part(0, None, "sh", L)), END], ONE),
    "vllm-null-name": (
        [calls(part(0, "a", "Bash", "")), calls({"index": 0, "function": {"name": None, "arguments": L}}), END], ONE,
    ),
    "arguments-as-an-object": ([calls(part(0, "a", "Bash", LS)), END], ONE),
    "glm-arguments-encoded-twice": ([calls(part(0, "a", "Bash", json.dumps(L))), END], ONE),
    "qwen-arguments-encoded-twice-in-pieces": (
        [calls(part(0, "a", "Bash", json.dumps(L)[:7])), calls(part(0, arguments=json.dumps(L)[7:])), END], ONE,
    ),
    "flat-call-without-function": ([calls({"index": 0, "id": "a", "name": "Bash", "arguments": L}), END], ONE),
    "one-call-that-is-no-list": ([delta(tool_calls=part(0, "a", "Bash", L)), END], ONE),
    "legacy-function-call": (
        [delta(function_call={"name": "Bash", "arguments": L[:6]}), delta(function_call={"arguments": L[6:]}),
         delta("function_call")], ONE,
    ),
    "index-as-text": ([calls(part("0", "a", "Bash", L)), calls(part("1", "b", "Bash", W)), END], BOTH),
    "nim-glm-without-finish": ([calls(part(0, "a", "Bash", L))], ONE),
    "gemini-finish-stop-in-a-later-chunk": ([calls(part(0, "a", "Bash", L)), delta("stop")], ONE),
    "empty-tool-calls-in-every-chunk": (
        [delta(content="I look.", tool_calls=[]), calls(part(0, "a", "Bash", L)), END], ONE,
    ),
    "null-everywhere": (
        [delta(role=None, content=None, tool_calls=None, function_call=None, refusal=None),
         calls(part(0, "a", "Bash", L)), END], ONE,
    ),
    "whole-message-in-the-last-chunk": (
        [{"choices": [{"message": {"content": "", "tool_calls": [part(0, "a", "Bash", L)]}, "finish_reason": "stop"}]}],
        ONE,
    ),
    "name-with-functions-prefix": ([calls(part(0, "a", "functions.Bash", L)), END], ONE),
    "name-with-kimi-index": ([calls(part(0, "a", "functions.Bash:0", L)), END], ONE),
    "name-with-mcp-prefix": ([calls(part(0, "a", "mcp__workspace__Bash", L)), END], ONE),
    "name-in-lower-case": ([calls(part(0, "a", "bash", L)), END], ONE),
    "name-in-snake-case": ([calls(part(0, "a", "multi_edit", "{}")), END], [("MultiEdit", {})]),
    "claude-code-file-path": (
        [calls(part(0, "a", "Read", '{"file_path": "model.py"}')), END], [("Read", {"path": "model.py"})],
    ),
    "text-editor-parameters": (
        [calls(part(0, "a", "Edit", '{"filename": "k.cu", "old_str": "a", "new_str": "b"}')), END],
        [("Edit", {"path": "k.cu", "old_string": "a", "new_string": "b"})],
    ),
    "cmd-for-command": ([calls(part(0, "a", "Bash", '{"cmd": "ls"}')), END], ONE),
    "both-names-of-a-parameter": (
        [calls(part(0, "a", "Read", '{"path": "a", "file_path": "b"}')), END],
        [("Read", {"path": "a", "file_path": "b"})],
    ),
    "unknown-tool": ([calls(part(0, "a", "FormatDisk", "{}")), END], [("FormatDisk", {})]),
    "arguments-that-are-a-list": ([calls(part(0, "a", "Bash", "[1]")), END], [("Bash", None)]),
    "no-arguments": ([calls(part(0, "a", "BashOutput")), END], [("BashOutput", {})]),
    "cut-in-the-second-call": (
        [calls(part(0, "a", "Bash", L)), calls(part(1, "b", "Bash", W[:8])), delta("length")], ONE,
    ),
    "cut-in-the-only-call": ([calls(part(0, "a", "Bash", L[:8])), delta("length")], [("Bash", None)]),
    "hermes-in-the-text": (
        [delta(content=f'<tool_call>\n{{"name": "bash", "arguments": {L}}}\n</tool_call>'), delta("stop")], ONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_the_ones_that_the_model_made(name):
    chunks, wanted = CALLS[name]
    reply = read(*chunks, done="without-finish" not in name)
    assert called(reply) == wanted
    ids = [call["id"] for call in reply.calls]
    assert all(ids) and len(set(ids)) == len(ids)


HM = {"type": "reasoning.text", "text": "hm"}
TEXTS = {
    "parts": (delta(content=[{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]), ""),
    "mistral-thinking-parts": (
        delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"text": "Hello"}]), "hm",
    ),
    "deepseek-reasoning-content": (delta(content="Hello", reasoning_content="hm"), "hm"),
    "openrouter-reasoning": (delta(content="Hello", reasoning="hm", reasoning_details=[HM]), "hm"),
    "openrouter-reasoning-details": (delta(content="Hello", reasoning_details=[HM]), "hm"),
    "reasoning-as-a-list": (delta(content="Hello", reasoning=[{"summary": "hm"}]), "hm"),
    "think-tags": (delta(content="<think>hm</think>\n\nHello"), "hm"),
    "texts-in-a-list": (delta(content=["Hel", "lo"]), ""),
    "an-image-part": (delta(content=[{"type": "image_url", "image_url": {}}, {"text": "Hello"}]), ""),
    "refusal-null": (delta(content="Hello", refusal=None), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_text_and_thoughts_are_told_apart(name):
    chunk, thought = TEXTS[name]
    reply = read(chunk, delta("stop"))
    assert (reply.content, reply.thought, reply.refused) == ("Hello", thought, "")


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS"])
def test_a_cut_answer_is_known_by_each_name_of_the_reason(reason):
    assert read(delta(content="abc"), delta(reason)).cut


@pytest.mark.parametrize("reason", ["content_filter", "SAFETY", "PROHIBITED_CONTENT", "refusal"])
def test_a_filter_is_told(reason):
    assert reason in read(delta(content="abc"), delta(reason)).refused


def test_a_refusal_is_text_and_told():
    reply = read(delta(refusal="I cannot "), delta(refusal="help."), delta("stop"))
    assert reply.content == "I cannot help." and reply.refused == "the model refuses: I cannot help."


def test_a_thought_signature_is_kept_for_the_next_request():
    signed = {"google": {"thought_signature": "EjQ"}}
    assert read(calls(part(0, "a", "Bash", L, extra_content=signed)), END).calls[0]["extra_content"] == signed


@pytest.mark.parametrize("end", ["\n", "\r\n\r\n"])
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
def test_streams_with_other_line_ends_and_content_types_are_streams(end, kind):
    reply = read(delta(content="Hello"), calls(part(0, "a", "Bash", L)), END, end=end, kind=kind)
    assert reply.content == "Hello" and called(reply) == ONE


BROKEN = {
    "text": [delta(content="Hel")], "call": [calls(part(0, "a", "Bash", L[:6]))],
    "error": ['{"error": {"message": "busy"}}'], "error-as-text": ['{"error": "busy"}'],
    "vllm-error": ['{"object": "error", "message": "busy"}'], "html": ["<html>"], "list": ["[1]"],
    "transformers-error-that-is-no-json": ['{"error": "busy\nContent: \'x\'"}'],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
def test_what_is_no_whole_turn_is_asked_again(name, kind):
    with pytest.raises(Again, match="busy" if "error" in name else None):
        read(*BROKEN[name], done=False, kind=kind)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices": []}', b"[]", b"null", b"<html>"])
def test_a_body_without_a_turn_is_said_to_be_none(body):
    with pytest.raises(NoTurn):
        Turn(str, lambda what, piece: None).whole(body)


def test_an_error_with_status_200_is_asked_again():
    with pytest.raises(Again, match="overloaded"):
        Turn(str, lambda what, piece: None).whole(b'{"error": {"message": "overloaded"}}')
