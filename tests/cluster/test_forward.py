"""Forwarding a port: every local connection is a stream of bytes in both directions, until one side ends it."""

import socket
import socketserver
import threading

import pytest

from cuda_agent.cluster import forward
from cuda_agent.cluster.api import Cluster, ClusterError


@pytest.fixture
def pod(monkeypatch):
    """A server in place of a pod's port; it answers with what it got, in capitals, when the sender has ended."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(self.rfile.read().upper())

    with forward._Server(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(forward, "_open", lambda *_: socket.create_connection(server.server_address))
        yield
        server.shutdown()


def ask(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as there:
        there.sendall(text)
        there.shutdown(socket.SHUT_WR)
        answer = b""
        while more := there.recv(1 << 16):
            answer += more
        return answer


def test_connections_go_to_the_pod_and_end_with_the_block(pod):
    place = Cluster(None, "n", "c")
    with forward.forwarded(place, "p", 5000) as port:
        assert ask(port, b"a" * 300_000) == b"A" * 300_000
        with socket.create_connection(("127.0.0.1", port)):  # an idle connection holds nothing up
            assert ask(port, b"b") == b"B"
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"c")


def test_a_pod_that_refuses_is_an_error_at_once(monkeypatch):
    def refuse(*_: object) -> None:
        raise ClusterError("c refused to forward a port of p: Forbidden", 403)

    monkeypatch.setattr(forward, "_open", refuse)
    with pytest.raises(ClusterError, match="refused to forward"), forward.forwarded(Cluster(None, "n", "c"), "p", 5000):
        pass


def test_a_port_that_is_in_use_is_one_clear_error(pod):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ClusterError, match=f"port {port} of this machine cannot be used"),
            forward.forwarded(Cluster(None, "n", "c"), "p", 5000, port),
        ):
            pass
