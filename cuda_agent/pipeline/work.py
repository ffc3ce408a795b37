"""Estimates the work of a stage from the configuration, with one function for each kind of stage.

``Work.tokens`` is an upper bound: it assumes that every episode is as long as the configured limits allow."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cuda_agent.config import EVAL_TASKS, Config, CriticConfig, Ppo, Sft


@dataclass(frozen=True)
class Work:
    """The estimated work of one stage."""

    samples: int = 0  # number of tasks, examples or episodes
    tokens: int = 0  # upper bound for all samples together
    optimizer_steps: int = 0
    decoded: int = 0  # tokens that an engine samples
    trained: int = 0  # tokens that trainers process, in all passes
    overhead: float = 0.0  # seconds spent on anything but decoding and training
    most_seconds: float | None = None  # time limit, with the overhead
    models: int = 0  # number of models that the stage trains
    longest: int = 0  # most tokens of one training sequence
    from_scratch: bool = False  # all weights are trained, in one process


Estimate = Callable[[Config], Work]
COMPILATION = 60.0  # seconds in which torch.compile compiles a model
GPU_START = 10.0  # seconds until the judge of a GPU answers
GPU_VERDICT, HOST_VERDICT = 0.1, 0.45  # seconds to judge an episode on a GPU: format plan; formats with host code
GPU_TASK, GPU_SWEPT = 2.4, 13.0  # seconds to synthesize a task on a GPU: without and with ``synthesis.headroom``


def synthesis(config: Config) -> Work:
    settings, heldout = config.synthesis, _heldout(config)
    tasks = settings.train + heldout
    if config.sandbox.device == "cpu":
        return Work(samples=tasks, overhead=1.5 * min(settings.max_candidates, 4 * heldout))
    catalogue = settings.catalogue + round(settings.train * settings.catalogue_share)
    swept = tasks - catalogue if settings.headroom else 0
    return Work(samples=tasks, overhead=GPU_TASK * (tasks - swept) + GPU_SWEPT * swept)


def bootstrap(config: Config) -> Work:
    """Returns the work of training a policy from scratch by imitation.  If ``policy.base`` names a pretrained model,
    nothing is trained, and only a few seconds of overhead remain."""
    if config.policy.base is not None:
        return Work(overhead=10)
    settings = config.bootstrap
    tokens = settings.steps * settings.tokens_per_step
    overhead = 10 + COMPILATION * config.training.compile  # which ``max_seconds`` does not count
    return Work(
        samples=settings.examples,
        tokens=tokens,
        optimizer_steps=settings.steps,
        trained=tokens,
        overhead=overhead,
        most_seconds=settings.max_seconds and settings.max_seconds + overhead,
        models=1,
        longest=config.policy.context,
        from_scratch=True,
    )


def ppo(config: Config, ppo: Ppo, answer_tokens: int) -> Work:
    """Returns the work of a PPO stage in which the policy samples at most ``answer_tokens`` tokens in an episode."""
    trained = ppo.steps * ppo.episodes_per_step
    rounds = math.ceil(ppo.steps / ppo.eval_every) if ppo.eval_every else 0
    episodes = trained + rounds * min(EVAL_TASKS, _heldout(config)) * ppo.samples_per_prompt
    longest = min(answer_tokens, ppo.context)
    tokens = episodes * longest
    return Work(
        samples=episodes,
        tokens=tokens,
        optimizer_steps=ppo.steps * ppo.epochs * ppo.minibatches,
        decoded=tokens // 2,
        trained=trained * longest * ppo.epochs,  # half of the bound, twice: policy and critic
        overhead=_verdicts(config, episodes, 0.05),
        most_seconds=ppo.max_seconds,
        models=2,
        longest=ppo.context,
    )


def collect(config: Config) -> Work:
    return _play(config, config.synthesis.train * config.collect.samples, config.agent.turns, 0.05)


def supervised(config: Config, settings: Sft | CriticConfig) -> Work:
    collected = collect(config)
    tokens = collected.tokens * settings.epochs
    return Work(
        samples=collected.samples,
        tokens=tokens,
        optimizer_steps=math.ceil(tokens / settings.tokens_per_step),
        trained=tokens // 2,
        overhead=2,
        models=1,
        longest=config.policy.context,
    )


def evaluate(config: Config) -> Work:
    return _play(config, _heldout(config) * config.evaluate.samples, config.evaluate.turns, 0.1)


def _play(config: Config, episodes: int, turns: int, seconds: float) -> Work:
    tokens = episodes * agent_tokens(config, turns)
    overhead = _verdicts(config, episodes, seconds)
    return Work(samples=episodes, tokens=tokens, decoded=tokens // 2, overhead=overhead)


def _verdicts(config: Config, episodes: int, seconds: float) -> float:
    """Returns the estimated seconds to judge ``episodes`` episodes.

    If solutions are not timed on a GPU, each episode takes ``seconds``.  If they are, each episode takes the constant
    ``GPU_VERDICT`` (format plan) or ``HOST_VERDICT`` (other formats).  The episodes are then divided among the sandbox
    servers, because each server has one GPU and judges one solution at a time.  The start of the judge adds
    ``GPU_START`` seconds."""
    sandbox = config.sandbox
    if sandbox.device == "cuda" and sandbox.clock == "real":
        each = GPU_VERDICT if sandbox.format == "plan" else HOST_VERDICT
        return GPU_START + each * episodes / max(1, len(sandbox.servers))
    return seconds * episodes


def agent_tokens(config: Config, turns: int) -> int:
    """Returns the largest number of tokens that the policy can sample in an episode of ``turns`` turns."""
    return min(turns * config.agent.turn_tokens, config.policy.context)


def _heldout(config: Config) -> int:
    return config.synthesis.heldout + config.synthesis.catalogue
