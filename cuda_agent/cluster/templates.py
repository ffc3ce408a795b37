"""Finds the WorkflowTemplates of the Helm chart: for runs and for searches one for each profile, and one for each
maintenance job.

A template belongs to a release and has the version of its chart.  This command uses templates of its own minor version
(0.1.3 and 0.1.0 fit each other): all versions with the same first two numbers have the same configuration keys."""

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from cuda_agent.cluster.api import Cluster, ClusterError

PROFILE_LABEL, JOB_LABEL = "cuda-agent.io/profile", "cuda-agent.io/maintenance"
SEARCH_LABEL = "cuda-agent.io/search"
SCHEDULED_LABEL = "cuda-agent.io/scheduled"  # of a Workflow that a schedule made: its run has the Workflow's name


@dataclass(frozen=True)
class Template:
    """A WorkflowTemplate of the chart."""

    name: str  # of the object
    job: str  # name of its profile, of its maintenance job, or "search-" and the name of its profile
    release: str  # prefix of the names of the release's objects
    version: str  # of the chart
    gpus: str = ""  # how many GPUs a server that judges has
    mlflow: str = "off"  # address of MLflow


def own_version() -> str:
    return version("cuda-agent")


def template_name(release: str, job: str) -> str:
    """Returns the name of a release's template for a profile or a maintenance job, in the version of this command."""
    return f"{release}-{job}-{_in_names(own_version())}"


def templates(cluster: Cluster, label: str = PROFILE_LABEL) -> list[Template]:
    """Returns the templates of all releases in the namespace: those of profiles, or with ``JOB_LABEL`` those of
    maintenance jobs, or with ``SEARCH_LABEL`` those of searches."""
    return [_template(about, label) for about in cluster.metadata("WorkflowTemplate", label)]


def of_release(cluster: Cluster, release: str | None, label: str = PROFILE_LABEL) -> list[Template]:
    """Returns the templates of the release ``release`` that fit this command.  None means the only release of the
    namespace.

    Raises:
        ClusterError: There is no such release, there are several, or none of its templates fits.  The first sentence
            says what is wrong, the others what helps."""
    where = f"namespace {cluster.namespace} of {cluster.name}"
    try:
        there = templates(cluster, label)
    except ClusterError as error:
        if error.status != 404:
            raise
        raise ClusterError(f"{cluster.name} has no Argo Workflows. Install them first.", 404) from None
    if not there:
        require_namespace(cluster)
        text = f"There is no chart of cuda-agent in {where}. helm install it there, or name another --namespace."
        raise ClusterError(text, 404)
    releases = sorted({one.release for one in there})
    if release is None and len(releases) > 1:
        text = f"There are several releases in {where}: {', '.join(releases)}. Name one of them with --release."
        raise ClusterError(text, 404)
    ours = [one for one in there if one.release == (release or releases[0])]
    if not ours:
        text = f"There is no release {release} in {where}. Leave --release out, or give {' or '.join(releases)}."
        raise ClusterError(text, 404)
    fitting = [one for one in ours if _numbers(one.version)[:2] == _numbers(own_version())[:2]]
    if not fitting:
        versions = ", ".join(sorted({one.version for one in ours}))
        text = (
            f"Release {ours[0].release} in {where} has version {versions}, and this command {own_version()}. "
            "The first two numbers must be equal: install another cuda-agent, or run helm upgrade."
        )
        raise ClusterError(text, 404)
    return fitting


def choose(cluster: Cluster, job: str, release: str | None, label: str = PROFILE_LABEL) -> Template:
    """Returns the template of a release for the profile ``job``, or with ``JOB_LABEL`` for the maintenance job ``job``.

    Raises:
        ClusterError: The release has none (see ``of_release``)."""
    ours = of_release(cluster, release, label)
    found = [one for one in ours if one.job == job]
    if not found:
        what = {JOB_LABEL: "maintenance job", SEARCH_LABEL: "template"}.get(label, "profile")
        names = ", ".join(sorted({one.job for one in ours}))
        raise ClusterError(f"Release {ours[0].release} has no {what} {job}. It has {names}.", 404)
    return max(found, key=lambda one: _numbers(one.version))


def require_namespace(cluster: Cluster) -> None:
    """Raises a ``ClusterError`` if the namespace does not exist.  Does nothing if the account may not read it."""
    try:
        cluster.ask(f"/api/v1/namespaces/{cluster.namespace}", f"read namespace {cluster.namespace}")
    except ClusterError as error:
        if error.status == 404:
            text = f"There is no namespace {cluster.namespace} in {cluster.name}. Name another one with --namespace."
            raise ClusterError(text, 404) from None
        if error.status != 403:
            raise


def _template(about: dict[str, Any], label: str) -> Template:
    said, job = about.get("annotations", {}), about["labels"][label]
    made_by = said.get("cuda-agent.io/version", "")
    release = about["name"].removesuffix(f"-{job}-{_in_names(made_by)}")
    gpus, mlflow = (said.get(f"cuda-agent.io/{name}", "") for name in ("gpus", "mlflow"))
    return Template(about["name"], job, release, made_by, gpus, mlflow or "off")


def _in_names(text: str) -> str:
    return text.replace(".", "-").replace("+", "-")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
