"""A policy that vLLM can serve, and a scripted server that simulates faults of vLLM."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from cuda_agent.config import PolicyConfig, Vllm
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.model import load_model, new_policy, save_policy
from tests.policy.adapters import merge_adapter

CONTEXT = 512
_LOADING = threading.Lock()  # transformers cannot load two models at once


def config_of(servers=(), batch=32, threads=2, **settings):
    """Returns the configuration of an engine.  ``servers`` may be addresses of Unix sockets."""
    vllm = Vllm.model_construct(servers=list(servers), **settings)
    return PolicyConfig.model_construct(vllm=vllm, context=CONTEXT, engine_batch=batch, threads=threads)


def load_served(folder: Path, base: Path):
    """Returns the model in the folder ``base``, with the adapter in ``folder`` merged into its weights."""
    model = load_model(base)
    merge_adapter(model, folder)
    return model


def write_policy(folder: Path, tokenizer, seed: int):
    """Writes a small random model to ``folder`` and returns it; its next-token distributions are far from uniform."""
    config = PolicyConfig(layers=2, hidden=64, heads=2, kv_heads=1, intermediate=128, context=CONTEXT)
    model = new_policy(config, tokenizer, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_policy(model, tokenizer, folder)
    return model


def reference(model, prompt, ids, temperature=1.0):
    """Returns the log-probabilities of ``ids`` after ``prompt``, computed by the model's forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]], device=model.device)).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.cpu() / temperature, -1)
    return logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


class ScriptedServer:
    """A server for one model that speaks the part of vLLM's HTTP protocol that the engine uses. Each item of ``faults``
    spoils one completion. An item is a status code to answer with, "cut" (breaks the connection), "hang" (never
    answers), "garbage" (answers no JSON), or a dict of changed fields of the answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = load_model(folder)
        self.computing = self.model  # what it really computes with
        self.loads = True  # else a load does nothing
        self.reaches = True  # else a load changes the weights and not what is computed with
        self.name = "served"  # under which it serves the model
        self.adapters: dict = {}  # name -> the model with it merged
        self.forgets = False  # an adapter that is loaded has the weights of the one before, or of none
        self.faults: list = []
        self.asked: list[dict] = []
        self.delay = 0.0
        self.ready = lambda: True  # else it answers nobody
        self.keeps = True  # else it closes a connection that is used a second time, and says nothing
        self.left = threading.Event()  # a client went away while it waited
        self.paused = False
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            answered = False

            def log_message(self, *_) -> None:
                pass

            def parse_request(self) -> bool:
                understood = super().parse_request()
                if not server.keeps and self.answered:
                    self.close_connection = True
                    return False
                self.answered = True
                return understood

            def do_GET(self) -> None:
                if not server.ready():
                    return self._say({}, 503)
                models = [{"id": server.name, "max_model_len": CONTEXT, "parent": None}]
                self._say({"data": models + [{"id": name, "parent": server.name} for name in server.adapters]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != "/v1/completions":
                    return self._say(server._control(self.path, body))
                server.asked.append(body)
                fault = server.faults.pop(0) if server.faults else None
                if fault == "cut":
                    self.wfile.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"
                    )
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                elif fault == "hang":
                    self.connection.settimeout(30)
                    if self.connection.recv(1) == b"":
                        server.left.set()
                    self.close_connection = True
                elif fault == "garbage":
                    self._say(b"<html>")
                elif body["model"] not in (server.name, *server.adapters):
                    self._say({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
                elif isinstance(fault, int):
                    self._say({"error": {"message": "scripted"}}, fault)
                else:
                    time.sleep(server.delay)
                    answer = server._complete(body)
                    answer["choices"][0] |= fault or {}
                    self._say(answer)

            def _say(self, answer, code: int = 200) -> None:
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler

    def _control(self, path: str, body: dict) -> dict:
        if path.startswith(("/pause", "/resume")):
            self.paused = path.startswith("/pause")
            return {}
        if path == "/v1/load_lora_adapter":
            with _LOADING:
                served = load_served(Path(body["lora_path"]), self._folder)
            before = next(reversed(self.adapters.values()), self.computing)
            self.adapters[body["lora_name"]] = before if self.forgets else served
            return {}
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return {}
        assert path == "/collective_rpc"
        if body["method"] == "cuda_agent_load":
            assert self.paused
            if self.loads:
                with _LOADING:
                    self.model = load_model(body["kwargs"]["folder"])
                self.computing = self.model if self.reaches else self.computing
        weights = {"digest": digest(self.model.named_parameters()), "dtype": "float32", "device": "cpu"}
        return {"results": [weights]}

    @torch.inference_mode()
    def _complete(self, body: dict) -> dict:
        """Completes a prompt greedily.  ``temperature`` affects only the log-probabilities."""
        prompt, ids = body["prompt"], []
        computing = self.adapters.get(body["model"], self.computing)
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            ids.append(int(computing(input_ids=torch.tensor([prompt + ids])).logits[0, -1].argmax()))
        logprobs = reference(computing, prompt, ids, body["temperature"] or 1.0)
        probe = [None] + [
            {str(token): {"logprob": value}}
            for token, value in zip(prompt[1:], reference(computing, prompt[:1], prompt[1:]), strict=True)
        ]
        finish = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}
        return {"model": body["model"], "choices": [choice | {"prompt_logprobs": probe}]}
