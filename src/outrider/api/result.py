"""Results: text events while a request runs, one `GenerationResult` at its end, and their JSON.

Fields with a default may be missing in a JSON record, so a record outlives versions that add
fields.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from html import escape
from importlib.resources import files
from itertools import accumulate
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin, get_type_hints

from outrider.api.stream import TINTS, Run, TokenDecoder, html_of, pieces_of
from outrider.core.draft import Origin, RoundEvent, RoundTrace, TokenLogprobs
from outrider.core.errors import ConfigError, OutriderError, with_hint
from outrider.core.params import FinishReason
from outrider.core.plugins import KINDS
from outrider.metrics import (
    MemoryTrace,
    SpecMetrics,
    Stats,
    inter_token_latencies,
    percentile,
    profile,
    round_latencies,
    spec_metrics,
    summarise,
    token_latencies,
)

if TYPE_CHECKING:
    from jinja2 import Template

# Most separate events of a reader that does not read them; more become one.
MOST_EVENTS = 16
# Fields that every record has; others are left out if they have their default.
_ALWAYS = ("text", "token_ids", "finish_reason", "exact", "stats", "token_seconds")


_hints = cache(get_type_hints)


def _plain(value: Any) -> Any:
    """A field of a result in plain values."""
    if isinstance(value, Stats):
        return value.to_dict()
    if isinstance(value, RoundEvent):
        return event_record(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _read(kind: Any, value: Any) -> Any:
    """A value of the type `kind` from `_plain`; keys that `kind` lacks are ignored. Raises KeyError
    for a missing key without a default, TypeError or ValueError for a value of another type."""
    kinds = [part for part in get_args(kind) if part is not NoneType]
    if value is None or get_origin(kind) in (Union, UnionType):
        return None if value is None else _read(kinds[0], value)
    if get_origin(kind) is tuple:
        each = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(part, item) for part, item in zip(each, value, strict=True))
    if kind is RoundEvent:
        value = {**value, "trace": value}
    if not is_dataclass(kind):
        return value
    hints = _hints(kind)
    # Fields without a default are read in any case.
    found = [i for i in fields(kind) if i.name in value or i.default is i.default_factory]
    return cast("Any", kind)(**{i.name: _read(hints[i.name], value[i.name]) for i in found})


def event_record(event: RoundEvent) -> dict[str, Any]:
    """The fields of its trace, `nodes` and `budget`; docs/rounds.md describes them."""
    nodes = [asdict(node) for node in event.nodes]
    budget = event.budget and asdict(event.budget)
    trace = asdict(event.trace)
    # A list, as JSON has it.
    trace["members"] = list(trace["members"])
    return trace | {"nodes": nodes, "budget": budget}


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Output of one round: the emitted ids, and the origin and text of each.

    A piece is empty while its character is incomplete or may belong to a stop string; the text
    then comes with a later token's piece. The last event of a request whose time was up may have
    such text alone, without an id. `round_events` list drafted and refused tokens, if the request
    wants them.
    """

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    round_events: tuple[RoundEvent, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @classmethod
    def merged(cls, events: Sequence[TextEvent]) -> TextEvent:
        """One event with the content of all `events`."""
        names = [item.name for item in fields(cls)]
        return cls(*(tuple(x for event in events for x in getattr(event, name)) for name in names))


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """A finished request. `token_ids` has every emitted id, a stop token included; `text` has
    neither stop token nor stop string. `finish_reason` is stop, length, timeout if `max_time` was
    up, error with `error` as its reason while others of a batch went on, or None if the reader left
    early. `seed` is the seed of sampling; greedy decoding may have none. `rounds` holds every trace
    if the engine profiles; `logprobs` has an entry per token and `round_events` an entry per round
    if the request wants them. `prompt_logprobs` has an entry per prompt token, None for the first,
    in the first of several completions: from the model's own logits, before any processing of the
    request. `stop` is the stop string that ended the text, if one did. `exact` is False if a lossy
    rule may have changed the text.

    `token_seconds` has each token's arrival, in seconds since the request was submitted; the tokens
    of a round arrive together (metrics.py). `peak_memory_bytes` is the peak of the process
    until the request ended: resident memory, or tensors on a CUDA device; None if it is not
    counted. `memory` comes with `rounds`. `num_cached_tokens` of the prompt were in the KV cache
    already, from another request; `queue_seconds` is the wait before the engine began.
    `prediction_tokens` are the accepted and the refused tokens of its own prediction.
    `thought_tokens` counts thoughts; `thoughts_cut` says if a `thinking_budget` ended them. With
    `drafter_failed` the target alone wrote the rest, and a note says why. `runs` are the text in
    pieces of tokens of one origin, for notebooks; no record has them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    notes: tuple[str, ...] = ()
    rounds: tuple[RoundTrace, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    exact: bool = True
    token_seconds: tuple[float, ...] = ()
    peak_memory_bytes: int | None = None
    memory: MemoryTrace | None = None
    seed: int | None = None
    error: str | None = None
    round_events: tuple[RoundEvent, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    stop: str | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    prediction_tokens: tuple[int, int] | None = None
    thought_tokens: int | None = None
    thoughts_cut: bool | None = None
    drafter_failed: bool = False
    runs: tuple[Run, ...] = field(default=(), compare=False)

    @classmethod
    def failed(cls, error: OutriderError, *, drafter: str, k: int) -> GenerationResult:
        """The result of a request that could not be run."""
        stats = summarise((), drafter=drafter, k=k, total_seconds=0.0)
        return cls("", (), "error", stats, error=with_hint(error))

    def __repr__(self) -> str:
        return f"<GenerationResult {self.text!r}: {self.finish_reason}, {self.summary()}>"

    def __str__(self) -> str:
        return self.error or self.text

    def _repr_html_(self) -> str:
        runs: Sequence[Run] = (not self.error and self.runs) or [("plain", str(self))]
        text = "".join(map(html_of, runs))
        legend = [html_of((origin, origin)) for origin in TINTS if origin in dict(runs)]
        line = " · ".join([*legend, escape(self.summary())])
        return f'<pre style="white-space: pre-wrap">{text}</pre><small>{line}</small>'

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def total_seconds(self) -> float:
        """Seconds from submission to the last token."""
        return self.stats.seconds["total"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of `total_seconds`, prefill included; 0 if that is 0."""
        return self.num_tokens / self.total_seconds if self.total_seconds > 0 else 0.0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds of waiting, prefill and the first round. None without a token."""
        return self.token_seconds[0] if self.token_seconds else None

    @property
    def per_token_latencies(self) -> tuple[float, ...]:
        """Seconds, one entry a token: its equal share of its round. They add up to the arrival of
        the last token; the first round's include the wait for the first token."""
        return token_latencies(self.token_seconds)

    @property
    def inter_token_latencies(self) -> tuple[float, ...]:
        """The per-token latencies without those of the first round."""
        return inter_token_latencies(self.token_seconds)

    @property
    def round_latencies(self) -> tuple[float, ...]:
        """Seconds between arrivals: the pauses of a reader."""
        return round_latencies(self.token_seconds)

    @property
    def latency_p50(self) -> float:
        """Percentile 50 of `per_token_latencies`, as np.percentile; 0 without a token."""
        return percentile(self.per_token_latencies, 50)

    @property
    def latency_p95(self) -> float:
        return percentile(self.per_token_latencies, 95)

    @property
    def latency_p99(self) -> float:
        return percentile(self.per_token_latencies, 99)

    @property
    def is_speculative(self) -> bool:
        """True if a drafter was in use, even without a draft; else its figures are None."""
        return self.stats.k > 0

    @property
    def num_rounds(self) -> int | None:
        return self.stats.num_rounds if self.is_speculative else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; the target's own tokens are in neither."""
        return self.stats.acceptance_rate if self.is_speculative else None

    @property
    def tokens_per_round(self) -> float | None:
        """Emitted tokens over rounds; the target's own token counts."""
        return self.stats.tokens_per_round if self.is_speculative else None

    @property
    def p_hit(self) -> float | None:
        """Share of the verdicts that drafting ahead predicted; None if it was not in use."""
        return self.stats.p_hit

    @property
    def draft_milliseconds(self) -> float | None:
        """Time of drafting, over all rounds."""
        return self._milliseconds("draft")

    @property
    def verify_milliseconds(self) -> float | None:
        """Time of target passes that read nothing of a prompt."""
        return self._milliseconds("verify")

    @property
    def accept_milliseconds(self) -> float | None:
        """Time of judging, sampling and committing."""
        return self._milliseconds("accept")

    def spec_metrics(self, *, adaptive: bool = False) -> SpecMetrics | None:
        """Per-request acceptance under vLLM's names; `adaptive` says that K was not fixed."""
        if not self.is_speculative:
            return None
        stats = self.stats
        found = spec_metrics(
            stats.acceptance_histogram,
            num_drafted=stats.num_drafted,
            k=None if adaptive else stats.k,
        )
        return {**found, "members": stats.members} if stats.members else found

    def profile(self, metadata: Mapping[str, object] | None = None) -> dict[str, object]:
        """Rounds, counts, times and memory (metrics.py). Raises ConfigError if off."""
        if not self.rounds:
            raise ConfigError("this result has no rounds.", hint="set profile (--profile)")
        return profile(self.rounds, k=self.stats.k, memory=self.memory, metadata=metadata)

    def to_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON; empty and unrequested ones are left out after `metrics`,
        which repeats values that follow from the rest."""
        record: dict[str, object] = {name: _plain(getattr(self, name)) for name in _ALWAYS}
        record |= {"peak_memory_bytes": self.peak_memory_bytes, "metrics": self._metrics()}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.compare and item.name not in record and value != item.default:
                record[item.name] = _plain(value)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> GenerationResult:
        """The result that wrote `record`. Computed and unknown keys are ignored. Raises ConfigError
        if `record` is not of a result."""
        try:
            return _read(cls, record)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not the record of a result: {type(error).__name__} at {error}.",
                hint="`outrider generate --json` prints one",
            ) from None

    def to_json_line(self) -> str:
        """`to_dict` as one line of a JSON-lines file."""
        return json.dumps(self.to_dict(), allow_nan=False) + "\n"

    def summary(self) -> str:
        """The verdict line: tokens, speed, acceptance, exactness."""
        stats = self.stats
        parts = [f"{len(self.token_ids)} tokens", f"{stats.tokens_per_second:.0f} tok/s"]
        if stats.num_drafted:
            parts += [
                f"{stats.num_accepted} of {stats.num_drafted} drafts accepted",
                f"{stats.tokens_per_round:.2f} tokens a round",
                f"drafting {100 * stats.draft_share:.0f} % of the time",
            ]
        if stats.p_hit is not None:
            num = stats.num_hits + stats.num_misses
            parts.append(f"{stats.num_hits} of {num} verdicts predicted (p_hit {stats.p_hit:.2f})")
        if not self.exact:
            parts.append("LOSSY: the text may differ from the target's own")
        return " · ".join(parts)

    def one_line(self) -> str:
        """A row for a log of many runs: AR is plain decoding, SD speculative."""
        parts = [
            "SD " if self.is_speculative else "AR ",
            f"{self.num_tokens} tok",
            f"{self.tokens_per_second:.2f} tok/s",
            f"p50={1e3 * self.latency_p50:.1f}ms p95={1e3 * self.latency_p95:.1f}ms",
        ]
        if self.peak_memory_bytes is not None:
            parts.append(f"mem={self.peak_memory_bytes / 1e6:.0f}MB")
        if self.is_speculative:
            parts.append(f"accept={self.acceptance_rate:.2f} rounds={self.num_rounds}")
        return " | ".join(parts)

    def _milliseconds(self, name: str) -> float | None:
        return 1e3 * self.stats.seconds[name] if self.is_speculative else None

    def _metrics(self) -> dict[str, float | None]:
        after_first = self.inter_token_latencies
        return {
            "num_tokens": self.num_tokens,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": self.time_to_first_token,
            "latency_p50": self.latency_p50,
            "latency_p95": self.latency_p95,
            "latency_p99": self.latency_p99,
            "inter_token_p50": percentile(after_first, 50),
            "inter_token_p95": percentile(after_first, 95),
            "inter_token_p99": percentile(after_first, 99),
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "p_hit": self.p_hit,
        }


# Log-probabilities as OpenAI's two older APIs write them.


def finite(logprob: float) -> float:
    """`logprob`, or a large negative number for -inf, which JSON lacks."""
    return max(logprob, -9999.0)


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    return decoder.decode([token_id], skip_special=False)


def chat_logprobs(
    decoder: TokenDecoder, items: Iterable[TokenLogprobs], num_top: int | None = None
) -> list[dict[str, Any]]:
    """The format of chat completions, with the `num_top` likeliest tokens; None is all known."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = decoder.token_bytes(token_id)
        values = None if data is None else list(data)
        text = token_text(decoder, token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": values}

    return [
        entry(item.token_id, item.logprob)
        | {"top_logprobs": [entry(*pair) for pair in item.top[:num_top]]}
        for item in items
    ]


def completion_logprobs(
    decoder: TokenDecoder, items: Sequence[TokenLogprobs | None], ids: Sequence[int], start: int
) -> dict[str, Any]:
    """The format of completions. An item is None if unknown, such as that of a prompt's first
    token; `start` is the number of characters before the first token."""
    tokens = [token_text(decoder, token_id) for token_id in ids]
    return {
        "tokens": tokens,
        "token_logprobs": [None if item is None else finite(item.logprob) for item in items],
        "top_logprobs": [
            None
            if item is None
            else {token_text(decoder, token_id): finite(p) for token_id, p in item.top}
            for item in items
        ],
        "text_offset": list(accumulate(map(len, tokens), initial=start))[:-1],
    }


# Rounds of a request as plain values for a page, with the text of every token.
#
# docs/rounds.md describes their shape. The modules in `assets/` show them, in a page of their own
# and in the server's playground.
# Significant digits of probabilities and seconds on a page.
_DIGITS = 6
_FORCED = "forced"


# The modules of a self-contained page: each imports only those before it.
_MODULES = ("kinds.js", "tree.js", "rounds.js", "page.js")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page_script() -> str:
    """The modules as one script, since a page of one file can import nothing."""
    joined = "\n".join(asset(name) for name in _MODULES)
    return _EXPORT.sub("", _IMPORT.sub("", joined))


def asset(name: str) -> str:
    """The text of an asset that shows rounds."""
    return files("outrider.api").joinpath("assets", name).read_text("utf-8")


def run_page(title: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of runs, as `run_of` gives them, round by round: one file whose policy allows no
    requests, and allows its one script by its hash."""
    script = page_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page_template("run.html.j2").render(
        page={"title": title},
        policy=f"sha256-{digest}",
        style=asset("rounds.css"),
        script=script,
        runs=list(runs),
        texts=[(run, text_of(run)) for run in runs],
    )


@cache
def page_template(name: str, package: str = "outrider.api") -> Template:
    """The template of a page, one of the assets or of the folder `templates` of another package.
    HTML escapes all content on insertion."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape

    shared = PackageLoader("outrider.api", "assets")
    own = [] if package == "outrider.api" else [PackageLoader(package)]
    environment = Environment(
        loader=ChoiceLoader([*own, shared]),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def run_of(
    title: str,
    prompt: str,
    result: GenerationResult,
    decoder: TokenDecoder,
    *,
    facts: Mapping[str, str] | None = None,
    speed_ratio: str = "",
) -> dict[str, Any]:
    """A run for a page: a result whose request wanted round events. `facts` describe the run;
    `speed_ratio` is a sentence, given only if the ratio was measured."""
    pieces = iter(_pieces(result, decoder))
    shown: dict[str, Any] = {
        "finish_reason": result.finish_reason,
        "tokens_per_second": _short(result.tokens_per_second),
        "notes": list(result.notes),
    }
    if speed_ratio:
        shown["speed_ratio"] = speed_ratio
    return {
        "title": title,
        "prompt": prompt,
        "facts": [[name, value] for name, value in (facts or {}).items()],
        "rounds": [round_of(event, pieces, decoder) for event in result.round_events],
        "result": shown,
    }


def round_of(event: RoundEvent, pieces: Iterator[str], decoder: TokenDecoder) -> dict[str, Any]:
    """One round. `pieces` are the texts of its emitted tokens, as in a TextEvent."""
    record = event_record(event)
    record["source"] = _source(event.trace.drafter)
    nodes = [_node(node, decoder) for node in record["nodes"]]
    for node in nodes:
        if node["verdict"] not in ("refused", "unused"):
            node["text"] = next(pieces, "")
    return {name: _short(value) for name, value in record.items()} | {"nodes": nodes}


def _node(node: Mapping[str, Any], decoder: TokenDecoder) -> dict[str, Any]:
    shown = {
        name: _short(value) for name, value in node.items() if value is not None or name == "q"
    }
    return shown | {"token": spelled(decoder, node["token_id"])}


def _source(drafter: str) -> str:
    """The colour class of accepted tokens: a draft, a look-up in texts, or a grammar."""
    if drafter == _FORCED:
        return _FORCED
    kinds = [KINDS.get(name) for name in drafter.split("+") if name != _FORCED]
    looks_up = all(kind is not None and kind.looks_up for kind in kinds)
    return "lookup" if looks_up else "draft"


def spelled(decoder: TokenDecoder, token_id: int) -> str:
    """A token by itself; bytes of an incomplete character as \\x.."""
    data = decoder.token_bytes(token_id)
    if data:
        return data.decode("utf-8", "backslashreplace")
    return decoder.decode([token_id], skip_special=False)


def _pieces(result: GenerationResult, decoder: TokenDecoder) -> list[str]:
    """The text of each token, as far as it belongs to the result: a stop string does not."""
    pieces = pieces_of(decoder, result.token_ids)
    left = len(result.text)
    for index, piece in enumerate(pieces):
        pieces[index] = piece[:left]
        left -= len(pieces[index])
    return pieces


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in cast("dict[str, Any]", value).items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def text_of(run: Mapping[str, Any]) -> str:
    """The text of the run."""
    nodes: Sequence[Mapping[str, Any]] = [n for one in run["rounds"] for n in one["nodes"]]
    return "".join(node.get("text", "") for node in nodes)


@dataclass(slots=True)
class Mailbox:
    """The waiting events of one request: those of a slow reader become one larger event. However
    many wait, each token is copied at most twice: into a merged event, and when the reader takes
    all of them. Its owners must use it from one thread at a time."""

    _merged: list[TextEvent] = field(default_factory=list[TextEvent])
    """Events older than those in `_fresh`; each was more than MOST_EVENTS events."""
    _fresh: deque[TextEvent] = field(default_factory=deque[TextEvent])

    def put(self, events: Iterable[TextEvent]) -> None:
        self._fresh += events
        if len(self._fresh) > MOST_EVENTS:
            self._merged.append(TextEvent.merged(self._fresh))
            self._fresh.clear()

    def take(self) -> TextEvent | None:
        """The next event; one for all if more wait than a reader gets separately."""
        if self._merged:
            event = TextEvent.merged([*self._merged, *self._fresh])
            self._merged.clear()
            self._fresh.clear()
            return event
        return self._fresh.popleft() if self._fresh else None

    def __bool__(self) -> bool:
        return bool(self._merged or self._fresh)
