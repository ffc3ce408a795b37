"""Converts conversations to token ids, and to messages for chat servers.

Sampled text is never tokenized again: each new prompt is the concatenation of the previous prompt, the sampled tokens
and the tokens of the tool results. A conversation therefore has the same token ids in training, in rollouts and on
every server. The chat template is saved with the tokenizer. Policies trained from scratch use
``chat_template.jinja``."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

Message = Mapping[str, Any]  # role, content; for an assistant also tool_calls: [{"name": str, "arguments": dict}]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of the tools

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()

END = "<|im_end|>"
CONTROL = (END, "<|im_start|>", "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n")
"""The control tokens of the tokenizer that this project trains. Each of the last three is the
whole header of a message."""

MARKUP = (
    "<tool_call>\n<function=",
    *(
        f"<tool_call>\n<function={tool}>\n<parameter={parameter}>\n"
        for tool, parameter in (("Write", "path"), ("Read", "path"), ("Edit", "path"), ("Bash", "command"))
    ),
    "\n</parameter>\n<parameter=",
    *(f"\n</parameter>\n<parameter={parameter}>\n" for parameter in ("content", "old_string", "new_string")),
    "\n</parameter>\n</function>\n</tool_call>",
    "</tool_call>",
    "<tool_response>\n",
    "\n</tool_response>",
)
"""Strings that the tokenizer of this project encodes as one token each. If several match, the longest is taken."""

Form = Literal["native", "text", "raw"]  # see ``on_the_wire``

_RULES = """# Tools

You call tools by writing calls in this form, outside of any code fence:

<tool_call>
<function=Write>
<parameter=path>
notes.txt
</parameter>
<parameter=content>
The value of a parameter stands on lines of its own, as it is, without quotes or escapes.
</parameter>
</function>
</tool_call>

