"""Help pages, written from the table of verbs and the registry of settings.

A verb's page fits one screen: an example, and as many common options as fit. `--help-all` shows all
options, `--help WORD` those that contain a word.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, zip_longest

from outrider.cli.options import CONFIG_TEXT, SET_TEXT, Verb, setting_flags
from outrider.cli.verbs import GROUPS, VERBS
from outrider.core.errors import ConfigError
from outrider.core.settings import Setting

# Minimum width of a column that wraps, enough for some words.
_LEAST_WIDTH = 18


def wrapped_table(cells: Sequence[Sequence[str]], limit: int) -> str | None:
    """Return the table with its widest columns wrapped; None if it is still too wide."""
    widths, needed = column_widths(cells), column_widths(cells, words=True)
    needed = [
        max(need, min(_LEAST_WIDTH, width)) for need, width in zip(needed, widths, strict=True)
    ]
    excess = sum(widths) + 2 * (len(widths) - 1) - limit
    while excess > 0:
        column = max(range(len(widths)), key=lambda i: widths[i] if widths[i] > needed[i] else 0)
        if widths[column] <= needed[column]:
            return None
        others = [width for i, width in enumerate(widths) if i != column and width > needed[i]]
        least = max(
            [needed[column], widths[column] - excess, *(w for w in others if w < widths[column])]
        )
        excess -= widths[column] - least
        widths[column] = least
    lines: list[str] = []
    for row in cells:
        columns = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def column_widths(cells: Sequence[Sequence[str]], *, words: bool = False) -> list[int]:
    """Return the width of each column's widest cell, or of its longest word."""
    return [
        max(max(map(len, cell.split()), default=0) if words else len(cell) for cell in column)
        for column in zip(*cells, strict=True)
    ]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def wrapped(page: str, limit: int) -> str:
    """Wrap longer lines at words, or within a word that is too long. A command is continued after a
    backslash, so that it can be pasted."""
    return "\n".join(_fitted(line, limit) for line in page.split("\n"))


def _fitted(line: str, limit: int) -> str:
    if len(line) <= limit:
        return line
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    is_command = text.startswith(_COMMANDS)
    words = (_COMMAND_WORDS if is_command else _WORDS).findall(text)
    hanging = indent + ("    " if is_command else "  " if indent else "")
    lines, width = [indent], limit - 2 * is_command
    for word in chain.from_iterable(_pieces(word, width - len(hanging)) for word in words):
        between = " " if lines[-1].strip() else ""
        if between and len(lines[-1]) + 1 + len(word) > width:
            lines.append(hanging)
            between = ""
        lines[-1] += between + word
    return (" \\\n" if is_command else "\n").join(lines)


