"""GGUF files beside llama.cpp: where texts part, who is chosen, and what is compared."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.models.gguf.reader import read_header

BENCHMARKS = Path(__file__).parents[3] / "studies"
NEAR, FAR = 1e-3, 1.0


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # pyright: ignore[reportUnknownMemberType]
    return importlib.import_module("gguf_texts")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # pyright: ignore[reportUnknownMemberType]
    return importlib.import_module("gguf_requests")


def test_texts_part_at_near_ties_or_are_not_explained(texts: ModuleType) -> None:
    """Margins of equal positions differ by as much as those of near-ties may."""

    def text(*tokens: tuple[int, float]) -> Any:
        """Each token with its margin over that which the other side has there."""
        ids = tuple(token for token, _ in tokens)
        return texts.Text(ids, [{one: -margin, 1 - one: -2 * margin} for one, margin in tokens])

    ours = [text((0, FAR)), text((0, FAR), (0, NEAR)), text((0, FAR))]
    theirs = [text((0, FAR + 3 * NEAR)), text((0, FAR), (1, NEAR)), text((1, FAR))]
    found = texts.beside(ours, theirs)
    assert found["num_equal"] == 1
    assert found["mean_equal_tokens"] == pytest.approx(2 / 3)
    assert found["margins_apart"]["most"] == pytest.approx(3 * NEAR)
    near, far = found["splits"]
    assert (near["prompt"], near["place"], near["tokens"]) == (1, 1, (0, 1))
    assert (near["swing"], near["explained"]) == (pytest.approx(2 * NEAR), True)
    assert (far["swing"], far["explained"]) == (pytest.approx(2 * FAR), False)
    assert found["num_explained"] == 1


def test_a_token_that_the_other_side_does_not_think_of_is_not_explained(texts: ModuleType) -> None:
    one, other = texts.Text((5,), [{5: -0.1, 6: -2.0}]), texts.Text((7,), [{7: -0.1, 5: -2.0}])
    (split,) = texts.beside([one], [other])["splits"]
    assert split["margins"] == (None, pytest.approx(1.9))
    assert (split["swing"], split["explained"]) == (None, False)


def test_a_text_that_ends_one_token_sooner_is_the_same(texts: ModuleType) -> None:
    """llama.cpp may keep the token that ends a text to itself."""
    whole = texts.Text((5, 2), [{5: -0.1, 6: -2.0}] * 2)
    assert texts.beside([whole], [texts.Text((5,), whole.top[:1])])["num_equal"] == 1


def side(requests: ModuleType, seconds: float, calls: list[int]) -> Callable[..., Any]:
    """Writes so many tokens in so many seconds each, after half a second of reading."""

    def write(ids: Sequence[int], max_tokens: int) -> Any:
        calls.append(max_tokens)
        time = 0.5 + seconds * (max_tokens - 1)
        return requests.Turn(tuple(ids[:1]) * max_tokens, time, 0.5)

    return write


def test_the_best_of_both_write_the_same_prompts(requests: ModuleType) -> None:
    seconds = {
        "ours none": 0.02,
        "ours suffix": 0.01,
        "ours ngram k=4": 0.05,
        "llama.cpp none": 0.04,
        "llama.cpp ngram": 0.08,
    }
    calls = {name: list[int]() for name in seconds}
    sides = {name: side(requests, spent, calls[name]) for name, spent in seconds.items()}
    options = SimpleNamespace(quick=False, max_tokens=64)
    cell = requests.cell_of(sides, [[number] for number in range(8)], options)
    assert cell["chosen"] == {"ours": "ours suffix", "llama.cpp": "llama.cpp none"}
    # Who is far behind after one trial is not asked again, and nobody twice for one prompt.
    assert calls["ours ngram k=4"] == calls["llama.cpp ngram"] == [requests.TRIAL_TOKENS]
    assert calls["llama.cpp none"].count(64) == 6
    later = cell["later_tokens"]
    assert (later["value"], later["num_pairs"]) == (pytest.approx(2.0), 6)
    plain = cell["ratios"]["ours none over llama.cpp none"]["value"]
    assert plain == pytest.approx((0.5 + 63 * 0.04) / (0.5 + 63 * 0.02))
    assert (cell["num_texts_equal"], cell["same_as_plain"]) == (6, True)
    about = {"cell": "it", "threads": 2, "workload": "chat"}
    one, best = requests.bars_of([cell | about])
    assert (one["bar"], one["met"]) == (1.15, True)
    assert (best["bar"], best["met"]) == (1.5, True)
    (alone,) = requests.bars_of([cell | about | {"threads": 1}])
    assert alone["ratio"] == one["ratio"]


def test_transformers_takes_part_where_it_is_there(requests: ModuleType) -> None:
    """The faster dtype decodes plainly, and is not asked twice where nothing else is."""
    seconds = {
        "ours none": 0.02,
        "llama.cpp none": 0.04,
        "transformers none bfloat16": 0.2,
        "transformers none float32": 0.1,
        "transformers ngram k=4 float32": 0.05,
    }
    sides = {name: side(requests, spent, []) for name, spent in seconds.items()}
    options = SimpleNamespace(quick=False, max_tokens=64)
    cell = requests.cell_of(sides, [[number] for number in range(4)], options)
    assert cell["chosen"]["transformers"] == "transformers ngram k=4 float32"
    rates = cell["tokens_per_second"]
    assert list(rates) == [
        f"{who} {kind}"
        for who in ("ours", "llama.cpp", "transformers")
        for kind in ("none", "best")
    ]
    assert rates["transformers none"] == pytest.approx(64 / (0.5 + 63 * 0.1), abs=0.01)
    ratio = cell["ratios"]["ours best over transformers best"]["value"]
    assert ratio == pytest.approx((0.5 + 63 * 0.05) / (0.5 + 63 * 0.02))


def test_a_file_in_bfloat16_is_like_its_folder_though_its_norms_are_wider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)  # pyright: ignore[reportUnknownMemberType]
    sides = importlib.import_module("gguf_sides")
    number = 134_515_008

    def read_spec(_: str) -> SimpleNamespace:
        return SimpleNamespace(num_parameters=number)

    monkeypatch.setattr(sides, "read_spec", read_spec)
    for weight_bytes, is_like in ((269_100_288, True), (143_000_000, False), (4 * number, False)):
        spec = SimpleNamespace(weight_bytes=weight_bytes, num_parameters=number)
        assert sides._are_like(SimpleNamespace(spec=spec), tmp_path) is is_like


BENCH = """#!{python}
import json, sys
words = sys.argv[1:]
length = int(words[words.index("-p") + 1]) if "-p" in words else 0
rate = 2.0 if "off" in words else 1.0
if "-npl" in words:
    rate *= float(words[words.index("-npl") + 1])
    print("log", "|  PP | TG |", "|-----|----|", sep="\\n")
    print(f"|  64 | 16 |  2 |  9 |  0.1 |  9.5 |  0.2 |  {{rate}} |  0.3 |  9.5 |")
