"""What a verb may be told besides settings: the same kind of fields, hence the same flags and help.

These are of one run, so they have no variable and no file key.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOption:
    """Of every verb that a program may want to read."""

    json: bool = setting(False, "Print JSON, for programs to read.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(JsonOption):
    """Of `generate`."""

    stdin: bool = setting(False, "Read the prompt from stdin; a lone - means the same.")
    output: str | None = setting(None, "Also write the JSON object to this file.")
    compare: bool = setting(False, "Also run without speculation, and print the speed-up.")
    quiet: bool = setting(False, "Print the text and nothing else.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(JsonOption):
    """Of `chat`."""

    system: str | None = setting(None, "System message that opens the conversation.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Of a verb that takes none."""
