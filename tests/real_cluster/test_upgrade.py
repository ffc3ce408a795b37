"""``helm upgrade`` to a later version with other values while a run is live, and back: the run does not notice."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from canaries import values as planted_values
from kubectl import Cluster, wait_for
from release import CHART, NAME, Release, merged, of_version, values
from runs import LONG, OTHER, TINY, pod_of, pods_of, reaches, submit, succeeded

from cuda_agent.cluster.pools import version_name
from cuda_agent.deploy.chart_values import CHART_VERSION

pytestmark = pytest.mark.cluster

MAJOR, MINOR, _ = CHART_VERSION.split(".")
NEXT = f"{MAJOR}.{int(MINOR) + 1}.0"  # commands of this version do not fit it


def next_chart(folder: Path) -> Path:
    """The same chart, one version later."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": NEXT, "appVersion": NEXT}))
    return chart


def next_values(planted: dict[str, str]) -> dict[str, Any]:
    """Other values; the images are those that the cluster has."""
    images = {name: {"tag": CHART_VERSION} for name in ("stage", "sandbox", "minio", "mlflow")}
    more = {"images": images, "environment": {"OF_THE_NEXT": "yes"}, "sandbox": {"recycleAfter": 7}}
    return merged(merged(values(), planted_values(planted)), more)


def templates(space: Cluster) -> set[str]:
    return {item["metadata"]["name"] for item in space.get("workflowtemplates")["items"]}


def environment(space: Cluster, pod: str) -> dict[str, str]:
    containers = space.get("pod", pod)["spec"]["containers"]
    (main,) = (container for container in containers if container["name"] == "main")
    return {item["name"]: item.get("value", "") for item in main["env"]}


def servers(space: Cluster, run: str) -> str:
    """The command line of the run's servers."""
    return " ".join(space.get("statefulset", f"{run}-evaluate")["spec"]["template"]["spec"]["containers"][0]["args"])


def stage_pods(space: Cluster, run: str) -> list[str]:
    """Pods of a run's stages, oldest first."""
    return [name for name in pods_of(space, run) if "-prepare-" not in name and "-finish-" not in name]


def test_a_live_run_ends_well_through_an_upgrade_and_back_and_new_ones_use_the_new_templates(
    installed: Release, planted: dict[str, str], tmp_path: Path
) -> None:
    space, of_next = installed.cluster, of_version(NEXT, tmp_path / "next")
    before = templates(space)
    assert before >= {f"{NAME}-{profile}-{version_name()}" for profile in ("cpu", "gpu")}
    submit(installed, "lives", OTHER)
    first = wait_for("the first stage", LONG, lambda: stage_pods(space, "lives"))

    try:
        installed.upgrade(next_values(planted), next_chart(tmp_path))
        assert templates(space) == {name.replace(version_name(), NEXT.replace(".", "-")) for name in before}
        refused = installed.command("submit", *TINY, "run.name=older")
        assert refused.returncode == 78 and f"has version {NEXT}, and this command" in refused.stderr
        sent = installed.command("submit", *TINY, "seed=5", "run.name=newer", PYTHONPATH=of_next)
        assert sent.returncode == 0, sent.stderr
        assert environment(space, pod_of(space, "newer", "prepare"))["OF_THE_NEXT"] == "yes"
        reaches(space, "newer", "prepare", "done")
        assert "--recycle-after 7 " in servers(space, "newer")
        assert installed.command("cancel", "newer", "--now", PYTHONPATH=of_next).returncode == 0
        later = wait_for("a stage after the upgrade", LONG, lambda: stage_pods(space, "lives")[len(first) :])
        assert "OF_THE_NEXT" not in environment(space, later[0])
    finally:
        back = installed.helm("rollback", NAME, "--timeout=15m")
    assert back.returncode == 0, back.stderr

    assert templates(space) == before
    sent = installed.command("submit", *TINY, "seed=6", "run.name=again")
    assert sent.returncode == 0, sent.stderr
    assert "OF_THE_NEXT" not in environment(space, pod_of(space, "again", "prepare"))
    assert installed.command("cancel", "again", "--now").returncode == 0
    ended = succeeded(space, "lives")
    assert ended["spec"]["workflowTemplateRef"]["name"] in before
    mlflow = f"deployment/{NAME}-mlflow"
    wait_for("MLflow", LONG, lambda: space.get(mlflow).get("status", {}).get("readyReplicas"))
    reported = installed.command("report", "lives", "--on", ".")
    assert reported.returncode == 0, reported.stderr
