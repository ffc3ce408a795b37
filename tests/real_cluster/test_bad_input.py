"""Mistakes on a live release: one screen that says what is wrong, and nothing half-made is left.

What the commands refuse before a cluster is asked, and what admission refuses, is tried in tests/pipeline as well.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from kubectl import Cluster, wait_for
from release import CHART, NAME, Release, helm, merged, of_version, release, values
from runs import TINY, ended, stages, submission

from cuda_agent.cluster import submit as commands
from cuda_agent.storage import canonical_json

pytestmark = pytest.mark.cluster

KINDS = "workflows,configmaps,secrets,statefulsets,services,networkpolicies,pods"


def there(space: Cluster) -> set[str]:
    """Names of all that a submission might leave."""
    return {f"{item['kind']}/{item['metadata']['name']}" for item in space.get(KINDS)["items"]}


def refused(installed: Release, *words: str, **environment: str) -> str:
    """What a person reads; no object is there that was not before."""
    space = installed.cluster
    before = there(space)
    done = installed.command("submit", *TINY, *words, **environment)
    assert done.returncode == 78, done
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 6, done.stderr
    assert {name for name in there(space) - before if "bad-input" in name} == set()
    return done.stderr


@contextmanager
def someone(installed: Release, folder: Path, role: str | None) -> Iterator[str]:
    """A kubeconfig of an account that has this role of the release, or none."""
    space = installed.cluster
    space.run("create", "serviceaccount", "someone")
    try:
        if role:
            account = f"--serviceaccount={space.namespace}:someone"
            space.run("create", "rolebinding", "someone", f"--role={NAME}-{role}", account)
        settings = json.loads(space.run("config", "view", "--raw", "-o", "json"))
        settings["users"][0]["user"] = {"token": space.run("create", "token", "someone")}
        (folder / "kubeconfig").write_text(json.dumps(settings))
        yield str(folder / "kubeconfig")
    finally:
        space.run("delete", "serviceaccount/someone", "rolebinding/someone", "--ignore-not-found")


def test_a_namespace_without_the_chart_is_said_so(installed: Release, space: Cluster) -> None:
    said = refused(Release(space), "run.name=bad-input")
    assert f"There is no chart of cuda-agent in namespace {space.namespace}" in said and there(space) <= {
        "ConfigMap/kube-root-ca.crt"
    }


@pytest.mark.parametrize(("role", "refusal"), [(None, "list WorkflowTemplates"), ("viewer", "create Workflow")])
def test_who_may_not_submit_is_told_which_role_is_missing(
    installed: Release, tmp_path: Path, role: str | None, refusal: str
) -> None:
    with someone(installed, tmp_path, role) as kubeconfig:
        said = refused(installed, "run.name=bad-input", KUBECONFIG=kubeconfig)
        assert f"refused to {refusal}" in said and "Ask for the chart's role of submitters" in said


def test_who_has_the_role_may_submit_and_cancel(installed: Release, tmp_path: Path) -> None:
    """The positive control of the one before, with the same account and a role more."""
    with someone(installed, tmp_path, "submitter") as kubeconfig:
        done = installed.command("submit", *TINY, "run.name=good-input", KUBECONFIG=kubeconfig)
        assert done.returncode == 0, done.stderr
        done = installed.command("cancel", "good-input", "--now", KUBECONFIG=kubeconfig)
        assert done.returncode == 0, done.stderr


def test_a_name_that_is_too_long_is_refused_before_anything_is_made(installed: Release) -> None:
    said = refused(installed, f"run.name=bad-input-{'a' * 40}")
    assert "at most 35 more" in said


def test_a_command_of_another_version_names_the_version_that_is_there(installed: Release, tmp_path: Path) -> None:
    said = refused(installed, "run.name=bad-input", PYTHONPATH=of_version("9.9.9", tmp_path))
    assert f"has version {version('cuda-agent')}, and this command 9.9.9" in said


def test_a_configuration_of_another_version_ends_the_run_with_a_sentence_and_no_pools(installed: Release) -> None:
    """As a later version would send it, under a template's name that is there: a setting that this version lacks."""
    space = installed.cluster
    config = submission("bad-config")
    text = json.loads(config.config_map["data"]["config.json"])
    text["critic"]["of_a_later_version"] = 1
    sent = changed(config, canonical_json(text))
    space.create(sent.workflow)
    uid = space.get("workflow", "bad-config")["metadata"]["uid"]
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "bad-config", "uid": uid}
    space.create(sent.config_map | {"metadata": sent.config_map["metadata"] | {"ownerReferences": [owner]}})
    assert commands.phase(ended(space, "bad-config")) == "Failed"
    assert "critic.of_a_later_version" in stages(space, "bad-config")["prepare"].message
    done = installed.command("watch", "bad-config")
    assert done.returncode == 78 and "critic.of_a_later_version" in done.stdout
    assert {name for name in there(space) if "bad-config-" in name and not name.startswith("Pod/")} == set()
    space.run("delete", "workflow", "bad-config")
    wait_for("its configuration goes with it", 60, lambda: "ConfigMap/bad-config" not in there(space))


def changed(config: commands.Submission, text: str) -> commands.Submission:
    """The same submission with another configuration, and the digest of that."""
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    workflow: dict[str, Any] = json.loads(json.dumps(config.workflow))
    workflow["spec"]["arguments"]["parameters"][1]["value"] = sha256
    return commands.Submission(config.run, workflow, config.config_map | {"data": {"config.json": text}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"store": {"existingSecret": "absent"}}, "store.existingSecret: there is no secret absent"),
        ({"minio": {"enabled": True}, "webhook": {"existingSecret": "incomplete"}}, "has no key url"),
    ],
)
def test_a_release_whose_secret_is_missing_is_not_installed(space: Cluster, given: dict[str, Any], said: str) -> None:
    space.run("create", "secret", "generic", "incomplete", "--from-literal=other=x")
    before = there(space)
    done = helm(space, "install", "without", str(CHART), given=given)
    assert done.returncode and said in done.stderr and len(done.stderr.splitlines()) < 6
    assert there(space) == before and space.try_run("get", "serviceaccount", "without-cuda-agent-stage").returncode


def test_a_secret_that_has_gone_is_named_to_who_watches_a_run(cluster: Cluster, tmp_path: Path) -> None:
    """It went after the release was installed: the run's first pod cannot start, and `watch` says why."""
    store = {"existingSecret": "gone", "endpoint": "http://store.invalid:443"}
    keys = {"accesskey": "tester", "secretkey": "long-enough"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "gone"}, "stringData": keys}
    off = {"minio": {"enabled": False}, "mlflow": {"enabled": False}, "store": store, "extraObjects": [secret]}
    with release(cluster, f"gone-{os.getpid()}", merged(values(), off)) as installed:
        installed.cluster.run("delete", "secret", "gone")
        assert installed.command("submit", *TINY, "run.name=waits").returncode == 0
        line = [sys.executable, "-m", "cuda_agent.cli", "watch", "waits", "-n", installed.cluster.namespace]
        file, unbuffered = tmp_path / "said.txt", installed.environment | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(line, stdout=open(file, "w"), env=unbuffered) as watching:
            try:
                wait_for("the reason", 120, lambda: "not found" in file.read_text())
            finally:
                watching.kill()
        said = next(line for line in file.read_text().splitlines() if "not found" in line)
        assert said.startswith("prepare: ") and 'secret "gone"' in said
