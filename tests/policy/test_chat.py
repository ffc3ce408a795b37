import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cuda_agent.policy.chat import CONTROL, MARKUP, Chat, ToolCall

TEXT = st.text(max_size=40) | st.sampled_from(
    [*MARKUP, *CONTROL, "\n", "\n\nx = 1;\n", "a\r\n", " ", "<|im_start|>user", "S3NTINEL here"]
)
PLAIN = TEXT.filter(lambda text: not any(token.strip() in text for token in CONTROL))
CALL = st.builds(
    lambda name, arguments: {"name": name, "arguments": arguments},
    st.sampled_from(["Write", "Bash", "Read", "Other"]),
    st.dictionaries(st.sampled_from(["path", "content", "command", "limit"]), TEXT, max_size=2),
)
# A dialogue: prompt, then rounds of (assistant turn, tool results).
ROUND = st.tuples(TEXT, st.lists(CALL, max_size=2), st.lists(TEXT, min_size=1, max_size=2))


def dialogue(system, user, rounds, last):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    for content, calls, results in rounds:
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages += [{"role": "tool", "content": result} for result in results]
    return [*messages, {"role": "assistant", "content": last}]


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, st.lists(ROUND, max_size=2), TEXT)
def test_a_written_dialogue_has_the_ids_that_the_loop_would_have_grown(tokenizer, system, user, rounds, last):
    chat = Chat(tokenizer, "compact")
    messages = dialogue(system, user, rounds, last)
    ids = chat.prompt_ids(messages[:2])
    mask = [0] * len(ids)
    for message, (_, _, results) in zip([m for m in messages if m["role"] == "assistant"], rounds, strict=False):
        turn, delta = chat.turn_ids(message), chat.delta_ids(results)
        ids, mask = ids + turn + delta, mask + [1] * len(turn) + [0] * len(delta)
    turn = chat.turn_ids(messages[-1])
    assert chat.encode_dialogue(messages) == (ids + turn, mask + [1] * len(turn))


@settings(max_examples=60, deadline=None)
@given(
    PLAIN, PLAIN, st.lists(st.tuples(PLAIN, st.just([]), st.lists(PLAIN, min_size=1, max_size=2)), max_size=2), PLAIN
)
def test_a_server_with_the_saved_template_sees_the_same_ids(tmp_path_factory, tokenizer, system, user, rounds, last):
    folder = tmp_path_factory.getbasetemp() / "server"
    if not folder.exists():
        tokenizer.save_pretrained(folder)
    served = AutoTokenizer.from_pretrained(folder)
    messages = dialogue(system, user, rounds, last)
    ids, _ = Chat(tokenizer).encode_dialogue(messages)
    rendered = served.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert rendered == ids + served.encode("\n")
    header = served.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids[: len(header)] == header


@settings(max_examples=80, deadline=None)
@given(TEXT)
def test_text_decodes_to_itself(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(max_examples=60, deadline=None)
@given(TEXT)
def test_no_text_can_open_or_close_a_turn(tokenizer, text):
    chat = Chat(tokenizer)
    control = set(tokenizer.all_special_ids)
    plain = [i for i in chat.delta_ids(["x"]) if i in control]
    assert [i for i in chat.delta_ids([text]) if i in control] == plain


def test_a_turn_that_was_cut_is_closed_by_the_delta(tokenizer):
    chat = Chat(tokenizer)
    assert chat.delta_ids(["ok"], closed=False) == [chat.end_id, *chat.delta_ids(["ok"])]


CODE = '\n#include <cmath>\nvoid f(const float* x) { if (x[0] < 1 && "a\\n") {} }\n\n'
CALLS = [
    {"name": "Write", "arguments": {"path": "kernels/fused.cpp", "content": CODE}},
    {"name": "Bash", "arguments": {"command": "verify"}},
]


def test_what_was_written_is_what_is_parsed(tokenizer):
    chat = Chat(tokenizer)
    ids = chat.turn_ids({"role": "assistant", "content": "I fuse it.", "tool_calls": CALLS})
    content, calls, malformed = chat.parse(ids)
    assert (content, malformed) == ("I fuse it.", False)
    assert calls == [ToolCall(call["name"], call["arguments"]) for call in CALLS]
    markup = [i for i in ids if tokenizer.decode([i]) in MARKUP]
    assert len(markup) == 5  # two openings, one parameter between, two ends: a token each


def test_hermes_json_calls_are_read(tokenizer):
    chat = Chat(tokenizer)
    text = "Now:\n" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS)
    content, calls, malformed = chat.parse(tokenizer.encode(text))
    assert (content, malformed) == ("Now:", False)
    assert [call.arguments for call in calls] == [call["arguments"] for call in CALLS]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=Bash>\n<parameter=command>\nverify",
        "<tool_call>\n<function=Bash>\n<parameter=command>\nverify\n</parameter>\n</tool_call>",
        "<tool_call>\nBash verify\n</tool_call>",
        '<tool_call>{"name": "Bash", "arguments": {"command": </tool_call>',
        "<function=Bash>\n<parameter=command>\nverify\n</parameter>\n</function>",
        "verify\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=Bash>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
        "fine <|im_start|>user\nmore",
    ],
)
def test_malformed_calls_are_told(tokenizer, text):
    _, calls, malformed = Chat(tokenizer).parse(tokenizer.encode(text))
    assert malformed and not calls


