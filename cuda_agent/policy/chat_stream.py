"""Puts together one turn of a model from the answer of a chat server, streamed or whole.

The OpenAI protocol streams a turn as JSON objects (chunks), each with pieces of text and of tool calls. Servers deviate
from the protocol, above all in tool calls. This module accepts the deviations that are known from their issue trackers:
several calls with one index, no index, other indices for the later pieces of a call, a name in every piece, arguments
as an object or encoded twice, ``function_call`` in place of ``tool_calls``, text as a list of parts, and an answer
without ``finish_reason``."""

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from cuda_agent.policy.chat import Form, Tools, read_calls

Listener = Callable[[str, str], None]
"""Takes (what, text). "text" and "thought" are pieces of an answer; "again" cancels the pieces received so far; "wait"
and "form" explain a pause or a change to tool calls as text."""

CHARACTERS = 4  # assumed characters per token, if the server does not count tokens
LONGEST = 2 << 20  # most characters of one answer, independent of max_tokens
_CUT = ("length", "max_tokens")  # reasons for the end of a turn that was cut
_FILTERED = ("content_filter", "safety", "refusal", "prohibited_content", "blocklist")
_FINAL = (400, 401, 402, 403, 404, 413, 422)  # status codes of refusals that come inside an answer
_SPENT = re.compile(
    r"insufficient[_ ](quota|balance|credit|funds)|exceeded.{0,20}quota|credit balance|(out of|not enough) credit"
    r"|billing[_ ](hard[_ ]limit|not[_ ]active)",
    re.I,
)
_LATER = re.compile(r"(retry|try again) (in|after)|retry-?delay|per.?(minute|second)", re.I)
_SENT_BACK = ("extra_content",)  # fields of a tool call that a server wants back, such as Gemini's thought signatures
# Names that models know from other tools -> the names of this project's parameters.
_PARAMETERS = {
    "file_path": "path", "filepath": "path", "filename": "path", "notebook_path": "path", "cmd": "command",
    "file_text": "content", "old_str": "old_string", "new_str": "new_string", "bash_id": "id", "shell_id": "id",
}  # fmt: skip


@dataclass
class Reply:
    """One assistant turn. ``calls`` lists the tool calls as {"id", "name", "arguments"}; the arguments are a dict, or
    None if they are not a JSON object. If ``estimated`` is true, ``tokens`` is an estimate from the length of the
    text."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    cut: bool = False  # whether max_tokens, or this client's limit on characters, ended the turn
    prompt_tokens: int = 0
    estimated: bool = False
    thought: str = ""
    raw: str = ""  # the text from which calls were read; empty for native calls
    malformed: bool = False  # whether the text holds a malformed call
    refused: str = ""  # why the server or the model refuses to answer; empty if it does not refuse

    def message(self) -> dict[str, Any]:
        said = {"role": "assistant", "content": self.content, "tool_calls": self.calls, "raw": self.raw}
        return {key: value for key, value in said.items() if value or key == "content"}


class Again(Exception):
    """A request failed and may be sent again. ``after`` is the pause in seconds that the server asks for, or None."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Refused(Exception):
    """The server refuses a request, and would refuse it again. ``spent`` says that the key has no quota or credit."""

    def __init__(self, message: str, spent: bool = False) -> None:
        super().__init__(message)
        self.spent = spent


class NoTurn(ValueError):
    """A whole answer holds no turn."""


