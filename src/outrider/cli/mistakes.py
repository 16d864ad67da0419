"""Words on the command line that mean nothing, explained with the nearest that would."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.cli.verb import Verb
from outrider.cli.verbs import names
from outrider.core.errors import ConfigError, nearest
from outrider.core.foreign import hint_for

# How the parser says that words are left over.
_SURPLUS = re.compile(r"^Unused Tokens: \[([^,\]]*)")


def unknown_verb(word: str, verbs: Sequence[Verb], path: Sequence[str]) -> ConfigError:
    """`path` are the words before it."""
    page = f"`{' '.join(['outrider', *path])} --help` lists the verbs"
    return ConfigError(f"unknown verb {word!r}.", hint=nearest(word, names(verbs), page))


def bad_words(message: str, verb: Verb, path: Sequence[str], words: Sequence[str]) -> ConfigError:
    """An unknown flag if there is one, since the parser may stumble over its value first."""
    page = f"`outrider {' '.join(path)} --help` lists the options"
    known = verb.flags()
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.split("=", 1)[0]
        theirs = hint_for(flag)
        if flag not in known and (flag.startswith("--") or theirs):
            hint = theirs or nearest(flag, known, page)
            return ConfigError(f"unknown option {flag!r}.", hint=hint)
    surplus = _SURPLUS.search(message)
    if surplus:
        message = f"{surplus[1]}: one word too many."
    return ConfigError(message, hint=page)
