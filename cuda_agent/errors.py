"""Errors whose messages are shown to a user, and the exit codes of processes.  Imports only the standard library."""

from typing import ClassVar

EXIT_DONE, EXIT_BUG, EXIT_RETRY, EXIT_BUDGET, EXIT_CONFIG, EXIT_GATE = 0, 1, 75, 76, 78, 79
FINAL = (EXIT_BUG, EXIT_BUDGET, EXIT_CONFIG, EXIT_GATE)  # of a stage that another attempt would not help


class UserError(Exception):
    """An error that is shown to a person.  If it reaches the command line, the process exits with ``exit_code``."""

    exit_code: ClassVar[int] = EXIT_CONFIG


class ConfigError(UserError):
    """A key, a name or a value that the user gave is wrong.  The message says which one, and what is expected."""


class TaskError(UserError):
    """A task (a PyTorch model to make faster), or a set of tasks, cannot be read or run.  The message is one line."""


class PolicyError(UserError, ValueError):
    """A policy (a language model) cannot be loaded or used.  The message names the problem."""


class SandboxUnready(UserError, RuntimeError):
    """The sandbox cannot start on this machine.  The message names the missing protection or compiler."""


class StageError(UserError):
    """An error that ends a stage (one step of the workflow).  The stage's process exits with ``exit_code``."""

    exit_code = EXIT_BUG


class TryAgain(StageError):
    """A stage stopped early or failed, but may succeed later.  For example, it was preempted, or a GPU was lost."""

    exit_code = EXIT_RETRY


class BadConfiguration(StageError):
    """The configuration, or an input from the user, is wrong.  Another attempt of the stage would fail too."""

    exit_code = EXIT_CONFIG


class NotGoodEnough(StageError):
    """The result of a stage is below a minimum of the configuration, or the stage has no data to learn from."""

    exit_code = EXIT_GATE


class BudgetSpent(StageError):
    """The run has used the GPU-hours that its configuration allows."""

    exit_code = EXIT_BUDGET
