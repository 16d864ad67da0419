"""Texts are bit for bit the same with a prompt store: empty, full, damaged, shared, cut short."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)

from doubles.tiny_families import add_words, write_family
from outrider import LLM, EngineConfig, SamplingParams
from outrider.cache.paged_kv import PagedKV
from outrider.core.errors import ConfigError
from outrider.models.loading import resolve
from outrider.plugins.prompt_store.files import StoreFolder

pytestmark = [pytest.mark.slow, pytest.mark.weights]

TARGET, HYBRID = "outrider/embedded", "outrider/embedded-hybrid"
DRAFT = "outrider/embedded-draft"
BEGINNING = "def quicksort(items):\n    return items\n\n" * 8
PROMPTS = [
    BEGINNING + "def",
    BEGINNING + "class Stack:",
    "class Queue:\n    def push(self, item):\n" * 6,
]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PAGE = 16

Texts = list[tuple[int, ...]]


def opened(model: str | Path, **settings: Any) -> LLM:
    draft = settings.pop("draft", None)
    usual: dict[str, Any] = {"device": "cpu", "page_size": PAGE, "batch_size": 2, "k": 3}
    return LLM(model, draft=draft, config=EngineConfig(**usual | settings))


def written(
    model: str | Path, prompts: Sequence[str] = PROMPTS, salt: str = "", **settings: Any
) -> tuple[Texts, list[int]]:
    """The texts, and how many tokens of each prompt were known."""
    with closing(opened(model, **settings)) as llm:
        results = [llm.generate(prompt, PARAMS, cache_salt=salt)[0] for prompt in prompts]
    return [one.token_ids for one in results], [one.num_cached_tokens for one in results]


def lengths(model: str | Path) -> list[int]:
    with closing(opened(model, drafter="none")) as llm:
        return [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TARGET, {"drafter": "none"}),
    "automatic": (TARGET, {}),
    "draft model": (TARGET, {"draft": DRAFT, "drafter": "model"}),
    "copied": (TARGET, {"drafter": "quantised-self"}),
    "hidden states": (TARGET, {"draft": "outrider/embedded-eagle"}),
    "heads": (TARGET, {"draft": "outrider/embedded-medusa"}),
    "two kinds of heads": (TARGET, {"draft": "outrider/embedded-eagle,outrider/embedded-mtp"}),
    "lanes": (TARGET, {"drafter": "ngram", "schedule": "pd"}),
    "trees": (TARGET, {"drafter": "ngram", "tree_nodes": 8}),
    "int8": (TARGET, {"drafter": "ngram", "kv_dtype": "int8"}),
    "reference": (TARGET, {"drafter": "ngram", "force_reference": True}),
    "hybrid": (HYBRID, {"drafter": "none"}),
    "hybrid with its block": (HYBRID, {"drafter": "mtp"}),
    "hybrid with a ring": (HYBRID, {"drafter": "ngram", "state_rollback": "ring"}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES)
def test_a_restart_knows_the_prompts_and_writes_the_same(case: str, tmp_path: Path) -> None:
    model, settings = CASES[case]
    plain, _ = written(model, **settings)
    store = str(tmp_path / "store")
    first, known = written(model, prompt_store=store, **settings)
    again, kept = written(model, prompt_store=store, **settings)
    assert first == again == plain
    whole = [(length - 1) // PAGE * PAGE for length in lengths(model)]
    assert known[0] == 0
    if model == TARGET:
        assert kept == whole
    else:  # states are stored at the ends of chunks and of what was written
        assert all(most - 256 < found <= most for found, most in zip(kept, whole, strict=True))
        assert min(kept) > 0


def test_a_store_fills_an_arena_that_is_too_small_for_it(tmp_path: Path) -> None:
    store = f"{tmp_path / 'store'}:1GB"
    settings: dict[str, Any] = {"drafter": "ngram", "batch_size": 1, "context": 400}
    plain, _ = written(TARGET, **settings)
    settings |= {"prompt_store": store, "arena_tokens": 336}
    assert written(TARGET, **settings)[0] == plain
    texts, known = written(TARGET, PROMPTS[::-1], **settings)
    assert texts == plain[::-1]
    assert min(known) > 0


# One sees a window in all layers, the others in some, which have an arena of their own unless the
# whole memory is as small. Keys of the last have two sizes, and an arena for each size.
@pytest.mark.parametrize(
    ("family", "tokens"), [("mistral", 0), ("gemma3_text", 0), ("gemma4", 0), ("gemma4", 96)]
)
def test_layers_with_windows(family: str, tokens: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = add_words(write_family(tmp_path / family, family))
    prompts = [[(5 * i + 3) % 96 for i in range(n)] for n in (40, 24)]
    found: list[Texts] = []
    known: list[list[int]] = []
    for store in ("", "store", "store"):
        path = str(tmp_path / store) if store else ""
        config = {"drafter": "ngram", "page_size": 4, "prefill_chunk": 8, "dtype": "float32"}
        config |= {"arena_tokens": tokens, "batch_size": 8} if tokens else {}
        with closing(opened(folder, prompt_store=path, **config)) as llm:
            state: Any = llm._pair.target.state  # pyright: ignore[reportPrivateUsage]
            assert len(state.arenas) == 1 + (tokens > 0)
            results = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
        found.append([one.token_ids for one in results])
        known.append([one.num_cached_tokens for one in results])
    assert found[1] == found[2] == found[0]
    assert known[2] == [36, 20]


@pytest.mark.parametrize("settings", [{"drafter": "mtp"}, {"state_rollback": "ring"}])
def test_whole_pages_of_a_hybrid_are_known_but_the_last(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """One token is left to be read, so the state before the last page is the longest of use."""
    prompts = [[10 + i % 7 for i in range(pages * PAGE)] for pages in (2, 5)]
    config = {"drafter": "ngram", "prompt_store": str(tmp_path / "store"), **settings}
    found: list[Texts] = []
    known: list[list[int]] = []
    for _ in range(2):
        with closing(opened(HYBRID, **config)) as llm:
            for _ in range(2):
                results = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
                found.append([one.token_ids for one in results])
                known.append([one.num_cached_tokens for one in results])
    assert known == [[0, PAGE], *[[PAGE, 4 * PAGE]] * 3]
    assert found == [found[0]] * 4


@pytest.mark.parametrize(
    ("draft", "drafter"), [(DRAFT, "model"), (DRAFT, "auto"), ("outrider/embedded-mtp", "mtp")]
)
def test_what_drafts_knows_prompts_of_the_same_salt_alone(
    draft: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model knows them after a restart too; heads read the states that are stored."""
    known, opening, target = list[int](), PagedKV.open, None

    def noted(self: PagedKV, *given: Any) -> int:
        found = opening(self, *given)
        if target is not None and self is not target and given[0] >= 0:
            known.append(found)
        return found

    monkeypatch.setattr(PagedKV, "open", noted)
    for salts in (("mine", "yours", "mine"), ("mine", "theirs")):
        store = str(tmp_path / "store")
        with closing(opened(TARGET, draft=draft, drafter=drafter, prompt_store=store)) as llm:
            target = llm._pair.target.state  # pyright: ignore[reportPrivateUsage]
            for salt in salts:
                llm.generate(PROMPTS[0], PARAMS, cache_salt=salt)
        target = None
    most = (lengths(TARGET)[0] - 1) // PAGE * PAGE
    assert known == [0, 0, most, most if draft == DRAFT else 0, 0]


