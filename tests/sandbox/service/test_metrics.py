"""The names, labels and values that dashboards and alerts read."""

from cuda_agent.sandbox.service.metrics import Metrics


def test_the_text_has_every_name_with_its_labels_and_no_others():
    metrics = Metrics()
    metrics.verdicts.labels("plan", "ok").inc()
    metrics.submitted.labels("evaluate", "true").inc(2)
    metrics.rejected.labels('a"b\\').inc()
    metrics.phase_seconds.labels("evaluate", "run").observe(0.3)
    lines = metrics.text().decode().splitlines()
    assert 'cuda_agent_sandbox_verdicts_total{format="plan",status="ok"} 1.0' in lines
    assert 'cuda_agent_sandbox_submitted_total{kind="evaluate",new="true"} 2.0' in lines
    assert 'cuda_agent_sandbox_rejected_total{reason="a\\"b\\\\"} 1.0' in lines
    assert 'cuda_agent_sandbox_phase_seconds_bucket{kind="evaluate",le="0.5",phase="run"} 1.0' in lines
    assert "cuda_agent_sandbox_infra_faults_total 0.0" in lines, "a counter without labels begins at zero"
    types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert len(types) == 12 and types["cuda_agent_sandbox_verdicts_total"] == "counter"
    assert not [name for name in types if name.endswith("_created")]


def test_two_services_of_one_process_count_apart():
    one, other = Metrics(), Metrics()
    one.infra_faults.inc()
    assert b"infra_faults_total 1.0" in one.text() and b"infra_faults_total 0.0" in other.text()
