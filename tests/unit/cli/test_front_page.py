"""The front page answers at once, and no word on the command line is left unexplained."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from doubles.command_line import Command, nothing
from doubles.warm_python import warm
from outrider import __version__
from outrider.cli import call
from outrider.cli.options import Verb
from outrider.cli.verbs import VERBS

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2")
PATHS: dict[tuple[str, ...], Verb] = {
    (*path, verb.name): verb
    for path, verbs in [((), VERBS), *(((v.name,), v.parts) for v in VERBS)]
    for verb in verbs
}


FRONT = [(), ("--help",), ("--version",)]
LINES = [*FRONT, *((*words, "--help") for words in PATHS), ("config",)]


@pytest.fixture(scope="module")
def modules_after() -> dict[tuple[str, ...], set[str]]:
    """What is imported when each line is done. All run in one interpreter, one after the other:
    what a line imports stays, so it shows at that line or was there before."""
    script = (
        "import sys\n"
        "from outrider.cli.main import run\n"
        f"for words in {LINES!r}:\n"
        "    code = run(list(words))\n"
        "    print('\\nMODULES', *sys.modules)\n"
        "    if code: sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return {words: set(names) for words, names in zip(LINES, found, strict=True)}


@pytest.mark.parametrize("words", FRONT, ids=" ".join)
def test_the_front_page_imports_no_parser_and_no_model(
    modules_after: dict[tuple[str, ...], set[str]], words: tuple[str, ...]
) -> None:
    assert not modules_after[words] & {*HEAVY, "cyclopts", "rich", "yaml"}


@pytest.mark.parametrize("words", PATHS, ids=" ".join)
def test_help_of_a_verb_imports_no_parser_and_no_model(
    modules_after: dict[tuple[str, ...], set[str]], words: tuple[str, ...]
) -> None:
    assert not modules_after[*words, "--help"] & {*HEAVY, "cyclopts", "rich", "yaml"}


def test_config_shows_settings_without_importing_a_model(
    modules_after: dict[tuple[str, ...], set[str]],
) -> None:
    assert not modules_after["config",] & set(HEAVY)
    assert "cyclopts" in modules_after["config",]


@pytest.mark.alone
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_is_quick(words: list[str]) -> None:
    """200 ms is the promise; on a busy machine, a dozen bare interpreters' time."""
    ours, bare = [
        min(seconds([sys.executable, *start]) for _ in range(5))
        for start in (["-m", "outrider", *words], ["-c", "pass"])
    ]
    assert ours < max(0.2, 12 * bare)


def seconds(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True, timeout=240)
    return time.perf_counter() - start


@pytest.mark.parametrize(("seconds", "named"), [(0.0, True), (60.0, False)])
def test_imports_that_take_long_are_named(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, seconds: float, named: bool
) -> None:
    imported = call.import_module

    def slowly(name: str) -> object:
        time.sleep(0.2)
        return imported(name)

    monkeypatch.setattr(call, "import_module", slowly)
    monkeypatch.setattr(call, "_SILENCE", seconds)
    shown = outrider("config", "--json")
    assert ("starting: its modules are imported" in shown.err) is named
    assert json.loads(shown.out)


def test_the_front_page_names_every_verb_and_its_meaning(outrider: Command) -> None:
    shown = outrider("--help")
    assert shown.code == 0
    unwrapped = " ".join(shown.out.split())
    for verb in VERBS:
        assert (verb.text in unwrapped) == bool(verb.group)
    assert shown.out.count("\n") <= 45
    assert outrider().out == shown.out


def test_the_version_is_the_package_version(outrider: Command) -> None:
    assert outrider("--version").out == f"outrider {__version__}\n"


def pasted(page: str) -> str:
    """With commands that go on after a backslash as a shell reads them."""
    return re.sub(r" \\\n +", " ", page)