# Words of a sentence, in which commands are not split; and of a command, which may quote blanks.
_WORDS = re.compile(r"(?:`[^`]*`|[^ \t])+")
_COMMAND_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^ \t])+""")
_COMMANDS = ("outrider ", "echo ")


def _pieces(word: str, limit: int) -> list[str]:
    """Split a word that is too long for a line, such as a path."""
    return [word[start : start + limit] for start in range(0, len(word), max(limit, 1))]


SYNOPSIS = "Speculative decoding that never changes the text."
TITLES = {"program": "Models and output", "engine": "Engine", "sampling": "Sampling"}
MAX_WIDTH = 120
MIN_WIDTH = 20
MOST_LINES = 45
# Minimum width in columns of an option's description.
_LEAST_TEXT = 44
# Maximum numbers of characters for an option's choices, and of its flags, on the page of common
# options.
_MOST_CHOICES, _MOST_FLAGS = 44, 3
# Common settings, the most used first.
DAILY = (
    *("target", "draft", "drafter", "max_tokens", "temperature", "top_p", "k", "quantise", "seed"),
    *("stop", "device", "dtype", "context", "batch_size", "color"),
)

Row = tuple[str, str]


def front_page() -> str:
    """Return the page of `outrider --help`."""
    options = [
        ("--help, -h [WORD]", "Show this page; with a word, the verbs and options that have it."),
        ("--version", "Show the version."),
    ]
    verbs = [(group, _verb_rows(v for v in VERBS if v.group == group)) for group in GROUPS]
    return "\n\n".join(
        [
            "Usage: outrider VERB [OPTIONS]",
            _filled(f"{SYNOPSIS} `outrider VERB --help` shows the options of a verb."),
            f"Example:\n  {VERBS[0].example}",
            *_tables([*verbs, ("Options", options)]),
            "Exit codes: 0 done, 1 a check failed, 2 bad input, 3 bad files or machine.",
        ]
    )


def verb_page(verb: Verb, path: Sequence[str], *, everything: bool = False) -> str:
    """Return the page of `--help` or `--help-all` of a verb; `path` are the words that call it."""
    if everything and not verb.parts:
        return "\n\n".join([_head(verb, path), *_tables(_sections(verb))])
    if verb.parts:
        rows = _verb_rows(part for part in verb.parts if part.text)
        return "\n\n".join([_head(verb, path), *_tables([("Verbs", rows)])])
    rest = (
        f"`outrider {' '.join(path)} --help-all` lists every option, `--help WORD` searches them."
    )
    rows = _daily(verb)
    while True:
        sections = [*_arguments(verb), ("Options", [*rows, ("--help, -h", "Show this page.")])]
        page = "\n\n".join([_head(verb, path), *_tables(sections), _filled(rest)])
        if page.count("\n") < MOST_LINES:
            return page
        rows.pop()


def help_page(verb: Verb, path: Sequence[str], asked: Sequence[str]) -> str:
    """The page for a help flag and the word after it, or the verb's page without any."""
    word = next(iter(asked[1:]), "-")
    if word.startswith("-"):
        return verb_page(verb, path, everything=asked[:1] == ["--help-all"])
    return search_page(word, verb, path)


def search_page(word: str, verb: Verb | None, path: Sequence[str]) -> str:
    """Return the options of a verb, or of all, with `word`. Raises ConfigError if none has it."""
    wanted = _plain(word)
    found = dict(_found(verb, wanted) if verb else _found_anywhere(wanted))
    if not found:
        page = " ".join(["outrider", *path, "--help-all" if verb else "--help"])
        raise ConfigError(f"no option and no verb has the word {word!r}.", hint=f"`{page}`")
    return "\n\n".join(_tables([(f"With {word}", list(found.items()))]))


def _found(verb: Verb, wanted: str) -> Iterator[Row]:
    for _, rows in _sections(verb):
        yield from (row for row in rows if wanted in _plain(" ".join(row)))


def _found_anywhere(wanted: str) -> Iterator[Row]:
    listed = [(v.name, v) for v in VERBS if v.group and not v.parts]
    listed += [(f"{v.name} {part.name}", part) for v in VERBS if v.group for part in v.parts]
    for name, verb in listed:
        if wanted in _plain(f"{name} {verb.text}"):
            yield name, verb.text
    for name, verb in listed:
        for usage, text in _found(verb, wanted):
            yield (usage, text) if verb.settings else (f"{name} {usage}", text)


