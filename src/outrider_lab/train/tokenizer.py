"""A byte-level BPE vocabulary from text: `outrider train tokenizer`.

Byte-level, so that every text has tokens and comes back as it was (Radford et al., 2019). Digits
stand alone: a number is then spelled the same way wherever it occurs. Id 0 is the end of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.core.errors import ConfigError
from outrider.core.files import writing
from outrider_lab.train.data import find_files
from outrider_lab.train.tokens import TokenOptions, draw

END = "<|endoftext|>"
# Documents whose tokens are counted, to say how long they are.
_SAMPLED = 200
_LEAST_SIZE = 257  # all bytes, and the end
_CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% elif m['role'] == 'assistant' %}Answer: {{ m['content'] }}<|endoftext|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """At most `vocab_size` tokens; fewer if the text has no more pairs to merge.

    Raises ConfigError for a size that has no room for every byte.
    """
    if vocab_size < _LEAST_SIZE:
        raise ConfigError(
            f"{vocab_size} tokens have no room for all bytes.", hint=f"use --size {_LEAST_SIZE} up"
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def write_tokenizer(made: Tokenizer, folder: Path) -> None:
    """tokenizer.json and what says which token ends a text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": _CHAT,
    }
    text = json.dumps(config, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """What was made, and how long its tokens are on the text they were made of."""

    num_tokens: int
    num_files: int
    bytes_per_token: float


def make_tokenizer(
    folder: Path, words: Sequence[str], size: int, wish: TokenOptions
) -> MadeTokenizer:
    """A tokenizer in the new folder `folder`, from the texts that `words` name (data.py).

    Raises ConfigError for a folder that holds something, or if there is no text; MachineError for
    one that cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already.", hint="name a new folder")
    drawn = draw(find_files(words), wish)
    texts = [document.text for document in drawn.documents(wish)]
    if not texts:
        raise ConfigError("the files have no text to learn from.", hint="name other files")
    made = train_bpe(texts, size)
    with writing(folder):
        write_tokenizer(made, folder)
    sample = texts[:: max(1, len(texts) // _SAMPLED)]
    num_bytes = sum(len(text.encode()) for text in sample)
    num_tokens = sum(len(one.ids) for one in made.encode_batch_fast(sample))
    return MadeTokenizer(made.get_vocab_size(), len(drawn.files), num_bytes / max(1, num_tokens))
