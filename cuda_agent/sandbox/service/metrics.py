"""Defines the metrics of the sandbox service, and exports them for Prometheus."""

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

        self.ready = gauge("ready", "1 if the walls hold and the compiler works, else 0.")
        self.draining = gauge("draining", "1 if the server is ending and takes no new work, else 0.")
        self.queue_length = gauge("queue_length", "Jobs that wait in the queue.")
        self.running = gauge("running", "Jobs handed to the sandbox.")
        self.room_in_seconds = gauge("room_in_seconds", "Seconds that Retry-After would contain now.")
        self.workspaces = gauge("workspaces", "Open workspaces.")
        self.workspaces_idle = counter("workspaces_idle_total", "Workspaces closed because they were not used.")
        self.submitted = counter("submitted_total", "Submissions, and whether they made a new job.", "kind", "new")
        self.verdicts = counter("verdicts_total", "Verdicts given by the sandbox.", "format", "status")
        self.rejected = counter("rejected_total", "Refused requests.", "reason")
        self.infra_faults = counter("infra_faults_total", "Faults of the sandbox or the service, not of a solution.")
        self.phase_seconds = Histogram(
            "cuda_agent_sandbox_phase_seconds",
            "Seconds that jobs spent, by phase; queue and run are the service's own.",
            ("kind", "phase"),
            buckets=_BUCKETS,
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
