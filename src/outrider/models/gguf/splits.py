"""Rules by which text is cut before it is merged into tokens, by the names that GGUF files give.

Each name stands for the rule in the tokenizer.json of the family that has it: steps of a
pre-tokenizer, whether a piece that is a token is taken whole (`ignore_merges`), whether texts are
brought to NFC, and whether they begin with BOS where the file does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPACES = r"\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_MARKED_REST = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str) -> str:
    """Words by their upper and lower case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}"


LLAMA3 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}"
_QWEN35 = rf"{_SHORT}|{_MARKED}|\p{{N}}|{_MARKED_REST}"
TEKKEN = rf"{_cased('')}|\p{{N}}|{_SLASHED_REST}"
_GPT4O = rf"{_cased(_SHORT + '?')}|\p{{N}}{{1,3}}|{_SLASHED_REST}"
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
# Letters that have a case; the mathematical ones, which have it too, are no part of words.
_CASED_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7CB}]]+"
_SIGNS = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"  # noqa: RUF001 - full-width signs
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|" + _SPACES
)

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """`steps` run before bytes become characters, `after` then; `gpt2` cuts between as GPT-2
    does."""

    steps: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    gpt2: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    begins: bool = False

    def pre_tokenizer(self, *, prefix: bool) -> Step:
        last = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
        steps = [*self.steps, last | {"use_regex": self.gpt2}, *self.after]
        return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]


def _cut(*patterns: str) -> tuple[Step, ...]:
    return tuple(
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    )


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_NUMBERS: Step = {"type": "Digits", "individual_digits": False}
_PUNCTUATION: Step = {"type": "Punctuation", "behavior": "Contiguous"}
_PLAIN = Rule(gpt2=True)
_BY_DIGIT = Rule((_DIGITS,), gpt2=True)
_FALCON = Rule((_PUNCTUATION,), (_NUMBERS, *_cut("[0-9][0-9][0-9]")), gpt2=True)
_LLAMA3 = Rule(_cut(LLAMA3), ignore_merges=True, begins=True)
_QWEN2 = Rule(_cut(QWEN2), nfc=True)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Rule(_cut(LLAMA3))),
    **dict.fromkeys(("qwen2", "megrez"), _QWEN2),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), Rule(_cut(QWEN2))),
    "qwen35": Rule(_cut(_QWEN35), nfc=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum"), _PLAIN),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _BY_DIGIT,
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), Rule(_cut(_GPT4O))),
    "tekken": Rule(_cut(TEKKEN), ignore_merges=True, begins=True),
    "deepseek-llm": Rule(
        (*_cut("[\r\n]", _CASED_LETTERS, _SIGNS, r"\s+$", _CHINESE), _DIGITS),
    ),
    "deepseek-coder": Rule(
        (*_cut("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE), _DIGITS),
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        Rule(_cut(r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    ),
    # Files of before names were given are cut so by llama.cpp.
    **dict.fromkeys(("falcon", "default"), _FALCON),
}