def _plain(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ").strip()


def _head(verb: Verb, path: Sequence[str]) -> str:
    names = (f"[{item.name}{' ...' if item.many else ''}]" for item in verb.arguments)
    words = ["VERB"] if verb.parts else ["[OPTIONS]", *names]
    usage = f"Usage: outrider {' '.join([*path, *words])}"
    example = wrapped(f"  {verb.example}", _width())
    return f"{usage}\n\n{_filled(verb.text)}\n\nExample:\n{example}"


def _daily(verb: Verb) -> list[Row]:
    """Return a verb's own options and the common settings, the most used first."""
    offered = {item.name: item for item in _stated(verb)}
    own = sorted(verb.own_options(), key=lambda item: item.name == "json")
    items = [*own, *(offered[name] for name in DAILY if name in offered)]
    return [
        (_usage(item, most=_MOST_FLAGS), _brief(item, _first_sentence(item.meta.help)))
        for item in items
    ]


def _stated(verb: Verb) -> list[Setting]:
    """Return the settings that a verb takes, with its own defaults."""
    return [
        replace(item, default=verb.stated.get(item.name, item.default))
        for item in verb.offered_settings()
    ]


def _first_sentence(text: str) -> str:
    """Return a text up to its first full stop or semicolon."""
    ends = [end for end in (text.find(". "), text.find("; ")) if end > 0]
    return f"{text[: min(ends)]}." if ends else text


def _sections(verb: Verb) -> list[tuple[str, list[Row]]]:
    own = [(_usage(item), _brief(item, item.meta.help)) for item in verb.own_options()]
    helps = [
        ("--help, -h [WORD]", "Show the options of every day, or those that have a word."),
        ("--help-all", "Show this page."),
    ]
    sections = [*_arguments(verb), ("Options", [*own, *helps])]
    for group in verb.settings:
        rows = [
            (_usage(item), f"{item.meta.help} [{_details(item)}]")
            for item in _stated(verb)
            if item.group == group
        ]
        if group == verb.settings[0]:
            rows += [("--config FILE", CONFIG_TEXT), ("--set KEY=VALUE", SET_TEXT)]
        sections.append((TITLES[group], rows))
    return sections


def _arguments(verb: Verb) -> list[tuple[str, list[Row]]]:
    rows = [
        (item.name, f"{item.text} [{' | '.join(item.choices)}]" if item.choices else item.text)
        for item in verb.arguments
    ]
    return [("Arguments" if len(rows) > 1 else "Argument", rows)] if rows else []


def _usage(item: Setting, *, most: int | None = None) -> str:
    """Return the flags of an option, the first `most` of them, and its value."""
    if item.kind is bool:
        return f"--[no-]{item.flag[2:]}" if item.group else item.flag
    return f"{', '.join(setting_flags(item)[:most])} {item.metavar}"


def _brief(item: Setting, text: str) -> str:
    """Return `text` with choices, as many as fit, and the default, unless it names it."""
    if item.kind is bool:
        return f"{text} [on by default]" if item.default else text
    names = list(item.meta.choices)
    while len(" | ".join(names)) > _MOST_CHOICES:
        names[-2:] = ["..."]
    is_named = str(item.default).rpartition("/")[2] in re.findall(r"\w+", text)
    default = [] if is_named else _default(item)
    parts = [*([" | ".join(names)] if names else []), *default]
    return f"{text} [{'; '.join(parts)}]" if parts else text


def _default(item: Setting) -> list[str]:
    if item.default in (None, "", ()):
        return []
    is_float = isinstance(item.default, float)
    return [f"default {item.default:g}" if is_float else f"default {item.default}"]


def _details(item: Setting) -> str:
    if item.kind is bool:
        return "on by default" if item.default else "off by default"
    if item.kind is tuple:
        return "may be repeated"
    accepts = item.accepts
    with suppress(ConfigError):  # Help must work even if two packages have the same name.
        accepts = " | ".join((accepts, *item.meta.others()))
    return "; ".join([accepts, *_default(item)])


def _verb_rows(verbs: Iterable[Verb]) -> list[Row]:
    return [(f"{v.name}, {v.alias}" if v.alias else v.name, v.text) for v in verbs]


def _width() -> int:
    return max(MIN_WIDTH, min(shutil.get_terminal_size().columns, MAX_WIDTH))


def _filled(text: str) -> str:
    return textwrap.fill(text, _width())


def _tables(sections: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Return tables of two columns, with the same widths in all sections. The second column wraps;
    after a long name it begins on the next line."""
    longest = max(len(name) for _, rows in sections for name, _ in rows)
    left = min(longest, max(_width() - _LEAST_TEXT, 10))
    return [
        "\n".join([f"{title}:", *(_row(name, text, left) for name, text in rows)])
        for title, rows in sections
    ]


def _row(name: str, text: str, left: int) -> str:
    indent = " " * (left + 4)
    start = f"  {name:<{left}}  " if len(name) <= left else indent
    filled = textwrap.fill(
        text, _width(), initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )
    return filled if len(name) <= left else f"  {name}\n{filled}"
