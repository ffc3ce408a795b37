"""What the doctor makes of the answer of its pod, without a cluster."""

from typing import Any

import pytest

from cuda_agent.cluster import doctor, maintenance


@pytest.mark.parametrize("answer", [[{"name": "store", "ok": True, "text": "written", "remedy": ""}], [1], {"a": 1}, 2])
def test_a_pod_of_another_version_is_a_finding(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "ask", lambda *_: answer)
    place: Any = None
    *_, last = doctor._inside(place, "cuda-agent")
    assert not last.ok and "another version" in last.text and "same version" in last.mend


def test_the_checks_of_the_pod_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "ask", lambda *_: [{"name": "store", "ok": False, "text": "full", "mend": "tidy"}])
    place: Any = None
    works, last = doctor._inside(place, "cuda-agent")
    assert works.ok and last == doctor.Check("store", False, "full", "tidy")
