"""Published sets: which rows become prompts, and what is said when they cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest

from outrider.core.errors import MachineError
from outrider_lab.bench.published import PUBLISHED, published_texts
from outrider_lab.bench.workload import SUMMARIZE

ROWS: Mapping[str, list[dict[str, Any]]] = {
    "code": [{"prompt": "def f():"}, {"prompt": "def g():"}],
    "conversation": [
        {"instruction": "Sort these.", "input": "3, 1"},
        {"instruction": "Name a colour.", "input": ""},
    ],
    "summarization": [{"article": "word " * 513}, {"article": "word " * 512}],
    "maths": [{"question": "1 + 1?", "answer": "2"}],
    "translation": [{"translation": {"de": "Guten Tag.", "en": "Good day."}}],
    "retrieval": [{"context": "A is B.", "question": "What is A?", "answers": {}}],
}


class Hub:
    """A hub folder with one parquet file a repository, and a reader of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []

    def snapshot_download(self, repo: str, **wanted: Any) -> str:
        self.asked.append(repo)
        assert wanted["repo_type"] == "dataset"
        domain = next(name for name, chosen in PUBLISHED.items() if chosen.repo == repo)
        path = self.folder / domain / PUBLISHED[domain].files.replace("*", "00000-of-00001")
        path.parent.mkdir(parents=True)
        path.write_text(domain)
        return str(self.folder / domain)


class ParquetFile:
    def __init__(self, path: Path) -> None:
        self.domain = path.read_text()

    def iter_batches(self) -> Iterator[ParquetFile]:
        yield self

    def to_pylist(self) -> list[dict[str, Any]]:
        return ROWS[self.domain]


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    module = ModuleType("pyarrow.parquet")
    vars(module)["ParquetFile"] = ParquetFile
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    return found


@pytest.mark.usefixtures("hub")
def test_rows_become_prompts() -> None:
    assert published_texts("code", 1, words) == ["def f():"]
    assert published_texts("conversation", 9, words) == ["Name a colour."]
    assert published_texts("maths", 9, words) == ["Question: 1 + 1?\nAnswer:"]
    assert published_texts("translation", 9, words) == ["Translate German to English: Guten Tag."]
    (asked,) = published_texts("retrieval", 9, words)
    assert asked == "A is B.\n\nQuestion: What is A?\nAnswer:"


@pytest.mark.usefixtures("hub")
def test_articles_of_more_than_512_tokens_are_left_out() -> None:
    assert published_texts("summarization", 9, words) == ["word " * 512 + SUMMARIZE]


def test_sets_are_fetched_by_name(hub: Hub) -> None:
    for domain in PUBLISHED:
        published_texts(domain, 1, words)
    assert hub.asked == [
        *("openai/openai_humaneval", "tatsu-lab/alpaca", "abisee/cnn_dailymail"),
        *("openai/gsm8k", "wmt/wmt14", "rajpurkar/squad"),
    ]


def test_a_missing_reader_is_said_before_anything_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MachineError, match="pyarrow") as caught:
        published_texts("code", 1, words)
    assert "pip install 'pyarrow>" in str(caught.value.hint)
    assert hub.asked == []


@pytest.mark.usefixtures("hub")
def test_the_hubs_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(MachineError, match=r"no route to the hub\n"):
        published_texts("code", 1, words)


def test_a_domain_without_a_published_set() -> None:
    with pytest.raises(MachineError, match="echo"):
        published_texts("echo", 1, words)
