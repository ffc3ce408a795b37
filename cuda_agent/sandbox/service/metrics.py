"""Exports the service's metrics for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

disable_created_metrics()


class Metrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"cuda_agent_sandbox_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cuda_agent_sandbox_{name}", text, labels, registry=registry)

        self.ready = gauge("ready", "1 when the walls are proven and the compiler works")
        self.draining = gauge("draining", "1 after SIGTERM")
        self.queue_length = gauge("queue_length", "Jobs that wait.")
        self.running = gauge("running", "Jobs handed to the sandbox.")
        self.room_in_seconds = gauge("room_in_seconds", "What Retry-After would say now.")
        self.workspaces = gauge("workspaces", "Open workspaces.")
        self.workspaces_idle = counter("workspaces_idle_total", "Workspaces closed because they were not used.")
        self.submitted = counter("submitted_total", "Submissions, and whether they made a new job.", "kind", "new")
        self.verdicts = counter("verdicts_total", "Verdicts given by the sandbox.", "format", "status")
        self.rejected = counter("rejected_total", "Requests refused before they became work.", "reason")
        self.infra_faults = counter("infra_faults_total", "Faults of ours.")
        self.phase_seconds = Histogram(
            "cuda_agent_sandbox_phase_seconds",
            "Seconds that jobs spent, by phase; queue and run are the service's own.",
            ("kind", "phase"),
            buckets=_BUCKETS,
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
