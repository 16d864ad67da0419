"""tokenizer.json and tokenizer_config.json of a GGUF file, from its tokens, kinds, merges, scores.

`gpt2` is BPE over bytes with a rule that cuts text first (splits.py). `llama` is SentencePiece's
BPE, which falls back to bytes. Such a file has no list of merges: two neighbours merge if the
result is a token, and the highest score comes first. So each way to cut a token into two tokens is
a merge, in the order of falling scores. Unused tokens are left out of tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError, nearest
from outrider.core.files import FileKind
from outrider.models.gguf.reader import Header, Texts
from outrider.models.gguf.splits import RULES, Rule
from outrider.models.json_object import JsonObject

# Tokens that end a text or a turn are recognised by their text, as in llama.cpp, whatever their
# kind: metadata often name only one of several ends (Qwen's files name <|im_end|> but not
# <|endoftext|>), and fine-tunes have ends that their maker did not mark as control tokens.
TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|return|>",
    "<turn|>",
    "<end_of_utterance>",
)
_OTHER_ENDS = (
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    # DeepSeek's, with full-width bars.
    "<\uff5cend▁of▁sentence\uff5c>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "[e~[",
)
# Tokens between files of code, by the metadata key that may name one; of its texts, the first that
# the vocabulary has is used.
BETWEEN_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})


def ends_among(vocabulary: Collection[str]) -> list[str]:
    """The ends that a vocabulary has, except `</s>`, which may be HTML."""
    between = (
        next((text for text in texts if text in vocabulary), "") for texts in BETWEEN_FILES.values()
    )
    return [text for text in (*TURN_ENDS, *_OTHER_ENDS, *between) if text in vocabulary]


def has_messages(vocabulary: Collection[str]) -> bool:
    """True if `<|end|>` only closes a message within a turn, before the answer (harmony)."""
    if "<|end|>" not in vocabulary:
        return False
    return any(all(text in vocabulary for text in texts) for texts in _MESSAGES)


_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_PREFIX = "tokenizer.ggml."
_OWN = "name a model or folder whose tokenizer fits with --tokenizer"
# A SentencePiece token has 16 characters at the most unless its maker chose more.
_MAX_PIECE_CHARS, _MAX_PIECES_CHARS = 256, 1 << 23
# A merge takes 900 bytes of memory and a token half of that, however short they are in the file.
# The largest published tokenizers have 262,144 tokens and 515,000 merges.
_MAX_TOKENS, _MAX_MERGES, _MAX_MERGES_A_TOKEN, _MAX_LIST_BYTES = 1 << 19, 3 << 18, 8, 1 << 25
_SPACE = "▁"
_LINES = r"[^\n]+|[\n]+"
# Ids of special tokens in SentencePiece files that do not name them.
_SENTENCE_PIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Special tokens of Phi-3 that take no blanks.
_PHI3_TEXT_ENDS = ("<unk>", "<s>", "<|endoftext|>")
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file. Raises CheckpointError for missing or wrong values."""

    header: Header

    @cached_property
    def raw(self) -> JsonObject:
        return JsonObject(str(self.header.path), self.header.metadata)

    @cached_property
    def tokens(self) -> list[str]:
        found = self._list("tokens", _MAX_TOKENS)
        embedding = self.header.entries.get("token_embd.weight")
        if embedding is not None and embedding.shape[0] != len(found):
            raise CheckpointError(
                f"{self.raw.where} has {len(found)} tokens, and token_embd.weight has "
                f"{embedding.shape[0]} rows.",
                hint=f"the file was made wrong; another may be right, or {_OWN}",
            )
        # Empty tokens get names, as in llama.cpp.
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(found.read())]

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each token; normal if the file has no kinds. A token whose text ends a text
        or a turn is a control token, whatever the file says."""
        kinds = self._stored_kinds.copy()
        for text in ends_among(self.ids):
            kinds[self.ids[text]] = _CONTROL
        return kinds

    @cached_property
    def _stored_kinds(self) -> list[int]:
        return self._numbers("token_type", "iu", 1)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each text; the last one if several tokens have the same text."""
        return {token: index for index, token in enumerate(self.tokens)}

    @cached_property
    def ends(self) -> list[int]:
        """Ids of tokens that end a text or a turn; the ones that the file names come first."""
        named = [self.token_id(name) for name in ("eos", "eot", "eom", *BETWEEN_FILES)]
        found = named + [self.ids[text] for text in ends_among(self.ids)]
        # In some vocabularies </s> is HTML.
        html = self.ids.get("</s>")
        if html is not None and self._stored_kinds[html] == _CONTROL:
            found.append(html)
        closed = self.ids["<|end|>"] if has_messages(self.ids) else None
        return [end for end in dict.fromkeys(found) if end not in (None, closed)]

    @cached_property
    def scores(self) -> list[float]:
        """The score of each token; 0 if the file has no scores."""
        return self._numbers("scores", "iuf", 0.0)

    @property
    def merges(self) -> list[list[str]]:
        """Pairs by rank."""
        return self._merges[True]

    @property
    def lost_merges(self) -> list[list[str]]:
        """Pairs of which a part or the result is no token, so tokenizer.json cannot have them."""
        return [] if _kind(self) == "llama" else self._merges[False]

    @cached_property
    def _merges(self) -> dict[bool, list[list[str]]]:
        pairs = [merge.split(" ") for merge in self._list("merges", self.most_merges).read()]
        if any(len(pair) != 2 for pair in pairs):
            raise self.wrong("merges", "has one that is no pair")
        known = {self.tokens[index] for index, kind in enumerate(self.kinds) if kind != _UNUSED}
        found: dict[bool, list[list[str]]] = {True: [], False: []}
        for pair in pairs:
            found[known.issuperset((*pair, "".join(pair)))].append(pair)
        if not found[True]:
            raise self.wrong("merges", "has no pair that makes a token")
        return found

    @property
    def most_merges(self) -> int:
        """A limit for the number of merges; real vocabularies have two for each token."""
        return min(_MAX_MERGES, _MAX_MERGES_A_TOKEN * len(self.tokens) + 1024)

    def flag(self, name: str, *, default: bool) -> bool:
        return self.raw.flag(f"{_PREFIX}{name}", default=default)

    def token_id(self, name: str) -> int | None:
        """The id of a special token that the file names, or that its kind of tokenizer implies."""
        sentence_piece = self.raw.values.get(f"{_PREFIX}model") == "llama"
        usual = _SENTENCE_PIECE_IDS.get(name, -1) if sentence_piece else -1
        found = self.raw.integer(f"{_PREFIX}{name}_token_id", usual, least=-1, most=2**32)
        found = found if found < len(self.tokens) else usual
        return found if 0 <= found < len(self.tokens) else None

    def _list(self, name: str, most: int) -> Texts:
        found = self.header.metadata.get(f"{_PREFIX}{name}")
        if not isinstance(found, Texts) or not len(found):
            raise self.wrong(name, "is missing or no list of texts")
        if len(found) > most or found.num_bytes > _MAX_LIST_BYTES:
            raise self.too_large(name, f"{len(found)} texts of {found.num_bytes} bytes")
        return found

    def too_large(self, name: str, has: str) -> CheckpointError:
        return self.wrong(name, f"has {has}, more than any vocabulary")

    def wrong(self, name: str, why: str) -> CheckpointError:
        """The error for the list `name`."""
        return CheckpointError(f"{self.raw.where}: {_PREFIX}{name} {why}.", hint=_OWN)

    def _numbers(self, name: str, kinds: str, usual: float) -> list[Any]:
        """The list `name`, with one number of NumPy's `kinds` for each token; `usual` if absent."""
        found = self.header.metadata.get(f"{_PREFIX}{name}")
        if found is None:
            return [usual] * len(self.tokens)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise self.wrong(name, f"has no number for each of {len(self.tokens)} tokens")
        if found.dtype.kind not in kinds or np.isnan(found).any():
            raise self.wrong(name, f"is no list of {'integers' if kinds == 'iu' else 'numbers'}")
        return found.tolist()


