"""Errors that a person can fix, with the exit codes of the process.  This module imports the standard library only."""

from typing import ClassVar

EXIT_DONE, EXIT_BUG, EXIT_RETRY, EXIT_CONFIG, EXIT_GATE = 0, 1, 75, 78, 79


class UserError(Exception):
    """An error that is shown to a person.  If it reaches the command line, the process exits with ``exit_code``."""

    exit_code: ClassVar[int] = EXIT_CONFIG


class ConfigError(UserError):
    """A key, a name or a value that the user gave is wrong.  The message says which one, and what is expected."""


class TaskError(UserError):
    """A task (a PyTorch model to make faster), or a set of tasks, cannot be read or run.  The message is one line."""


class PolicyError(UserError, ValueError):
    """A folder holds no usable policy (a language model).  The message names what is missing."""


class SandboxUnready(UserError, RuntimeError):
    """The sandbox cannot start on this machine.  The message names the missing protection or compiler."""


class StageError(UserError):
    """An error that ends a stage.  The stage's process exits with ``exit_code``."""

    exit_code = EXIT_BUG


class TryAgain(StageError):
    """A stage failed, but may succeed later: it was preempted, a device was lost, or the store was unreachable."""

    exit_code = EXIT_RETRY


class BadConfiguration(StageError):
    """The configuration, or an input that a person gave, is wrong.  Another attempt would fail too."""

    exit_code = EXIT_CONFIG


class NotGoodEnough(StageError):
    """The result of a stage is below a minimum that the configuration sets."""

    exit_code = EXIT_GATE
