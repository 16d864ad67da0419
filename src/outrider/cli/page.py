"""Help pages, written from the table of verbs and the registry of settings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from outrider.cli.verb import Verb
from outrider.cli.verbs import VERBS
from outrider.core.settings import DEFAULT_FILE, Setting

SYNOPSIS = "Speculative decoding that never changes the text."
TITLES = {"program": "Models and output", "engine": "Engine", "sampling": "Sampling"}
CONFIG_TEXT = f"Read settings from this TOML or YAML file, not ./{DEFAULT_FILE}."
MAX_WIDTH = 100

Row = tuple[str, str]


def front_page() -> str:
    """What `outrider --help` prints."""
    options = [
        ("--help, -h", "Show this page; `outrider VERB --help` shows a verb's."),
        ("--version", "Show the version."),
    ]
    sections = [("Verbs", _verb_rows(VERBS)), ("Options", options)]
    return "\n\n".join(
        [
            "Usage: outrider VERB [OPTIONS]",
            SYNOPSIS,
            *_tables(sections),
            f"Example:\n  {VERBS[0].example}",
            "Exit codes: 0 done, 1 a check failed, 2 bad input, 3 bad files or machine.",
        ]
    )


def verb_page(verb: Verb, path: Sequence[str]) -> str:
    """What `--help` of a verb prints; `path` are the words that lead to it."""
    names = (f"[{item.name}{' ...' if item.many else ''}]" for item in verb.arguments)
    words = ["VERB"] if verb.parts else ["[OPTIONS]", *names]
    usage = f"Usage: outrider {' '.join([*path, *words])}"
    sections = [("Verbs", _verb_rows(verb.parts))] if verb.parts else _sections(verb)
    text = textwrap.fill(verb.text, min(shutil.get_terminal_size().columns, MAX_WIDTH))
    return "\n\n".join([usage, text, f"Example:\n  {verb.example}", *_tables(sections)])


def _sections(verb: Verb) -> list[tuple[str, list[Row]]]:
    arguments = [
        (item.name, f"{item.text} [{' | '.join(item.choices)}]" if item.choices else item.text)
        for item in verb.arguments
    ]
    own = [(_usage(item), item.meta.help) for item in verb.own_options()]
    sections = [
        ("Arguments" if len(arguments) > 1 else "Argument", arguments),
        ("Options", [*own, ("--help, -h", "Show this page.")]),
    ]
    for group in verb.settings:
        rows = [
            (_usage(item), f"{item.meta.help} [{_details(item)}]")
            for item in verb.offered_settings()
            if item.group == group
        ]
        if group == verb.settings[0]:
            rows.append(("--config FILE", CONFIG_TEXT))
        sections.append((TITLES[group], rows))
    return [section for section in sections if section[1]]


def _usage(item: Setting) -> str:
    if item.kind is bool:
        return f"--[no-]{item.flag[2:]}" if item.group else item.flag
    return f"{item.flag} {item.metavar}"


def _details(item: Setting) -> str:
    if item.kind is bool:
        return "on by default" if item.default else "off by default"
    if item.kind is tuple:
        return "may be repeated"
    return f"{item.accepts}; default {item.default}"


def _verb_rows(verbs: Iterable[Verb]) -> list[Row]:
    return [(f"{v.name}, {v.alias}" if v.alias else v.name, v.text) for v in verbs]


def _tables(sections: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Two columns of one width for all sections; the second one wraps."""
    left = max(len(name) for _, rows in sections for name, _ in rows)
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    indent = " " * (left + 4)
    return [
        "\n".join(
            [
                f"{title}:",
                *(
                    textwrap.fill(
                        f"  {name:<{left}}  {text}",
                        max(width, left + 40),
                        subsequent_indent=indent,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                    for name, text in rows
                ),
            ]
        )
        for title, rows in sections
    ]
