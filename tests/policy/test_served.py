"""What the client of a served model sends, and what it makes of answers; misbehaving servers are in optimize."""

import asyncio
import json

import httpx
import pytest

from cuda_agent.policy.chat import on_the_wire
from cuda_agent.policy.chat_stream import Again, Reply
from cuda_agent.policy.served import ServedModel, ServedModelError, ServedModelRefused, check_address

TOOLS = [{"type": "function", "function": {"name": "Bash", "description": "Runs.", "parameters": {"properties": {}}}}]
KEY = "sk-0123456789abcdef"
ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]


def stream(*chunks: dict, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * done
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content="".join(lines))


def text(piece: str, finish: str | None = None) -> dict:
    return {"choices": [{"delta": {"content": piece}, "finish_reason": finish}]}


def asked_of(answer, work, form="native"):
    """What ``work`` returns for a model whose requests ``answer`` answers."""

    async def script():
        async with ServedModel("http://there/v1/", "m", form=form, pause=0.0) as model:
            await model._client.aclose()
            model._client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            return await work(model)

    return asyncio.run(script())


def chat(*answers: httpx.Response, form="native", **asked):
    """The reply, the bodies of the requests, what a listener heard, and the model."""
    waiting, sent, heard = list(answers), [], []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sent.append(json.loads(request.content))
        return waiting.pop(0)

    async def work(model):
        return await model.chat(ASKED, listen=lambda what, said: heard.append((what, said)), **asked), model

    reply, model = asked_of(answer, work, form)
    return reply, sent, heard, model


def models(*names: str) -> httpx.Response:
    return httpx.Response(200, json={"object": "list", "data": [{"id": name} for name in names]})


def refusal(status: int, message: str, **more) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message} | more})


def test_a_body_that_is_not_streamed_is_read_with_its_calls_and_counts():
    calls = [{"id": "a1", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}]
    message = {"content": "I look.", "reasoning_content": "hm", "tool_calls": calls}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    reply, _, _, _ = chat(httpx.Response(200, json=body), tools=TOOLS)
    asked = [{"id": "a1", "name": "Bash", "arguments": {"command": "ls"}}]
    assert reply == Reply("I look.", asked, tokens=3, prompt_tokens=7, thought="hm")
    assert reply.message() == {"role": "assistant", "content": "I look.", "tool_calls": asked}


def test_lone_surrogates_of_a_model_are_replaced_and_pairs_that_come_in_pieces_are_joined():
    """JSON can hold them and UTF-8 cannot, so neither a transcript nor the next request could."""
    call = {"index": 0, "function": {"name": "Write", "arguments": '{"content": "a\\ud800b", "\\udfff": [1]}'}}
    answer = stream(
        text("x\ud83d"), text("\ude00y\ud800"), {"choices": [{"delta": {"tool_calls": [call]}}]}, text("", "stop")
    )
    reply, _, _, _ = chat(answer, tools=TOOLS)
    assert reply.content == "x\U0001f600y\ufffd"
    assert reply.calls[0]["arguments"] == {"content": "a\ufffdb", "\ufffd": [1]}


def test_calls_that_come_in_pieces_are_put_together_in_order():
    def piece(index: int, name: str, arguments: str) -> dict:
        return {
            "choices": [
                {"delta": {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}}]}}
            ]
        }

    reply, _, _, _ = chat(
        stream(piece(1, "Ba", '{"a'), piece(0, "Bash", ""), piece(1, "sh", '": 1}'), text("", "tool_calls")),
        tools=TOOLS,
    )
    assert [(call["id"], call["name"], call["arguments"]) for call in reply.calls] == [
        ("call-0", "Bash", {}),
        ("call-1", "Bash", {"a": 1}),
    ]


def test_an_answer_that_breaks_off_is_asked_again_and_counted_as_lost():
    reply, sent, heard, model = chat(stream(text("x" * 400), done=False), stream(text("whole", "stop")))
    assert reply.content == "whole" and sent[0] == sent[1] and model.lost == 100
    assert [what for what, _ in heard] == ["text", "again", "wait", "text"]


def test_text_at_the_limit_is_cut_and_endless_text_is_left():
    assert chat(stream(text("abc", "length")))[0].cut
    pieces = [text("x" * 10_000) for _ in range(9)]
    reply, _, _, _ = chat(stream(*pieces, text("never read", "stop")), max_tokens=10)
    assert reply.cut and "never" not in reply.content


