"""A server that speaks the OpenAI protocol and plays a language model that knows one answer: the kernel in ``plan/``.

It shows ``cuda-agent optimize`` without a language model:

    python examples/scripted_server.py 8000 &
    cuda-agent optimize examples/model.py --base-url http://127.0.0.1:8000/v1 --model scripted --device cpu
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PLAN = Path(__file__).parent / "plan"
FILES = ("kernels/fused.cpp", "plan.json")
TURNS: list[dict[str, Any]] = [
    {"calls": [("Write", {"path": path, "content": (PLAN / path).read_text()}) for path in FILES]},
    {"calls": [("Bash", {"command": "profile"})]},
    {
        "text": "One pass over memory; nothing more is to be gained.\n"
        "Lesson: Fuse elementwise operators into one pass over memory, and give each thread one contiguous part."
    },
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = sum(message["role"] == "assistant" for message in request["messages"])
        turn = TURNS[min(said, len(TURNS) - 1)]
        calls = [
            {
                "id": f"call-{said}-{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for index, (name, given) in enumerate(turn.get("calls", ()))
        ]
        message = {"role": "assistant", "content": turn.get("text", ""), "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": len(json.dumps(request)) // 4, "completion_tokens": len(json.dumps(message)) // 4}
        body = json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(port: int) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else 8000).serve_forever()
