"""The prompts that benchmarks and parity runs read, and sets of them with their lengths in tokens.

Code, maths, conversations and articles are files of the package. Translation asks for the articles'
sentences one by one. Retrieval asks for one of many facts, made up by a hash, so that its prompts
can be of any length and none need be shipped. Prompts are named by domain and place (`code_000`):
two runs mean the same prompt by the same name, and the fingerprint of a domain's texts says whether
they do.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.files import FileKind, read_text
from outrider_lab.measure.store import RecordError, made, parse, write_json

T = TypeVar("T")

_NAMES = (
    "Ada Berg", "Amos Keller", "Anna Lind", "Boris Hale", "Carla Moor", "Cyril Nash",
    "Dora Finch", "Edda Roth", "Emil Stone", "Frieda Wells", "Gideon Park", "Greta Olsen",
    "Hanna Price", "Igor Vane", "Ines Falk", "Jonas Reed", "Karin Holt", "Leo Marsh",
    "Lotte Brandt", "Marta Quist", "Nils Ford", "Olga Trent", "Otto Weir", "Paula Storm",
    "Quentin Dale", "Rosa Lake", "Simon Fells", "Thea Grove", "Ulf Barden", "Vera Nyland",
    "Walter Cross", "Yara Dunn",
)  # fmt: skip
_THINGS = (
    "the boat shed", "the bicycle cellar", "the archive", "the greenhouse", "the piano room",
    "the workshop", "the east gate", "the map cabinet", "the kitchen store", "the lamp room",
    "the bell tower", "the reading hall", "the seed bank", "the pump house", "the film library",
    "the guest house",
)  # fmt: skip
_PLACES = (
    "behind the clock in the hall", "in the blue tin on the third shelf", "under the stairs",
    "in the drawer marked with a star", "on the hook beside the oven", "inside the old atlas",
    "in the coat with brass buttons", "below the loose stone at the well", "in the violin case",
    "on top of the tall cupboard", "in the jar of dried beans", "at the harbour office",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# So many different notes there are for one prompt.
MOST_NOTES = len(_NAMES) * len(_THINGS)


def retrieval_prompt(number: int, num_notes: int) -> str:
    """Notes, then a question about one of them. More than MOST_NOTES are cut to that."""
    subjects = _subjects(number)[:num_notes]
    asked = _draw(range(len(subjects)), number, "asked")
    notes = [_note(number, name, thing) for name, thing in subjects]
    name, thing = subjects[asked]
    question = f"Where does {name} keep the key to {thing}?"
    return "Notes of the caretaker.\n" + "\n".join(notes) + f"\n\nQuestion: {question}\nAnswer:"


def _note(number: int, name: str, thing: str) -> str:
    place = _draw(_PLACES, number, name, thing)
    day = _draw(_DAYS, number, name, thing, "day")
    return f"{name} keeps the key to {thing} {place}, and needs it on {day}."


@lru_cache(maxsize=128)
def _subjects(number: int) -> list[tuple[str, str]]:
    """All of them, in an order of the prompt's own."""
    pairs = [(name, thing) for name in _NAMES for thing in _THINGS]
    return sorted(pairs, key=lambda pair: _digest(number, *pair))


def _draw(options: Sequence[T], *key: object) -> T:
    return options[int.from_bytes(_digest(*key)[:8]) % len(options)]


def _digest(*key: object) -> bytes:
    return hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()


WORKLOADS = ("humaneval", "gsm8k")
DOMAINS = ("code", "maths", "conversation", "summarization", "translation", "retrieval")
# For drafters that copy from the text: prompts that begin a copy of themselves, and prompts whose
# words come once. They are asked for by name, and are no part of any mixture.
ECHO, ADVERSARIAL = "echo", "adversarial"
# Code, maths and conversation in turns.
MIXED = "mixed"
# Domains of prompts that users send as messages. Code is continued as it is, and so are the texts
# for drafters that copy.
MESSAGES = ("maths", "conversation", "summarization", "translation", "retrieval")
MESSAGES_NOTE = (
    "an instruct model: prompts are messages, by its chat template, but shipped ones of code, echo "
    "and adversarial"
)
RAW_HINT = "--raw gives the texts alone"
SUMMARIZE = "\n\nSummarize the above article:"
NUM_MADE = 50
_NUM_NOTES = 8
_TRANSLATE = "Translate English to German: "
_SENTENCE = re.compile(r"[A-Z][^.!?]+[.!?](?= [A-Z]|$)")

_FILES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "code": ("humaneval", lambda row: row["prompt"]),
    "maths": ("gsm8k", lambda row: f"Question: {row['question']}\nAnswer:"),
    "conversation": ("conversation", lambda row: row["instruction"]),
    "summarization": ("summarization", lambda row: row["article"] + SUMMARIZE),
    ECHO: ("echo", lambda row: row["prompt"]),
    ADVERSARIAL: ("adversarial", lambda row: row["prompt"]),
}


def builtin_texts(domain: str) -> list[str]:
    """All prompts of `domain`, in their order. Raises ConfigError for an unknown name."""
    check_domain(domain)
    if domain in _MADE:
        return _MADE[domain]()
    name, text_of = _FILES[domain]
    text = files("outrider_lab.bench").joinpath("prompts", f"{name}.jsonl").read_text("utf-8")
    return [text_of(json.loads(line)) for line in text.splitlines()]


