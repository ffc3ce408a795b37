"""Sandbox servers are killed at random seconds of the stages that judge.  A stage then ends with the bytes of a run in
peace, or says what it lost and leaves no cache entry."""

import random
import time

import pytest
import runs
from canaries import open_bucket
from kubectl import Cluster
from release import Release

from cuda_agent.pipeline.manifest import Manifest, cache_entry, manifest_entry
from cuda_agent.storage import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
STAGES = ("collect", "agentic", "evaluate-agentic")
KILLED = (("evaluate",), ("workspace",), ("evaluate", "workspace"))
LENGTH = ("agentic.steps=2", "warmup.steps=1")


def manifests(store: Store, run: str) -> dict[str, Manifest]:
    return {stage: Manifest.from_bytes(store.get(manifest_entry(run, stage))) for stage in STAGES}


def kill(space: Cluster, run: str, stage: str, after: float, roles: tuple[str, ...]) -> None:
    runs.pod_of(space, run, stage)
    time.sleep(after)
    space.run("delete", "pod", *(f"{run}-{role}-0" for role in roles), "--force", "--grace-period=0")


def test_a_stage_whose_sandboxes_die_has_the_bytes_of_a_run_in_peace_or_says_what_it_lost(installed: Release) -> None:
    space, draws = installed.cluster, random.Random(7)
    runs.submit(installed, "calm", *LENGTH)
    runs.succeeded(space, "calm")
    with open_bucket(installed) as store:
        calm = manifests(store, "calm")
    seen = []
    for number in range(4):
        run = f"killed-{number}"
        with open_bucket(installed) as store:
            for stage in STAGES:  # without the entry the stage runs again
                store.delete(cache_entry(stage, calm[stage].key))
        runs.submit(installed, run, *LENGTH)
        plans = [(stage, draws.uniform(0, 8), KILLED[(number + at) % len(KILLED)]) for at, stage in enumerate(STAGES)]
        for plan in plans:
            kill(space, run, *plan)
        runs.succeeded(space, run)
        with open_bucket(installed) as store:
            found = manifests(store, run)
            for stage, after, roles in plans:
                same = found[stage].outputs == calm[stage].outputs
                cached = store.exists(cache_entry(stage, found[stage].key))
                seen.append((run, stage, round(after, 1), roles, same, found[stage].lost, cached))
    print(*seen, sep="\n")
    for run, stage, _, _, same, lost, cached in seen:
        earlier = [one for one in seen if one[0] == run and one[1] in STAGES[: STAGES.index(stage)]]
        assert cached == (not lost), (run, stage)
        assert same or lost or any(not one[4] for one in earlier), (run, stage)
