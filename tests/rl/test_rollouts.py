"""Where rollouts decode: never beside a time that is taken.  What faults cut is played again."""

import asyncio

import pytest

from cuda_agent.config import Config
from cuda_agent.errors import EXIT_CONFIG, BadConfiguration
from cuda_agent.policy.episode import Episode
from cuda_agent.rl import rollouts
from cuda_agent.rl.rollouts import PLAYS, Rollouts, servers_apart
from cuda_agent.tasks.task import Task


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


@pytest.mark.parametrize(("faults", "ended"), [(0, "answer"), (1, "answer"), (PLAYS - 1, "answer"), (PLAYS, "infra")])
def test_an_episode_that_faults_cut_is_played_again_with_its_seed(monkeypatch, faults: int, ended: str) -> None:
    played: list[tuple[int, str, Episode | None]] = []

    async def play(task, engine, chat, sandbox, settings, seed, name, before, kind):
        played.append((seed, name, before))
        cut = name == "s/a/0" and len([1 for _, known, _ in played if known == name]) <= faults
        ids = [0] * (9 - len(played))
        return Episode(name, "a", "agent", *[ids] * 5, None if cut else 1.0, "infra" if cut else "answer")

    monkeypatch.setattr(rollouts, "run_episode", play)
    task, done = Task("a", "", (), "torch#1"), []
    player = Rollouts(None, None, None, None, None, None, Config.model_validate({"agent": {"concurrency": 1}}))
    episodes = asyncio.run(player.play([(task, "s/a/0"), (task, "s/a/1")], "agent", done.append))
    assert [episode.ended for episode in episodes] == [ended, "answer"] and done == episodes
    tries = [(seed, before) for seed, name, before in played if name == "s/a/0"]
    assert len(tries) == min(faults + 1, PLAYS) and len({seed for seed, _ in tries}) == 1
    assert [before and len(before.ids) for _, before in tries] == [None, 8, 8][: len(tries)], "the longest is known"


def test_an_episode_beyond_its_deadline_is_not_played_again(monkeypatch) -> None:
    async def play(task, engine, chat, sandbox, settings, seed, name, before, kind):
        assert before is None
        return Episode(name, "a", "agent", [], [], [], [], [], None, "deadline")

    monkeypatch.setattr(rollouts, "run_episode", play)
    player = Rollouts(None, None, None, None, None, None, Config())
    assert asyncio.run(player.play([(Task("a", "", (), "torch#1"), "s/a/0")], "agent"))[0].ended == "deadline"


def test_a_server_on_the_gpu_that_broadcasts_weights_is_a_wrong_configuration() -> None:
    judges_elsewhere = {"servers": ["http://elsewhere:8001"]}
    with pytest.raises(BadConfiguration, match="from which the stage broadcasts weights"):
        servers_apart(config(1, judges_elsewhere, sync="nccl"), 1)
    for here in (0, 2):
        servers_apart(config(1, judges_elsewhere, sync="nccl"), here)
