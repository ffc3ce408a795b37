"""Writes the corpus of the stage ``bootstrap``: dialogues in which the scripted teacher, a program, solves tasks.

The dialogues look like the policy's episodes. The program makes up the verdicts in tool results, so the corpus needs no
compiler. Tests and ``bootstrap`` check a sample of the verdicts in the sandbox. A design is a set of choices for a
kernel, such as the number of blocks. The teacher draws designs without regard to the shapes of the task's tensors. Some
episodes end after the first solution, right or wrong. The corpus therefore does not teach which designs are right and
fast for which shapes. It does not teach to verify every solution either. Only reinforcement learning teaches both."""

import random
from collections.abc import Collection
from typing import Any

from cuda_agent.agent.prompt import agent_messages, one_shot_messages, write_answer
from cuda_agent.agent.tools import TOOLS, describe, describe_restored, merit
from cuda_agent.config import Bootstrap
from cuda_agent.policy.chat import Chat
from cuda_agent.sandbox.wire import Status, Verdict
from cuda_agent.synthesis.teacher.cpu_kernels import ROWS
from cuda_agent.synthesis.teacher.family import FamilySpec, combination, parse, sample_task
from cuda_agent.synthesis.teacher.teacher import Worked, redesign, solve, spoil
from cuda_agent.tasks.task import Task

REFUSED = 3  # most solutions of an episode that the judge refuses for their design
CHANGES = 50  # changes of a design that the teacher tries to find one that is new
RESTORED = 0.7  # share of the episodes whose last solution is slower in which the agent restores the best one
# Messages: role, content, an assistant's tool_calls; "spoilt": True on a turn that is shown but must not be imitated.
Dialogue = list[dict[str, Any]]


def corpus(settings: Bootstrap, seed: int, excluded: Collection[str], device: str = "cpu") -> list[Dialogue]:
    """Returns ``settings.examples`` dialogues on new tasks for ``device``. No task has one of the
    operator combinations ``excluded`` (``family.combination``)."""
    rng = random.Random(f"corpus {seed}")
    dialogues: list[Dialogue] = []
    while len(dialogues) < settings.examples:
        task = sample_task(rng, device)
        if combination(task) in excluded:
            continue
        if rng.random() >= settings.agent_share:
            dialogues.append(one_shot(task, rng, device))
        elif rng.random() < settings.careless_share:
            dialogues.append(careless(task, rng, device))
        else:
            dialogues.append(episode(task, rng, rng.random() < settings.repair_share, device, settings.designs))
    return dialogues


def texts(dialogues: Collection[Dialogue]) -> list[str]:
    """Returns all texts in ``dialogues``, without chat markup, as training data of the tokenizer."""
    found = []
    for message in (message for dialogue in dialogues for message in dialogue):
        arguments = (text for call in message.get("tool_calls", ()) for text in call["arguments"].values())
        found += [message["content"], *arguments]
    return [text for text in found if text]


def encode(dialogue: Dialogue, chat: Chat) -> tuple[list[int], list[int]]:
    """Returns the token ids of ``dialogue``, and a mask that is 1 on the tokens to imitate. The mask covers the
    assistant's turns, except turns marked "spoilt", which contain a mistake."""
    ids, mask = chat.encode_dialogue(dialogue, TOOLS)
    turns = [message for message in dialogue if message["role"] == "assistant"]
    starts = [i for i, one in enumerate(mask) if one and not mask[i - 1]]
    for turn, start in zip(turns, starts, strict=True):
        if turn.get("spoilt"):
            stop = mask.index(0, start)
            mask[start:stop] = [0] * (stop - start)
    return ids, mask


def one_shot(task: Task, rng: random.Random, device: str = "cpu") -> Dialogue:
    return [*one_shot_messages(task, "compact"), _says(write_answer(_stripped(solve(task, rng, device).files)))]


def careless(task: Task, rng: random.Random, device: str = "cpu") -> Dialogue:
    """Returns an episode with tools. The agent ends the episode after the first solution, even if this is wrong. In
    half of the cases, the agent verifies the solution before the end."""
    worked = solve(task, rng, device)
    calls = _writes(_stripped(worked.files))
    verdict = _judged(worked) if rng.random() < 0.5 else None
    return [*agent_messages(task, "compact"), *_turn(calls, "verify", verdict), _says("done")]


def episode(task: Task, rng: random.Random, repair: bool, device: str = "cpu", designs: int = 2) -> Dialogue:
    """Returns an episode with tools. The agent writes a solution and verifies it. If ``repair`` is set and the design
    is correct, the solution first contains a mistake, which the agent then repairs. If the design is wrong, the agent
    tries other designs: at most ``REFUSED`` wrong designs come before a correct one.

    Then the agent profiles one to ``designs`` designs, each once. The first is the correct design found above. Each
    later design changes the best design so far, and may be wrong. If the last design is wrong, the agent restores the
    best design. If the last design is only slower, the agent does so with probability ``RESTORED``."""
    worked = solve(task, rng, device)
    mistake = spoil(task, worked, rng) if repair and worked.status == "ok" else None
    written = _stripped(mistake.files if mistake else worked.files)
    dialogue = agent_messages(task, "compact")
    calls = _writes(written)
    if mistake is not None:
        dialogue += _turn(calls, "verify", _verdict(device, mistake.status, mistake.message))
        next(message for message in dialogue if message["role"] == "assistant")["spoilt"] = True
        calls = [_call("Edit", path=mistake.path, old_string=mistake.wrong, new_string=mistake.right)]
    dialogue += _turn(calls, "verify", _judged(worked))
    shown = 1  # solutions that the judge refuses
    while worked.status != "ok":
        other, shown = worked, shown + 1
        while other.files == worked.files or (shown > REFUSED and other.status != "ok"):
            other = solve(task, rng, device)
        worked, calls = _rewritten(worked, other)
        dialogue += _turn(calls, "verify", _judged(worked))
    return [*dialogue, *_profiled(task, worked, rng, rng.randint(1, designs)), _says("done")]


