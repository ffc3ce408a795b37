"""The connection to a cluster: which context of a kubeconfig, and what is said if there is no answer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cuda_agent.cluster.api import Cluster, ClusterError


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A kubeconfig of two contexts, none of which is the current one.  A test writes it with ``write``."""
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return {
        "apiVersion": "v1", "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": "https://one.test.invalid"}}],
        "users": [{"name": "ada", "user": {"token": "secret"}}],
        "contexts": [
            {"name": "a", "context": {"cluster": "one", "user": "ada", "namespace": "kernels"}},
            {"name": "b", "context": {"cluster": "one", "user": "ada"}},
        ],
    }  # fmt: skip


def write(kubeconfig: dict[str, Any], path: Path) -> None:
    (path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))


def test_a_context_that_is_named_needs_no_current_one(kubeconfig: dict[str, Any], tmp_path: Path) -> None:
    write(kubeconfig, tmp_path)
    found = Cluster.of_kubeconfig("a")
    assert (found.name, found.namespace) == ("a", "kernels")
    assert Cluster.of_kubeconfig("b").namespace == "default"
    with pytest.raises(ClusterError, match="no current context, and no context is named"):
        Cluster.of_kubeconfig()
    with pytest.raises(ClusterError, match="There is no context c in your kubeconfig: a, b"):
        Cluster.of_kubeconfig("c")


def test_without_a_name_the_current_context_counts(kubeconfig: dict[str, Any], tmp_path: Path) -> None:
    write(kubeconfig | {"current-context": "a"}, tmp_path)
    assert Cluster.of_kubeconfig().name == "a"
    assert Cluster.of_kubeconfig("b", "other").namespace == "other"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "contexts: 3\ncurrent-context: a\n", "contexts: [3]\ncurrent-context: a"]
)
def test_a_kubeconfig_that_cannot_be_used_is_said_in_one_sentence(
    kubeconfig: dict[str, Any], tmp_path: Path, text: str
) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(ClusterError, match="Your kubeconfig cannot be used") as error:
        Cluster.of_kubeconfig()
    assert error.value.exit_code == 78 and "\n" not in str(error.value)


def test_an_error_without_a_message_is_named_by_its_kind() -> None:
    def call(*_: Any, **__: Any) -> None:
        raise TimeoutError

    cluster = Cluster(SimpleNamespace(call_api=call), "default", "the cluster")
    with pytest.raises(ClusterError, match=r"does not answer: could not read Pod x \(TimeoutError\)") as error:
        cluster.get("Pod", "x")
    assert error.value.exit_code == 75