def messages_in(domains: Iterable[str]) -> frozenset[str]:
    """The prompts of `domains` that users send as messages."""
    named = frozenset(domains)
    known = MESSAGES if MIXED in named else [name for name in MESSAGES if name in named]
    return frozenset(text for name in known for text in builtin_texts(name))


def check_domain(domain: str) -> None:
    """Raises ConfigError for an unknown name."""
    known = (*_FILES, *_MADE)
    if domain not in known:
        raise ConfigError(f"unknown domain {domain!r}.", hint=did_you_mean(domain, known))


def load_prompts(workload: str) -> list[str]:
    """All prompts of `workload`, in file order. Raises ConfigError for an unknown name."""
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}.", hint=did_you_mean(workload, WORKLOADS))
    return builtin_texts({"humaneval": "code", "gsm8k": "maths"}[workload])


def _translations() -> list[str]:
    """The second sentence of each article: the first ones are long, and the last ones short."""
    articles = [text.removesuffix(SUMMARIZE) for text in builtin_texts("summarization")]
    return [_TRANSLATE + _SENTENCE.findall(article)[1] for article in articles[:NUM_MADE]]


def _retrievals() -> list[str]:
    return [retrieval_prompt(number, _NUM_NOTES) for number in range(NUM_MADE)]


def _mixed() -> list[str]:
    rows = zip(*(builtin_texts(domain) for domain in DOMAINS[:3]), strict=False)
    return [text for row in rows for text in row]


_MADE: Mapping[str, Callable[[], list[str]]] = {
    "translation": _translations,
    "retrieval": _retrievals,
    MIXED: _mixed,
}


PER_DOMAIN = 50
TINY_PER_DOMAIN = 5
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_count` is by the tokenizer of the data set."""

    prompt_id: str
    domain: str
    raw_text: str
    token_count: int


@dataclass(frozen=True, slots=True)
class DomainStats:
    """Lengths of one domain's prompts, in tokens."""

    domain: str
    source: str
    n: int
    min: int
    mean: float
    max: int


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """`tokenizer` names the model whose tokenizer counted; `sources` says for each domain whether
    its prompts are built in or which published set they are from."""

    prompts: Sequence[Prompt]
    tokenizer: str
    sources: Mapping[str, str]

    @classmethod
    def build(
        cls,
        texts: Mapping[str, Sequence[str]],
        count_tokens: Callable[[str], int],
        *,
        tokenizer: str,
        sources: Mapping[str, str],
    ) -> PromptDataset:
        """The texts of each domain, in their order."""
        prompts = (
            Prompt(f"{domain}_{i:03d}", domain, text, count_tokens(text))
            for domain, listed in texts.items()
            for i, text in enumerate(listed)
        )
        return cls(list(prompts), tokenizer, dict(sources))

    @classmethod
    def load(cls, path: Path) -> PromptDataset:
        """Raises ConfigError for a file that `save` did not write."""
        hint = f"write it with `outrider bench prompts --output {path}`"
        try:
            return _dataset(parse(read_text(path, FileKind.PROMPTS)))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}.", hint=hint) from None
        except (RecordError, UnicodeDecodeError) as error:
            found = f"{path} is not a saved set of prompts: {error}."
            raise ConfigError(found, hint=hint) from None

    def save(self, path: Path) -> None:
        write_json(path, {"schema": _SCHEMA, **asdict(self)})

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def domains(self) -> tuple[str, ...]:
        """In order of their first prompts."""
        return tuple(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def get_by_domain(self, domain: str) -> tuple[Prompt, ...]:
        """Raises ConfigError for a domain that the set has not."""
        if domain not in self.domains:
            raise ConfigError(f"no domain {domain!r}.", hint=did_you_mean(domain, self.domains))
        return tuple(prompt for prompt in self.prompts if prompt.domain == domain)

    def tiny(self, per_domain: int = TINY_PER_DOMAIN) -> PromptDataset:
        """The first few prompts of every domain."""
        kept = [p for domain in self.domains for p in self.get_by_domain(domain)[:per_domain]]
        return PromptDataset(kept, self.tokenizer, self.sources)

    def statistics(self) -> list[DomainStats]:
        found: list[DomainStats] = []
        for domain in self.domains:
            lengths = [prompt.token_count for prompt in self.get_by_domain(domain)]
            found.append(
                DomainStats(
                    domain=domain,
                    source=self.sources[domain],
                    n=len(lengths),
                    min=min(lengths),
                    mean=round(statistics.mean(lengths), 1),
                    max=max(lengths),
                )
            )
        return found

    def fingerprint(self, domain: str) -> str:
        """12 hexadecimal digits that change with any text of `domain`."""
        return fingerprint([prompt.raw_text for prompt in self.get_by_domain(domain)])


def _dataset(record: dict[str, Any]) -> PromptDataset:
    """Raises RecordError for what `save` would not write."""
    schema = record.pop("schema", None)
    if schema != _SCHEMA:
        raise RecordError(f"its schema is {schema!r:.40}")
    saved = made(PromptDataset, record)
    if len({prompt.prompt_id for prompt in saved.prompts}) < len(saved.prompts):
        raise RecordError("two prompts have one name")
    for domain in set(saved.domains) - saved.sources.keys():
        raise RecordError(f"nothing says where {domain!r:.40} is from")
    return saved


def fingerprint(texts: Sequence[str]) -> str:
    """12 hexadecimal digits of `texts` in their order."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:12]
