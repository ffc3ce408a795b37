"""Errors that a person can mend, and the exit codes they end a process with.  Standard library only.

Not covered: errors inside one module or room, which never reach a person.
"""

from typing import ClassVar

EXIT_DONE, EXIT_BUG, EXIT_RETRY, EXIT_CONFIG, EXIT_GATE = 0, 1, 75, 78, 79


class UserError(Exception):
    """The message is one screen for a person; ``exit_code`` is the process's when the error reaches the command
    line."""

    exit_code: ClassVar[int] = EXIT_CONFIG


class ConfigError(UserError):
    """The configuration is wrong; the message gives the key's full path, what is expected, the nearest right name."""


class TaskError(UserError):
    """A task, or a set of tasks, cannot be read or run; the message is one clear line."""


class PolicyError(UserError, ValueError):
    """A folder is no usable policy; the message names exactly what is missing."""


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
