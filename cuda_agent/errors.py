"""Errors that a person can fix, with the exit codes of the process.  This module imports the standard library only."""

from typing import ClassVar

EXIT_DONE, EXIT_BUG, EXIT_RETRY, EXIT_CONFIG, EXIT_GATE = 0, 1, 75, 78, 79


class UserError(Exception):
    """An error that is shown to a person.  The message fits one screen.  If the error reaches the command line, the
    process exits with ``exit_code``."""

    exit_code: ClassVar[int] = EXIT_CONFIG


class ConfigError(UserError):
    """The configuration is wrong.  The message gives the key, the expected value and the nearest right name."""


class TaskError(UserError):
    """A task, or a set of tasks, cannot be read or run; the message is one clear line."""


class PolicyError(UserError, ValueError):
    """A folder holds no usable policy; the message names what is missing."""


class SandboxUnready(UserError, RuntimeError):
    """The sandbox cannot start on this machine: a required wall or the compiler is missing.  The message names it."""


class StageError(UserError):
    """A stage ends with this error and the exit code ``exit_code``."""

    exit_code = EXIT_BUG


class TryAgain(StageError):
    """The same stage may succeed later: it was preempted, a device was lost, or the store was unreachable."""

    exit_code = EXIT_RETRY


class BadConfiguration(StageError):
    """The configuration, or an input that a person gave, is wrong.  Another attempt would fail too."""

    exit_code = EXIT_CONFIG


class NotGoodEnough(StageError):
    """The result is below a minimum that the configuration sets."""

    exit_code = EXIT_GATE
