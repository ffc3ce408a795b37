"""The stage ``evaluate``, with the scripted engine and the real judge (model clock)."""

import random
from dataclasses import replace

import pytest

from cuda_agent.compose import compose
from cuda_agent.config import Bootstrap
from cuda_agent.policy.episode import EPISODES, read_episodes
from cuda_agent.policy.model import new_policy, save_policy, train_tokenizer
from cuda_agent.rl.dialogues import corpus, texts
from cuda_agent.rl.scores import read_scores
from cuda_agent.stages import evaluate
from cuda_agent.synthesis.teacher.family import sample_task
from cuda_agent.tasks.io import write_tasks
from tests.stages.test_stages import context


@pytest.mark.nightly  # strict mode compiles with torch.compile; tests/agent has the modes of an episode
def test_final_answers_are_judged_in_the_evaluations_mode(tmp_path):
    settings = compose(["experiment=smoke", "evaluate.mode=strict", "evaluate.turns=9"])
    inputs = {"tasks": tmp_path / "tasks", "policy": tmp_path / "policy"}
    write_tasks(inputs["tasks"], [replace(sample_task(random.Random(0)), split="heldout")])
    tokenizer = train_tokenizer(texts(corpus(Bootstrap(examples=100), 0, set())), settings.policy.vocab)
    inputs["policy"].mkdir()
    save_policy(new_policy(settings.policy, tokenizer, 0), tokenizer, inputs["policy"])
    ctx = context(tmp_path / "stage", "evaluate-base", settings, inputs, "scores")
    evaluate.run(ctx)
    (episode,) = read_episodes(ctx.outputs["scores"] / EPISODES)
    assert (episode.verdict["mode"], episode.best["mode"]) == ("strict", "quick")
    scores = read_scores(ctx.outputs["scores"] / "scores.json")
    assert scores.mode == "strict" and scores.final.overall.passed == scores.best.overall.passed == 1.0