@lru_cache(maxsize=8)
def vocabulary_of(header: Header) -> Vocabulary:
    """The vocabulary of a header, made once: several documents read it."""
    return Vocabulary(header)


def special_ids(header: Header) -> dict[str, Any]:
    """Token ids for config.json: the ends of a text or a turn, and the beginning of a text."""
    if f"{_PREFIX}tokens" not in header.metadata:
        return {}
    words = vocabulary_of(header)
    found: dict[str, Any] = {"eos_token_id": words.ends} if words.ends else {}
    begin = words.token_id("bos")
    return found if begin is None else {**found, "bos_token_id": begin}


def _kind(words: Vocabulary) -> str:
    return words.raw.text(f"{_PREFIX}model", "none")


def tokenizer_of(header: Header) -> dict[str, Any]:
    """The contents of tokenizer.json. Raises CheckpointError for an unknown kind of tokenizer."""
    words = vocabulary_of(header)
    kind = _kind(words)
    makers = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _spaced}
    if kind not in makers:
        raise CheckpointError(
            f"{words.raw.where}: tokenizers of type {kind!r} are not supported in GGUF files.",
            hint=f"supported: {', '.join(makers)}; {_OWN}",
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(words),
        **makers[kind](words),
    }


def tokenizer_config_of(header: Header) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens and the chat template."""
    words = vocabulary_of(header)
    found: dict[str, Any] = {}
    for name, theirs in _NAMES.items():
        if (token_id := words.token_id(theirs)) is not None:
            found[f"{name}_token"] = words.tokens[token_id]
    template = words.raw.text("tokenizer.chat_template", "")
    if len(template.encode()) > FileKind.TEMPLATE.max_bytes:
        raise CheckpointError(
            f"{words.raw.where}: tokenizer.chat_template has more than "
            f"{FileKind.TEMPLATE.max_bytes} bytes.",
            hint="choose another file",
        )
    return found | ({"chat_template": template} if template else {})


def _added(words: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found before text is cut."""
    swallowing = _swallows_blanks(words)
    return [
        {
            "id": index,
            "content": words.tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": swallowing and words.tokens[index] not in _PHI3_TEXT_ENDS,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, kind in enumerate(words.kinds)
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]


def _swallows_blanks(words: Vocabulary) -> bool:
    """True for Phi-3 and 3.5, whose special tokens include blanks after them. The format has no key
    for that: llama.cpp goes by the name, and others stored as `phi3` have BPE."""
    name = words.raw.text("general.name", "").lower()
    by_kind = words.raw.text("general.architecture", "") in ("phi3", "phimoe")
    return "phi-3" in name or "phi3" in name or (by_kind and _kind(words) == "llama")


def _vocab(words: Vocabulary) -> dict[str, int]:
    indices = [index for index, kind in enumerate(words.kinds) if kind != _UNUSED]
    found = {words.tokens[index]: index for index in indices}
    if len(found) < len(indices):
        twice = next(t for index in indices if found[t := words.tokens[index]] != index)
        raise CheckpointError(f"{words.raw.where}: the token {twice!r:.60} has two ids.", hint=_OWN)
    return found


def _bpe(vocab: Mapping[str, int], merges: Sequence[Sequence[str]], **more: object) -> Any:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    } | more