Lists and objects are written as JSON. Several calls may follow each other. Stop after the last one: the results come in
the next message, in <tool_response>. Without a call your answer counts as the last one. The tools are:
"""

_SENTINEL = "S3NTINEL"


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


_EXAMPLE: list[dict[str, Any]] = [  # a conversation with a call
    _user("?"),
    {
        "role": "assistant",
        "content": _SENTINEL,
        "tool_calls": [{"name": "Read", "arguments": {"path": _SENTINEL}}],
    },
]
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_STRAY = re.compile(r"</?tool_call>|</?function\b|</?parameter\b")


@dataclass(frozen=True)
class ToolCall:
    """One tool call. If a call in XML is parsed without the tools' schemas, all its arguments are strings."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Chat:
    """Converts conversations to token ids of ``tokenizer``, and sampled token ids to text and tool calls. If ``style``
    is "full", prompts contain the tools' schemas; if it is "compact", they do not. Raises ``ValueError`` if the
    tokenizer has no chat template."""

    def __init__(self, tokenizer: Any, style: Literal["compact", "full"] = "full") -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "")
            raise ValueError(f"the tokenizer {name!r} has no chat template: an instruction-tuned model is needed")
        self.tokenizer = tokenizer
        self.style = style
        specials = {token.strip() for token in tokenizer.all_special_tokens} - {""}
        self._control = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
        after = self._render([_user("?"), {"role": "assistant", "content": _SENTINEL}]).rpartition(_SENTINEL)[2]
        ids = self._encode(after)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        end = ids[0] if ids and ids[0] in self._special_ids else tokenizer.eos_token_id
        self.end_id: int = end  # the token that ends an assistant turn
        self._end: str = tokenizer.decode([end], skip_special_tokens=False)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (end, tokenizer.eos_token_id) if i is not None))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Returns the token ids of the conversation ``messages``, with the header of the assistant's next turn. Raises
        ``ValueError`` if the chat template leaves out the tools."""
        spelled = list(tools) if tools and self.style == "full" else None
        text = self._render(messages, spelled, header=True)
        if spelled and spelled[0].get("function", spelled[0])["name"] not in text:
            raise ValueError("the chat template does not spell out tools: this model cannot be used as an agent")
        return self._encode(text)

    def delta_ids(self, tool_results: Sequence[str], closed: bool = True) -> list[int]:
        """Returns the token ids between two assistant turns: the tool results, then the next assistant header. If
        ``closed`` is false, the sampled turn lacks its stop token, and the ids begin with this token."""
        return self._delta([{"role": "tool", "content": text} for text in tool_results], closed)

    def encode_dialogue(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[list[int], list[int]]:
        """Returns the token ids of a dialogue given as text, and a mask of the same length. The mask is 1 for the
        tokens of assistant turns, including their stop tokens, and 0 for all others. If the last message is not the
        assistant's, the ids end with the header of the next assistant turn."""
        starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        ids = self.prompt_ids(messages[: starts[0] if starts else None], tools)
        mask = [0] * len(ids)
        for start, end in pairwise([*starts, len(messages)]):
            turn = self.turn_ids(messages[start])
            delta = self._delta(messages[start + 1 : end], closed=True) if end > start + 1 else []
            ids += turn + delta
            mask += [1] * len(turn) + [0] * len(delta)
        return ids, mask

    def turn_ids(self, message: Message) -> list[int]:
        """Returns the token ids of an assistant message given as text, with its stop token, as a policy would sample
        them. Raises ``ValueError`` if the chat template's generation prompt differs from the header that the template
        writes before an assistant message."""
        whole = self._render([_user("?"), message])
        if not whole.startswith(self._opening):
            raise ValueError("the chat template opens a turn otherwise than it writes one: cannot encode written turns")
        return [*self._encode(whole[len(self._opening) : whole.rindex(self._end)]), self.end_id]

    @cached_property
    def _opening(self) -> str:
        """The text before an assistant turn that follows one short message of the user."""
        return self._render([_user("?")], header=True)

    def parse(self, ids: Sequence[int], tools: Tools | None = None) -> tuple[str, list[ToolCall], bool]:
        """Returns one sampled turn's text without tool calls, its tool calls, and whether the turn is malformed. A turn
        is malformed if it contains a malformed call, or a special token other than the stop tokens at its end.

        Tool calls may have XML form or Hermes' JSON form. A malformed call stays in the text; the other calls are still
        returned. With ``tools``, string arguments are converted to the types of the tools' schemas."""
        ids = list(ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        malformed = any(i in self._special_ids for i in ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        text, calls, stray = read_calls(text, tools)
        return text, calls, malformed or stray

    def _delta(self, messages: Sequence[Message], closed: bool) -> list[int]:
        text, after = self._render([*_EXAMPLE, *messages], header=True), 0
        for _ in range(self._sentinels):  # ``messages`` may hold the word, too
            after = text.index(_SENTINEL, after) + len(_SENTINEL)
        ids = self._encode(text[text.index(self._end, after) :])
        return ids[1:] if closed else ids

    @cached_property
    def _sentinels(self) -> int:
        """How often the template writes the sentinel of ``_EXAMPLE``."""
        return self._render(_EXAMPLE).count(_SENTINEL)

    def _render(self, messages: Sequence[Message], tools: Any = None, header: bool = False) -> str:
        clean = [self._clean(message) for message in messages]
        return self.tokenizer.apply_chat_template(clean, tools=tools, add_generation_prompt=header, tokenize=False)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _clean(self, message: Message) -> dict[str, Any]:
        """Returns the message in the form of Hugging Face's templates. Wherever the message's content or the arguments
        of its calls contain a control token, such as ``<|im_end|>``, inserts a space into the token. A message can
        therefore neither end nor begin a turn."""

        def broken(value: Any) -> Any:
            if isinstance(value, str):
                return self._control.sub(lambda match: match[0][0] + " " + match[0][1:], value)
            return value

        clean: dict[str, Any] = {"role": message["role"], "content": broken(message.get("content") or "")}
        if message["role"] == "tool":
            clean["tool_call_id"] = "call00000"  # some templates require exactly nine letters or digits
        if message.get("tool_calls"):
            clean["tool_calls"] = [
                function_call("call00000", call["name"], {name: broken(v) for name, v in call["arguments"].items()})
                for call in message["tool_calls"]
            ]
        return clean


def function_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call in the form that Hugging Face's templates and OpenAI's messages share."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_calls(text: str, tools: Tools | None = None) -> tuple[str, list[ToolCall], bool]:
    """Returns the text of an assistant turn without tool calls, its tool calls, and whether any call is malformed.
    Calls before ``</think>`` are ignored and stay in the text. With ``tools``, string arguments are converted to the
    types of the tools' schemas."""
    thought, closed, said = text.rpartition("</think>")  # calls inside the thought are ignored
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _parse_call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    said = _CALL.sub(take, said)
    malformed = _STRAY.search(said) is not None
    if tools:
        schemas = [tool.get("function", tool) for tool in tools]
        types = {schema["name"]: schema.get("parameters", {}).get("properties", {}) for schema in schemas}
        calls = [_typed(call, types.get(call.name, {})) for call in calls]
    return (thought + closed + said).strip(), calls, malformed


def _parse_call(body: str) -> ToolCall | None:
    body = body.strip()
    if body.startswith("{"):
        try:
            call = json.loads(body)
            arguments = call.get("arguments", {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
        except (ValueError, AttributeError):
            return None
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            return ToolCall(call["name"], arguments)
        return None
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return None
    arguments, rest = {}, function[2]
    while rest.strip():
        parameter = _PARAMETER.match(rest)
        if parameter is None or parameter[1] in arguments:
            return None
        arguments[parameter[1]] = parameter[2]
        rest = rest[parameter.end() :]
    return ToolCall(function[1].strip(), arguments)


def _typed(call: ToolCall, properties: Mapping[str, Any]) -> ToolCall:
    """Returns ``call`` with its string arguments converted to the types of the tool's parameters. ``properties`` holds
    the parameters' schemas. If a parameter's type is not string, its argument is parsed as JSON. An argument that is
    not valid JSON stays a string."""

    def typed(name: str, value: Any) -> Any:
        if not isinstance(value, str) or properties.get(name, {}).get("type", "string") == "string":
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value

    return ToolCall(call.name, {name: typed(name, value) for name, value in call.arguments.items()})


def on_the_wire(messages: Sequence[Message], tools: Tools, form: Form) -> list[Any]:
    """Converts messages to the form that an OpenAI-compatible server accepts.

    An assistant's message may have the key ``tool_calls``, a list of {"id", "name", "arguments"}, and the key ``raw``,
    the model's text that contains these calls. A tool's message has the key ``tool_call_id``. ``form`` decides how tool
    calls and tool results are sent:

    - "native", for servers that accept tool calls as JSON: tool calls are JSON, and tool results have the role "tool";
    - "text", for servers without tool calls: the first system message lists the tools, tool calls are part of the
      text, and tool results become user messages;
    - "raw", for policies that this project trains from scratch: tool calls are part of the text, and tool results have
      the role "tool".

    In the forms "text" and "raw", the text of an assistant's message is ``raw``. If ``raw`` is missing, tool calls are
    written as XML after the content."""
    if form == "native":
        return [_native(message) for message in messages]
    sent: list[dict[str, Any]] = []
    listed = not tools
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            content = message.get("raw") or written(content, message.get("tool_calls") or ())
        if form == "raw":
            sent.append({"role": role, "content": content} | _id_of(message))
            continue
        if role == "system" and not listed:
            content, listed = f"{content}\n\n{_spelled_out(tools)}", True
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if sent and sent[-1]["role"] == role == "user":  # templates require alternating turns
            sent[-1]["content"] += f"\n{content}"
        else:
            sent.append({"role": role, "content": content})
    return sent


def _spelled_out(tools: Tools) -> str:
    lines = [_RULES]
    for tool in tools:
        schema = tool.get("function", tool)
        lines.append(f"## {schema['name']}\n{schema['description']}")
        required = schema["parameters"].get("required", ())
        for name, what in schema["parameters"]["properties"].items():
            optional = "" if name in required else ", may be left out"
            about = f": {what['description']}" if "description" in what else ""
            items = f" of {json.dumps(what['items'])}" if "items" in what else ""
            lines.append(f"- {name} ({what['type']}{items}{optional}){about}")
        lines.append("")
    return "\n".join(lines)


def written(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    parts = [content] if content else []
    for call in calls:
        lines = [f"<tool_call>\n<function={call['name']}>"]
        for name, value in (call["arguments"] or {}).items():
            lines.append(f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>")
        parts.append("\n".join([*lines, "</function>\n</tool_call>"]))
    return "\n".join(parts)


def _native(message: Mapping[str, Any]) -> dict[str, Any]:
    sent = {"role": message["role"], "content": message["content"]} | _id_of(message)
    if message.get("tool_calls"):
        # servers parse arguments again, so arguments that are not JSON become {}
        sent["tool_calls"] = [
            function_call(call["id"], call["name"], json.dumps(call["arguments"] or {}))
            | ({"extra_content": call["extra_content"]} if "extra_content" in call else {})
            for call in message["tool_calls"]
        ]
    return sent


def _id_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
