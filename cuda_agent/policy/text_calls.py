"""Conversations on the wire of an OpenAI-compatible server, with native tool calls or with calls written as text.

A message here has ``role`` and ``content``; an assistant's may have ``tool_calls`` ({"id", "name", "arguments"}) and
``raw``, the text that they were read from; a tool's has ``tool_call_id``.  ``on_the_wire`` converts a list of them to
one of three forms:

- ``native``: the server's own tool calls;
- ``text``: for servers without them. The system message spells out the tools, calls are XML in the text, and
  results come in the user's name;
- ``raw``: the same calls, but roles and tools are left to the server's chat template: for policies of this project.

Pure functions.  Not covered: sending (``served``), token ids (``chat``).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cuda_agent.policy.chat import function_call

Form = Literal["native", "text", "raw"]

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


def on_the_wire(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: Form) -> list[Any]:
    """Converts the messages to ``form``; with ``text``, the first system message lists the tools."""
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
            content, listed = f"{content}\n\n{spell_out(tools)}", True
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if sent and sent[-1]["role"] == role == "user":  # templates require alternating turns
            sent[-1]["content"] += f"\n{content}"
        else:
            sent.append({"role": role, "content": content})
    return sent


def spell_out(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that explains the form of calls and lists the tools."""
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
    """Returns an assistant's turn as text, calls included."""
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
        # arguments that are not JSON are left out: servers parse them again
        sent["tool_calls"] = [
            function_call(call["id"], call["name"], json.dumps(call["arguments"] or {}))
            for call in message["tool_calls"]
        ]
    return sent


def _id_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
