"""Tokenizer in GGUF: a byte-level BPE vocabulary with tokens, kinds, merges and the pre-tokenizer.

llama.cpp splits text by rules of its own that a file can only name, so tokenizer.json must split as
one of them does; models/gguf/splits.py has the rules, which are read as well. Another checkpoint
is refused, unless the caller names a rule: then some texts become other tokens, and only token ids
mean the same on both sides. llama.cpp knows no Unicode normalisation; that of Qwen (NFC) is left
out, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.files import FileKind, read_text
from outrider.models.checkpoint import open_checkpoint
from outrider.models.gguf.splits import RULES, Rule
from outrider.models.json_object import JsonObject, token_text
from outrider_lab.models.gguf import Value

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# Names that a caller may choose; auto may find others.
PRE_TOKENIZERS = ("auto", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken")
_NEXT = "name the nearest with --pre-tokenizer, and feed llama.cpp token ids rather than text"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`metadata` are the keys of the file; `notes` are sentences for the user."""

    metadata: Mapping[str, Value]
    notes: tuple[str, ...] = ()


def read_vocabulary(
    folder: Path, *, vocab_size: int, stop_ids: tuple[int, ...], pre_tokenizer: str = "auto"
) -> Vocabulary:
    """The tokenizer of the checkpoint in `folder`, with unused tokens up to `vocab_size`.

    Raises CheckpointError for a tokenizer that the format cannot express, ConfigError for an
    unknown `pre_tokenizer`.
    """
    raw = open_checkpoint(folder).document("tokenizer.json")
    model = raw.child("model")
    if model is None:
        raise CheckpointError(f"{raw.where}: the key model is missing.")
    _check_kind(raw, model)
    name = _rule(raw, model, pre_tokenizer)
    tokens, kinds = _tokens(raw, model, vocab_size)
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": _merges(model),
        **_special(folder, raw, tokens, stop_ids),
    }
    return Vocabulary(metadata, _notes(raw, pre_tokenizer))


def _check_kind(raw: JsonObject, model: JsonObject) -> None:
    """Raise unless it is BPE over bytes, of text as it is."""
    kind, normalizer = model.text("type", ""), raw.child("normalizer")
    reason = ""
    if kind != "BPE" or model.flag("byte_fallback", default=False):
        reason = (
            f"it is of type {kind}, not BPE over bytes"
            if kind != "BPE"
            else ("it falls back to bytes, as SentencePiece does, rather than starting from them")
        )
    elif normalizer is not None and normalizer.text("type") != "NFC":
        reason = f"it changes text before it is cut ({normalizer.text('type')})"
    elif model.values.get("continuing_subword_prefix") or model.values.get("end_of_word_suffix"):
        reason = "its tokens have a prefix or suffix of their own"
    if reason:
        raise CheckpointError(
            f"{raw.where} cannot be exported to GGUF: {reason}.",
            hint="choose a checkpoint with a byte-level tokenizer, as Llama 3 and Qwen have",
        )


def _rule(raw: JsonObject, model: JsonObject, wanted: str) -> str:
    if wanted not in PRE_TOKENIZERS:
        raise ConfigError(
            f"no pre-tokenizer {wanted!r}.", hint=f"one of: {', '.join(PRE_TOKENIZERS)}"
        )
    if wanted != "auto":
        return wanted
    whole = model.flag("ignore_merges", default=False)
    steps, nfc = _told(_steps(raw)), raw.child("normalizer") is not None
    found = [
        (rule.nfc != nfc, name)
        for name, rule in RULES.items()
        if rule.ignore_merges == whole and _told(_steps_of(rule)) == steps
    ]
    if found:
        # Of those that cut alike, the first that normalises alike, where one does.
        return min(found, key=lambda one: one[0])[1]
    raise CheckpointError(
        f"{raw.where} cuts text by a rule that llama.cpp does not know, so the same text would "
        "be other tokens there.",
        hint=f"{_NEXT} (one of: {', '.join(PRE_TOKENIZERS[1:])})",
    )


def _steps(raw: JsonObject) -> list[JsonObject]:
    """The parts of the pre-tokenizer, in order."""
    outer = raw.child("pre_tokenizer")
    if outer is None:
        return []
    if outer.text("type", "") != "Sequence":
        return [outer]
    return _objects(outer, "pretokenizers")


def _objects(raw: JsonObject, key: str) -> list[JsonObject]:
    """The list of objects under `key`; empty if the key is absent."""
    items = raw.values.get(key)
    if items is None:
        return []
    listed = cast("list[object]", items) if isinstance(items, list) else [items]
    found = [cast("dict[str, object]", item) for item in listed if isinstance(item, dict)]
    if len(found) < len(listed):
        raise raw.wrong(key, "a list of objects", listed)
    return [JsonObject(f"{raw.where}: {key}", item) for item in found]


def _steps_of(rule: Rule) -> list[JsonObject]:
    return _steps(JsonObject("", {"pre_tokenizer": rule.pre_tokenizer(prefix=False)}))


