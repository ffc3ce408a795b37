"""Frames: what goes in comes out, and what is no frame is refused."""

import socket
from collections.abc import Iterator

import pytest

from cuda_agent.sandbox import messages
from cuda_agent.sandbox.messages import (
    FRAME_LIMIT,
    HEAD,
    Frame,
    JudgeRequest,
    JudgeSettings,
    Reply,
    WorkerOperation,
    WorkspaceOperation,
    decode_head,
    encode_frame,
    receive_frame,
    send_frame,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.mark.parametrize("operation", [*Reply, *JudgeRequest, *WorkerOperation, *WorkspaceOperation])
def test_every_operation_comes_out_as_it_went_in(pair, operation) -> None:
    send_frame(pair[0], operation, {"a": [1, None]}, slot=3, extra=65535)
    assert receive_frame(pair[1]) == Frame(operation, 3, {"a": [1, None]}, [], 65535)


def test_no_value_is_used_twice() -> None:
    """Operations are looked up by value: two of the same would be one."""
    assert len({str(operation) for operation in messages._OPERATIONS}) == len(messages._OPERATIONS)


def test_a_call_on_prepared_buffers_is_eight_bytes() -> None:
    assert len(encode_frame(WorkerOperation.RUN, slot=2, extra=7)) == 8


def test_descriptors_cross(pair) -> None:
    send_frame(pair[0], WorkspaceOperation.OPEN, 1, fds=[pair[0].fileno()])
    frame = receive_frame(pair[1], max_fds=1)
    with socket.socket(fileno=frame.fds[0]) as same:
        same.sendall(b"x")
    assert pair[1].recv(1) == b"x"


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (HEAD.pack(len(messages._OPERATIONS), 0, 0, 0), "unknown operation"),
        (HEAD.pack(0, 0, 0, FRAME_LIMIT + 1), f"a frame of {FRAME_LIMIT + 1} bytes"),
    ],
)
def test_what_is_no_frame_is_refused_by_its_head(pair, head, words) -> None:
    with pytest.raises(ValueError, match=words):
        decode_head(head)
    pair[0].sendall(head)
    with pytest.raises(ValueError, match=words):
        receive_frame(pair[1])


def test_bodies_that_are_no_json_or_nested_too_deep_are_refused(pair) -> None:
    for body in (b"{", b"[" * 100_000):
        pair[0].sendall(HEAD.pack(0, 0, 0, len(body)) + body)
        with pytest.raises(ValueError):
            receive_frame(pair[1])


def test_the_end_of_the_stream_is_an_error_within_a_frame_too(pair) -> None:
    pair[0].sendall(HEAD.pack(0, 0, 0, 10) + b"[1,")
    pair[0].close()
    with pytest.raises(ConnectionError):
        receive_frame(pair[1])
    with pytest.raises(ConnectionError):
        receive_frame(pair[1])


def test_settings_survive_json() -> None:
    import json
    from dataclasses import asdict

    settings = JudgeSettings(2, 5, 1e-2, 9, 2.0, 400, "real", ["landlock", "seccomp"], "c", "s", "l", "cuda", "k", "i")
    assert JudgeSettings(**json.loads(json.dumps(asdict(settings)))) == settings
