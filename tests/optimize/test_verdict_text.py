"""What a verdict says on one screen; more of it is in sandbox/judge/test_legality.py."""

from cuda_agent.optimize.verdict_text import verdict_lines
from cuda_agent.sandbox.wire import Verdict


def test_a_refused_solution_is_not_said_to_have_passed():
    verdict = Verdict("cheat", "python", "quick", "cpu", "real", "outputs are wrong", checks=5, max_error=7.4)
    lines = verdict_lines(verdict)
    assert lines[-1] == "before that, 5 checks passed" and "7.4" not in "\n".join(lines)
    verdict.status, verdict.max_error = "ok", 2e-7
    assert verdict_lines(verdict)[-1].startswith("5 checks passed, largest difference from eager 2e-07; reward")