else:
    print(json.dumps([{{"samples_ts": [rate * (length or 8)]}}]))
"""


@pytest.mark.slow
def test_a_table_has_the_fastest_setting_of_the_peer_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that is twice as fast without flash attention is compared without it."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # pyright: ignore[reportUnknownMemberType]
    table = importlib.import_module("table")
    for name in ("llama-bench", "llama-batched-bench"):
        program = tmp_path / name
        program.write_text(BENCH.format(python=sys.executable))
        program.chmod(0o755)
    file, output = tmp_path / "tiny-q4_k_m.gguf", tmp_path / "table.json"
    words = ["--files", str(file), "--programs", str(tmp_path), "--output", str(output)]
    words += ["--quick", "--threads", "1", "--works"]
    assert table.table.main([*words, "plain,16 rows"]) == 0
    first = json.loads(output.read_text())["cells"]
    assert table.table.main([*words, "32 at once,16 rows,prompt 512"]) == 0
    report = json.loads(output.read_text())
    rates = {cell["work"]: cell["theirs"] for cell in report["cells"]}
    assert rates == {"plain": 16.0, "16 rows": 32.0, "prompt 512": 1024.0, "32 at once": 64.0}
    assert report["cells"][:2] == first
    assert {cell["setting"] for cell in report["cells"]} == {"-fa off / -fa off"}
    assert all(
        cell["speed"] == pytest.approx(cell["ours"] / cell["theirs"], rel=1e-2)
        for cell in report["cells"]
    )
    assert all(cell["share"] > 0 for cell in report["cells"])
    assert "| tiny-q4_k_m | llama.cpp |" in capsys.readouterr().out


def test_a_cell_is_behind_if_most_of_its_turns_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The medians are 2.5 seconds of theirs and 2.0 of ours, which is slower in two of three."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # pyright: ignore[reportUnknownMemberType]
    table = importlib.import_module("table")
    found = table.paired([1.8, 2.5, 4.0], [2.0, 5.0, 1.0])
    assert found == {"speed": 0.9, "least": 0.5, "most": 4.0}
    cell = {"file": "a", "work": "plain", "peer": "b", "ours": 8.0, "theirs": 9.0, "share": 0.5}
    assert "8.0 / 9.0: **0.90** [0.50 to 4.00] (0.50)" in table.markdown([cell | found])
    assert "**0.90** (0.50)" in table.markdown([cell | found | {"most": 0.95}])


def test_a_mix_of_four_and_six_bits_has_the_types_that_llama_quantize_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)  # pyright: ignore[reportUnknownMemberType]
    random_gguf = importlib.import_module("random_gguf")
    random_gguf.write_random_gguf(tmp_path / "tiny-q4_k_m.gguf")
    header = read_header(tmp_path / "tiny-q4_k_m.gguf")
    kinds = {name: entry.kind.name for name, entry in header.entries.items()}
    assert kinds["token_embd.weight"] == kinds["blk.1.attn_v.weight"] == "Q6_K"
    assert kinds["blk.0.ffn_down.weight"] == kinds["blk.1.attn_q.weight"] == "Q4_K"
    with pytest.raises(ConfigError, match="SHAPE-FORMAT"):
        random_gguf.write_random_gguf(tmp_path / "tiny-q9.gguf")