def test_a_good_call_beside_a_malformed_one_still_counts(tokenizer):
    good = "<tool_call>\n<function=Bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    _, calls, malformed = Chat(tokenizer).parse(tokenizer.encode(good + "\n<tool_call>\nBash\n</tool_call>"))
    assert malformed and calls == [ToolCall("Bash", {"command": "ls"})]


def test_a_call_in_a_thought_is_none(tokenizer):
    good = "<tool_call>\n<function=Bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    assert Chat(tokenizer).parse(tokenizer.encode(f"<think>maybe {good}</think>no"))[1:] == ([], False)


def test_schemas_give_xml_arguments_their_types(tokenizer):
    properties = {"path": {"type": "string"}, "limit": {"type": "integer"}, "edits": {"type": "array"}}
    tools = [{"type": "function", "function": {"name": "Read", "parameters": {"properties": properties}}}]
    arguments = {"path": "7", "limit": 3, "edits": [{"a": "b"}]}
    chat = Chat(tokenizer)
    ids = chat.turn_ids({"role": "assistant", "tool_calls": [{"name": "Read", "arguments": arguments}]})
    assert chat.parse(ids, tools)[1] == [ToolCall("Read", arguments)]
    assert chat.parse(ids)[1][0].arguments["limit"] == "3"


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(ValueError, match="no chat template"):
        Chat(bare)


# The habits of other houses' templates: tools spelled out, calls as JSON, thoughts dropped from all turns but the last;
# and one that writes no text beside a call.
HERMES = r"""
{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if loop.last else '') }}
        {{- TEXT }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOLS = [{"type": "function", "function": {"name": "Bash", "description": "", "parameters": {"properties": {}}}}]


@pytest.mark.parametrize("text", ["m.content", "m.content if not m.tool_calls else ''"])
def test_other_templates_give_the_same_delta_whatever_came_before(tokenizer, text):
    foreign = copy.deepcopy(tokenizer)
    foreign.chat_template = HERMES.replace("TEXT", text)
    chat = Chat(foreign, "full")
    delta = "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert foreign.decode(chat.delta_ids(["ok"])) == delta
    assert chat.stop_ids == (foreign.eos_token_id,)
    messages = [{"role": "user", "content": "go"}]
    assert "Bash" in foreign.decode(chat.prompt_ids(messages, TOOLS))
    assert "Bash" not in foreign.decode(Chat(foreign, "compact").prompt_ids(messages, TOOLS))
    calls = [{"name": "Bash", "arguments": {"command": 'echo "a"'}}]
    turn = chat.turn_ids({"role": "assistant", "content": "", "tool_calls": calls})
    assert chat.parse(turn)[1:] == ([ToolCall("Bash", {"command": 'echo "a"'})], False)


def test_a_template_that_knows_no_tools_is_refused_when_tools_are_needed(tokenizer):
    foreign = copy.deepcopy(tokenizer)
    foreign.chat_template = HERMES.replace("TEXT", "m.content").replace("if tools", "if false")
    with pytest.raises(ValueError, match="does not spell out tools"):
        Chat(foreign, "full").prompt_ids([{"role": "user", "content": "go"}], TOOLS)
