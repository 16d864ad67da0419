"""What people type first who know another tool: it works, works with a note, or is answered with
a command that does. docs/guesses.md is this table.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants

from doubles.command_line import Command, nothing
from outrider.cli import call
from outrider.cli.verbs import FLAGS_READ, VERBS
from outrider.core.errors import CheckpointError, foreign_names
from outrider.core.settings import SETTINGS, Given, typed
from outrider.models.loading import _called  # pyright: ignore[reportPrivateUsage]

PAGE = Path(__file__).parents[3] / "docs" / "guesses.md"
WORKS, NOTE, ANSWER = "works", "note", "hint"


class Guess(NamedTuple):
    """A line, the tool whose users type it, what happens, and what is said of it on stderr."""

    tool: str
    line: str
    outcome: str
    said: str = ""


GUESSES = [
    Guess("Ollama", 'run smollm2 "Why is the sky blue?"', WORKS),
    Guess("Ollama", "run smollm2", WORKS),
    Guess("Ollama", "run smollm2 hi --verbose", NOTE, "--verbose is --stats here"),
    Guess("Ollama", "run smollm2 hi --format json", ANSWER, "`outrider generate PROMPT --json"),
    Guess("Ollama", "pull Qwen/Qwen3-0.6B", WORKS),
    Guess("Ollama", "list", WORKS),
    Guess("Ollama", "ls", NOTE, "`outrider ls` is `outrider list`"),
    Guess("Ollama", "show smollm2", NOTE, "`outrider show` is `outrider models inspect`"),
    Guess("Ollama", "info smollm2", NOTE, "`outrider info` is `outrider models inspect`"),
    Guess("Ollama", "generate hi --num-predict 64", NOTE, "--num-predict is --max-tokens here"),
    Guess("Ollama", "embed smollm2 hi", ANSWER, "no embeddings are made here"),
    Guess("Ollama", "version", ANSWER, "`outrider --version`"),
    Guess("Ollama", "upgrade", ANSWER, "`git pull` and `scripts/setup` in the checkout"),
    Guess("Ollama", "ps", WORKS),
    Guess("Ollama", "serve", WORKS),
    Guess("Ollama", "stop smollm2", WORKS),
    Guess("Ollama", "rm smollm2", ANSWER, "`hf cache rm` deletes them"),
    Guess("Ollama", "cp a b", ANSWER, "`outrider list --json` says where they are"),
    Guess("Ollama", "create mine", ANSWER, "`outrider train --help` makes models"),
    Guess("Ollama", "help", ANSWER, "`outrider --help`"),
    Guess("llama.cpp", 'generate -m ./model -p "Hello" -n 64', NOTE, "-n is --max-tokens here"),
    Guess("llama.cpp", "generate hi -c 4096 -t 8", NOTE, "-c is --context, -t is --threads here"),
    Guess("llama.cpp", "generate hi --temp 0.7 --top-k 40", NOTE, "--temp is --temperature here"),
    Guess("llama.cpp", "generate hi --top-p 0.9 --min-p 0.05 --seed 7", WORKS),
    Guess("llama.cpp", "generate hi --ctx-size 32K", NOTE, "--ctx-size is --context here"),
    Guess("llama.cpp", "generate hi -md ./draft", NOTE, "-md is --draft here"),
    Guess("llama.cpp", "generate hi --draft-max 8", NOTE, "--draft-max is --k here"),
    Guess("llama.cpp", "generate hi --draft-min 2", ANSWER, "did you mean '--min-k'?"),
    Guess("llama.cpp", "generate hi -ngl 99", ANSWER, "did you mean '--device'?"),
    Guess("llama.cpp", "generate hi -hf org/model", WORKS),
    Guess("llama.cpp", "generate hi --repeat-penalty 1.1", NOTE, "is --repetition-penalty here"),
    Guess("llama.cpp", "generate hi -r END", NOTE, "-r is --stop here"),
    Guess("llama.cpp", "generate hi -f prompt.txt", ANSWER, "`outrider generate - < FILE`"),
    Guess("llama.cpp", "generate hi --grammar-file list.gbnf", NOTE, "is --grammar here"),
    Guess("llama.cpp", "generate hi -cnv", ANSWER, "`outrider chat`"),
    Guess("llama.cpp", "chat -m ./model -sys 'Be brief.'", NOTE, "-sys is --system here"),
    Guess("llama.cpp", "server --port 8080", NOTE, "`outrider server` is `outrider serve`"),
    Guess("vLLM", "serve Qwen/Qwen3-0.6B --port 8000", WORKS),
    Guess("vLLM", "chat Qwen/Qwen3-0.6B", WORKS),
    Guess("vLLM", "chat --model Qwen/Qwen3-0.6B", WORKS),
    Guess("vLLM", "complete org/model hi", NOTE, "`outrider complete` is `outrider generate`"),
    Guess("vLLM", "generate org/model hi --max-tokens 64 --temperature 0", WORKS),
    Guess("vLLM", "generate hi --max-model-len 25.6k", NOTE, "--max-model-len is --context here"),
    Guess("vLLM", "generate hi --num-speculative-tokens 5", NOTE, "is --k here"),
    Guess("vLLM", "generate hi --speculative-model org/draft", NOTE, "is --draft here"),
    Guess("vLLM", "generate hi --speculative-config '{}'", ANSWER, "did you mean '--draft'?"),
    Guess("vLLM", "generate hi --dtype half", NOTE, "half is float16 here"),
    Guess("vLLM", "generate hi --quantization int8", NOTE, "--quantization is --quantise here"),
    Guess("vLLM", "generate hi --tensor-parallel-size 2", NOTE, "is --tensor-parallel here"),
    Guess("vLLM", "generate hi --gpu-memory-utilization .9", ANSWER, "mean '--arena-tokens'?"),
    Guess("vLLM", "generate hi --max-num-seqs 4", NOTE, "--max-num-seqs is --batch-size here"),
    Guess("vLLM", "run-batch -i in.jsonl -o out.jsonl", ANSWER, "`outrider batch INPUT OUTPUT`"),
    Guess("vLLM", "collect-env", NOTE, "`outrider collect-env` is `outrider doctor`"),
    Guess("vLLM", "bench", WORKS),
    Guess("transformers", "generate hi --max_new_tokens 64", NOTE, "is --max-tokens here"),
    Guess("transformers", "generate hi --assistant-model ./draft", NOTE, "is --draft here"),
    Guess("transformers", "generate hi --prompt-lookup-num-tokens 5", ANSWER, "mean '--k'?"),
    Guess("transformers", "generate hi --do-sample 1", ANSWER, "did you mean '--temperature'?"),
    Guess("transformers", "generate hi --load-in-8bit int8", ANSWER, "did you mean '--quantise'?"),
    Guess("transformers", "env", NOTE, "`outrider env` is `outrider doctor`"),
    Guess("LM Studio", "get Qwen/Qwen3-0.6B", NOTE, "`outrider get` is `outrider pull`"),
    Guess("LM Studio", "load Qwen/Qwen3-0.6B", ANSWER, "`outrider chat MODEL`"),
    Guess("LM Studio", "status", ANSWER, "`outrider doctor`"),
    Guess("LM Studio", "generate hi --stream", NOTE, "text is always shown as it comes"),
    Guess("mlx_lm", "generate --model ./model --prompt hi", WORKS),
    Guess("mlx_lm", "generate hi --draft-model ./draft", NOTE, "--draft-model is --draft here"),
    Guess("mlx_lm", "generate hi --num-draft-tokens 3", NOTE, "--num-draft-tokens is --k here"),
    Guess("mlx_lm", "generate hi --max-kv-size 4k", NOTE, "--max-kv-size is --context here"),
    Guess("mlx_lm", "convert ./model", ANSWER, "`outrider models export MODEL FILE`"),
]
HEAD = """\
# Commands of other tools

