"""The verbs of the command line. Each is a function whose module is imported when the verb runs.

These tables have everything that help, parsing and completion need, so `--help` of any verb takes
little longer than the start of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.cli import verb_options
from outrider.cli.options import ASKS, KNOWN, Verb
from outrider.core.errors import ConfigError, foreign_names, nearest
from outrider.core.files import packaged

# Rows of the lab: its verbs are verbs of the program.
from outrider_lab.cli import bench_options
from outrider_lab.cli import verb_options as lab_options

# The headings of the front page.
GROUPS = ("Write text", "Models", "Measure speed", "Check exactness", "This machine")
TABLES = (verb_options, lab_options, bench_options)


# Verbs that only group others, by heading, text and example; and words of other tools, below.
_TABLES: dict[str, Any] = packaged("outrider.cli", "verbs.json")


def _group(name: str, heading: str, text: str, example: str) -> Verb:
    parts = tuple(verb for path, verb in KNOWN.items() if path.startswith(f"{name} "))
    return Verb(name=name, group=heading, text=text, example=example, parts=parts)


_GROUPS = {name: _group(name, *row) for name, row in _TABLES["groups"].items()}
# The order of the front page. Verbs that are not here follow in the order of their rows.
_ORDER = (
    *("generate", "chat", "batch", "serve", "cluster"),
    *("pull", "list", "models", "draft", "train"),
    *("plan", "bench", "report", "trace", "verify"),
    *("doctor", "ps", "stop", "top", "config", "completion", "cache"),
    *("pairs", "simulate", "prompts"),
)
_OTHERS = (name for name in KNOWN if " " not in name and name not in _ORDER)
VERBS = tuple(_GROUPS.get(name) or KNOWN[name] for name in (*_ORDER, *_OTHERS))


def names(verbs: Sequence[Verb]) -> list[str]:
    """Return every word that calls one of `verbs`."""
    return [name for verb in verbs for name in (verb.name, verb.alias) if name]


def find(verbs: Sequence[Verb], word: str) -> Verb | None:
    return next((verb for verb in verbs if word in (verb.name, verb.alias)), None)


# Verbs and flags of other tools: accepted with a note if they mean exactly the same here, or
# answered with our own command. docs/guesses.md lists all of them. `verbs`, and `flags` of options,
# have our names; core/errors.py has those of settings, of which `flags_of_settings` take the same
# values; `always` are flags for what always happens.
_SAME = {*_TABLES["flags_of_settings"].split()}
FLAGS_READ: dict[str, str] = {
    **{name: one.spelled_flag for name, one in foreign_names().items() if name in _SAME},
    **_TABLES["flags"],
}


def verb_named(words: Sequence[str]) -> tuple[Verb, int, list[str], str | None]:
    """Return the verb, how many words name it, its own name as words, and a note if that differs
    from what was typed. Raises ConfigError for an unknown verb."""
    read = _TABLES["verbs"].get(words[0])
    path = read.split() if read else [words[0]]
    verb = find(VERBS, path[0])
    if verb is None:
        raise _unknown(words[0], VERBS, [])
    num_words = 1
    if read is None and verb.parts and len(words) > 1 and words[1] not in ASKS:
        path, num_words = [*words[:2]], 2
    if len(path) > 1:
        part = find(verb.parts, path[1])
        if part is None:
            raise _unknown(path[1], verb.parts, path[:1])
        return part, num_words, path, _note(words[0], path) if read else None
    newer = _newer_path(verb)
    return verb, num_words, path, _note(words[0], newer or path) if newer or read else None


def _note(theirs: str, ours: Sequence[str]) -> str:
    return f"`outrider {theirs}` is `outrider {' '.join(ours)}`"


def _newer_path(verb: Verb) -> list[str] | None:
    """Return the new path of a verb that was moved from the top level; None for other verbs."""
    if verb.group:
        return None
    return next(([group.name, verb.name] for group in VERBS if verb in group.parts), None)


def _unknown(word: str, verbs: Sequence[Verb], path: Sequence[str]) -> ConfigError:
    """Return the error for an unknown verb; `path` are the words before it."""
    page = f"`{' '.join(['outrider', *path])} --help` lists the verbs"
    hint = None if path else _TABLES["answers"].get(word)
    return ConfigError(f"unknown verb {word!r}.", hint=hint or nearest(word, names(verbs), page))


def flags_read(verb: Verb, words: Iterable[str]) -> tuple[list[str], str | None]:
    """Return `words` with others' flags and values in our spelling, and a note about them."""
    known, read, notes = {*verb.flags()}, list[str](), dict[str, str]()
    for word in words:
        flag, equals, value = word.partition("=")
        ours = flag if flag in known else _flag_here(flag, known)
        if ours is None and flag in _TABLES["always"]:
            notes[flag] = f"{flag}: {_TABLES['always'][flag]}"
        elif read[-1:] == ["--dtype"] and word in _TABLES["dtypes"]:
            read.append(_TABLES["dtypes"][word])
            notes[word] = f"{word} is {read[-1]}"
        else:
            read.append(f"{ours or flag}{equals}{value}")
            notes |= {flag: f"{flag} is {ours}"} if ours not in (None, flag) else {}
    return read, f"{', '.join(notes.values())} here" if notes else None


def _flag_here(theirs: str, known: set[str]) -> str | None:
    if not theirs.startswith("-"):
        return None
    hyphens = theirs[:2] + theirs[2:].replace("_", "-")
    ours = hyphens if hyphens in known else FLAGS_READ.get(hyphens)
    return ours if ours in known else None
