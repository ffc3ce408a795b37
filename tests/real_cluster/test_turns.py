"""Runs that are submitted together on a cluster with room for one and a half of them."""

import json
import subprocess
import sys

import pytest
from release import Release
from runs import TINY, pod_of, reaches, submit, succeeded

from cuda_agent.cluster.submit import phase

pytestmark = pytest.mark.cluster
TIGHT = ("--profile", "tight")


def test_a_second_run_waits_for_its_turn_and_the_commands_say_so(installed: Release) -> None:
    space = installed.cluster
    try:
        done = installed.command("submit", *TINY, "run.name=turn-1", "seed=21", *TIGHT)
        assert "profile tight: a run requests 1.21 CPUs" in done.stdout and "at most 1 at once" in done.stdout, done
        assert "1 fit on the nodes" in done.stdout
        reaches(space, "turn-1", "prepare", "running", "done")
        submit(installed, "turn-2", "seed=22", *TIGHT)
        line = [sys.executable, "-m", "cuda_agent.cli", "watch", "turn-2", "--json", "-n", space.namespace]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=installed.environment) as watching:
            assert watching.stdout
            try:
                said = (json.loads(line)["stages"][0]["waits"] for line in watching.stdout)
                why = next(filter(None, said))
            finally:
                watching.kill()
        assert why == "waits for its turn behind the runs of its profile: turn-1"
        assert phase(space.get("workflow", "turn-2")) == "Pending"
        assert not space.get("pods", "-l", "workflows.argoproj.io/workflow=turn-2")["items"]
        submit(installed, "turn-3", "seed=23", *TIGHT)
        assert installed.command("cancel", "turn-3").returncode == 0, "one that waits can be stopped"
        assert installed.command("watch", "turn-3").returncode == 75
        listed = json.loads(installed.command("runs", "--on", ".", "--json").stdout)
        assert next(row["status"] for row in listed if row["name"] == "turn-3") == "failed"
        done = installed.command("resume", "turn-3")
        assert done.returncode == 0 and phase(space.get("workflow", "turn-3-r2")) == "Pending", done.stderr
        assert installed.command("cancel", "turn-3").returncode == 0
        assert installed.command("cancel", "turn-1", "--now").returncode == 0
        assert pod_of(space, "turn-2", "prepare")
    finally:
        for run in ("turn-1", "turn-2", "turn-3"):
            installed.command("cancel", run, "--now")


@pytest.mark.nightly
def test_four_runs_submitted_together_end_well_and_in_order(installed: Release) -> None:
    space, names = installed.cluster, [f"four-{number}" for number in range(1, 5)]
    for number, name in enumerate(names):
        submit(installed, name, f"agentic.actor_lr={number + 1}e-4", *TIGHT)
    found = [succeeded(space, name) for name in names]
    began = [min(node["startedAt"] for node in flow["status"]["nodes"].values()) for flow in found]
    ended = [flow["status"]["finishedAt"] for flow in found]
    assert began == sorted(began)
    assert all(before <= after for before, after in zip(ended[:-1], began[1:], strict=True)), (began, ended)
