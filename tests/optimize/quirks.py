"""Ways in which servers stream one turn. Each is named after a server, a model or a gateway that does it, where one is
known from issue trackers, and after what it does.

A way is a function from a turn to the chunks of its answer. A turn is a text and tool calls, each (name, arguments).
Strings among the chunks are lines of the stream as they are. ``stream`` makes an answer of the chunks."""

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]
Way = Callable[[str, Calls], list[Any]]
WAYS: dict[str, Way] = {}


def way(name: str) -> Callable[[Way], Way]:
    def add(function: Way) -> Way:
        WAYS[name] = function
        return function

    return add


def stream(chunks: list[Any], done: bool = True, end: str = "\n\n") -> bytes:
    lines = [each if isinstance(each, str) else f"data: {json.dumps(each)}" for each in chunks]
    return "".join(f"{line}{end}" for line in [*lines, *["data: [DONE]"] * done]).encode()


def chunk(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def part(index: Any = None, id: Any = None, name: Any = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    head = {key: value for key, value in (("index", index), ("id", id)) if value is not None}
    return head | {"function": function} | more


def calling(*parts: dict[str, Any]) -> dict[str, Any]:
    return chunk(tool_calls=list(parts))


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def end(calls: Calls) -> dict[str, Any]:
    return chunk("tool_calls" if calls else "stop")


def spoken(text: str) -> list[dict[str, Any]]:
    return [chunk(content=text)] if text else []


def of_parts(parts: Callable[[int, str, str, str], list[dict[str, Any]]]) -> Way:
    """``parts(number, id, name, arguments)`` are the parts of one call, each in a chunk."""

    def chunks(text: str, calls: Calls) -> list[Any]:
        named = [(n, f"c{n}", name, json.dumps(given)) for n, (name, given) in enumerate(calls)]
        return [*spoken(text), *(calling(one) for call in named for one in parts(*call)), end(calls)]

    return chunks


def in_pieces(first: dict[str, Any], arguments: str, **rest: Any) -> list[dict[str, Any]]:
    return [first, *(part(arguments=piece, **rest) for piece in halves(arguments))]


def renamed(rename: Callable[[str], str], parameters: dict[str, str] | None = None) -> Way:
    def chunks(text: str, calls: Calls) -> list[Any]:
        other = [(rename(n), {(parameters or {}).get(key, key): v for key, v in given.items()}) for n, given in calls]
        return WAYS["openai"](text, other)

    return chunks


def plainly(change: Callable[[list[Any]], list[Any]]) -> Way:
    """The usual chunks, changed."""
    return lambda text, calls: change(WAYS["openai"](text, calls))


WAYS |= {
    "openai": of_parts(lambda n, id, name, a: in_pieces(part(n, id, name, ""), a, index=n)),
    "vllm-whole-call-in-a-chunk": of_parts(lambda n, id, name, a: [part(n, id, name, a)]),
    "ollama-qwen3-coder-all-at-index-0": of_parts(lambda n, id, name, a: [part(0, id, name, a)]),
    "dynamo-all-at-index-0-in-pieces": of_parts(lambda n, id, name, a: in_pieces(part(0, id, name, ""), a, index=0)),
    "index-0-without-ids": of_parts(lambda n, id, name, a: [part(0, None, name, a)]),
    "one-id-for-all-calls": of_parts(lambda n, id, name, a: [part(0, "same", name, a)]),
    "one-id-for-all-calls-at-other-indices": of_parts(lambda n, id, name, a: [part(n, "same", name, a)]),
    "gemini-without-index": of_parts(lambda n, id, name, a: [part(None, id, name, a)]),
    "gemini-pieces-without-index": of_parts(lambda n, id, name, a: in_pieces(part(None, id, name, ""), a)),
    "local-without-index-and-id": of_parts(lambda n, id, name, a: [part(None, None, name, a)]),
    "cerebras-pieces-at-other-indices": of_parts(
        lambda n, id, name, a: [part(9 * n, id, name, ""),
                                *(part(9 * n + i + 1, arguments=piece) for i, piece in enumerate(halves(a)))]
    ),
    "minimax-on-nim-name-and-id-in-every-chunk": of_parts(
        lambda n, id, name, a: [part(n, id, name, piece) for piece in ("", *halves(a), "")]
    ),
    "kimi-on-fireworks-name-in-every-chunk": of_parts(
        lambda n, id, name, a: [part(n, None, name, piece) for piece in halves(a)]
    ),
    "id-in-every-chunk": of_parts(lambda n, id, name, a: in_pieces(part(n, id, name, ""), a, index=n, id=id)),
    "lm-studio-empty-name-in-pieces": of_parts(
        lambda n, id, name, a: in_pieces(part(n, id, name, ""), a, index=n, name="")
    ),
    "vllm-null-name-and-id-in-pieces": of_parts(
        lambda n, id, name, a: [part(n, id, name, ""),
                                {"index": n, "id": None, "function": {"name": None, "arguments": a}}]
    ),
    "old-vllm-new-id-in-every-chunk": of_parts(
        lambda n, id, name, a: [part(n, id, name, ""), *(part(n, f"{id}{i}", None, p) for i, p in enumerate(halves(a)))]
    ),
    "gemini-name-in-pieces": of_parts(
        lambda n, id, name, a: [part(n, id, halves(name)[0], ""), part(n, None, halves(name)[1], a)]
    ),
    "dashscope-glm-empty-id-and-name-in-pieces": of_parts(
        lambda n, id, name, a: in_pieces(part(n, id, name, ""), a, index=n, id="", name="")
    ),
    "name-after-the-first-arguments": of_parts(
        lambda n, id, name, a: [part(n, id, None, halves(a)[0]), part(n, None, name, halves(a)[1])]
    ),
    "dashscope-empty-id-in-pieces": of_parts(
        lambda n, id, name, a: in_pieces(part(n, id, name, ""), a, index=n, id="")
    ),
    "tgi-arguments-as-an-object": of_parts(lambda n, id, name, a: [part(n, id, name, json.loads(a))]),
    "glm-arguments-encoded-twice": of_parts(lambda n, id, name, a: [part(n, id, name, json.dumps(a))]),
    "qwen-arguments-encoded-twice-in-pieces": of_parts(
        lambda n, id, name, a: in_pieces(part(n, id, name, ""), json.dumps(a), index=n)
    ),
    "flat-call-without-function": of_parts(
        lambda n, id, name, a: [{"index": n, "id": id, "name": name, "arguments": a}]
    ),
    "index-as-text": of_parts(lambda n, id, name, a: [part(str(n), id, name, a)]),
    "gemini-thought-signature": of_parts(
        lambda n, id, name, a: [part(n, id, name, a, extra_content={"google": {"thought_signature": f"sig-{id}"}})]
    ),
    "type-in-every-part": of_parts(lambda n, id, name, a: [part(n, id, name, a, type="function")]),
    "moonshot-functions-prefix": renamed(lambda name: f"functions.{name}"),
    "kimi-functions-prefix-with-index": renamed(lambda name: f"functions.{name}:0"),
    "claude-mcp-prefix": renamed(lambda name: f"mcp__workspace__{name}"),
    "gemini-default-api-prefix": renamed(lambda name: f"default_api.{name}"),
    "name-in-lower-case": renamed(str.lower),
    "name-in-capitals": renamed(str.upper),
    "name-with-spaces": renamed(lambda name: f" {name} "),
    "claude-code-file-path": renamed(str, {"path": "file_path"}),
    "text-editor-file-text": renamed(str, {"content": "file_text", "path": "filepath"}),
    "gpt-oss-cmd-for-command": renamed(str, {"command": "cmd", "path": "filename"}),
    "nim-glm-no-finish-and-no-done": plainly(lambda chunks: chunks[:-1]),
    "gemini-finish-stop-after-calls": plainly(lambda chunks: [*chunks[:-1], chunk("stop")]),
    "vertex-finish-in-capitals": plainly(lambda chunks: [*chunks[:-1], chunk("STOP")]),
    "gateway-empty-tool-calls-in-every-chunk": plainly(lambda chunks: [chunk(content="", tool_calls=[]), *chunks]),
    "azure-empty-choices-first": plainly(lambda chunks: [{"choices": [], "prompt_filter_results": []}, *chunks]),
    "gateway-chunk-without-choices": plainly(lambda chunks: [{"object": "chat.completion.chunk"}, *chunks]),
    "openai-role-first": plainly(lambda chunks: [chunk(role="assistant", content=""), *chunks]),
    "fields-that-are-null": plainly(
        lambda chunks: [chunk(role=None, content=None, tool_calls=None, function_call=None, refusal=None), *chunks]
    ),
    "usage-in-the-last-chunk": plainly(lambda chunks: [*chunks[:-1], chunks[-1] | {"usage": {"total_tokens": 3}}]),
    "openai-null-usage-in-every-chunk": plainly(lambda chunks: [each | {"usage": None} for each in chunks]),
    "openrouter-comments": plainly(lambda chunks: [line for each in chunks for line in (": PROCESSING", each)]),
    "anthropic-event-lines": plainly(lambda chunks: [line for each in chunks for line in ("event: delta", each)]),
    "deepseek-reasoning-content": plainly(lambda chunks: [chunk(reasoning_content="Let me "), *chunks]),
    "openrouter-reasoning": plainly(lambda chunks: [chunk(reasoning="hm"), *chunks]),
    "openrouter-reasoning-details": plainly(
        lambda chunks: [chunk(reasoning_details=[{"type": "reasoning.text", "text": "hm"}]), *chunks]
    ),
    "mistral-thinking-parts": plainly(
        lambda chunks: [chunk(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]), *chunks]
    ),
    "content-as-a-list-of-parts": plainly(lambda chunks: [chunk(content=[{"type": "text", "text": "I "}]), *chunks]),
    "content-as-a-list-of-texts": plainly(lambda chunks: [chunk(content=["I ", "go."]), *chunks]),
    "qwq-think-tags": plainly(lambda chunks: [chunk(content="<think>hm</think>\n"), *chunks]),
    "think-end-tag-alone": plainly(lambda chunks: [chunk(content="hm</think>\n"), *chunks]),
    "lone-surrogate": plainly(lambda chunks: [chunk(content="a\ud800b"), *chunks]),
    "split-surrogate": plainly(lambda chunks: [chunk(content="a\ud83d"), chunk(content="\ude00b"), *chunks]),
}  # fmt: skip


@way("gemini-all-calls-in-one-chunk-without-index")
def _(text: str, calls: Calls) -> list[Any]:
    return [*spoken(text), calling(*(part(None, f"c{n}", m, json.dumps(a)) for n, (m, a) in enumerate(calls))), end([])]


@way("ollama-all-calls-in-one-chunk-at-index-0")
def _(text: str, calls: Calls) -> list[Any]:
    return [*spoken(text), calling(*(part(0, f"c{n}", m, json.dumps(a)) for n, (m, a) in enumerate(calls))), end(calls)]


@way("openai-parallel-interleaved")
def _(text: str, calls: Calls) -> list[Any]:
    first = [calling(part(n, f"c{n}", name, "")) for n, (name, _) in enumerate(calls)]
    pieces = [halves(json.dumps(given)) for _, given in calls]
    rest = [calling(part(n, arguments=pair[half])) for half in (0, 1) for n, pair in reversed([*enumerate(pieces)])]
    return [*spoken(text), *first, *rest, end(calls)]


@way("whole-message-in-the-last-chunk")
def _(text: str, calls: Calls) -> list[Any]:
    whole = [part(n, f"c{n}", name, json.dumps(given)) for n, (name, given) in enumerate(calls)]
    return [{"choices": [{"message": {"content": text, "tool_calls": whole}, "finish_reason": "stop"}]}]


@way("hermes-calls-in-the-text")
def _(text: str, calls: Calls) -> list[Any]:
    written = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return [chunk(content=text + "".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)), chunk("stop")]


