"""Where rollouts decode: never beside a time that is taken."""

import pytest

from cuda_agent.config import Config
from cuda_agent.errors import EXIT_CONFIG, BadConfiguration
from cuda_agent.rl.rollouts import servers_apart


def config(replicas: int, sandbox: dict[str, object] | None = None, **vllm: object) -> Config:
    policy = {"engine": "vllm", "vllm": {"replicas": replicas, **vllm}}
    return Config.model_validate({"policy": policy, "sandbox": {"device": "cuda"} | (sandbox or {})})


@pytest.mark.parametrize(("replicas", "here"), [(1, 1), (2, 2), (3, 2)])
def test_a_server_on_the_gpu_of_the_judge_is_a_wrong_configuration(replicas: int, here: int) -> None:
    with pytest.raises(BadConfiguration, match=r"policy\.vllm\.replicas") as error:
        servers_apart(config(replicas), here)
    assert error.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    "given",
    [
        config(1, servers=["http://elsewhere:8000"]), config(1, {"servers": ["http://elsewhere:8001"]}),
        config(1, {"device": "cpu"}), config(1, {"clock": "model"}),
    ],
    ids=["other servers", "other judges", "times of a processor", "no times"],
)  # fmt: skip
def test_servers_and_judges_that_share_no_gpu_are_fine(given: Config) -> None:
    servers_apart(given, 1)
    servers_apart(config(1), 2)


def test_a_server_on_the_gpu_that_broadcasts_weights_is_a_wrong_configuration() -> None:
    judges_elsewhere = {"servers": ["http://elsewhere:8001"]}
    with pytest.raises(BadConfiguration, match="from which the stage broadcasts weights"):
        servers_apart(config(1, judges_elsewhere, sync="nccl"), 1)
    for here in (0, 2):
        servers_apart(config(1, judges_elsewhere, sync="nccl"), here)
