"""Makes the corpus of the stage ``bootstrap``: dialogues in which the scripted teacher, a program, solves tasks.

The stage trains a small model to imitate the dialogues. They look like the policy's episodes, but the verdicts in tool
results do not come from the sandbox. The teacher predicts the status of a solution, such as "ok" or "wrong", and the
speed-ups are drawn at random. The corpus therefore needs no compiler. Tests and ``bootstrap`` judge some of the
teacher's solutions in the sandbox, and compare the statuses.

A design is a set of choices for a kernel, such as the number of blocks. The teacher draws designs at random and ignores
the shapes of the task's tensors. Some episodes end after the first solution, even if it is wrong or not verified, and
some solutions contain a mistake that the agent does not repair. A model that imitates the corpus thus learns neither to
choose a design by the shapes nor to verify every solution. It learns both later, by reinforcement learning."""

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
REDRAWN = 0.4  # probability that the agent tries another design before it repairs a mistake; again after each try
RESTORED = 0.7  # share of the episodes whose last solution is slower in which the agent restores the best one
# Messages: role, content, an assistant's tool_calls; "spoilt": True on a turn that is shown but must not be imitated.
Dialogue = list[dict[str, Any]]


def corpus(settings: Bootstrap, seed: int, excluded: Collection[str], device: str = "cpu") -> list[Dialogue]:
    """Returns ``settings.examples`` dialogues on new random tasks for ``device``. Skips tasks whose combination of
    operators, such as ``relu>mul_y>sum``, is in ``excluded``."""
    rng = random.Random(f"corpus {seed}")
    dialogues: list[Dialogue] = []
    while len(dialogues) < settings.examples:
        task = sample_task(rng, device)
        if combination(task) in excluded:
            continue
        if rng.random() >= settings.agent_share:
            dialogues.append(one_shot(task, rng, device, settings.mistake_share))
        elif rng.random() < settings.careless_share:
            dialogues.append(careless(task, rng, device, settings.mistake_share))
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


def one_shot(task: Task, rng: random.Random, device: str = "cpu", mistake_share: float = 0) -> Dialogue:
    """Returns a single answer. In ``mistake_share`` of the answers a correct solution gets a mistake."""
    files, _ = _first_draft(task, rng, device, mistake_share)
    return [*one_shot_messages(task, "compact"), _says(write_answer(files))]


def careless(task: Task, rng: random.Random, device: str = "cpu", mistake_share: float = 0) -> Dialogue:
    """Returns an episode with tools in which the agent writes one solution and stops, even if the solution is wrong. In
    ``mistake_share`` of these episodes a correct solution gets a mistake. In about half of the episodes, the agent
    verifies the solution before it stops."""
    files, verdict = _first_draft(task, rng, device, mistake_share)
    shown = verdict if rng.random() < 0.5 else None
    return [*agent_messages(task, "compact"), *_turn(_writes(files), "verify", shown), _says("done")]


def _first_draft(task: Task, rng: random.Random, device: str, mistake_share: float) -> tuple[dict[str, str], Verdict]:
    """Returns the files of a solution with a random design, and its predicted verdict."""
    worked = solve(task, rng, device)
    if mistake_share and worked.status == "ok" and rng.random() < mistake_share:
        mistake = spoil(task, worked, rng)
        return _stripped(mistake.files), _verdict(device, mistake.status, mistake.message)
    return _stripped(worked.files), _judged(worked)


