"""Rules that cut text before it is merged into tokens, by their names in GGUF files.

Each name stands for the rule in the tokenizer.json of its family: the steps of a pre-tokenizer,
whether a piece that is a token is taken as a whole (`ignore_merges`), whether texts are normalised
to NFC, and whether they begin with BOS if the file does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPACES = r"\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
_MARKED_REST = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _LINES
_SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES
# Signs and a line's end once: EXAONE's mixtures, and Bailing's without the signs.
_SINGLE_LINES = r"|\s*[\r\n]|" + _SPACES
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str, less: str = "") -> str:
    """Words by their upper and lower case, without the letters of `less`."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", _UPPER + less, _LOWER + less
    return f"{before}[{upper}]*[{lower}]+{ending}|{before}[{upper}]+[{lower}]*{ending}"


def _marks(lines: str) -> str:
    """Words of DeepSeek V3 and its descendants, and signs before `lines`, in real line ends."""
    signs = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    words = "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    return rf"{signs}|{words}| ?[\p{{P}}\p{{S}}]+{lines}|{_SPACES}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
LLAMA3 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}"
_QWEN35 = rf"{_SHORT}|{_MARKED}|\p{{N}}|{_MARKED_REST}"
TEKKEN = rf"{_cased('')}|\p{{N}}|{_SLASHED_REST}"
_GPT4O = rf"{_cased(_SHORT + '?')}|\p{{N}}{{1,3}}|{_SLASHED_REST}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SINGLE_LINES}"
_SEED_CODER = rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
# Words in Latin letters with single spaces between them are one piece.
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?{_SINGLE_LINES}"
)
_KIMI_K2 = r"[\p{Han}]+|" + _cased(_SHORT + "?", r"&&[^\p{Han}]") + rf"|\p{{N}}{{1,3}}|{_REST}"
# Runs of spaces by powers of two.
_JAIS2 = (
    rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "|".join(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001 - full-width signs
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
_HAN_AND_KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
# Letters that have a case, except the mathematical ones, which are no part of words.
_CASED_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7CB}]]+"
_SIGNS = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"  # noqa: RUF001 - full-width signs
_YOUTU_SCRIPTS = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|"  # noqa: RUF001 - full-width signs
    + _HAN_AND_KANA
)
_AFMOE_SCRIPTS = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ\uff65-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"  # noqa: RUF001
    "ក-\u17ff\u1000-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7af\u1100-ᇿ]+"
)

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: `steps` run before text is mapped from bytes to characters, `after` afterwards. With
    `gpt2`, text is cut in between as GPT-2 does."""

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
_THREES = r"\p{N}{1,3}"
_PLAIN = Rule(gpt2=True)
_BY_DIGIT = Rule((_DIGITS,), gpt2=True)
_FALCON = Rule((_PUNCTUATION,), (_NUMBERS, *_cut("[0-9][0-9][0-9]")), gpt2=True)
# Falcon's steps on characters, where Falcon itself cuts numbers out of the bytes.
_DEFAULT = Rule(_cut(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_LLAMA3 = Rule(_cut(LLAMA3), ignore_merges=True, begins=True)
_QWEN2 = Rule(_cut(QWEN2), nfc=True)
_NOT_NORMAL = Rule(_cut(QWEN2))
_DEEPSEEK3 = Rule(_cut(_THREES, _HAN_AND_KANA, _marks("[\r\n]*|\\s*[\r\n]+")))
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)


def _named(rule: Rule, names: str) -> Mapping[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    **_named(_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    **_named(Rule(_cut(LLAMA3)), "dbrx smaug-bpe chatglm-bpe"),
    **_named(Rule(_cut(LLAMA3), ignore_merges=True), "glm4 glm5"),
    "minicpm5": Rule(_cut(_THREES, LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "jais-2": Rule(_cut(_JAIS2)),
    **_named(_QWEN2, "qwen2 megrez"),
    **_named(_NOT_NORMAL, "deepseek-r1-qwen stablelm2 kormo hunyuan solar-open grok-2"),
    "qwen35": Rule(_cut(_QWEN35), nfc=True),
    "ufakzeka": Rule(_cut(QWEN2.removeprefix(_SHORT + "|"))),
    "laguna": Rule(_cut(r"[^\n]+|[\n]+", QWEN2)),
    **_named(_PLAIN, "gpt-2 phi-2 mpt olmo jais gigachat mellum exaone4 a.x-4.0 trillion"),
    "granite-docling": _PLAIN,
    **_named(_BY_DIGIT, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    **_named(Rule(_cut(_GPT4O)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    **_named(Rule(_cut(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya cohere2moe"),
    "tekken": Rule(_cut(TEKKEN), ignore_merges=True, begins=True),
    "kimi-k2": Rule(_cut(_KIMI_K2)),
    "deepseek-llm": Rule((*_cut("[\r\n]", _CASED_LETTERS, _SIGNS, r"\s+$", _CHINESE), _DIGITS)),
    "deepseek-coder": Rule((*_cut("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE), _DIGITS)),
    **_named(_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    "spark2_5": Rule(_cut(_THREES, _HAN_AND_KANA, _marks("|[\r\n]"), r"\p{N}")),
    "youtu": Rule(_cut(_YOUTU_SCRIPTS, _GPT4O.replace("{1,3}", "")), ignore_merges=True),
    "afmoe": Rule(
        _cut(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _marks("[\r\n]*|\\s*[\r\n]+"))
    ),
    **_named(Rule(_cut(_BAILING)), "bailingmoe bailingmoe2 llada-moe"),
    "seed-coder": Rule(_cut(_SEED_CODER)),
    "exaone-moe": Rule(_cut(_EXAONE_MOE)),
    "superbpe": Rule(_cut(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **_named(Rule(_cut(_BLOOM)), "bloom poro-chat gpt3-finnish"),
    "viking": Rule(_cut(_BLOOM, r"\p{N}")),
    "chameleon": Rule(_cut(*_CHAMELEON), gpt2=True, begins=True),
    "falcon": _FALCON,
    "default": _DEFAULT,
}

# The expressions of all rules.
PATTERNS = frozenset(
    step["pattern"]["Regex"]
    for rule in RULES.values()
    for step in (*rule.steps, *rule.after)
    if step["type"] == "Split"
)
