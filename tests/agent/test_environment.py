"""The environment, with the real workspace and the real judge (model clock), without a policy."""

import pytest
from agent_cases import KERNEL, PLAN, TASK

from cuda_agent.agent.environment import KernelEnvironment, SandboxFault
from cuda_agent.sandbox.wire import Solution, Verdict

FILES = {"kernels/fused.cpp": KERNEL, "plan.json": PLAN}
WRITES = [("Write", {"path": path, "content": text}) for path, text in FILES.items()]


async def play(sandbox, calls, judge=True, style="compact"):
    async with KernelEnvironment(TASK, sandbox, style=style) as environment:
        said = [(await environment.call(name, arguments)).text for name, arguments in calls]
        verdict = await environment.finish() if judge else None
    return environment, said, verdict


def test_calls_have_results_and_the_folder_has_a_verdict(loop, sandbox):
    environment, said, verdict = loop.run(play(sandbox, [*WRITES, ("Bash", {"command": "verify"})]))
    assert said == ["ok", "ok", "verify: ok"]
    assert verdict.status == "ok" and verdict.reward >= 1
    assert environment.files == FILES and not environment.flags
    assert environment.best == verdict


def test_the_best_state_is_remembered_when_it_is_spoiled(loop, sandbox):
    spoil = ("Write", {"path": "plan.json", "content": "{}"})
    environment, _, verdict = loop.run(play(sandbox, [*WRITES, ("Bash", {"command": "verify"}), spoil]))
    assert verdict.status == "build_error" and verdict.reward == -1
    assert environment.best.status == "ok"


def test_restore_puts_the_best_solution_back(loop, sandbox):
    verify, restore = ("Bash", {"command": "verify"}), ("Bash", {"command": "restore"})
    spoil = [("Write", {"path": "plan.json", "content": "{}"}), ("Bash", {"command": "touch kernels/b.cpp note.txt"})]
    environment, said, verdict = loop.run(play(sandbox, [restore, *WRITES, verify, *spoil, verify, restore]))
    assert said[0] == "restore: no correct solution so far" and said[-1] == "restore: ok"
    assert verdict == environment.best and verdict.status == "ok"
    assert environment.files == FILES | {"note.txt": ""}


def test_restore_in_full_style_says_how_fast_the_solution_is(loop, sandbox):
    _, said, _ = loop.run(
        play(sandbox, [*WRITES, *[("Bash", {"command": c}) for c in ("profile", "restore")]], style="full")
    )
    ratios = said[-2].splitlines()[0].removeprefix("profile: ")
    assert said[-1] == f"restore: ok, the best solution so far: {ratios}"


def test_a_verdict_of_strict_mode_is_not_compared_with_the_best_of_quick_mode(loop, sandbox):
    environment = KernelEnvironment(TASK, sandbox)
    assert loop.run(environment.judge(Solution("plan", FILES), "strict")).status == "ok" and environment.best is None
    quick = loop.run(environment.judge(Solution("plan", FILES)))
    loop.run(environment.judge(Solution("plan", FILES), "strict"))
    assert environment.best == quick


def test_mistakes_of_the_player_are_answers_and_are_noted(loop, sandbox):
    calls = [("Teleport", {"to": "mars"}), ("Write", {}), *[("Glob", {"pattern": "*"})] * 3]
    environment, said, verdict = loop.run(play(sandbox, calls))
    assert said[:2] == ["error: there is no tool 'Teleport'", "error: Write needs path"]
    assert environment.flags == {"unknown_tool", "loop"} and verdict.reward == -1


def test_a_command_after_other_edits_through_bash_is_no_loop(loop, sandbox):
    verify = ("Bash", {"command": "verify"})
    edits = [("Bash", {"command": f"echo '// {n}' >> kernels/fused.cpp"}) for n in range(3)]
    calls = [*WRITES, *(call for edit in edits for call in (edit, verify))]
    assert not loop.run(play(sandbox, calls))[0].flags
    assert loop.run(play(sandbox, [*calls, verify, verify]))[0].flags == {"loop"}
    to_and_fro = [("Bash", {"command": f"printf '{text}' > note.txt"}) for text in "ab"]
    assert loop.run(play(sandbox, [*WRITES, *(call for one in to_and_fro * 4 for call in (one, verify))]))[0].flags


def test_to_ask_a_background_command_again_is_a_loop_only_without_an_answer(loop, sandbox):
    start = (
        "Bash",
        {"command": "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done; sleep 60", "run_in_background": True},
    )
    ask = ("BashOutput", {"id": "bg1"})
    waits = [("Bash", {"command": f"sleep 0.4{n}"}) for n in range(2)]
    environment, said, _ = loop.run(play(sandbox, [start, ask, waits[0], ask, waits[1], ask], judge=False))
    assert environment.flags == set(), said
    environment, said, _ = loop.run(
        play(sandbox, [("Bash", start[1] | {"command": "sleep 60"}), *[ask] * 4], judge=False)
    )
    assert environment.flags == {"loop"} and "bg1" in said[0], said


def test_a_cell_that_changes_resets_the_counts_as_an_edit_does(loop, sandbox):
    wrote = ("Write", {"path": "a.ipynb", "content": '{"cells": []}'})
    insert = [{"path": "a.ipynb", "new_source": str(i), "cell_type": "code", "edit_mode": "insert"} for i in range(2)]
    read = ("Read", {"path": "a.ipynb"})
    calls = [wrote, read, read, ("NotebookEdit", insert[0]), read, read, ("NotebookEdit", insert[1]), read]
    environment, said, _ = loop.run(play(sandbox, calls, judge=False))
    assert environment.flags == set(), said


def test_a_player_is_told_the_task_and_in_full_the_rules(loop, sandbox):
    system, user = KernelEnvironment(TASK, sandbox).messages()
    assert "plan.json" in system["content"] and "torch.relu" in user["content"]
    assert len(KernelEnvironment(TASK, sandbox, style="compact").messages()[0]["content"]) < 20
    _, said, _ = loop.run(play(sandbox, [("Read", {"path": "SKILL.md"})], judge=False))
    assert "## The form of a solution" in said[0]


def test_a_fault_of_the_sandbox_is_tried_once_more_and_then_nobodys_verdict(loop, sandbox):
    class Failing:
        def __init__(self, failures):
            self.failures = failures

        async def evaluate(self, task, solution, mode="quick"):
            self.failures -= 1
            if self.failures >= 0:
                return Verdict("infra", "plan", "quick", "cpu", "model", message="the judge is gone")
            return await sandbox.evaluate(task, solution, mode)

    assert loop.run(KernelEnvironment(TASK, Failing(1)).judge(Solution("plan", FILES))).status == "ok"
    with pytest.raises(SandboxFault, match="the judge is gone"):
        loop.run(KernelEnvironment(TASK, Failing(2)).judge(Solution("plan", FILES)))