def episode(task: Task, rng: random.Random, repair: bool, device: str = "cpu", designs: int = 2) -> Dialogue:
    """Returns an episode with tools, which has two parts. A design is a set of choices for a kernel, such as the number
    of blocks. A wrong design does not fit the task's shapes.

    First, the agent looks for a correct solution. It writes a solution with a random design and verifies it. If this
    design is wrong, the agent tries other designs; after at most ``REFUSED`` wrong ones comes a correct one. If the
    first design is correct and ``repair`` is set, the first version of the solution contains a mistake, such as a
    wrong operator, and the agent repairs it. If the solution compiles in spite of the mistake, the agent may try up to
    ``REFUSED`` - 1 other designs before, which contain the mistake too.

    Second, the agent profiles between 1 and ``designs`` different designs, beginning with the correct one. It makes
    each new design by a change of the best design so far; the new design may be wrong. If the last design is wrong, the
    agent restores the best solution. If the last design is correct but slower than the best one, the agent restores
    the best solution with probability ``RESTORED``."""
    worked = solve(task, rng, device)
    dialogue, calls = agent_messages(task, "compact"), _writes(_stripped(worked.files))
    if repair and worked.status == "ok":
        turns, worked, calls = _mistaken(task, worked, rng)
        dialogue += turns
    dialogue += _turn(calls, "verify", _judged(worked))
    shown = 1  # solutions that the judge refuses
    while worked.status != "ok":
        other, shown = worked, shown + 1
        while other.files == worked.files or (shown > REFUSED and other.status != "ok"):
            other = solve(task, rng, device)
        worked, calls = _rewritten(worked, other)
        dialogue += _turn(calls, "verify", _judged(worked))
    return [*dialogue, *_profiled(task, worked, rng, rng.randint(1, designs)), _says("done")]


def _mistaken(task: Task, worked: Worked, rng: random.Random) -> tuple[Dialogue, Worked, list[dict[str, Any]]]:
    """Returns the turns in which the agent verifies ``worked`` with a mistake, and may then verify other designs with
    the same mistake. Also returns the last design without the mistake, and the call that repairs it."""
    mistake = spoil(task, worked, rng)
    verdict = _verdict(worked.device, mistake.status, mistake.message)
    tried = [_stripped(mistake.files)]
    dialogue = _spoilt(_turn(_writes(tried[0]), "verify", verdict))
    for _ in range(REFUSED - 1):
        if mistake.status != "wrong" or rng.random() >= REDRAWN:
            break
        other = redesign(task, worked, rng)
        code = other.files[mistake.path]
        if other.status != "ok" or code.count(mistake.right) != 1 or mistake.wrong in code:
            break
        rewritten = _stripped(other.files | {mistake.path: code.replace(mistake.right, mistake.wrong)})
        if rewritten in tried:
            break
        dialogue += _spoilt(_turn(_changes(tried[-1], rewritten), "verify", verdict))
        worked = other
        tried.append(rewritten)
    return dialogue, worked, [_call("Edit", path=mistake.path, old_string=mistake.wrong, new_string=mistake.right)]


def _profiled(task: Task, worked: Worked, rng: random.Random, designs: int) -> Dialogue:
    """Returns the turns in which the agent profiles ``designs`` different designs (sets of choices for a kernel). The
    first is the design of ``worked``, the solution in the work folder. Each later one is the best design so far with
    one random change. Stops early if ``CHANGES`` random changes give no new design. If the last design is not the
    best, one more turn may restore the best solution."""
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
    return other, _changes(_stripped(worked.files), _stripped(other.files))


def _changes(before: dict[str, str], after: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the tool calls that write the files in which ``after`` differs from ``before``."""
    return _writes({path: text for path, text in after.items() if text != before[path]})


def _writes(files: dict[str, str]) -> list[dict[str, Any]]:
    return [_call("Write", path=path, content=text) for path, text in files.items()]


def _turn(
    calls: list[dict[str, Any]], command: str, verdict: Verdict | None, before: Verdict | None = None
) -> Dialogue:
    """Returns an assistant turn with the tool calls ``calls``, and the message of each call's result. If ``verdict`` is
    not None, the turn also runs ``command``, such as "verify", and the result of this call shows ``verdict``. The
    result of "profile" also compares ``verdict`` with ``before``, the best earlier verdict, if there is one."""
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


def _spoilt(turn: Dialogue) -> Dialogue:
    """Returns ``turn``, an assistant turn and its results, marked so that it is not imitated."""
    return [turn[0] | {"spoilt": True}, *turn[1:]]


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
    """Draws two random speed-ups of the solution ``worked``: over eager PyTorch and over ``torch.compile``. Both
    contain one common random factor. On the CPU, the speed-ups depend on the design, and their medians and spreads
    follow measurements on idle machines. On a GPU, the speed-ups do not depend on the design."""
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
