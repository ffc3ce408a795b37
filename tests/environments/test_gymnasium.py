"""Our tasks as a Gymnasium environment, with a real sandbox. Needs ``gymnasium``."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_agent.agent.prompt import parse_answer, write_answer
from cuda_agent.agent.tools import solution_of
from cuda_agent.exploits.records import TASKS, solution, task_of
from cuda_agent.exploits.suite import exploits_on
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.tasks.io import write_tasks
from tests import by_day
from tests.environments.examples import blocks, surroundings

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
EXAMPLES = Path(__file__).parents[2] / "examples"
PLAN = {path: (EXAMPLES / "plan" / path).read_text() for path in ("kernels/fused.cpp", "plan.json")}
ANSWER = write_answer(PLAN)
# Some attacks are files that are no part of an answer (large ones, or not below kernels/). The rest of these is honest.
EXPLOITS = [
    exploit
    for exploit in exploits_on("cpu").values()
    if exploit.format == "plan" and not (exploit.timed or exploit.needs_root or exploit.before)
    if solution_of(parse_answer(write_answer(dict(exploit.files))), "plan").files.keys() == exploit.files.keys()
]
LIMITS = [
    "sandbox.clock=model",
    "sandbox.run_seconds=2",
    "sandbox.memory_mb=400",
    "sandbox.threads=2",
]  # as in ``exploits.session``


def opened(tasks, folder, *overrides, **options):
    from cuda_agent.environments.gymnasium import KernelEnv

    return KernelEnv(tasks, [*LIMITS, f"run.store={folder}/store", *overrides], **options)


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    env = opened(EXAMPLES / "model.py", tmp_path_factory.mktemp("env"))
    yield env
    env.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder that any user may write, and a file with a secret, as the exploits name them."""
    folder = tmp_path_factory.mktemp("places")
    folder.chmod(0o777)
    (folder / "secret").write_text("canary canary;\n")
    return {"@FOLDER@": f"/{folder}", "@SECRET@": f"/{folder / 'secret'}"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    write_tasks(folder / "tasks", [task_of(name, code) for name, code in TASKS.items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_CANARY", "canary")
        env = opened(folder / "tasks", folder, tools=False)
        yield env
        env.close()


def call(tool, **arguments):
    return json.dumps({"tool": tool, "arguments": arguments})


def test_gymnasiums_own_check_passes(env):
    from gymnasium.utils.env_checker import check_env

    check_env(env)


def test_the_documents_example_prints_what_it_says(tmp_path):
    (code,) = [text for kind, text in blocks("## Gymnasium") if kind == "python"]
    (shown,) = [text for kind, text in blocks("## Gymnasium") if not kind]
    command, places = [sys.executable, "-c", code], surroundings() | {"CUDA_AGENT_HOME": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES, env=places)
    assert said.stdout == shown, said.stderr


def test_an_answer_ends_the_episode_with_the_reward_of_its_verdict(env):
    prompt, info = env.reset(seed=0)
    assert info == {"task": "model"} and "SKILL.md" in prompt and prompt in env.observation_space
    assert env.step(ANSWER) == ("", 3.0, True, False, {"status": "ok", "message": ""})
    with pytest.raises(ValueError, match="the episode is over"):
        env.step(ANSWER)


def test_tool_calls_change_the_folder_that_is_judged(env):
    env.reset()
    for path, content in PLAN.items():
        assert env.step(call("Write", path=path, content=content)) == ("ok", 0.0, False, False, {})
    assert env.step("Done.")[1:4] == (3.0, True, False)


def test_a_call_that_is_wrong_is_answered_and_ends_nothing(env):
    env.reset()
    for action, said in (
        (call("nosuch"), "error: there is no tool 'nosuch'"),
        ('{"tool": "Read"}', "error: the arguments are no JSON object"),
    ):
        observation, *rest = env.step(action)
        assert observation.startswith(said) and rest == [0.0, False, False, {}]


def test_a_fault_of_ours_gives_no_reward(env, monkeypatch):
    async def broken(*_, **__):
        return Verdict("infra", "plan", "quick", "cpu", "model", "the disk is full")

    env.reset()
    monkeypatch.setattr(env._sandbox, "evaluate", broken)
    _, reward, terminated, truncated, info = env.step(ANSWER)
    assert math.isnan(reward) and (terminated, truncated) == (False, True) and "the disk is full" in info["fault"]
    assert math.isnan(*env.score(["model"], [ANSWER]))


def test_a_task_that_is_not_there_is_said_so(env):
    with pytest.raises(ValueError, match="there is no task nosuch"):
        env.reset(options={"task": "nosuch"})


@pytest.mark.parametrize("exploit", by_day.every(8, EXPLOITS), ids=lambda exploit: exploit.name)
def test_an_exploit_gets_no_reward(attacked, places, exploit):
    files = solution(exploit.format, exploit.files, places).files
    attacked.reset(options={"task": exploit.task})
    _, reward, terminated, _, info = attacked.step(write_answer(files))
    assert (reward, terminated) == (-1.0, True) and info["status"] in exploit.admissible, info