def _profiled(task: Task, worked: Worked, rng: random.Random, designs: int) -> Dialogue:
    """Returns the turns in which the agent profiles ``designs`` designs: first ``worked``, whose files are in the work
    folder, then changes of the best design so far. Profiles fewer designs if ``CHANGES`` random changes of the best
    design give no new design. The last turn may restore the best design."""
    dialogue: Dialogue = []
    spec, best, fastest, profiled = parse(task), worked, None, [worked.files]
    for number in range(designs):
        calls: list[dict[str, Any]] = []
        if number:
            changes = (redesign(task, best, rng) for _ in range(CHANGES))
            other = next((one for one in changes if one.files not in profiled), None)
            if other is None:
                break
            profiled.append(other.files)
            worked, calls = _rewritten(worked, other)
        verdict = _judged(worked, _ratios(spec, worked, rng) if worked.status == "ok" else None)
        dialogue += _turn(calls, "profile", verdict, fastest)
        if fastest is None or merit(verdict) >= merit(fastest):
            best, fastest = worked, verdict
    if best is not worked and (worked.status != "ok" or rng.random() < RESTORED):
        dialogue += _answered([_bash("restore")], [describe_restored(fastest, "compact")])
    return dialogue


def _rewritten(worked: Worked, other: Worked) -> tuple[Worked, list[dict[str, Any]]]:
    """Returns ``other``, and the tool calls that write the files in which ``other`` differs from ``worked``."""
    before, after = _stripped(worked.files), _stripped(other.files)
    return other, _writes({path: text for path, text in after.items() if text != before[path]})


def _writes(files: dict[str, str]) -> list[dict[str, Any]]:
    return [_call("Write", path=path, content=text) for path, text in files.items()]


def _turn(
    calls: list[dict[str, Any]], command: str, verdict: Verdict | None, before: Verdict | None = None
) -> Dialogue:
    """Returns an assistant turn with ``calls``, and their results. If there is a ``verdict``, the turn ends with a call
    that runs ``command`` and shows the verdict. ``before`` is the best earlier verdict, or None."""
    results = ["ok"] * len(calls)
    if verdict:
        calls, results = [*calls, _bash(command)], [*results, describe(verdict, command, "compact", before)]
    return _answered(calls, results)


def _answered(calls: list[dict[str, Any]], results: list[str]) -> Dialogue:
    """Returns an assistant turn with ``calls``, and the message of each call's result."""
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": result} for result in results),
    ]


def _says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def _bash(command: str) -> dict[str, Any]:
    return _call("Bash", command=command)


def _stripped(files: dict[str, str]) -> dict[str, str]:
    return {path: text.rstrip() for path, text in files.items()}


def _judged(worked: Worked, ratios: tuple[float, float] | None = None) -> Verdict:
    return _verdict(worked.device, worked.status, worked.message, ratios)


def _verdict(device: str, status: Status, message: str = "", ratios: tuple[float, float] | None = None) -> Verdict:
    verdict = Verdict(status, format="plan", mode="quick", device=device, clock="real", message=message)  # type: ignore[arg-type]
    if ratios:
        verdict.seconds, verdict.eager_seconds, verdict.compile_seconds = 1e-3, ratios[0] * 1e-3, ratios[1] * 1e-3
    return verdict


def _ratios(spec: FamilySpec, worked: Worked, rng: random.Random) -> tuple[float, float]:
    """Draws two speed-ups of ``worked``: over eager and over ``torch.compile``. One random factor is common to the two
    speed-ups. On the CPU, their medians and spreads follow measurements on idle machines. On a GPU, they do not depend
    on the design."""
    slower, design = 1.0, worked.design
    if worked.device == "cpu":
        slower *= 1.9 if design.number == "double" else 1
        slower *= {1: 1.5, 2: 1.0, 8: 1.05, ROWS: 2.5 if spec.ending else 1.25}[design.grid]
        slower *= (5.0 if spec.ending else 1.6) if design.width == 8 else 1
        slower *= (1.3 if spec.ending or design.width == 8 else 5.0) if design.order == "stride" else 1
        slower *= 1.1 if design.passes == "split" and (spec.ending or len(spec.chain) > 1) else 1
        slower *= 1.1 if design.moments == "two" and spec.ending in ("var", "layer_norm") else 1
    luck = rng.lognormvariate(0, 0.35)
    return 2.6 * luck * rng.lognormvariate(0, 0.4) / slower, 2.0 * luck * rng.lognormvariate(0, 0.2) / slower
