"""Waiting for a maintenance job, and a pod's log, without a cluster."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from urllib3.exceptions import ProtocolError

from cuda_agent.cluster import maintenance
from cuda_agent.cluster.api import Cluster, ClusterError

ANSWER = {"name": "answer", "value": json.dumps({"removed": True})}
DONE = {"status": {"phase": "Succeeded", "nodes": {"a": {"phase": "Succeeded", "outputs": {"parameters": [ANSWER]}}}}}


class Place:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def get(self, *_: str) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_api_server_that_restarts_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "EVERY", 0)
    place: Any = Place(ClusterError("away", 0), ClusterError("busy", 503), DONE)
    assert maintenance._answer(place, "gc-1", "gc") == {"removed": True}
    refused: Any = Place(ClusterError("forbidden", 403))
    with pytest.raises(ClusterError, match="forbidden"):
        maintenance._answer(refused, "gc-1", "gc")
    monkeypatch.setattr(maintenance, "AWAY", -1)
    gone: Any = Place(ClusterError("away", 0))
    with pytest.raises(ClusterError, match="away"):
        maintenance._answer(gone, "gc-1", "gc")


def test_a_log_that_breaks_off_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(_: int) -> Iterator[bytes]:
        yield b"one\ntwo"
        raise ProtocolError("IncompleteRead")

    place = Cluster(None, "n", "c")
    monkeypatch.setattr(place, "_request", lambda *_, **__: SimpleNamespace(stream=stream))
    lines = place.logs("p", follow=True)
    assert next(lines) == "one"
    with pytest.raises(ClusterError, match="the log of p broke off"):
        next(lines)
