"""Sending spans: a real receiver gets what was recorded, and without an address nothing is sent or imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from drill import table
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError, TryAgain
from cuda_agent.pipeline import otlp
from cuda_agent.pipeline.local import run_pipeline
from cuda_agent.spans import recording, span
from tests.otlp_receiver import receiving
from tests.ports import free_port
from tests.waiting import wait_for

ROOT, TRACE = "b7ad6b7169203331", "4bf92f3577b34da6a3ce929d0e0e4736"
ROWS = [
    {"id": "00f067aa0ba902b7", "parent": ROOT, "name": "play", "start": 5, "end": 9, "attributes": {"step": 3}},
    {"id": ROOT, "parent": "", "name": "run", "start": 1, "end": 10, "attributes": {"error": "KeyError"}},
]


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    """The environment of the tests sets nothing, and a collector that is away is given up soon."""
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS", "COMPRESSION"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def settings(tmp_path: Path) -> Config:
    return Config.model_validate({"run": {"store": str(tmp_path / "store"), "mlflow": "off"}, "critic": {"epochs": 4}})


def execute(config: Config, **options):
    return run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05, **options)


def test_a_receiver_gets_ids_times_attributes_and_errors(monkeypatch):
    with receiving() as (receiver, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=kernels")
        assert otlp.send_all("a-run", TRACE, ROWS) == 2
    ((path, headers),) = receiver.requests
    assert path == "/v1/traces" and headers["authorization"] == "Bearer abc"
    assert receiver.spans == [{**row, "trace": TRACE, "error": row["attributes"].get("error", "")} for row in ROWS]
    (resource,) = receiver.resources
    assert resource.items() >= {"service.name": "cuda-agent", "cuda_agent.run": "a-run", "team": "kernels"}.items()


def test_the_name_of_the_service_can_be_set(monkeypatch):
    with receiving() as (receiver, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{address}/elsewhere")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "kernels")
        otlp.send_all("a-run", TRACE, ROWS)
    assert receiver.requests[0][0] == "/elsewhere" and receiver.resources[0]["service.name"] == "kernels"


def test_many_spans_go_in_several_requests(monkeypatch):
    rows = [ROWS[0] | {"id": f"{number:016x}"} for number in range(1, 2 * otlp.BATCH + 2)]
    with receiving() as (receiver, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        assert otlp.send_all("a-run", TRACE, rows) == len(rows)
    assert len(receiver.requests) == 3 and [row["id"] for row in receiver.spans] == [row["id"] for row in rows]


def test_a_live_run_sends_every_span_once_also_after_the_collector_was_away(tmp_path, monkeypatch):
    monkeypatch.setattr(otlp, "EVERY", 0.05)
    said: list[str] = []
    with receiving() as (receiver, address), recording(tmp_path / "a.jsonl", ROOT):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        receiver.status = 400
        sender = otlp.open_sender(tmp_path, "a-run", TRACE, said.append)
        assert sender
        with span("first"):
            pass
        wait_for("the failure", 60, lambda: said)
        receiver.status = 200
        wait_for("the first span", 60, lambda: receiver.spans)
        with recording(tmp_path / "b.jsonl", ROOT), span("of another process"):
            pass
        with span("last"):
            pass
        sender.close()
    assert next(row["name"] for row in receiver.spans) == "first"
    assert sorted(row["name"] for row in receiver.spans) == ["first", "last", "of another process"]
    (line,) = said
    assert address in line and "kept in the store" in line


def test_a_whole_run_arrives_as_one_trace(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    with receiving() as (receiver, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        outcome = execute(settings(tmp_path))
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
        done = CliRunner().invoke(main.app, ["trace", "last", "--json", "--store", str(tmp_path / "store")])
    kept = json.loads(done.stdout)
    assert {row["trace"] for row in receiver.spans} == {kept["trace"]}
    assert {row["id"] for row in receiver.spans} == {row["id"] for row in kept["spans"]}
    assert len(receiver.spans) == len(kept["spans"]) and outcome.code == 0
    ids = {row["id"] for row in receiver.spans}
    assert [row["name"] for row in receiver.spans if row["parent"] not in ids] == ["run"], "it has one root"


def test_a_finished_run_can_be_sent_later(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    execute(settings(tmp_path))
    command = ["trace", "last", "--send", "--store", str(tmp_path / "store")]
    refused = CliRunner().invoke(main.app, command)
    assert isinstance(refused.exception, ConfigError) and "OTEL_EXPORTER_OTLP_ENDPOINT" in str(refused.exception)
    with receiving() as (receiver, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        done = CliRunner().invoke(main.app, command)
    assert done.exit_code == 0 and f"sent {len(receiver.spans)} spans" in done.stderr
    assert {row["name"] for row in receiver.spans} >= {"run", "train", "save checkpoint"}


def test_a_collector_that_is_away_stops_no_run_and_is_told_once(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    shown: list[list[str]] = []
    outcome = execute(settings(tmp_path), watch=lambda run, views: shown.append([n for v in views for n in v.notes]))
    assert outcome.code == 0 and outcome.report
    (note,) = shown[-1]
    assert "takes no spans" in note
    with pytest.raises(TryAgain, match=r"took 0 of 2 spans"):
        otlp.send_all("a-run", TRACE, ROWS)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "4318")],
)
def test_another_protocol_is_refused_with_a_note(tmp_path, monkeypatch, name, value, said):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv(name, value)
    notes: list[str] = []
    assert otlp.open_sender(tmp_path, "a-run", TRACE, notes.append) is None
    assert len(notes) == 1 and said in notes[0]


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_sending_can_be_turned_off(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)
    assert otlp.open_sender(tmp_path, "a-run", TRACE, print) is None


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    notes: list[str] = []
    assert otlp.open_sender(tmp_path, "a-run", TRACE, notes.append) is None
    assert "pip install 'cuda-agent[otlp]'" in notes[0]


def test_without_an_address_nothing_is_imported(tmp_path):
    script = (
        "import sys; from pathlib import Path; from cuda_agent.pipeline import otlp\n"
        f"assert otlp.open_sender(Path({str(tmp_path)!r}), 'a', {TRACE!r}, print) is None\n"
        "import cuda_agent.pipeline.local\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
