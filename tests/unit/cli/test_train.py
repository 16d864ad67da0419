"""`outrider train`: a draft that the engine then uses, runs that go on, mistakes that are named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from doubles.clocks import FakeClock
from doubles.command_line import Command
from doubles.warm_python import warm
from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.errors import MachineError
from outrider.core.params import SamplingParams
from outrider_lab.cli.train import Preparation
from outrider_lab.train import session, worth
from outrider_lab.train.folder import STATE, WORK

pytestmark = pytest.mark.wide

SMALL = ("--batch", "2", "--window", "64", "--warmup", "1", "--device", "cpu")
DRAFT = (*SMALL, "--hidden", "64", "--layers", "1", "--exam-prompts", "2")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        body = f"def add_{number}(a, b):\n    return a + b + {number}\n\n\n" * 12
        (folder / f"{number}.py").write_text(body, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.weights
def test_a_draft_is_trained_written_and_used(outrider: Command, texts: Path) -> None:
    words = ("train", "draft", "made", str(texts), *DRAFT, "--steps", "3", "--json")
    shown = outrider(*words)
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["steps"] == 3
    assert 1 <= record["before"]["tokens_per_round"] < 1.3
    folder = Path("made")
    card = (folder / "README.md").read_text(encoding="utf-8")
    for said in ("outrider/embedded", "not told: 12 files", "tokens per round", "SHA-256"):
        assert said in card
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    assert len(provenance["files"]) == 12
    assert provenance["standing"]["step"] == 3

    done = outrider("train", "draft", "made", str(texts), *DRAFT, "--steps", "3", "--json")
    assert json.loads(done.out)["loss"] == record["loss"]
    other = outrider(
        "train", "draft", "made", str(texts), *SMALL, "--hidden", "128", "--steps", "3"
    )
    assert other.code == 2
    assert "--fresh" in other.err

    llm = LLM(draft="made", config=EngineConfig(device="cpu"))
    plain = LLM(config=EngineConfig(device="cpu", drafter="none"))
    params = SamplingParams(max_tokens=24)
    with_draft, without = (one.generate("def add(a, b):", params)[0] for one in (llm, plain))
    assert with_draft.token_ids == without.token_ids
    llm.close()
    plain.close()


@pytest.mark.slow
@pytest.mark.weights
def test_dflash_layers_learn_from_the_targets_own_text_and_draft_it(
    outrider: Command, texts: Path
) -> None:
    sizes = ("--block", "4", "--layers", "1", "--written", "4096", "--learning-rate", "0.003")
    words = ("train", "dflash", "made", str(texts), *SMALL, *sizes, "--exam-prompts", "2")
    shown = outrider(*words, "--steps", "60", "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["before"]["tokens_per_round"] == 1
    # Chance is one of 8,192 ids: a loss of nine nats.
    assert record["loss"] < 5
    assert len(record["worth"]["kept"]) == 3
    plain = LLM(config=EngineConfig(device="cpu", drafter="none"))
    llm = LLM(draft="made", config=EngineConfig(device="cpu", controller="fixed", watchdog="off"))
    params = SamplingParams(max_tokens=48)
    prompts = [f"def add_{number}(a, b):\n" for number in range(3)]
    wanted, found = (one.generate(prompts, params) for one in (plain, llm))
    assert llm.drafter == "dflash"
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    num_accepted, num_rounds = (
        sum(getattr(one.stats, name) for one in found) for name in ("num_accepted", "num_rounds")
    )
    assert num_accepted > 0.04 * num_rounds, "by chance 3 in 8,192"
    llm.close()
    plain.close()


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.usefixtures("outrider")
def test_simulated_rounds_are_the_engines(tmp_path: Path) -> None:
    """The exam of a finished draft says what the engine then does after the same prompts."""
    from outrider_lab.bench.workload import builtin_texts
    from outrider_lab.train.loop import TrainPlan
    from outrider_lab.train.session import RunWish, open_session
    from outrider_lab.train.setup import DraftWish, draft_recipe
    from outrider_lab.train.tokens import TokenOptions

    (tmp_path / "text.py").write_text("x = 1\n" * 400, encoding="utf-8")
    prompts = tuple(builtin_texts("code")[:3])
    wish = RunWish(
        folder=tmp_path / "run",
        words=("text.py",),
        plan=TrainPlan(steps=1),
        prompts=prompts,
        exam_tokens=40,
        window=16,
        text=TokenOptions(held_out=0.0),
        device="cpu",
    )
    session = open_session(wish, "outrider/embedded")
    recipe = draft_recipe(session, DraftWish(start="outrider/embedded-draft"))
    simulated = recipe.measure(session.text.trainer(recipe).module.eval())["tokens_per_round"]
    llm = LLM(config=EngineConfig(device="cpu", controller="fixed", k=4))
    params = SamplingParams(max_tokens=40)
    results = [llm.generate(prompt, params)[0] for prompt in prompts]
    llm.close()
    assert [r.token_ids for r in results] == [
        one.ids[one.num_prompt :] for one in session.exam.texts
    ]
    num_rounds = sum(result.stats.num_rounds for result in results)
    measured = sum(len(result.token_ids) for result in results) / num_rounds
    assert simulated == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
@pytest.mark.weights
def test_a_killed_run_goes_on(outrider: Command, texts: Path, tmp_path: Path) -> None:
    words = ["train", "draft", "made", str(texts), *DRAFT, "--save-seconds", "0.2"]
    command = [sys.executable, "-m", "outrider", *words, "--steps", "100000"]
    state = tmp_path / "made" / WORK / STATE
    with warm(), subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 240
            while not state.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
    assert state.exists()
    shown = outrider(*words, "--minutes", "0.001")
    assert shown.code == 0, shown.err
    assert "going on from step" in shown.err


@pytest.mark.slow
@pytest.mark.weights
def test_a_tokenizer_and_then_a_model_of_ones_own(outrider: Command, texts: Path) -> None:
    made = outrider("train", "tokenizer", "words", str(texts), "--size", "400", "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out)["num_tokens"] <= 400
    words = ("train", "pretrain", "model", str(texts), *SMALL, "--tokenizer", "words")
    shown = outrider(*words, "--hidden", "64", "--layers", "1", "--steps", "30", "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["after"].get("held_out_loss", 0) <= record["before"].get("held_out_loss", 0)
    assert record["loss"] < 6
    reply = outrider(
        "generate", "def", "--target", "model", "--drafter", "none", "--max-tokens", "4"
    )
    assert reply.code == 0, reply.err


@pytest.mark.slow
@pytest.mark.weights
def test_a_student_learns_from_its_own_text(outrider: Command, texts: Path) -> None:
    words = ("train", "draft", "made", str(texts), *DRAFT, "--steps", "2", "--on-policy", "0.5")
    shown = outrider(*words, "--reverse", "1", "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["loss"] > 0


@pytest.mark.slow
@pytest.mark.weights
def test_a_finished_training_is_reported_though_its_worth_cannot_be_measured(
    outrider: Command, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MachineError("the arena does not fit in memory")

    monkeypatch.setattr(worth, "state_worth", refuse)
    shown = outrider("train", "draft", "made", str(texts), *DRAFT, "--steps", "2", "--json")
    assert shown.code == 0, shown.err
    assert "not measured: the arena does not fit in memory" in shown.err
    record = json.loads(shown.out)
    assert record["steps"] == 2
    assert "worth" not in record


@pytest.mark.slow
@pytest.mark.weights
def test_the_target_writes_what_is_learned_once(
    outrider: Command, texts: Path, tmp_path: Path
) -> None:
    words = ("train", "draft", "made", str(texts), *DRAFT, "--written", "512", "--json")
    assert outrider(*words, "--steps", "2").code == 0
    (written,) = (tmp_path / "made" / WORK).glob("written-*.bin")
    assert written.stat().st_size == 2 * 512
    before = written.read_bytes()
    assert outrider(*words, "--steps", "3").code == 0
    assert written.read_bytes() == before
    other = outrider("train", "draft", "made", str(texts), *DRAFT, "--steps", "3")
    assert other.code == 2
    assert "text" in other.err


@pytest.mark.weights
def test_an_interrupt_before_training_says_what_it_cost(
    outrider: Command, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "tokenised", interrupted)
    shown = outrider("train", "draft", "made", str(texts), *DRAFT, "--steps", "1")
    assert shown.code == 130
    assert shown.err.splitlines()[0] == "reading the texts"
    assert "stopped before training began" in shown.err


def test_what_takes_long_before_training_is_told_now_and_then() -> None:
    clock, out = FakeClock(), StringIO()
    heard = Preparation(out, clock=clock)
    for share in range(0, 100, 10):
        heard("reading", share / 100)
        clock.advance(2.0)
    heard("writing", 0.0)
    assert out.getvalue().splitlines() == [
        "reading",
        *(f"reading: {n} %" for n in (30, 60, 90)),
        "writing",
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("draft",), 2, "FOLDER is missing"),
        (("draft", "made"), 2, "TEXTS is missing"),
        (("draft", "made", "nowhere"), 2, "nowhere"),
        (("draft", "made", "texts", "--target", "none/such"), 3, "none/such"),
        (("draft", "taken", "texts"), 2, "taken"),
        (("draft", "file", "texts"), 2, "file"),
        (("draft", "made", "texts", "--hidden", "100"), 2, "--hidden 128"),
        (("draft", "made", "empty"), 2, "empty"),
        (("tokenizer", "taken", "texts"), 2, "taken"),
        (("pretrain", "made", "texts", "--tokenizer", "texts"), 3, "tokenizer.json"),
        (("draft", "file/made", "texts"), 3, "file/made cannot be written"),
        (("tokenizer", "file/made", "texts"), 3, "file/made cannot be written"),
        (("tokenizer", "made", "broken.jsonl"), 2, "line 1 is not JSON"),
        (("tokenizer", "made", "list.jsonl"), 2, "neither an object nor a text"),
        (("tokenizer", "made", "key.jsonl"), 2, "its keys are body"),
        (("tokenizer", "made", "key.jsonl", "--field", "bdy"), 2, "no text under 'bdy'"),
    ],
    ids=str,
)
@pytest.mark.weights
@pytest.mark.usefixtures("texts")
def test_mistakes_are_named_with_what_to_try(
    outrider: Command,
    tmp_path: Path,
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for name, line in (("broken", "{oops"), ("list", "[1]"), ("key", '{"body": "x"}')):
        (tmp_path / f"{name}.jsonl").write_text(line, encoding="utf-8")
    shown = outrider("train", *words)
    assert (shown.code, shown.out) == (code, "")
    assert said in shown.err
    assert "try:" in shown.err
    # Nobody waits for what can be told at once.
    assert "held-out prompts" not in shown.err
    assert (tmp_path / "taken" / "thesis.txt").read_text(encoding="utf-8") == "mine"
