"""Tokens are made once and mapped; batches are a function of the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.api.tokenizer import Tokenizer
from outrider.core.clock import host_ints
from outrider.core.errors import ConfigError, VocabularyError
from outrider_lab.train.data import find_files
from outrider_lab.train.tokenizer import train_bpe, write_tokenizer
from outrider_lab.train.tokens import TokenFiles, TokenOptions, Windows, tokenised

CPU = torch.device("cpu")
VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(train_bpe(["one two three four"] * 9, VOCAB), folder)
    return Tokenizer.load(folder)


def write_texts(folder: Path, count: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"text {number} " * 5, encoding="utf-8")
    return folder


def made(
    folder: Path, tokenizer: Tokenizer, work: Path, wish: TokenOptions | None = None
) -> TokenFiles:
    wish = wish or TokenOptions(held_out=0.3)
    return tokenised(find_files([str(folder)]), tokenizer, VOCAB, work, wish)


@given(
    num_windows=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 99),
    window=st.integers(1, 5),
)
def test_every_epoch_reads_every_window_once(
    num_windows: int, batch_size: int, seed: int, window: int
) -> None:
    ids = np.arange(num_windows * window + (window - 1), dtype=np.uint16)
    windows = Windows(ids, "", batch_size, window, seed)
    assert windows.num_windows == num_windows
    steps = [windows.batch(step, CPU) for step in range(num_windows * 2)]
    numbers = [number for batch in steps for number in batch.windows]
    for epoch in range(len(numbers) // num_windows):
        read = numbers[epoch * num_windows : (epoch + 1) * num_windows]
        assert sorted(read) == list(range(num_windows))
    for step, batch in enumerate(steps):
        again = windows.batch(step, CPU)
        assert torch.equal(again.ids_BT, batch.ids_BT)
        assert again.windows == batch.windows
        assert host_ints(batch.ids_BT[:, 0]) == [number * window for number in batch.windows]


def test_documents_end_with_the_end_and_come_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = made(write_texts(tmp_path / "texts"), tokenizer, tmp_path)
    end = tokenizer.stop_ids[0]
    assert found.record.num_documents == 40
    assert len(found.tokens) + len(found.held_out) == sum(
        found.record.__getattribute__(name) for name in ("num_tokens", "num_held_out")
    )
    both = [*found.tokens.tolist(), *found.held_out.tolist()]
    assert both.count(end) == 40
    texts = tokenizer.decode(both, skip_special=False).split("<|endoftext|>")[:-1]
    assert sorted(texts) == sorted(f"text {number} " * 5 for number in range(40))
    assert 4 <= found.held_out.tolist().count(end) <= 20


def test_tokens_are_made_once_for_the_same_contents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder, work = write_texts(tmp_path / "texts"), tmp_path / "work"
    first = made(folder, tokenizer, work)
    before = (work / "tokens.bin").stat().st_mtime_ns
    assert made(folder, tokenizer, work).record == first.record
    assert (work / "tokens.bin").stat().st_mtime_ns == before
    (folder / "0.txt").write_text("another text", encoding="utf-8")
    assert made(folder, tokenizer, work).record.digest != first.record.digest


def test_reading_is_heard_of_to_its_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    told: list[float] = []
    files = find_files([str(write_texts(tmp_path / "texts", 150))])
    words = (files, tokenizer, tokenizer.vocab_size, tmp_path / "work", TokenOptions())
    tokenised(*words, lambda _, share: told.append(share))
    assert len(told) == 3
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1)
    tokenised(*words, lambda _, share: told.append(share))
    assert len(told) == 3


def test_a_share_of_the_texts_can_be_enough(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", 200)
    whole = made(folder, tokenizer, tmp_path / "a").record
    part = made(
        folder, tokenizer, tmp_path / "b", TokenOptions(max_tokens=1000, held_out=0.3)
    ).record
    assert 0.1 * whole.num_documents < part.num_documents < 0.7 * whole.num_documents
    assert part.num_held_out > 0


def test_an_empty_text_and_a_foreign_vocabulary_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("  \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no text"):
        made(folder, tokenizer, tmp_path)
    (folder / "a.txt").write_text("one two", encoding="utf-8")
    files = find_files([str(folder)])
    with pytest.raises(VocabularyError, match="knows 20 ids"):
        tokenised(files, tokenizer, 20, tmp_path, TokenOptions(held_out=0.0))
    with pytest.raises(ConfigError, match="less than one window"):
        Windows(np.arange(3, dtype=np.uint16), "", 2, 8, 0)


def test_a_tokenizer_spells_any_text(tokenizer: Tokenizer) -> None:
    text = "naïve 42\n\t\N{SNOWMAN} <|end"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stop_ids == (0,)
    with pytest.raises(ConfigError, match="no room"):
        train_bpe(["text"], 100)
