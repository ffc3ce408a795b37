"""A Grafana dashboard and alert rules over the sandbox's metrics."""

from typing import Any

_P = "cuda_agent_sandbox_"
_BY_PHASE = f"sum by (phase) (rate({_P}phase_seconds_%s[5m]))"
_PANELS = (  # title, expression, legend, unit
    ("Verdicts a minute", f"sum by (status) (rate({_P}verdicts_total[5m])) * 60", "{{status}}", "short"),
    ("Jobs that wait", f"sum by (pod) ({_P}queue_length)", "{{pod}}", "short"),
    ("Jobs that run", f"sum by (pod) ({_P}running)", "{{pod}}", "short"),
    ("Open workspaces", f"sum by (pod) ({_P}workspaces)", "{{pod}}", "short"),
    ("Seconds by phase, mean", f"{_BY_PHASE % 'sum'} / {_BY_PHASE % 'count'}", "{{phase}}", "s"),
    ("Refused a minute", f"sum by (reason) (rate({_P}rejected_total[5m])) * 60", "{{reason}}", "short"),
    ("Faults of ours a minute", f"sum by (pod) (rate({_P}infra_faults_total[5m])) * 60", "{{pod}}", "short"),
    ("Servers that are ready", f"sum({_P}ready)", "ready", "short"),
)
_ALERTS = (  # name, expression, for, severity, summary
    ("CudaAgentSandboxUnready", f"{_P}ready == 0", "10m", "warning",
     "A sandbox server is not ready: a wall or the compiler is missing; its /readyz says which."),
    ("CudaAgentSandboxFaults", f"increase({_P}infra_faults_total[30m]) > 5", "0m", "warning",
     "A sandbox server fails by its own fault again and again: its device or machine may be sick."),
    ("CudaAgentSandboxCheats", f'sum(increase({_P}verdicts_total{{status="cheat"}}[1h])) > 20', "0m", "info",
     "A policy has learned to cheat, or somebody tries: look at the verdicts of this hour."),
    ("CudaAgentSandboxQueue", f"min({_P}queue_length) > 100", "30m", "info",
     "All sandbox servers have long queues: more replicas of the pool would make runs faster."),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON: two panels per row, over any Prometheus that Grafana knows."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "datasource": source, "expr": expression, "legendFormat": legend}],
        }
        for number, (title, expression, legend, unit) in enumerate(_PANELS)
    ]
    return {
        "title": "cuda-agent: sandboxes",
        "uid": "cuda-agent-sandboxes",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def alerts() -> dict[str, Any]:
    """The spec of a PrometheusRule."""
    rules = [
        {"alert": name, "expr": expr, "for": wait, "labels": {"severity": severity}, "annotations": {"summary": text}}
        for name, expr, wait, severity, text in _ALERTS
    ]
    return {"groups": [{"name": "cuda-agent", "rules": rules}]}