@pytest.mark.parametrize("words", PATHS, ids=" ".join)
def test_help_of_a_verb_names_every_option_and_an_example(
    outrider: Command, words: tuple[str, ...]
) -> None:
    shown = outrider(*words, "--help-all")
    assert shown.code == 0
    assert f"\nExample:\n  {PATHS[words].example}\n" in pasted(shown.out)
    before, _, _ = shown.out.partition("Example:")
    assert max(map(len, before.splitlines())) <= 100
    shown_flags = shown.out + shown.out.replace("[no-]", "no-") + shown.out.replace("[no-]", "")
    for flag in PATHS[words].flags() if PATHS[words].target else ():
        assert re.search(rf"(?<!\S){flag}(?![\w-])", shown_flags)


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("words", PATHS, ids=" ".join)
def test_help_of_a_verb_fits_a_screen(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = outrider(*words, "--help")
    assert (shown.code, outrider(*words, "-h").out) == (0, shown.out)
    assert shown.out.count("\n") <= 45
    assert PATHS[words].example in pasted(shown.out)
    assert max(map(len, shown.out.splitlines())) <= int(columns)


# Words that mean something else, or nothing, to whoever has not read docs/vocabulary.md.
OWN_WORDS = {
    *("arena", "carry", "contestant", "emit", "exam", "foreseen", "foresees", "glue", "lane"),
    *("lanes", "law", "laws", "ledger", "mass", "piece", "pieces", "scene", "shaper"),
    *("staged", "trunk", "verdict", "verdicts", "visit", "visits"),
}


@pytest.mark.parametrize("words", [(), *PATHS], ids=" ".join)
def test_help_has_no_word_of_our_own(outrider: Command, words: tuple[str, ...]) -> None:
    shown = outrider(*words, "--help").out
    assert not OWN_WORDS & set(re.findall(r"(?<![-\w])[a-z]+(?![-\w])", shown.lower()))


@pytest.mark.parametrize(
    "words", [words for words, verb in PATHS.items() if verb.settings], ids=" ".join
)
def test_every_verb_with_settings_takes_them_by_key(
    outrider: Command, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "import_module", nothing)
    given = outrider(*words, "--set", "log_level=info", "--set", "nobody=1")
    assert (given.code, "no setting 'nobody'" in given.err) == (2, True)
    assert outrider(*words, "--set", "log_level=info").code == 0
    assert "--log-level" in outrider(*words, "--help", "log level").out


def test_help_searches_for_a_word(outrider: Command) -> None:
    shown = outrider("generate", "--help", "penalty")
    assert shown.code == 0
    assert "--presence-penalty" in shown.out
    assert "--temperature" not in shown.out
    assert "--kv-window" in outrider("--help", "kv window").out
    nothing = outrider("generate", "--help", "zzzz")
    assert (nothing.code, nothing.out) == (2, "")
    assert "outrider generate --help-all" in nothing.err


def test_a_setting_has_a_flag_a_key_and_other_words(outrider: Command) -> None:
    def k_and_target(*words: str) -> list[object]:
        found = json.loads(outrider("config", "--json", *words).out)
        return [found["k"]["value"], found["target"]["value"]]

    plain = k_and_target("--k", "3", "--target", "x")
    assert plain == [3, "x"]
    assert k_and_target("--set", "k=3", "-m", "x") == plain
    assert k_and_target("--set=k=3", "--set", "target=x") == plain
    assert k_and_target("--k", "3", "--model", "x") == plain


# Without a server at the usual address, a network, or a folder of results, these say so.
ENDS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("models", "pull"): (0, 3),
    ("models", "ollama"): (0, 3),
    ("models", "ping"): (0, 3),
    ("top",): (0, 3),
    ("stop",): (0, 2),
    # There may be no such folder.
    **{("cache", part): (0, 2) for part in ("list", "clear", "verify")},
    ("report",): (2,),
}


# A verb with parts may show the example of one of them.
EXAMPLES = {verb.example: words for words, verb in PATHS.items()}


# They have a pipe, or make a file. A process each would import torch anew for the others, which run
# in this one below.
IN_A_SHELL = [("chat",), ("batch",)]
# What makes an example do less in a test, by the first words of its verb.
LESS: dict[tuple[str, ...], str] = {
    ("train",): "--batch 2 --window 64",
    ("train", "tokenizer"): "",
    ("bench", "k"): "--max-tokens 8 --no-plots",
    ("bench", "drafters"): "--no-plots",
    ("bench", "engines"): "--no-plots",
    ("draft",): "--seconds 2",
    ("draft", "check"): "",
    ("draft", "suggest"): "",
}


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("words", IN_A_SHELL, ids=" ".join)
def test_examples_work_when_pasted_into_a_shell(words: tuple[str, ...], tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "outrider"])
    line = PATHS[words].example.replace("outrider ", f"{command} ", 1)
    done = subprocess.run(
        ["sh", "-c", line], check=False, capture_output=True, cwd=tmp_path, timeout=400
    )
    assert done.returncode in ENDS.get(words, (0,)), done.stderr