def test_a_request_holds_what_was_asked_for_and_no_more():
    _, (body,), _, _ = chat(stream(text("hi", "stop")), tools=TOOLS, seed=2**31 + 5, max_tokens=9, call=False)
    assert (body["seed"], body["max_tokens"], body["tool_choice"], body["tools"]) == (5, 9, "none", TOOLS)
    _, (body,), _, _ = chat(stream(text("hi", "stop")))
    assert body.keys() == {"model", "messages", "temperature", "stream", "stream_options"}


def test_a_last_turn_of_text_calls_lists_no_tools():
    _, (body,), _, _ = chat(stream(text("hi", "stop")), form="text", tools=TOOLS, call=False)
    assert body["messages"] == ASKED and "tools" not in body


def test_text_calls_alternate_between_user_and_assistant():
    call = {"id": "c", "name": "Bash", "arguments": {"command": "ls", "n": 2}}
    said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    results = [{"role": "tool", "tool_call_id": "c", "content": name} for name in ("one", "two")]
    sent = on_the_wire([*ASKED, said, *results, {"role": "user", "content": "more"}], TOOLS, "text")
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert "## Bash" in sent[0]["content"] and "<parameter=n>\n2\n</parameter>" in sent[2]["content"]
    assert sent[3]["content"].count("<tool_response>") == 2 and sent[3]["content"].endswith("more")
    raw = on_the_wire([said | {"raw": "as it came"}, *results], TOOLS, "raw")
    assert raw[0] == {"role": "assistant", "content": "as it came"} and raw[1] == results[0]


@pytest.mark.parametrize("url", ["", "there/v1", "ftp://there", "http://", "http://[::1", "http://there:0/v1"])
def test_what_is_no_address_is_refused_before_anything_is_sent(url):
    check_address("https://there:8000/v1", "KEY")
    with pytest.raises(ServedModelError, match="expected an address"):
        check_address(url, "KEY")
    with pytest.raises(ServedModelError, match="as KEY"):
        check_address("http://me:secret@there/v1", "KEY")


