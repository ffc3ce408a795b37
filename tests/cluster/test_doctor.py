"""What the doctor makes of the answer of its pod, without a cluster."""

from typing import Any

import pytest

from cuda_agent.cluster import doctor, maintenance, room, templates


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


@pytest.mark.parametrize(
    ("rooms", "mend"),
    [
        ({"cpu": (1, 3), "gpu": (1, 0)}, ""),  # a cluster without GPUs still has the chart's profile `gpu`
        ({"cpu": (4, 3), "gpu": (2, 2)}, "helm upgrade --set profiles.cpu.runs=3"),
        ({"cpu": (0, 1), "gpu": (5, 2)}, "helm upgrade --set profiles.cpu.runs=1 --set profiles.gpu.runs=2"),
        ({"cpu": (1, 0), "gpu": (1, 0)}, "add nodes, or lower the requests in the chart's profiles"),
        ({"cpu": (0, None), "gpu": (1, None)}, ""),  # the user may not list nodes
    ],
)
def test_more_runs_at_once_than_fit_are_a_finding(
    rooms: dict[str, tuple[int, int | None]], mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = [templates.Template(f"cuda-agent-{name}", name, "cuda-agent", "0.1.0") for name in rooms]
    monkeypatch.setattr(templates, "of_release", lambda *_: profiles)
    asked = {f"cuda-agent-{name}": room.Room({}, *numbers) for name, numbers in rooms.items()}
    monkeypatch.setattr(room, "of_profile", lambda _, template: asked[template])
    place: Any = None
    text, remedy = doctor._room(place, None)
    assert remedy == mend
    assert text.startswith("cpu: a run requests ") and "; gpu: a run requests " in text