class Turn:
    """A turn while it is read. ``clean`` removes secrets from text. ``hear`` receives the pieces of the text."""

    def __init__(self, clean: Callable[[str], str], hear: Listener) -> None:
        self._clean, self._hear = clean, hear
        self._text: list[str] = []
        self._thought: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._places: dict[int, dict[str, Any]] = {}  # index in the stream -> the newest call with this index
        self._finish, self._usage = "", {}  # type: str, dict[str, Any]
        self.characters = 0

    async def stream(self, answer: httpx.Response, room: int) -> None:
        """Reads a streamed answer to its end, or until it has more than ``room`` characters. Raises ``Again`` if it
        holds an error or something else than chunks, or breaks off, and ``Refused`` if the error is a refusal."""
        async for data in _events(answer):
            if self._ends(data):
                return
            if self.characters > room:
                self._finish = "length"
                return
        self._check_end()

    def _ends(self, data: str) -> bool:
        """Takes the event ``data`` of a stream. Returns whether it is the last one."""
        if data == "[DONE]":
            self._finish = self._finish or "stop"
            return True
        try:
            chunk = json.loads(data)
            if chunk.get("error") or chunk.get("object") == "error":
                raise _failure(chunk, self._clean(data))
            self._take(chunk)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            raise Again(f"the stream holds something else: {self._clean(data)[:300]}") from None
        return False

    def _check_end(self) -> None:
        """Raises ``Again`` if the stream ended too early. Complete tool calls need no reason for their end."""
        if not self._finish and not (self._calls and all(_arguments(c["arguments"]) is not None for c in self._calls)):
            raise Again("the stream broke off")

    def whole(self, content: bytes) -> None:
        """Reads ``content``, the whole answer of a server that does not stream, or a stream with another content type.
        Raises ``NoTurn`` if it is something else, and ``Again`` or ``Refused`` if it is an error."""
        if content.lstrip().startswith(b"data:"):
            lines = (line.strip() for line in content.decode(errors="replace").splitlines())
            if not any(self._ends(line[5:].strip()) for line in lines if line.startswith("data:")):
                self._check_end()
            return
        try:
            data = json.loads(content)
            if data.get("error") and not data.get("choices"):
                raise _failure(data, self._clean(content.decode(errors="replace")))
            choice = data["choices"][0]
            for index, call in enumerate(_listed(choice["message"].get("tool_calls"))):
                call.setdefault("index", index)
            reason = choice.get("finish_reason") or "stop"
            self._take({"choices": [{"delta": choice["message"], "finish_reason": reason}]})
            self._usage = _counts(data.get("usage"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise NoTurn(f"{type(error).__name__}: {error}") from None

    def _take(self, chunk: dict[str, Any]) -> None:
        self._usage = _counts(chunk.get("usage")) or self._usage
        for choice in (chunk.get("choices") or [])[:1]:
            self._finish = str(choice.get("finish_reason") or self._finish)
            delta = choice.get("delta") or {}
            if not delta and not self.characters:  # some servers send the whole message in the last chunk
                delta = choice.get("message") or {}
            for kind, piece in _parts(delta.get("content")):
                self._add(self._thought if kind == "thought" else self._text, kind, piece)
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            for _, piece in _parts(thought or delta.get("reasoning_details")):
                self._add(self._thought, "thought", piece)
            self._add(self._refusal, "text", delta.get("refusal"))
            parts = _listed(delta.get("tool_calls")) or _listed(delta.get("function_call"))
            for part in parts:
                self._take_call(part)

    def _take_call(self, part: Mapping[str, Any]) -> None:
        function = part.get("function") or part
        name, arguments = str(function.get("name") or ""), function.get("arguments") or ""
        piece = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call = self._call_of(part, name, piece)
        call["id"] = call["id"] or str(part.get("id") or "")
        if not call["name"].endswith(name):  # a name comes once, in pieces, or whole with each piece of the arguments
            call["name"] += name
        call["arguments"] += piece
        call |= {key: part[key] for key in _SENT_BACK if part.get(key)}
        self.characters += len(piece)

    def _call_of(self, part: Mapping[str, Any], name: str, piece: str) -> dict[str, Any]:
        """Returns the call to which ``part`` of a chunk belongs; it may be a new call. ``name`` and ``piece`` are the
        part's pieces of the name and of the arguments."""
        key = str(part.get("id") or "")
        index = None if part.get("index") is None else int(part["index"])
        call = next((call for call in self._calls if key and call["id"] == key), None)
        if call is None and index is not None and (index in self._places or name or key):
            call = self._places.get(index)
        elif call is None:
            call = self._calls[-1] if self._calls else None
        if call is None or _is_another(call, key, name, piece):
            used = {call["place"] for call in self._calls}
            place = max(used, default=-1) + 1 if index is None or index in used else index
            call = {"id": "", "name": "", "arguments": "", "place": place}
            self._calls.append(call)
        if index is not None:
            self._places[index] = call
        return call

    def _add(self, parts: list[str], what: str, piece: Any) -> None:
        if isinstance(piece, str) and piece:
            parts.append(piece)
            self.characters += len(piece)
            self._hear(what, piece)

    def reply(self, tools: Tools, form: Form, prompt: int) -> Reply:
        """Returns the turn that has been read. If the server did not count tokens, estimates them from characters;
        ``prompt`` is the number of characters in the request's messages."""
        raw = valid(self._clean("".join(self._text)))
        thought = valid(self._clean("".join(self._thought)))
        if not thought and "</think>" in raw:
            thought, _, raw = raw.rpartition("</think>")
            thought, raw = thought.replace("<think>", "").strip(), raw.lstrip()
        finish = self._finish.lower()
        cut = finish in _CUT
        calls: list[dict[str, Any]] = [
            {
                "id": valid(self._clean(call["id"])) or f"call-{index}",
                "name": valid(self._clean(call["name"])),
                "arguments": _arguments(self._clean(call["arguments"])),
            }
            | {key: _valid_values(call[key]) for key in _SENT_BACK if key in call}
            for index, call in enumerate(sorted(self._calls, key=lambda call: call["place"]))
        ]
        for index, call in enumerate(calls):
            if any(call["id"] == before["id"] for before in calls[:index]):
                call["id"] = f"{call['id']}-{index}"
        if cut and len(calls) > 1 and calls[-1]["arguments"] is None:
            calls.pop()  # the calls before it are complete
        content, malformed, from_text = raw, False, False
        if not calls:  # some servers leave tool calls in the text
            text, found, malformed = read_calls(raw, tools)
            content, from_text = text if found else raw, bool(found)
            calls = [{"id": f"call-{i}"} | asdict(call) for i, call in enumerate(found)]
        for call in calls:
            _conform(call, tools)
        refusal = valid(self._clean("".join(self._refusal)))
        filtered = f"the server's filter ended the answer ({self._finish})" if finish in _FILTERED else ""
        counted = self._usage.get("completion_tokens")
        return Reply(
            content=content or refusal,
            calls=calls,
            tokens=int(counted or self.characters // CHARACTERS),
            cut=cut,
            prompt_tokens=int(self._usage.get("prompt_tokens") or prompt // CHARACTERS),
            estimated=counted is None,
            thought=thought,
            raw=raw if from_text or form == "raw" else "",
            malformed=malformed,
            refused=f"the model refuses: {refusal}" if refusal else filtered,
        )


def _counts(usage: Any) -> dict[str, Any]:
    """Returns the numbers of tokens in ``usage``, which may be anything."""
    items = usage.items() if isinstance(usage, dict) else ()
    return {name: count for name, count in items if isinstance(count, int) and not isinstance(count, bool)}


def _is_another(call: Mapping[str, Any], key: str, name: str, piece: str) -> bool:
    """Returns whether a part with these pieces begins another call than ``call``, although its index or id is that of
    ``call``. A part without a name never does, because some servers send a new id with each part."""
    if not name:
        return False
    if key and call["id"] and key != call["id"]:
        return True
    complete = bool(call["arguments"]) and _arguments(call["arguments"]) is not None
    return complete and bool(piece or not call["name"].endswith(name))


def _listed(value: Any) -> list[dict[str, Any]]:
    """Returns ``value`` as a list of objects. Raises ``TypeError`` if it is neither an object nor a list of objects."""
    found = [value] if isinstance(value, dict) else list(value or [])
    if not all(isinstance(item, dict) for item in found):
        raise TypeError(f"expected objects, got {str(found)[:60]}")
    return found


def _parts(content: Any) -> list[tuple[str, str]]:
    """Returns the pieces of ``content``, each as ("text" or "thought", piece). ``content`` is a text, or a list of
    texts and of objects with a type and a text."""
    if isinstance(content, str):
        return [("text", content)] if content else []
    found: list[tuple[str, str]] = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, str):
            found.append(("text", part))
        elif isinstance(part, dict):
            said = part.get("text") or part.get("thinking") or part.get("summary") or ""
            kind = "thought" if part.get("type") in ("thinking", "reasoning") or part.get("thinking") else "text"
            found += [(kind, piece) for _, piece in _parts(said)]
    return found


def _conform(call: dict[str, Any], tools: Tools) -> None:
    """Replaces the name of ``call`` and the names of its arguments by those in ``tools``, if they mean the same: the
    name with a prefix or in another case, and parameters that models know from other tools."""
    schemas = {schema["name"]: schema for schema in (tool.get("function", tool) for tool in tools)}
    if call["name"] not in schemas:
        last = re.split(r"\.|__|:|/", re.sub(r":\d+$", "", call["name"]))[-1]  # such as functions.Read:0
        plain = last.lower().replace("_", "").strip()
        call["name"] = next((name for name in schemas if plain == name.lower()), call["name"])
    known = schemas.get(call["name"], {}).get("parameters", {}).get("properties", {})
    arguments = call["arguments"]
    if arguments and known:
        for alias, name in _PARAMETERS.items():
            if alias in arguments and alias not in known and name in known and name not in arguments:
                arguments[name] = arguments.pop(alias)


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """Yields the data of each server-sent event in ``answer``. Raises ``Again`` if a line is too long."""
    rest = b""
    async for block in answer.aiter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
        if len(rest) > 2 * LONGEST:
            raise Again("the stream holds a line without an end")
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode(errors="replace")


async def bounded(answer: httpx.Response) -> bytes:
    """Returns the body of ``answer``. Raises ``Again`` if it is too long."""
    content = b""
    async for block in answer.aiter_bytes():
        content += block
        if len(content) > 4 * LONGEST:
            raise Again("the answer does not end")
    return content


def message_of(text: str) -> str:
    """Returns the message of the error in ``text``, which is JSON, or the words of ``text`` if it is not."""
    try:
        error = json.loads(text)
        error = error.get("error") or error
        return valid(str(error.get("message", error) if isinstance(error, dict) else error))
    except (ValueError, AttributeError, RecursionError):
        return " ".join(text.split())


def is_spent(text: str) -> bool:
    """Returns whether the error in ``text`` says that the key has no quota or credit left. A limit that ends within
    minutes, which such a message can describe too, asks for another try."""
    return bool(_SPENT.search(text)) and not _LATER.search(text)


def _failure(answer: Mapping[str, Any], said: str) -> Again | Refused:
    """Returns the exception for ``answer``, which has an error although its status is 200. ``said`` is its text."""
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else answer.get("code")
    message, spent = f"in the answer: {message_of(said)[:300]}", is_spent(said)
    return Refused(message, spent) if spent or code in _FINAL else Again(message)


def _arguments(value: str) -> dict[str, Any] | None:
    """Returns the arguments of a tool call, also if they are encoded twice, or None if they are not a JSON object."""
    try:
        parsed = json.loads(value) if value.strip() else {}
        parsed = json.loads(parsed) if isinstance(parsed, str) else parsed
        parsed = _valid_values(parsed)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _valid_values(value: Any) -> Any:
    """Returns ``value``, which JSON can hold, with all its texts made valid."""
    return json.loads(valid(json.dumps(value, ensure_ascii=False)))


def valid(text: str) -> str:
    """Returns ``text`` as valid Unicode: a lone surrogate, which JSON can hold and UTF-8 cannot, is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