@pytest.mark.weights
def test_the_example_of_chat_works_in_this_process(outrider: Command) -> None:
    shown = outrider(*shlex.split(PATHS["chat",].example)[1:])
    assert shown.code == 0, shown.err
    assert shown.out.strip()


# Whole certificates take more than a minute; test_verify.py has small ones, and test_plan.py plans.
# Other engines are processes that import torch anew; those of test_bench_peers.py pretend. The same
# holds for test_bench_sweep.py.
LONG = [("verify",), ("plan",), *(("bench", name) for name in ("peers", "sweep"))]
# It writes a gigabyte: test_inflate.py does less of it.
LARGE = [("models", "inflate")]
ELSEWHERE = [*IN_A_SHELL, *LONG, *LARGE]


@pytest.mark.sample(8)
@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [words for words in EXAMPLES.values() if words not in ELSEWHERE], ids=" ".join
)
def test_examples_work(outrider: Command, words: tuple[str, ...]) -> None:
    """In this process, and with less to do where that is known."""
    less = LESS.get(words, LESS.get(words[:1], ""))
    example = PATHS[words].example.replace("--tokens 9000 --steps 5", "--tokens 3000 --steps 2")
    shown = outrider(*shlex.split(f"{example} {less}")[1:])
    assert shown.code in ENDS.get(words, (0,)), shown.err


def test_a_reader_who_leaves_early_causes_no_noise() -> None:
    line = f"{shlex.quote(sys.executable)} -m outrider config | head -c 1"
    done = subprocess.run(["sh", "-c", line], check=True, capture_output=True, timeout=240)
    assert (done.stdout, done.stderr) == (b"s", b"")


@pytest.mark.wide
@pytest.mark.weights
def test_an_interrupt_ends_quietly_with_130() -> None:
    # A shell's background jobs ignore interrupts, and so would what they start.
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from outrider.cli.main import main\n"
        "main(['generate', 'x', '--quiet', '--log-level', 'error', '--max-tokens', '1900'])\n"
    )
    with warm():
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("serve", "--port PORT Listen at this port. [default 8000]"),
        ("generate", "--temperature TEMPERATURE 0 is greedy. [default 0]"),
        ("generate", "ngram | ...; default auto]"),
        (
            "verify",
            "--max-tokens TOKENS Write at most this many tokens. [default 64, or 192 with --deep]",
        ),
    ],
)
def test_short_help_has_defaults_and_choices(outrider: Command, words: str, line: str) -> None:
    shown = outrider(*words.split(), "--help").out
    assert line in " ".join(shown.split())
    assert "default None" not in outrider(*words.split(), "--help-all").out


def test_a_defect_is_one_block_that_names_debug() -> None:
    script = (
        "import outrider.cli.main as entry\n"
        "def broken(words): raise RuntimeError('boom')\n"
        "entry.run = broken\n"
        "entry.main(['pairs'{}])\n"
    )
    for extra, traced in (("", False), (", '--debug'", True)):
        words = [sys.executable, "-c", script.replace("{}", extra)]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert "error: a defect in outrider: RuntimeError: boom\n  try: " in done.stderr
        assert ("Traceback" in done.stderr) == traced


