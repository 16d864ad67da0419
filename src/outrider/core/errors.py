"""Errors a user can cause. Each says what is wrong, why, and what to try next."""

from __future__ import annotations


class OutriderError(Exception):
    """Base of every error raised on purpose.

    `hint` is the next thing to try: a command, a flag or a file to look at.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(OutriderError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2


class CapacityError(OutriderError):
    """The arena has no room for the work asked of it."""

    exit_code = 3


class CheckpointError(OutriderError):
    """A model folder that is missing, incomplete, damaged or of an unsupported kind."""

    exit_code = 3


class VocabularyError(CheckpointError):
    """Target and draft do not share one vocabulary, so a draft's ids mean other text."""


class MachineError(OutriderError):
    """The machine lacks something: a compiler, a writable folder, a device."""

    exit_code = 3


class DrafterError(OutriderError):
    """A drafter broke its contract: too many tokens, or ids outside the vocabulary."""


class TimerError(OutriderError):
    """A timer was read before it ended, or started or stopped out of turn."""
