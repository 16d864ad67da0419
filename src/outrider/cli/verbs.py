"""The verbs of the command line. Each is a function whose module is imported when the verb runs.

These tables have everything that help, parsing and completion need, so `--help` of any verb takes
little longer than the start of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.cli import verb_options
from outrider.cli.options import ASKS, KNOWN, Verb
from outrider.core.errors import ConfigError, foreign_names, nearest

# Rows of the lab: its verbs are verbs of the program.
from outrider_lab.cli import bench_options
from outrider_lab.cli import verb_options as lab_options

# The headings of the front page.
GROUPS = ("Write text", "Models", "Measure speed", "Check exactness", "This machine")
TABLES = (verb_options, lab_options, bench_options)


def _parts(name: str) -> tuple[Verb, ...]:
    return tuple(verb for path, verb in KNOWN.items() if path.startswith(f"{name} "))


_GROUPS = {
    "cluster": Verb(
        name="cluster",
        text="Serve from many machines, on Ray.",
        example="outrider cluster config outrider/embedded --replicas 2",
        parts=_parts("cluster"),
    ),
    "models": Verb(
        name="models",
        group="Models",
        text="Inspect, load, inflate, export models; known pairs.",
        example="outrider models list",
        parts=_parts("models"),
    ),
    "draft": Verb(
        name="draft",
        group="Models",
        text="Choose a drafter for a target.",
        example="outrider draft suggest outrider/embedded",
        parts=_parts("draft"),
    ),
    "train": Verb(
        name="train",
        group="Models",
        text="Train a drafter, a model or a tokenizer on text.",
        example="outrider train draft my-draft python --tokens 9000 --steps 5 --exam-prompts 2",
        parts=_parts("train"),
    ),
    "bench": Verb(
        name="bench",
        group="Measure speed",
        text="Measure the gain of speculation, always compared with plain decoding.",
        example="outrider bench k --domains code --prompts 2 --ks 2,4",
        parts=_parts("bench"),
    ),
}
# The order of the front page. Verbs that are not here follow in the order of their rows.
_ORDER = (
    *("generate", "chat", "batch", "serve", "cluster"),
    *("pull", "list", "models", "draft", "train"),
    *("plan", "bench", "report", "trace", "verify"),
    *("doctor", "top", "config", "completion"),
    *("pairs", "simulate", "prompts"),
)
_OTHERS = (name for name in KNOWN if " " not in name and name not in _ORDER)
VERBS = tuple(_GROUPS.get(name) or KNOWN[name] for name in (*_ORDER, *_OTHERS))


def names(verbs: Sequence[Verb]) -> list[str]:
    """Return every word that calls one of `verbs`."""
    return [name for verb in verbs for name in (verb.name, verb.alias) if name]


def find(verbs: Sequence[Verb], word: str) -> Verb | None:
    return next((verb for verb in verbs if word in (verb.name, verb.alias)), None)


# Verbs and flags of other tools: accepted with a note, or answered with our own command. A word is
# accepted only if it means exactly the same here; docs/guesses.md lists all of them.
#
# Verbs of other tools that take the same words here under another name.
VERBS_READ = {
    "collect-env": ("doctor",),
    "complete": ("generate",),
    "download": ("pull",),
    "env": ("doctor",),
    "get": ("pull",),
    "info": ("models", "inspect"),
    "ls": ("list",),
    "server": ("serve",),
    "show": ("models", "inspect"),
}
# Other verbs of these tools, and the answer that names our equivalent.
_ANSWERS = {
    "convert": "`outrider models export MODEL FILE` writes GGUF; safetensors are read as they are",
    "cp": "models are folders, copied as such: `outrider list --json` says where they are",
    "create": "`outrider train --help` makes models; `outrider pull MODEL` fetches them",
    "embed": "no embeddings are made here; `outrider generate PROMPT` writes text",
    "embeddings": "no embeddings are made here; `outrider generate PROMPT` writes text",
    "explain": "docs/theory.md has the formulas, examples/theory.ipynb draws them",
    "help": "`outrider --help`, or `outrider VERB --help`",
    "launch": "nothing runs in the background; `outrider chat MODEL`",
    "load": "a model is loaded when it is used: `outrider chat MODEL`",
    "lora": "adapters are not read; `outrider train --help` makes models that draft",
    "ps": "nothing runs in the background; `outrider list` shows the models of this machine",
    "push": "models are folders, which `hf upload` sends; `outrider list --json` says where",
    "quantize": "while loading: `outrider generate PROMPT --quantise int8`",
    "rm": "`outrider list --json` says in which folders models are; `hf cache rm` deletes them",
    "run-batch": "`outrider batch INPUT OUTPUT`",
    "status": "nothing runs in the background; `outrider doctor` shows this machine",
    "stop": "nothing runs in the background, Ctrl-C ends what runs; `outrider list` shows models",
    "tokenize": "from Python: `LLM(model).tokenizer.encode(text)`; a server has POST /tokenize",
    "uninstall": "`pip uninstall outrider`",
    "unload": "memory is free when a command ends; `outrider doctor` shows how much",
    "update": "`git pull` and `scripts/setup` in the checkout; `outrider pull MODEL` for a model",
    "upgrade": "`git pull` and `scripts/setup` in the checkout; `outrider pull MODEL` for a model",
    "version": "`outrider --version`",
}
# Flags of other tools that take the same values as ours. core/errors.py has our names for flags of
# settings; the table below has those of options.
_READ = (
    "--target-model "
    "--draft-model --assistant-model --model-draft -md --hf-repo-draft -hfd --speculative-model "
    "--spec-draft-n-max --draft-max --num-speculative-tokens --num-draft-tokens --gamma "
    "--num-assistant-tokens "
    "--max-new-tokens --n-predict --num-predict -n --predict --temp -t --num-threads "
    "-c --ctx-size --max-model-len --context-length --max-kv-size "
    "--max-num-seqs -np --parallel --repeat-penalty -s -r --reverse-prompt --stop-strings "
    "--quantization --quantize --tensor-parallel-size -tp"
)
_OF_OPTIONS = {
    "-j": "--schema",
    "--grammar-file": "--grammar",
    "--guided-choice": "--choice",
    "--guided-json": "--schema",
    "--guided-regex": "--regex",
    "--json-schema": "--schema",
    "-o": "--output",
    "--output-file": "--output",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--verbose": "--stats",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
}
FLAGS_READ = {
    **{name: one.spelled_flag for name, one in foreign_names().items() if name in _READ.split()},
    **_OF_OPTIONS,
}
# Flags without a value that ask for what always happens.
_ALWAYS = {"--stream": "text is always shown as it comes"}
_DTYPES = {
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("float", "fp32", "f32"), "float32"),
}


def verb_named(words: Sequence[str]) -> tuple[Verb, int, list[str], str | None]:
    """Return the verb, how many words name it, its own name as words, and a note if that differs
    from what was typed. Raises ConfigError for an unknown verb."""
    read = VERBS_READ.get(words[0])
    path = [*read] if read else [words[0]]
    verb = find(VERBS, path[0])
    if verb is None:
        raise _unknown(words[0], VERBS, [])
    num_words = 1
    if read is None and verb.parts and len(words) > 1 and words[1] not in ASKS:
        path, num_words = [*words[:2]], 2
    if len(path) > 1:
        part = find(verb.parts, path[1])
        if part is None:
            raise _unknown(path[1], verb.parts, path[:1])
        return part, num_words, path, _note(words[0], path) if read else None
    newer = _newer_path(verb)
    return verb, num_words, path, _note(words[0], newer or path) if newer or read else None


def _note(theirs: str, ours: Sequence[str]) -> str:
    return f"`outrider {theirs}` is `outrider {' '.join(ours)}`"


def _newer_path(verb: Verb) -> list[str] | None:
    """Return the new path of a verb that was moved from the top level; None for other verbs."""
    if verb.group:
        return None
    return next(([group.name, verb.name] for group in VERBS if verb in group.parts), None)


def _unknown(word: str, verbs: Sequence[Verb], path: Sequence[str]) -> ConfigError:
    """Return the error for an unknown verb; `path` are the words before it."""
    page = f"`{' '.join(['outrider', *path])} --help` lists the verbs"
    hint = None if path else _ANSWERS.get(word)
    return ConfigError(f"unknown verb {word!r}.", hint=hint or nearest(word, names(verbs), page))


def flags_read(verb: Verb, words: Iterable[str]) -> tuple[list[str], str | None]:
    """Return `words` with others' flags and values in our spelling, and a note about them."""
    known, read, notes = {*verb.flags()}, list[str](), dict[str, str]()
    for word in words:
        flag, equals, value = word.partition("=")
        ours = flag if flag in known else _flag_here(flag, known)
        if ours is None and flag in _ALWAYS:
            notes[flag] = f"{flag}: {_ALWAYS[flag]}"
        elif read[-1:] == ["--dtype"] and word in _DTYPES:
            read.append(_DTYPES[word])
            notes[word] = f"{word} is {read[-1]}"
        else:
            read.append(f"{ours or flag}{equals}{value}")
            notes |= {flag: f"{flag} is {ours}"} if ours not in (None, flag) else {}
    return read, f"{', '.join(notes.values())} here" if notes else None


def _flag_here(theirs: str, known: set[str]) -> str | None:
    if not theirs.startswith("-"):
        return None
    hyphens = theirs[:2] + theirs[2:].replace("_", "-")
    ours = hyphens if hyphens in known else FLAGS_READ.get(hyphens)
    return ours if ours in known else None