Commands that users of other tools type, and the result. Flags with the same meaning work, with a
note on stderr that gives the name here. Anything else ends with exit code 2 and a hint.
`tests/unit/cli/test_guesses.py` checks the table.

A token count may be `32K` (32,768) or `25.6k` (25,600). A model is a hub id, a folder, a file, or
the beginning of a name: `smollm2` is the only matching model in the hub's cache; if there is
none, the error says what to pull.
"""
STANDS_FOR = {
    "MODEL": "outrider/embedded",
    "FILE": "x.gguf",
    "PROMPT": "hi",
    "INPUT": "in.jsonl",
    "OUTPUT": "out.jsonl",
}


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "import_module", nothing)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("guess", GUESSES, ids=lambda guess: guess.line)
def test_a_guess_works_or_is_answered(outrider: Command, guess: Guess) -> None:
    done = outrider(*shlex.split(guess.line))
    assert "Traceback" not in done.err
    if guess.outcome == WORKS:
        assert (done.code, done.err) == (0, "")
    elif guess.outcome == NOTE:
        assert done.code == 0
        assert done.err.startswith("note: ")
        assert done.err.count("\n") == 1
    else:
        assert (done.code, done.out) == (2, "")
        assert "\n  try: " in done.err
    assert guess.said in done.err


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "guess", [one for one in GUESSES if one.outcome == ANSWER], ids=lambda guess: guess.line
)
def test_the_command_of_an_answer_is_one(outrider: Command, guess: Guess) -> None:
    hint = outrider(*shlex.split(guess.line)).err.partition("\n  try: ")[2]
    commands = list(_commands_in(guess, hint))
    assert commands
    for words in commands:
        done = outrider(*words)
        assert done.code == 0, done.err


def _commands_in(guess: Guess, hint: str) -> Iterator[list[str]]:
    """Those in backticks, and the guess with the flag that is meant in place of its own."""
    for line in re.findall(r"`outrider ([^`<]*)", hint):
        words = shlex.split(line)
        yield [STANDS_FOR.get(word, word) for word in words if word != "VERB"]
    meant = re.search(r"did you mean '(--[\w-]+)'\? (-[\w-]+)", hint)
    if meant:
        ours, theirs = meant.groups()
        values = {"--device": "cpu", "--arena-tokens": "4096"}
        words = shlex.split(guess.line)
        place = words.index(theirs)
        yield [*words[:place], ours, values.get(ours, words[place + 1]), *words[place + 2 :]]


def test_the_page_is_this_table() -> None:
    rows = [("tool", "command", "result", "note or hint")]
    rows += [("---",) * 4]
    rows += [(one.tool, f"`outrider {one.line}`", one.outcome, one.said) for one in GUESSES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert PAGE.read_text("utf-8") == f"{HEAD}\n{table}\n"


def test_there_are_sixty_and_more_of_six_tools() -> None:
    assert len({guess.line for guess in GUESSES}) == len(GUESSES) >= 60
    assert len({guess.tool for guess in GUESSES}) == 6


def test_every_flag_that_is_read_is_one_of_ours_and_no_other() -> None:
    ours = {flag for verb in VERBS for flag in verb.flags()}
    assert set(FLAGS_READ.values()) <= ours
    assert not set(FLAGS_READ) & ours
    assert {name for name in foreign_names() if name in FLAGS_READ} <= set(FLAGS_READ)


def test_there_are_at_most_17_verbs_on_the_front_page() -> None:
    assert len([verb for verb in VERBS if verb.group]) <= 17


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("line", "newer"),
    [
        ("pairs", "models pairs"),
        ("simulate", "bench simulate"),
        ("prompts", "bench prompts"),
    ],
)
def test_older_places_of_verbs_work_with_a_note(outrider: Command, line: str, newer: str) -> None:
    assert outrider(line).err == f"note: `outrider {line}` is `outrider {newer}`\n"
    assert outrider(*newer.split()).err == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("hi",), {"PROMPT": "hi"}),
        (("org/model", "hi"), {"MODEL": "org/model", "PROMPT": "hi"}),
    ],
)
def test_a_model_is_a_word_before_the_prompt(words: tuple[str, ...], named: dict[str, str]) -> None:
    generate = next(verb for verb in VERBS if verb.name == "generate")
    assert generate.named(words) == named


@pytest.mark.parametrize(
    ("count", "said"),
    [("1.5", "must be an integer"), ("k", "must be an integer"), ("1.0001k", "an integer")],
)
def test_counts_that_are_none_are_refused(outrider: Command, count: str, said: str) -> None:
    done = outrider("generate", "hi", "--max-tokens", count)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    ("count", "number"),
    [("32K", 32768), ("25.6k", 25600), ("1m", 10**6), ("2M", 1 << 21), ("1.5K", 1536)],
)
def test_counts_may_have_a_multiple(count: str, number: int) -> None:
    assert typed(SETTINGS["max_tokens"], Given(count, "--max-tokens")) == number


class TestNames:
    """Of models that are no hub ids, with a hub cache of this test's own."""

    @pytest.fixture(autouse=True)
    def cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        _called.cache_clear()
        return tmp_path

    @pytest.mark.parametrize("verb", ["run", "chat", "generate"])
    def test_a_model_that_is_not_here_is_answered_with_what_fetches_it(
        self, outrider: Command, verb: str
    ) -> None:
        done = outrider(verb, "smollm2", "Why is the sky blue?")
        assert (done.code, done.out) == (3, "")
        assert "no model 'smollm2'" in done.err
        assert "`outrider pull HuggingFaceTB/SmolLM2-135M-Instruct`" in done.err

    @pytest.mark.parametrize(
        ("name", "fetched"),
        [
            ("llama3.2", "meta-llama/Llama-3.2-1B-Instruct"),
            ("llama3", "meta-llama/Llama-3.2-1B-Instruct"),
            ("llama3.1:8b", "meta-llama/Llama-3.1-8B-Instruct"),
            ("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
            ("gemma3:1b", "google/gemma-3-1b-it"),
            ("deepseek-r1:1.5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
            # Of a version that is not known, the family.
            ("llama9", "meta-llama/Llama-3.2-1B-Instruct"),
        ],
    )
    def test_names_of_others_are_answered_with_the_hubs(self, name: str, fetched: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            _called(name, Path(name))
        assert f"`outrider pull {fetched}`" in str(caught.value.hint)

    def test_heads_are_no_models_to_run(self) -> None:
        with pytest.raises(CheckpointError) as caught:
            _called("nosuch", Path("nosuch"))
        hint = str(caught.value.hint)
        assert "outrider/embedded, outrider/embedded-draft, outrider/embedded-hybrid." in hint
        assert "`outrider pull HuggingFaceTB/SmolLM2-135M-Instruct`" in hint

    def test_the_one_model_of_that_name_is_taken(
        self, cached: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = cached / "models--org--SmolLM2-135M-Instruct"
        (folder / "snapshots" / "c").mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("c")
        for name in ("smollm2", "SmolLM2:135m", "smollm2-135m-instruct"):
            assert _called(name, Path(name)) == "org/SmolLM2-135M-Instruct"
        assert "taking org/SmolLM2-135M-Instruct" in caplog.text
        with pytest.raises(CheckpointError):
            _called("135m", Path("135m"))

    def test_a_folder_that_was_made_here_is_taken(
        self, outrider: Command, cached: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outrider.models.loading.cache_folder", lambda: cached)
        folder = cached / "real" / "SmolLM2-135M-Instruct"
        folder.mkdir(parents=True)
        with pytest.raises(CheckpointError):
            _called("smollm2", Path("smollm2"))
        (folder / "config.json").write_text("{}")
        assert _called("smollm2", Path("smollm2")) == folder
        listed = json.loads(outrider("models", "list", "--json").out)
        assert str(folder) in json.dumps(listed)
        # The same model in the hub's cache goes before it, by its own name.
        _called.cache_clear()
        (cached / "models--org--SmolLM2-135M-Instruct").mkdir()
        assert _called("smollm2", Path("smollm2")) == "org/SmolLM2-135M-Instruct"

    def test_of_several_models_none_is_taken(self, cached: Path) -> None:
        for name in ("a", "b"):
            (cached / f"models--{name}--Qwen3-8B").mkdir()
        with pytest.raises(CheckpointError, match="may be one of a/Qwen3-8B, b/Qwen3-8B"):
            _called("qwen3", Path("qwen3"))


def test_a_message_in_the_place_of_a_model_is_told(outrider: Command) -> None:
    done = outrider("run", "Why is the sky blue?")
    assert (done.code, done.out) == (2, "")
    assert "no model is called 'Why is the sky blue?'" in done.err
    assert "`outrider run MODEL PROMPT`" in done.err