def _byte_level(words: Vocabulary) -> dict[str, Any]:
    rule = _rule(words)
    prefix = words.flag("add_space_prefix", default=False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": rule.pre_tokenizer(prefix=prefix),
        "post_processor": _template(words, begins=rule.begins),
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(_vocab(words), words.merges, ignore_merges=rule.ignore_merges),
    }


def _spaced(words: Vocabulary) -> dict[str, Any]:
    """Gemma 4's BPE over characters, with a list of merges, which falls back to bytes. Each line is
    merged by itself, as no merge joins a line end with another character."""
    lines = {"type": "Split", "pattern": {"Regex": _LINES}, "behavior": "Isolated", "invert": False}
    model = _bpe(_vocab(words), words.merges, **_fallback(words))
    return _pieces(words, prefix=False) | {"pre_tokenizer": lines, "model": model}


def _rule(words: Vocabulary) -> Rule:
    name = words.raw.text(f"{_PREFIX}pre", "default")
    if name not in RULES:
        raise CheckpointError(
            f"{words.raw.where} cuts text by the rule {name!r} ({_PREFIX}pre), which is not known "
            "here.",
            hint=nearest(name, RULES, f"Known: {', '.join(RULES)}. Or {_OWN}"),
        )
    return RULES[name]


def _sentence_piece(words: Vocabulary) -> dict[str, Any]:
    vocab = _vocab(words)
    model = _bpe(vocab, _merges_by_score(words, vocab), **_fallback(words))
    return _pieces(words, prefix=words.flag("add_space_prefix", default=True)) | {"model": model}


def _fallback(words: Vocabulary) -> dict[str, Any]:
    unknown = words.kinds.index(_UNKNOWN) if _UNKNOWN in words.kinds else None
    return {
        "unk_token": None if unknown is None else words.tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": True,
    }


def _pieces(words: Vocabulary, *, prefix: bool) -> dict[str, Any]:
    """Normalizer, post-processor and decoder of models that write spaces as SentencePiece does."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, space] if prefix else [space]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _template(words, begins=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
    }


def _merges_by_score(words: Vocabulary, vocab: Mapping[str, int]) -> list[list[str]]:
    """Merges in the order of falling scores; merges of one score by the ids of their parts."""
    if sum(map(len, vocab)) > _MAX_PIECES_CHARS or max(map(len, vocab)) > _MAX_PIECE_CHARS:
        raise CheckpointError(
            f"{words.raw.where} has longer tokens than any SentencePiece vocabulary.", hint=_OWN
        )
    found: list[tuple[float, int, int, str, str]] = []
    scores, most = words.scores, words.most_merges
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, token[:at], token[at:]))
        if len(found) > most:
            raise words.too_large("tokens", f"over {most} ways to cut a token into two tokens")
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]


def _template(words: Vocabulary, *, begins: bool) -> dict[str, Any] | None:
    """A post-processor that puts BOS before a text and EOS after it, as the file says."""
    begin = words.token_id("bos") if words.flag("add_bos_token", default=begins) else None
    if _kind(words) == "gemma4":
        # Gemma 4 always begins with BOS, whatever a converter wrote.
        begin = words.token_id("bos")
    end = words.token_id("eos") if words.flag("add_eos_token", default=False) else None
    if begin is None and end is None:
        return None
    named = {words.tokens[index]: index for index in (begin, end) if index is not None}
    text = {"Sequence": {"id": "A", "type_id": 0}}

    def special(index: int | None) -> list[Any]:
        if index is None:
            return []
        return [{"SpecialToken": {"id": words.tokens[index], "type_id": 0}}]

    single = [*special(begin), text, *special(end)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]}
            for token, index in named.items()
        },
    }
