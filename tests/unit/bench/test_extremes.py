"""Prompts at both ends for drafters that copy: one set begins a copy, the other repeats nothing."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from outrider_lab.bench.workload import ADVERSARIAL, DOMAINS, ECHO, builtin_texts


@pytest.mark.parametrize("domain", [ECHO, ADVERSARIAL])
def test_there_are_prompts_and_no_mixture_has_them(domain: str) -> None:
    texts = builtin_texts(domain)
    assert len(texts) == len(set(texts)) == 24
    assert domain not in DOMAINS


@pytest.mark.parametrize("prompt", builtin_texts(ECHO))
def test_an_echo_begins_its_own_text_again(prompt: str) -> None:
    head, again = re.split(r"\n# \S+, second copy\n", prompt)
    whole = head.partition(", first copy\n")[2].rstrip()
    begun = again.rstrip("\n")
    assert whole.startswith(begun)
    assert 0 < len(begun) < len(whole) / 2


@pytest.mark.parametrize("prompt", builtin_texts(ADVERSARIAL))
def test_no_two_words_of_an_adversarial_prompt_follow_each_other_twice(prompt: str) -> None:
    words = re.findall(r"\w+", prompt)
    pairs = list(pairwise(words))
    assert len(pairs) == len(set(pairs))
