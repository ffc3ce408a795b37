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

        self.ready = gauge("ready", "1 if every required wall holds and the compiler works, else 0.")
        self.draining = gauge("draining", "1 after SIGTERM, else 0.")
        self.queue_length = gauge("queue_length", "Jobs that wait in the queue.")
        self.running = gauge("running", "Jobs that the sandbox has taken and not finished.")
        self.room_in_seconds = gauge("room_in_seconds", "Seconds that Retry-After would contain now.")
        self.workspaces = gauge("workspaces", "Open workspaces.")
        self.workspaces_idle = counter("workspaces_idle_total", "Workspaces that were closed because they were idle.")
        self.submitted = counter(
            "submitted_total", "Submissions, by kind and whether they made a new job.", "kind", "new"
        )
        self.verdicts = counter("verdicts_total", "Verdicts, by format and status.", "format", "status")
        self.rejected = counter("rejected_total", "Requests that were refused, by reason.", "reason")
        self.infra_faults = counter("infra_faults_total", "Infrastructure faults, which are not the solution's fault.")
        self.phase_seconds = Histogram(
            "cuda_agent_sandbox_phase_seconds",
            "Seconds that jobs spent, by kind and phase.",
            ("kind", "phase"),
            buckets=_BUCKETS,
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