@pytest.mark.parametrize(
    ("words", "problem", "guess"),
    [
        (["generat", "x"], "unknown verb 'generat'", "'generate'"),
        (["zzz"], "unknown verb 'zzz'", "outrider --help"),
        (["generate", "x", "--max-token", "3"], "unknown option '--max-token'", "'--max-tokens'"),
        (
            ["generate", "--drafter=none", "--tmperature=1", "x"],
            "'--tmperature'",
            "'--temperature'",
        ),
        (["chat", "--sytem", "x"], "unknown option '--sytem'", "'--system'"),
        (["models", "lst"], "lst", "list"),
        (["models", "list", "--jsn"], "unknown option '--jsn'", "'--json'"),
        (["generate", "x", "y", "z"], "'z': one word too many", "outrider generate --help"),
        (["generate", "x", "--k"], "--k", "outrider generate --help"),
        (["generate", "x", "--k", "1", "--k", "2"], "--k", "outrider generate --help"),
        (["completion", "tcsh"], "tcsh", "bash"),
        (["models", "inspect"], "MODEL is missing", "outrider models inspect outrider/embedded"),
        (["status"], "unknown verb 'status'", "outrider ps"),
        (["list", "-n", "3"], "unknown option '-n'", "'--max-tokens'"),
        (["generate", "x", "y", "-p", "z"], "two prompts", "drop one"),
        (["run", "x", "y", "--prompt", "z"], "two prompts", "drop one"),
        (["generate", "x", "--draft", "5"], "--draft names a model, got '5'", "--k 5"),
        (["generate", "x", "--set", "kk=2"], "no setting 'kk'", "'k'"),
        (["generate", "x", "--set", "k"], "no value", "--set k=4"),
        (["generate", "x", "--set", "k=2", "--k", "3"], "--set k=2 and --k", "drop one"),
        (["chat", "a", "--target", "b"], "two models: 'a' and --target 'b'", "--prompt"),
    ],
)
def test_words_that_mean_nothing_are_explained(
    outrider: Command, words: list[str], problem: str, guess: str
) -> None:
    shown = outrider(*words)
    assert shown.code == 2
    assert shown.err.startswith("error: ")
    assert problem in shown.err
    assert guess in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(("closed", "code"), [(">&-", 2), ("2>&-", 2), (">&- 2>&-", 2)])
def test_closed_streams_are_no_defect(closed: str, code: int) -> None:
    shown = _in_shell(f"generate --k -1 hi {closed}")
    assert shown.returncode == code
    assert "Traceback" not in shown.stderr


def _in_shell(words: str) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.quote(sys.executable)} -m outrider {words}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.parametrize("words", ["--help", "doctor --json", "generate hi --max-tokens 2"])
def test_an_answer_that_nobody_can_read_is_an_error(words: str) -> None:
    shown = _in_shell(f"{words} >&-")
    assert shown.returncode == 3
    assert "error: standard output is closed" in shown.stderr
    assert shown.stderr.count("  try: ") == 1


@pytest.mark.sample(1)
@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.parametrize("words", ["generate - --max-tokens 2", "chat", "chat --json"])
def test_a_closed_standard_input_is_an_empty_one(words: str) -> None:
    """Closed before anything of ours is run: Python has None for it then."""
    script = "import os, sys\n{}from outrider.cli.main import main\nmain(sys.argv[1:])\n"
    with warm():
        closed, empty = (
            subprocess.run(
                [sys.executable, "-c", script.format(begin), *words.split()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            for begin in ("os.close(0)\nsys.stdin = None\n", "")
        )
    assert "defect" not in closed.stderr
    assert (closed.returncode, closed.stderr) == (empty.returncode, empty.stderr)


@pytest.mark.wide
def test_words_that_a_locale_cannot_read_are_told_so() -> None:
    line = f"PYTHONUTF8=0 LC_ALL=C {shlex.quote(sys.executable)} -m outrider generate 日本語"
    shown = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "PROMPT cannot be read: Python takes words for ascii here." in shown.stderr
    assert "PYTHONUTF8=1" in shown.stderr


def test_a_model_is_no_prompt(outrider: Command, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for name in ("model.gguf", "folder", "nosuch.gguf"):
        shown = outrider("generate", name)
        assert (shown.code, shown.out) == (2, "")
        assert f"{name} is a model, and no prompt is given." in shown.err
        assert f"outrider chat {name}" in shown.err
    assert "no such folder" not in outrider("generate", "--k", "-1", "--prompt", "folder").err


def test_a_verb_s_page_names_its_own_default(outrider: Command) -> None:
    chat, generate = (outrider(verb, "--help").out for verb in ("chat", "generate"))
    assert "default until" in chat
    assert "default 128" not in chat
    assert "default 128" in generate
