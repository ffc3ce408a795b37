"""Serves a policy of this project at an OpenAI-compatible address, with the project's own engine.

The server answers ``/v1/models`` and ``/v1/chat/completions`` in the form that ``cuda-agent optimize --style compact``
uses: the policy's chat template writes the prompt, and tool calls stay in the text. It needs PyTorch and Transformers
only, so it also runs where neither vLLM nor a web framework is installed. The engine batches concurrent requests. It
is for measurements on one machine: it listens on 127.0.0.1, has no key and does not stream.
"""

import asyncio
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda_agent.config import PolicyConfig
from cuda_agent.lease import Lease
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import Engine, SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.model import load_policy

NAME = "policy"


@contextmanager
def served(
    policy: Path, config: PolicyConfig, batch: int, processors: Sequence[int], lease: Path | None
) -> Iterator[str]:
    """Serves the policy in the folder ``policy`` in another process, and yields the server's address. The process has
    only these ``processors``. With ``lease``, a folder of a timing lease, it pauses while a kernel is timed. Raises
    RuntimeError if the server does not start."""
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    server = spawn.Process(target=_run, args=(policy, config, batch, processors, lease, its), daemon=True)
    server.start()
    its.close()
    try:
        yield f"http://127.0.0.1:{mine.recv()}/v1"
    except EOFError:
        raise RuntimeError("the policy's server does not start") from None
    finally:
        server.kill()
        server.join()


def _run(
    policy: Path, config: PolicyConfig, batch: int, processors: Sequence[int], lease: Path | None, started: Any
) -> None:
    os.sched_setaffinity(0, processors)

    async def work() -> None:
        model, tokenizer = load_policy(policy)
        held = Lease(lease) if lease else None
        engine = LocalEngine(model, min(config.threads, len(processors)), batch, held)
        server = await asyncio.start_server(answering(engine, Chat(tokenizer, "compact")), "127.0.0.1", 0)
        started.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(work())


def answering(engine: Engine, chat: Chat) -> Any:
    """Returns a function for ``asyncio.start_server``. It answers one request of a connection from ``engine``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            body = json.loads(await reader.readexactly(length) or b"{}")
            status, data = 200, {"object": "list", "data": [{"id": NAME, "object": "model"}]}
            if head.startswith("post"):
                status, data = await completed(engine, chat, body)
            content = json.dumps(data).encode()
            kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 {status} answer\r\n{kind}\r\n\r\n".encode() + content)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            writer.close()

    return answer


async def completed(engine: Engine, chat: Chat, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Returns the status and the JSON of the answer to a request for a chat completion."""
    prompt = chat.prompt_ids(body["messages"])
    sampling = SamplingParams(
        body.get("max_tokens") or 1 << 20, body.get("seed") or 0, body.get("temperature", 1.0), chat.stop_ids
    )
    try:
        completion = await engine.generate(prompt, sampling)
    except ValueError as error:  # the prompt fills the context
        return 400, {"error": {"message": f"the prompt exceeds the context length: {error}"}}
    said = [token for token in completion.ids if token not in chat.stop_ids]
    message = {"role": "assistant", "content": chat.tokenizer.decode(said, skip_special_tokens=False)}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(completion.ids)}
    choice = {"index": 0, "message": message, "finish_reason": completion.finish}
    return 200, {"object": "chat.completion", "model": NAME, "choices": [choice], "usage": usage}