def _told(steps: Sequence[JsonObject]) -> list[tuple[object, ...]]:
    """What each step does, by all of its settings that change a text."""
    return [(step.text("type", ""), *_settings(step)) for step in steps]


def _settings(step: JsonObject) -> tuple[object, ...]:
    match step.text("type", ""):
        case "ByteLevel":
            names = ("add_prefix_space", "use_regex")
            return tuple(step.flag(name, default=True) for name in names)
        case "Digits":
            return (step.flag("individual_digits", default=False),)
        case "Punctuation":
            return (step.text("behavior", "Isolated"),)
        case "Split":
            pattern = step.child("pattern")
            regex = pattern.text("Regex", "") if pattern is not None else ""
            return regex, step.text("behavior", ""), step.flag("invert", default=False)
        case _:
            # No rule has it.
            return (step.where,)


def _tokens(raw: JsonObject, model: JsonObject, vocab_size: int) -> tuple[list[str], list[int]]:
    """Every token by id, and its kind; ids that mean nothing get a text of their own."""
    vocab = model.child("vocab")
    texts = {vocab.integer(text, least=0): text for text in vocab.values} if vocab else {}
    kinds = dict.fromkeys(texts, _NORMAL)
    for added in _objects(raw, "added_tokens"):
        token_id = added.integer("id", least=0)
        texts[token_id] = added.text("content")
        special = added.flag("special", default=False)
        kinds[token_id] = _CONTROL if special else _USER_DEFINED
    if not texts or max(texts) >= vocab_size:
        raise CheckpointError(
            f"{raw.where} has ids up to {max(texts, default=-1)}, but config.json says "
            f"{vocab_size} tokens.",
            hint="config.json and tokenizer.json belong to different models",
        )
    listed = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]
    if len(set(listed)) < vocab_size:
        raise CheckpointError(
            f"{raw.where} has one text for several ids, which GGUF cannot express.",
            hint="choose another checkpoint",
        )
    return listed, [kinds.get(token_id, _UNUSED) for token_id in range(vocab_size)]


def _merges(model: JsonObject) -> list[str]:
    """In order of rank. Both generations of files are read: "a b", or a pair."""
    items = model.values.get("merges")
    found: list[str] = []
    for item in cast("list[object]", items) if isinstance(items, list) else []:
        pair = " ".join(map(str, cast("list[object]", item))) if isinstance(item, list) else item
        if not isinstance(pair, str) or pair.count(" ") != 1:
            raise model.wrong("merges", "a list of pairs of tokens", model.values["merges"])
        found.append(pair)
    return found


def _special(
    folder: Path, raw: JsonObject, tokens: list[str], stop_ids: tuple[int, ...]
) -> dict[str, Value]:
    """Tokens that begin and end a text, and the chat template."""
    name, checkpoint = "tokenizer_config.json", open_checkpoint(folder)
    config = checkpoint.document(name) if checkpoint.has(name) else JsonObject(name, {})
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    found: dict[str, Value] = {}
    marks = (token_text(config.values.get(key)) for key in ("bos_token", "eos_token"))
    begin, end = (ids.get(mark or "") for mark in marks)
    if begin is not None:
        found["tokenizer.ggml.bos_token_id"] = begin
    # The one that the tokenizer names comes first.
    ends = sorted(stop_ids, key=lambda token_id: token_id != end)
    for key, token_id in zip(("eos", "eot", "eom"), ends, strict=False):
        found[f"tokenizer.ggml.{key}_token_id"] = token_id
    found["tokenizer.ggml.add_bos_token"] = begin is not None and _opens(raw, tokens[begin])
    if template := _template(folder, config):
        found["tokenizer.chat_template"] = template
    return found


def _opens(raw: JsonObject, token: str) -> bool:
    """Whether the post-processor puts `token` before a text."""
    outer = raw.child("post_processor")
    if outer is None:
        return False
    parts = _objects(outer, "processors") or [outer]
    for part in parts:
        pieces = _objects(part, "single")
        first = pieces[0].child("SpecialToken") if pieces else None
        if first is not None and first.text("id", "") == token:
            return True
    return False


def _template(folder: Path, config: JsonObject) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, FileKind.TEMPLATE)
    if isinstance(config.values.get("chat_template"), str):
        return config.text("chat_template")
    named = _objects(config, "chat_template")
    return next((item.text("template") for item in named if item.text("name") == "default"), "")


def _notes(raw: JsonObject, pre_tokenizer: str) -> tuple[str, ...]:
    found: list[str] = []
    if pre_tokenizer != "auto":
        found.append(
            f"llama.cpp cuts text by its rule {pre_tokenizer!r}, which may not be the "
            "checkpoint's: feed it token ids to be sure of the same tokens"
        )
    if raw.child("normalizer") is not None:
        found.append("text is not normalised (NFC) there: accents may become other tokens")
    return tuple(found)