def test_a_key_in_an_answer_is_replaced_in_pieces_calls_and_errors(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    call = {"tool_calls": [{"index": 0, "id": KEY, "function": {"name": "Bash", "arguments": json.dumps({"c": KEY})}}]}
    pieces = [text(f"a {KEY[:4]}"), text(KEY[4:9]), text(f"{KEY[9:]} b{KEY[:3]}"), {"choices": [{"delta": call}]}]
    reply, _, heard, _ = chat(stream({"error": {"message": f"busy {KEY}"}}), stream(*pieces, text("", "stop")))
    assert "".join(piece for what, piece in heard if what == "text") == f"a [key] b{KEY[:3]}"
    assert reply.calls == [{"id": "[key]", "name": "Bash", "arguments": {"c": "[key]"}}]
    assert KEY not in str(heard) and any("busy [key]" in piece for what, piece in heard if what == "wait")


def test_a_server_that_refuses_tool_choice_gets_no_tools_in_a_turn_without_calls():
    refusal = httpx.Response(400, json={"error": {"message": "unknown field tool_choice"}})
    _, (first, second), _, _ = chat(refusal, stream(text("hi", "stop")), tools=TOOLS, call=False)
    assert first["tool_choice"] == "none" and "tools" not in second and "tool_choice" not in second


@pytest.mark.parametrize(
    "said",
    [
        "System role not supported",
        "Developer instruction is not enabled for models/gemma-3-27b-it",
        "Conversation roles must alternate user/assistant/user/assistant/...",
        "This model does not support messages with role 'system'",
        'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter',
    ],
)
def test_a_model_without_system_messages_gets_the_text_with_the_first_question(said):
    refusal = httpx.Response(400, json={"error": {"message": said}})
    _, (_, second), _, _ = chat(refusal, stream(text("hi", "stop")))
    assert second["messages"] == [{"role": "user", "content": "be brief\n\ngo"}]


def test_a_thought_signature_goes_back_with_its_call():
    call = {"id": "a", "name": "Bash", "arguments": {}, "extra_content": {"google": {"thought_signature": "EjQ"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    (sent,) = on_the_wire([said], TOOLS, "native")
    assert sent["tool_calls"][0]["extra_content"] == call["extra_content"]


@pytest.mark.parametrize(
    "answers, kinds",
    [
        ([models("other", "m")], ["GET"]),
        ([models("other"), stream(text("OK", "stop"))], ["GET", "POST"]),
        ([httpx.Response(404), stream(text("OK", "stop"))], ["GET", "POST"]),
        ([httpx.Response(200, text="<html>"), stream(text("OK", "stop"))], ["GET", "POST"]),
        ([httpx.Response(403), stream(text("OK", "stop"))], ["GET", "POST"]),
    ],
    ids=["listed", "not-listed", "no-list", "page", "key-without-the-right-to-list"],
)
def test_a_server_is_asked_for_the_model_and_for_a_word_if_it_does_not_list_it(answers, kinds):
    asked, left = [], list(answers)

    def answer(request):
        asked.append(request.method)
        return left.pop(0)

    asked_of(answer, lambda model: model.check())
    assert asked == kinds


LONG = "You exceeded your current quota, please check your plan and billing details."


@pytest.mark.parametrize(
    "answers, said",
    [
        ([models("a", "b", "mm"), refusal(404, "no m."), models("a", "b", "mm")], "HTTP 404: no m; it has mm, a, b"),
        ([httpx.Response(404), refusal(404, "no"), httpx.Response(404)], "is this the whole address, such as http://"),
        ([refusal(401, "wrong")], "HTTP 401: wrong (the key in OPENAI_API_KEY is not set)"),
        ([models(), refusal(400, "bad field")], "the request is refused: HTTP 400: bad field"),
        ([models(), refusal(429, LONG, code="insufficient_quota")], "has no quota or credit left (HTTP 429: You "),
        ([models(), refusal(402, "This request requires more")], "has no quota or credit left (HTTP 402: This "),
        ([models(), refusal(400, "Your credit balance is too low")], "has no quota or credit left (HTTP 400: Your "),
        ([models(), stream({"error": {"message": "pay", "code": 402}})], "the request is refused: in the answer: pay"),
    ],
    ids=["no-model", "no-address", "key", "bad-request", "quota", "payment", "credit", "in-the-stream"],
)
def test_what_cannot_mend_itself_is_asked_once_and_called_by_its_name(monkeypatch, answers, said):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    left = list(answers)
    with pytest.raises(ServedModelRefused) as caught:
        asked_of(lambda request: left.pop(0), lambda model: model.check())
    assert said in str(caught.value) and caught.value.exit_code == 78 and not left


def test_a_server_that_does_not_answer_is_found_at_once():
    def answer(request):
        raise httpx.ConnectError("refused")

    with pytest.raises(ServedModelError, match="http://there/v1 does not answer: ConnectError refused") as caught:
        asked_of(answer, lambda model: model.check())
    assert caught.value.exit_code == 75


@pytest.mark.parametrize(
    ("said", "after"),
    [
        ("Please retry in 53s.", 53.0),
        ('{"retryDelay": "7.5s"}', 7.5),
        ("try again in 20 seconds", 20.0),
        ("slow down", None),
    ],
)
def test_the_pause_that_a_server_names_in_words_is_kept(said, after):
    async def failed(model):
        try:
            await model._fail(httpx.Response(429, content=said))
        except Again as again:
            return again.after

    assert asked_of(lambda request: httpx.Response(200), failed) == after


def test_a_key_from_a_file_is_no_part_of_an_error_and_a_key_that_no_header_can_hold_is_refused(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    assert ServedModel("http://there/v1", "m")._client.headers["authorization"] == f"Bearer {KEY}"

    def answer(request):
        raise httpx.ConnectError(f"Illegal header value b'Bearer {KEY}'")

    with pytest.raises(ServedModelError) as caught:
        asked_of(answer, lambda model: model.check())
    assert "Illegal header" in str(caught.value) and KEY not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\u201csecret\u201d")
    with pytest.raises(ServedModelRefused, match="the key in OPENAI_API_KEY has characters") as refused:
        ServedModel("http://there/v1", "m")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "usage", [[{"completion_tokens": 3}], {"completion_tokens": "x"}, "x", {"prompt_tokens": None}]
)
def test_counts_of_tokens_may_be_anything(usage):
    reply, _, _, _ = chat(stream(text("now", "stop") | {"usage": usage}))
    assert reply.content == "now" and reply.estimated and reply.tokens >= 0


def test_a_limit_of_a_minute_is_waited_for():
    limit = refusal(429, f"{LONG} Quota exceeded for requests per minute. Please retry in 0.1s.")
    reply, _, heard, _ = chat(limit, stream(text("now", "stop")))
    assert reply.content == "now" and [what for what, _ in heard][:2] == ["again", "wait"]