@way("qwen3-coder-xml-calls-in-the-text")
def _(text: str, calls: Calls) -> list[Any]:
    for name, given in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        text += f"\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    return [*spoken(text), chunk("stop")]


@way("vllm-second-call-cut")
def _(text: str, calls: Calls) -> list[Any]:
    rest = [calling(part(len(calls), "cut", "Write", '{"path": "notes.txt", "cont'))] if calls else []
    return [*WAYS["openai"](text, calls)[:-1], *rest, chunk("length" if calls else "stop")]


@way("anthropic-bridge-second-call-cut-by-max-tokens")
def _(text: str, calls: Calls) -> list[Any]:
    rest = [calling(part(len(calls), "cut", "Bash", '{"comm'))] if calls else []
    return [*WAYS["openai"](text, calls)[:-1], *rest, chunk("max_tokens" if calls else "stop")]


@way("surrogate-in-arguments")
def _(text: str, calls: Calls) -> list[Any]:
    note = [("Write", {"path": "notes.txt", "content": "a\udfffb"})] if calls else []
    return WAYS["openai"](text, [*note, *calls])


@way("surrogate-in-a-name-and-an-id")
def _(text: str, calls: Calls) -> list[Any]:
    odd = [calling(part(len(calls), "c\ud800", "Writ\udfff", '{"path": "a"}'))] if calls else []
    return [*WAYS["openai"](text, calls)[:-1], *odd, end(calls)]


def one_call_a_turn(way: Way) -> Way:
    """For the ways that know one call: later calls of the turn are left out."""
    return lambda text, calls: way(text, calls[:1])


ALONE: dict[str, Way] = {
    "legacy-function-call": one_call_a_turn(
        lambda text, calls: [
            *spoken(text),
            *(chunk(function_call={"name": n, "arguments": ""}) for n, _ in calls),
            *(chunk(function_call={"arguments": piece}) for _, a in calls for piece in halves(json.dumps(a))),
            chunk("function_call" if calls else "stop"),
        ]
    ),
    "one-call-that-is-no-list": one_call_a_turn(
        lambda text, calls: [
            *spoken(text),
            *(chunk(tool_calls=part(0, "a", name, json.dumps(given))) for name, given in calls),
            end(calls),
        ]
    ),
}
"""Ways that send at most one call in a turn."""
