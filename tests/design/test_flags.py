"""The set of flags is a promise: adding or dropping one is a change of tests/golden/flags.txt.

Each of its lines has a verb and the verb's flags.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from cyclopts import App

from outrider.cli.call import completion_app
from outrider.cli.options import Verb
from outrider.cli.verbs import VERBS, find, names

LINES = (Path(__file__).parents[1] / "golden" / "flags.txt").read_text("utf-8").splitlines()
FLAGS = {
    tuple(word for word in line.split() if word[0] != "-"): {
        word for word in line.split() if word[0] == "-"
    }
    for line in LINES
}


def verb_of(words: tuple[str, ...]) -> Verb:
    verb = find(VERBS, words[0])
    for word in words[1:]:
        assert verb is not None
        verb = find(verb.parts, word)
    assert verb is not None
    return verb


@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_the_flags_of_a_verb_are_frozen(words: tuple[str, ...]) -> None:
    assert set(verb_of(words).flags()) == FLAGS[words] | {"--help", "--help-all"}


def test_the_verbs_are_frozen() -> None:
    assert set(names(VERBS)) == {words[0] for words in FLAGS} | {"run"}
    parts = {(verb.name, part.name) for verb in VERBS for part in verb.parts}
    assert parts == {words for words in FLAGS if len(words) > 1}


def test_every_verb_names_a_function_that_is_there() -> None:
    """Its module is imported when the verb is called."""
    every = [one for verb in VERBS for one in (verb, *verb.parts) if one.target]
    assert len(every) > 30
    for one in every:
        module, _, function = one.target.partition(":")
        found = find_spec(module)
        assert found is not None, one.target
        assert found.origin is not None
        assert f"\ndef {function}(" in Path(found.origin).read_text("utf-8"), one.target


@pytest.fixture(scope="module")
def app() -> App:
    return completion_app()


@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_the_parser_knows_exactly_these_flags(app: App, words: tuple[str, ...]) -> None:
    _, chain, _ = app.parse_commands(list(words))
    found = {
        name
        for argument in chain[-1].assemble_argument_collection()
        for name in argument.names
        if name.startswith("-")
    }
    assert found == FLAGS[words]
