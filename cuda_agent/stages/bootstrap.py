"""Stage ``bootstrap``: makes the first policy, from which the later stages start. Input: tasks; output: ``policy``.

If the setting ``policy.base`` names a Hugging Face model or its folder, the stage only checks and copies this model.
Otherwise it trains a small model from scratch, to imitate examples. The examples come from the scripted teacher, a
program that solves the tasks of one family with random kernel designs (package ``synthesis.teacher``). No example has
the same operators in the same order as a held-out task of this family. Before the training, the sandbox judges some of
the teacher's solutions."""

import asyncio
import random
from collections.abc import Sequence

from cuda_agent.context import StageContext
from cuda_agent.errors import BadConfiguration, PolicyError
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.model import load_policy, new_policy, save_policy, train_tokenizer
from cuda_agent.rl.dialogues import Dialogue, corpus, encode, texts
from cuda_agent.rl.trainers import imitate, make_trainer, require_gpus
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.wire import Solution
from cuda_agent.spans import opened, span
from cuda_agent.synthesis.teacher.family import combination, heldout_combinations
from cuda_agent.synthesis.teacher.teacher import solve
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.training.packing import tokens_of
from cuda_agent.training.recipes import sft_loss_of

HELDOUT = 100  # most examples that are held out to report their loss
TOKENIZER = 1000  # most examples that train the tokenizer


def run(ctx: StageContext) -> None:
    config = ctx.config
    if config.policy.base is not None:
        try:
            model, tokenizer = load_policy(config.policy.base)
            Chat(tokenizer)
        except (PolicyError, ValueError) as error:
            raise BadConfiguration(f"policy.base cannot be used: {error}") from error
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest and longest < config.policy.context:
            raise BadConfiguration(f"policy.context: policy.base has {longest} positions, got {config.policy.context}.")
        save_policy(model, tokenizer, ctx.outputs["policy"])
        return
    require_gpus(config.training.device, 1)
    family = [task for task in read_tasks(ctx.inputs["tasks"]) if task.family == "teacher"]
    asyncio.run(verify_teacher(ctx, [task for task in family if task.split == "train"]))
    heldout, device = heldout_combinations(family, combination), config.sandbox.device
    with span("make examples"):
        examples = corpus(config.bootstrap, config.seed, heldout, device)
    model, tokenizer = pretrain(ctx, examples)
    save_policy(model, tokenizer, ctx.outputs["policy"])


async def verify_teacher(ctx: StageContext, tasks: Sequence[Task]) -> None:
    """Checks solutions of the scripted teacher, a program that solves ``tasks`` and predicts the judge's status of each
    solution. The setting ``bootstrap.verify`` is the number of solutions. The sandbox judges each of them. Logs the
    share of the solutions that got each reward. Writes a note for each verdict whose status is not the predicted
    one."""
    count = ctx.config.bootstrap.verify if tasks else 0
    if not count:
        return
    rng = random.Random(f"{ctx.config.seed}/verify")
    async with opened("sandbox", open_sandbox(ctx.config.sandbox, ctx.cache)) as sandbox:
        drawn = [tasks[index % len(tasks)] for index in range(count)]
        solved = [solve(task, rng, ctx.config.sandbox.device) for task in drawn]
        solutions = [Solution("plan", worked.files) for worked in solved]
        with span("verify teacher"):
            verdicts = await asyncio.gather(*(sandbox.evaluate(*one) for one in zip(drawn, solutions, strict=True)))
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    for task, worked, verdict in zip(drawn, solved, verdicts, strict=True):
        if verdict.status != worked.status:
            reason = f"{verdict.status} {verdict.message}, expected {worked.status}"
            ctx.tracker.note(f"a solution of the teacher for {task.name} was judged otherwise: {reason}")
    if rewards:
        shares = {f"teacher_reward_{kind}": rewards.count(kind) / len(rewards) for kind in (-1, 1, 2, 3)}
        ctx.tracker.log(0, {"teacher_verified": float(len(rewards))} | shares)


def pretrain(ctx: StageContext, dialogues: Sequence[Dialogue]) -> tuple[object, object]:
    """Trains a tokenizer on ``dialogues``. Then trains a new model to imitate the dialogues of at most
    ``policy.context`` tokens. Holds out at most ``HELDOUT`` of these dialogues and logs their loss. Returns (model,
    tokenizer). Raises BadConfiguration if all dialogues are too long."""
    settings, policy = ctx.config.bootstrap, ctx.config.policy
    with span("train tokenizer"):
        tokenizer = train_tokenizer(texts(dialogues[:TOKENIZER]), policy.vocab)
    chat = Chat(tokenizer, "compact")
    with span("encode examples"):
        sequences = [tokens_of(*encode(dialogue, chat)) for dialogue in dialogues]
    short = [sequence for sequence in sequences if len(sequence) <= policy.context]
    count = min(HELDOUT, len(short) // 10)
    heldout, training = short[:count], short[count:]
    if not training:
        raise BadConfiguration(f"bootstrap: none of the examples fits policy.context ({policy.context} tokens)")
    longest = max(map(len, short))
    with span("make trainer"):
        model = new_policy(policy, tokenizer, ctx.config.seed)
        trainer = make_trainer(ctx, model, longest=longest, precision="auto", scratch=True)
    imitate(ctx, trainer, training, settings, steps=settings.steps, max_seconds=settings.max_seconds)
    if heldout:
        with span("heldout loss"):
            ctx.tracker.log(trainer.step, {"heldout_loss": sft_loss_of(trainer, heldout)})
    return model, tokenizer