def test_salts_keep_prompts_apart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"drafter": "none", "prompt_store": str(tmp_path / "store")}
    plain, _ = written(TARGET, salt="mine", **settings)
    others, known = written(TARGET, PROMPTS[:1], salt="yours", **settings)
    assert (others, known) == (plain[:1], [0])
    assert written(TARGET, PROMPTS[:1], salt="mine", **settings)[1][0] > 0


def test_a_changed_model_finds_nothing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve(TARGET), tmp_path / "model"))
    settings: dict[str, Any] = {"drafter": "none", "prompt_store": str(tmp_path / "store")}
    before, _ = written(folder, PROMPTS[:1], **settings)
    file = folder / "model.safetensors"
    tensors, stat = load_file(file), file.stat()
    name = next(name for name in tensors if "v_proj" in name)
    tensors[name] = torch.roll(tensors[name], 1, 0)
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == stat.st_size
    changed, known = written(folder, PROMPTS[:1], **settings)
    assert known == [0]
    assert changed == written(folder, PROMPTS[:1], drafter="none")[0] != before
    assert written(folder, PROMPTS[:1], dtype="float32", **settings)[1] == [0]


def test_flipped_bytes_are_read_again_from_the_text(tmp_path: Path) -> None:
    store = StoreFolder.opened(str(tmp_path / "store"))
    settings: dict[str, Any] = {"drafter": "none", "prompt_store": str(store.folder)}
    plain, _ = written(HYBRID, **settings)
    for number, one in enumerate(sorted(store.files(), key=lambda one: one.path)):
        data = bytearray(one.path.read_bytes())
        data[number * 7919 % len(data)] ^= 1 << number % 8
        if number % 3:
            one.path.write_bytes(data)
    assert written(HYBRID, **settings)[0] == plain
    list(store.verify())  # deletes those that no text met
    assert not [problem for _, problem in store.verify() if problem]
    assert written(HYBRID, **settings)[0] == plain


