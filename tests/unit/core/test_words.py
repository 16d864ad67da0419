"""Names between commas: each once, and none that nobody knows."""

from __future__ import annotations

import pytest

from outrider.core.errors import ConfigError
from outrider.core.fields import known_words, words_of


def test_words_are_read_once_and_in_order() -> None:
    assert words_of("--pairs", " b, a,,b ", hint="") == ("b", "a")
    assert known_words("--engines", "pd,ssd", ("ssd", "pd"), kind="engine") == ("pd", "ssd")


@pytest.mark.parametrize("text", ["", " , "])
def test_no_word_at_all(text: str) -> None:
    with pytest.raises(ConfigError, match="--engines names nothing") as caught:
        known_words("--engines", text, ("ssd", "pd"), kind="engine")
    assert caught.value.hint == "--engines ssd,pd"


def test_an_unknown_word() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'sds'") as caught:
        known_words("--engines", "pd,sds", ("ssd", "pd"), kind="engine")
    assert "did you mean 'ssd'" in str(caught.value.hint)
