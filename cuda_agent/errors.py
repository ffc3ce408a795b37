"""Errors that a person can fix, with the exit codes of the process.  Standard library only."""

from typing import ClassVar

EXIT_DONE, EXIT_BUG, EXIT_RETRY, EXIT_CONFIG, EXIT_GATE = 0, 1, 75, 78, 79


class UserError(Exception):
    """An error for a person.  The message fits one screen; ``exit_code`` ends the process if the error reaches the
    command line."""

    exit_code: ClassVar[int] = EXIT_CONFIG


class ConfigError(UserError):
    """The configuration is wrong; the message gives the key's full path, the expected value and the nearest right
    name."""


class TaskError(UserError):
    """A task, or a set of tasks, cannot be read or run; the message is one clear line."""


class PolicyError(UserError, ValueError):
    """A folder holds no usable policy; the message names what is missing."""


class SandboxUnready(UserError, RuntimeError):
    """The sandbox cannot start here: a required wall or the compiler is missing; the message says which."""


class StageError(UserError):
    """Ends a stage with ``exit_code``."""

    exit_code = EXIT_BUG


class TryAgain(StageError):
    """Preempted, device lost, store away: the same stage may succeed later."""

    exit_code = EXIT_RETRY


class BadConfiguration(StageError):
    """The configuration or an input a person gave is wrong: trying again is useless."""

    exit_code = EXIT_CONFIG


class NotGoodEnough(StageError):
    """The result misses a gate that the configuration set."""

    exit_code = EXIT_GATE