def test_a_size_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hold fewer than"):
        opened(TARGET, prompt_store=f"{tmp_path / 'store'}:1MB", page_size=256)


CHILD = """
import os, signal, sys
from pathlib import Path
from outrider import LLM, EngineConfig, SamplingParams

left = int(sys.argv[4])

def dying(call):
    def called(*args, **named):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **named)
    return called

class Written:
    # A file of which a kill leaves the first half.
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *raised):
        self.file.close()
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        dying(lambda: None)()
        self.file.write(data[len(data) // 2 :])
    def flush(self):
        self.file.flush()

if left:
    fdopen = os.fdopen
    os.fdopen = lambda number, mode="r": (Written(fdopen(number, mode)) if mode == "wb"
                                          else fdopen(number, mode))
    for module, name in ((os, "fsync"), (os, "utime"), (Path, "replace")):
        setattr(module, name, dying(getattr(module, name)))
config = EngineConfig(device="cpu", page_size=16, drafter="ngram", k=3, prompt_store=sys.argv[2])
llm = LLM(sys.argv[1], config=config)
for prompt in sys.argv[3].split("|"):
    result = llm.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))[0]
    print(*result.token_ids, flush=True)
llm.close()
"""


def child(model: str, store: Path, die_at: int = 0) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", CHILD, model, str(store), "|".join(PROMPTS), str(die_at)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def texts_of(process: subprocess.Popen[str]) -> Texts:
    lines = process.communicate(timeout=120)[0].splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@pytest.fixture(scope="module")
def plain() -> dict[str, Texts]:
    return {model: written(model, drafter="ngram")[0] for model in (TARGET, HYBRID)}


# 200 points in all: half of a file, before and after each of the calls by which it becomes whole.
@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("start", range(0, 100, 5))
@pytest.mark.parametrize("model", [TARGET, HYBRID])
def test_a_killed_process_leaves_no_wrong_text(
    model: str, start: int, plain: dict[str, Texts], tmp_path: Path
) -> None:
    store = StoreFolder.opened(str(tmp_path / "store"))
    num_killed = 0
    for point in range(start + 1, start + 6):
        process = child(model, store.folder, point)
        found = texts_of(process)
        num_killed += process.returncode == -9
        assert found == plain[model][: len(found)]
        assert not [problem for _, problem in store.verify() if problem]
    # Later processes find files of the earlier ones, and have less to write.
    assert num_killed or start
    whole = child(model, store.folder)
    assert texts_of(whole) == plain[model]
    assert written(model, drafter="ngram", prompt_store=str(store.folder))[0] == plain[model]


@pytest.mark.wide
@pytest.mark.usefixtures("warm_python")
def test_two_processes_share_a_store(plain: dict[str, Texts], tmp_path: Path) -> None:
    StoreFolder.opened(str(tmp_path / "store"))
    both = [child(HYBRID, tmp_path / "store") for _ in range(2)]
    assert [texts_of(one) for one in both] == [plain[HYBRID]] * 2
    store = StoreFolder.opened(str(tmp_path / "store"))
    assert not [problem for _, problem in store.verify() if problem]
    texts, known = written(HYBRID, drafter="ngram", prompt_store=str(store.folder))
    assert texts == plain[HYBRID]
    assert min(known) > 0
