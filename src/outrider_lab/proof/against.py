"""The audit of a server: does speculation change its texts? `outrider verify --against`.

Two sides of one model, without and with speculation, get the same requests. Greedy texts must be
equal up to near-ties, which only log-probabilities can tell from faults. Sampled texts are two
samples of one distribution (two_samples.py). Stop strings, choices and JSON must hold with
speculation where they hold without.

False alarms: each of the NUM_TESTS permutation tests has the level FAMILY_LEVEL / NUM_TESTS, so one
audit of an honest server raises one with a probability of at most FAMILY_LEVEL (Bonferroni).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, takewhile
from operator import eq
from statistics import median
from typing import Any

from outrider.plugins.proof.check import PROMPTS, Check
from outrider_lab.proof.served import Answer, RefusedError, Side, Token
from outrider_lab.proof.two_samples import (
    Pair,
    Permutation,
    Sample,
    distance,
    permutation_tests,
)

FAMILY_LEVEL = 0.005
MIN_P = 0.2
_UNLIKELY = math.log(MIN_P)
# Settings of sampled requests.
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "sampled": {},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.0},
    "min_p": {"min_p": MIN_P},
}
NUM_TESTS = 5 * len(SETTINGS)
LEVEL = FAMILY_LEVEL / NUM_TESTS
SAMPLED_PROMPTS = (PROMPTS[3], PROMPTS[0])
# A gap of log-probabilities up to ten times the median rounding is a near-tie, within these bounds.
_TIMES_ROUNDING, _LEAST_GAP, _MOST_GAP = 10.0, 0.01, 1.0
# A gap up to two steps of the logits is one too: an error below a step can move each of the two
# logits by a step.
_TIMES_STEP = 2.0
# Steps of logits of 16 bits (bfloat16 below 64, float16 from 8 on), the error of differences of
# reported log-probabilities, and the share of lists that must fit.
_STEPS = tuple(2.0**-power for power in range(2, 8))
_STEP_ERROR, _STEP_SHARE = 2e-4, 0.95
# If rounding or steps cannot be measured; bfloat16 logits from 16 to 32 are multiples of 0.125. A
# greater median is no rounding.
_ASSUMED_GAP = _MOST_ROUNDING = 0.25
_OWN_ROUNDING = 1e-3
_MAX_SHOWN = 3
# Prompts of checks that sampled texts are no copies. If a fault copies all and an honest side none,
# an honest server is accused with a probability of at most 2^-16, whatever its distribution.
_NUM_FEW = 8
_WORDS = re.compile(r"\s*\w{1,8}|\s*[^\w\s]|\s+$")
_COLOURS = ("red", "green", "blue")
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": [*_COLOURS]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
_VALID = {json.dumps({"colour": c, "sure": sure}) for c in _COLOURS for sure in (False, True)}
TITLES = {
    "speculation": "speculation seen",
    "greedy": "greedy text",
    "logprobs": "log-probabilities",
    "sampled": "sampled text",
    "penalties": "penalties",
    "min_p": "min_p",
    "stop": "stop strings",
    "seeds": "seeds",
    "n": "several choices",
    "json": "JSON schema",
}
# What is yielded by Audit.run before a check, or before the first three.
NUM_STEPS = len(TITLES) - 2


@dataclass(frozen=True, slots=True)
class Amount:
    """Texts of each side and sampled setting, tokens of a greedy and of a sampled text."""

    texts: int = 48
    greedy_tokens: int = 64
    sampled_tokens: int = 24
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Departure:
    """The first token at which a text leaves the plain one. `gap` is by how much the plain side's
    log-probability of its own token exceeds that of the other; None if it is not shown.
    With `at_least` the other token is not among the listed ones, and the gap is at least this."""

    position: int
    plain: str
    other: str
    gap: float | None
    at_least: bool = False

    def near(self, tolerance: float) -> bool | None:
        """True for a near-tie, False for more than that, None if it is not decidable."""
        if self.gap is not None and self.gap > tolerance:
            return False
        return None if self.gap is None or self.at_least else True

    def __str__(self) -> str:
        least = "at least " if self.at_least else ""
        gap = "unknown" if self.gap is None else f"{least}{self.gap:.3g}"
        words = f"token {self.position + 1}: {self.plain!r}, with speculation {self.other!r}"
        return f"{words}; gap of their log-probabilities: {gap}"


def departure(plain: Answer, text: str) -> Departure | None:
    """Return the first difference of `text`, read against the tokens of the plain answer."""
    own, other = plain.text.encode(), text.encode()
    if own == other:
        return None
    tokens = plain.tokens or ()
    # The end of a text may be a part of a character.
    if b"".join(token.piece for token in tokens).startswith(own[:-3]):
        offset = 0
        for position, token in enumerate(tokens):
            rest = other[offset:]
            if not token.piece or not rest.startswith(token.piece):
                return _left(position, token, rest)
            offset += len(token.piece)
    pairs = enumerate(zip(plain.text, text, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(plain.text), len(text)))
    return Departure(at, plain.text[at : at + 12], text[at : at + 12], gap=None)


def stopped(plain: Answer, text: str, stop: str) -> Departure | None:
    """Return the difference of a text that ended, perhaps within a token that begins the stop
    string: of the text with that string and the text without it, what agrees longer counts."""
    found = [departure(plain, text + end) for end in (stop, "")]
    return max(filter(None, found), key=_agreement, default=None)


def _agreement(found: Departure) -> tuple[int, float, bool]:
    return found.position, -math.inf if found.gap is None else -found.gap, not found.at_least


def _left(position: int, token: Token, rest: bytes) -> Departure:
    """Return the difference at `token`. Of the listed tokens with which `rest` may begin, or in
    which it may end, the likeliest one counts; any, if the text ended there."""
    words = token.piece.decode(errors="replace"), rest[:12].decode(errors="replace")
    others = {piece: value for piece, value in token.top.items() if piece != token.piece}
    fitting = [
        value for piece, value in others.items() if rest.startswith(piece) or piece.startswith(rest)
    ]
    if token.logprob is None or not others:
        return Departure(position, *words, gap=None)
    if not fitting:
        gap = token.logprob - min(token.top.values())
        return Departure(position, *words, gap=gap, at_least=True)
    return Departure(position, *words, gap=token.logprob - max(fitting))


@dataclass(slots=True)
class Audit:
    """Requests to both sides, and what the first of them showed for the later ones: greedy texts
    of the plain side, of the drafted side, and of the drafted side with log-probabilities, and the
    median difference of the latter (`rounding`, None if they are not shown). Logits are multiples
    of `step`; 0 if they are not rounded. `drafts_scored` if the server drafts for requests with
    log-probabilities, `lists_hold` if these are right."""

    sides: tuple[Side, Side]
    amount: Amount
    num_requests: int = 0
    plain: Sequence[Answer] = ()
    drafted: Sequence[Answer] = ()
    scored: Sequence[Answer] = ()
    rounding: float | None = None
    step: float = 0.0
    drafts_scored: bool = False
    lists_hold: bool = False

    def run(self) -> Iterator[str | Check]:
        """Yield what is being done, and each check when it is known. Raises MachineError."""
        yield "greedy texts"
        yield self._speculation()
        texts = enumerate(zip(self.plain, self.drafted, strict=True))
        yield self._departures("greedy", [(i, departure(a, b.text)) for i, (a, b) in texts])
        yield self._logprobs()
        checks: dict[str, Callable[[], Check]] = {}
        checks |= {name: partial(self._sampled, name) for name in SETTINGS}
        checks |= {"stop": self._stop, "seeds": self._seeds, "n": self._choices, "json": self._json}
        for name, check in checks.items():
            yield TITLES[name]
            try:
                yield check()
            except RefusedError as refusal:
                for side in self.sides:
                    side.write(PROMPTS[0], max_tokens=1)  # raises if the server is gone
                yield self._refused(name, refusal)

    @property
    def tolerance(self) -> float:
        """The gap up to which two tokens are a near-tie, in nats."""
        measured = None if self.rounding is None else _TIMES_ROUNDING * self.rounding
        rounding = _ASSUMED_GAP if measured is None else max(measured, _LEAST_GAP)
        return min(max(rounding, _TIMES_STEP * self.step), _MOST_GAP)

    def _refused(self, name: str, refusal: RefusedError) -> Check:
        """Return the check of what one side refuses. What only the side with speculation refuses is
        offered, and not decided."""
        drafted, own = self.sides[1], refusal.side
        if own.server is drafted.server and own.fields == drafted.fields:
            return _check(name, None, f"refused with speculation: {refusal}")
        return _left_out(name, f"refused: {refusal}")

    def _shared(self) -> Iterator[tuple[Token, Token]]:
        """Yield the tokens of the plain greedy texts and of the drafted ones that are equal from
        the first one on."""
        for plain, other in zip(self.plain, self.scored, strict=True):
            pairs = zip(plain.tokens or (), other.tokens or (), strict=False)
            yield from takewhile(lambda pair: pair[0].piece == pair[1].piece, pairs)

    def _write(self, side: Side, prompts: Sequence[str], **params: Any) -> list[Answer]:
        self.num_requests += len(prompts)
        return side.all([(prompt, params) for prompt in prompts])

    def _greedily(self, side: Side, prompts: Sequence[str], **params: Any) -> list[Answer]:
        num = self.amount.greedy_tokens
        return self._write(side, prompts, max_tokens=num, temperature=0, **params)

    def _counted(self, side: Side, *, scored: bool) -> tuple[list[Answer], float | None]:
        """Return greedy texts, with log-probabilities if `scored` and not refused, and the number
        of tokens drafted for them."""
        before = side.counter()
        try:
            texts = self._greedily(side, PROMPTS, logprobs=scored)
        except RefusedError:
            texts = self._greedily(side, PROMPTS)
        return texts, side.drafted(texts, before)

    def _speculation(self) -> Check:
        plain, drafted = self.sides
        self.plain, num_plain = self._counted(plain, scored=True)
        # Without log-probabilities, as most clients ask: a server may not draft with them.
        self.drafted, num_drafted = self._counted(drafted, scored=False)
        self.scored, num_scored = self._counted(drafted, scored=True)
        self.drafts_scored = bool(num_scored) and any(one.tokens for one in self.scored)
        shared = [(a.top, b.top) for a, b in self._shared() if a.top]
        found = [abs(a[piece] - b[piece]) for a, b in shared for piece in a.keys() & b.keys()]
        # Drafted tokens without alternatives may have been rounded otherwise than the rest.
        self.rounding = median(found) if found and all(b for _, b in shared) else None
        self.step = logit_step([token.top for one in self.plain for token in one.tokens or ()])
        problems = ["the side without speculation drafted tokens"] if num_plain else []
        if num_drafted == 0:
            problems.append("the side with speculation drafted nothing, so nothing is compared")
        if not any(one.text for one in self.plain):
            problems.append("the side without speculation wrote empty texts")
        summary = "not counted by the server"
        if num_drafted is not None:
            summary = f"{num_drafted:,.0f} tokens drafted for {len(PROMPTS)} greedy texts"
        # A server that does not count drafts may be compared all the same.
        return _check("speculation", None if problems else True, summary, problems)

    def _departures(
        self, name: str, found: Sequence[tuple[int, Departure | None]], also: str = ""
    ) -> Check:
        """Return the check of greedy texts, by the numbers of their prompts, which must equal the
        plain ones up to near-ties."""
        tolerance = self.tolerance
        # Penalties that a server adds by itself decide texts and are not in its log-probabilities.
        tops = [token for one in self.plain for token in one.tokens or () if token.top]
        gaps = [max(one.top.values()) - (one.logprob or 0) for one in tops]
        decides = sum(gap > tolerance for gap in gaps) <= len(gaps) // 100
        kinds: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for number, left in found:
            if left is not None:
                kind = left.near(tolerance) if decides else None
                kinds[kind].append(f"prompt {number + 1}, {left}")
        near, wrong, unknown = kinds[True], kinds[False], kinds[None]
        num = len(near) + len(wrong) + len(unknown)
        summary = f"{len(found)} texts{also}, {num} differ"
        if num:
            summary += f": {len(wrong)} by more than rounding, {len(near)} at near-ties"
        if unknown:
            summary += f", {len(unknown)} not decided by log-probabilities"
        holds = False if wrong else None if unknown else True
        facts: dict[str, Any] = {"tolerance": tolerance, "rounding": self.rounding}
        facts |= {"step": self.step, "num_near_ties": len(near)}
        return _check(name, holds, summary, wrong, [*unknown, *near], **facts)

    def _logprobs(self) -> Check:
        """Compare the log-probabilities of greedy tokens, over the tokens that both sides wrote."""
        pairs = [pair for pair in self._shared() if pair[0].logprob is not None and pair[0].top]
        if not pairs:
            shown = any(token.top for one in self.plain for token in one.tokens or ())
            side = "with speculation" if shown else "by the server"
            return _check("logprobs", None, f"not shown {side}", offered=shown)
        tolerance, measured = self.tolerance, self.rounding
        wrong = [
            f"{plain.piece.decode(errors='replace')!r}: {_shown(plain.logprob)}, with speculation "
            f"{_shown(other.logprob)}{'' if other.top else ' and no alternatives'}"
            for plain, other in pairs
            if not _alike(plain, other, tolerance)
        ]
        too_far = measured is not None and measured > _MOST_ROUNDING
        self.lists_hold = holds = not too_far and len(wrong) <= max(2, len(pairs) // 100)
        summary = f"{len(wrong)} of {len(pairs)} differ by more than {tolerance:.2g} nats or lack"
        summary += f" alternatives; median difference {_shown(measured)}"
        return _check("logprobs", holds, summary, [] if holds else wrong)

    def _sampled(self, name: str) -> Check:
        """Compare sampled texts as two samples of one distribution."""
        answers = self._samples(name, seeded=False)
        if any(len({one.text for one in side}) == 1 for sides in answers for side in sides):
            # A server may give the same seed to all requests without one.
            answers = self._samples(name, seeded=True)
        everything = [one for sides in answers for side in sides for one in side]
        by_token = all(one.tokens is not None for one in everything)
        tops = (token.top for one in everything for token in one.tokens or ())
        listed = self.lists_hold and by_token and all(tops)
        pairs = [
            Pair(*([_sample(one, by_token, listed) for one in side] for side in sides))
            for sides in answers
        ]
        tests = list(permutation_tests(pairs, level=LEVEL, seed=self.amount.seed))
        problems = [_explained(test) for test in tests if test.p_value <= LEVEL]
        least = distance(pairs) if problems else None
        if least:
            problems.append(f"total variation at a position: at least {least:.2f} (95 %, average)")
        smallest = min(test.p_value for test in tests)
        units = "tokens" if by_token else "words"
        summary = f"{len(everything)} texts of {units}, {len(tests)} tests: smallest p-value "
        summary += f"{smallest:.2g}, level {LEVEL:.2g}"
        facts = {test.statistic: asdict(test) for test in tests}
        return _check(name, not problems, summary, problems, tests=facts, total_variation=least)

    def _samples(self, name: str, *, seeded: bool) -> list[list[list[Answer]]]:
        """Return sampled texts by prompt and side. Seeds, if any, are all different."""
        params: dict[str, Any] = {
            "max_tokens": self.amount.sampled_tokens,
            "temperature": self.amount.temperature,
            "logprobs": self.drafts_scored,
            **SETTINGS[name],
        }
        number = max(2, self.amount.texts // len(SAMPLED_PROMPTS))
        self.num_requests += 2 * number * len(SAMPLED_PROMPTS)
        seeds = count(1_000_003 * (self.amount.seed + 1)) if seeded else None
        extra = ({} if seeds is None else {"seed": next(seeds) % 2**31} for _ in count())
        return [
            [
                side.all([(prompt, params | next(extra)) for _ in range(number)])
                for side in self.sides
            ]
            for prompt in SAMPLED_PROMPTS
        ]

    def _stop(self) -> Check:
        """Stop greedy texts at a string from their middle, which may begin within a token."""
        found: list[tuple[int, Departure | None]] = []
        broken: list[str] = []
        num_held = 0
        for number, (plain, drafted) in enumerate(zip(self.plain, self.drafted, strict=True)):
            stop = _stop_string(plain.text)
            if stop is None or len(found) == _NUM_FEW:
                continue
            whole, other = (
                self._greedily(side, [PROMPTS[number]], stop=[stop])[0] for side in self.sides
            )
            held = whole.ended and stop not in whole.text
            num_held += held
            if held and stop in other.text:
                broken.append(f"prompt {number + 1}: the text contains the stop string {stop!r}")
            cut = [whole.text, *(one.text.partition(stop)[0] for one in (plain, drafted))]
            left = None if other.text in cut else stopped(plain, other.text, stop)
            found.append((number, left))
        if not num_held:
            return _left_out("stop", "no text was stopped without speculation")
        check = self._departures("stop", found, " with a stop string")
        return replace(check, holds=False, problems=tuple(broken)) if broken else check

    def _seeds(self) -> Check:
        """Write texts with a seed twice, and with another one. No server promises a seed's text
        under speculation, so only texts that ignore their seed are a fault."""
        params = {"max_tokens": self.amount.sampled_tokens, "temperature": 1}
        first, second, third = (
            [
                [one.text for one in self._write(side, PROMPTS[:_NUM_FEW], **params, seed=seed)]
                for side in self.sides
            ]
            for seed in (77, 77, 78)
        )
        again, copies = (
            [sum(map(eq, *texts)) for texts in zip(first, other, strict=True)]
            for other in (second, third)
        )
        summary = f"of {_NUM_FEW} texts the same again: {again[0]} without speculation, {again[1]} "
        summary += f"with it; with and without: {sum(map(eq, *first))}"
        ignored = copies[1] == _NUM_FEW and not copies[0]
        warnings = ["with speculation a seed does not repeat its text"] * (again[1] < again[0])
        problems = ["another seed writes the same texts"] * ignored
        return _check("seeds", not ignored, summary, problems, warnings)

    def _choices(self) -> Check:
        """Ask for several choices: sampled ones, which must not be copies, and greedy ones."""
        num, most = self.amount.sampled_tokens, self.amount.greedy_tokens
        copies = [0, 0]
        found: list[tuple[int, Departure | None]] = []
        for number, prompt in enumerate(PROMPTS[:_NUM_FEW]):
            self.num_requests += 3
            three = [side.write(prompt, n=3, max_tokens=num, temperature=1) for side in self.sides]
            if len(three[0]) != 3:
                return _left_out("n", "not offered without speculation")
            if len(three[1]) != 3:
                return _check("n", False, f"{len(three[1])} of 3 choices with speculation")
            for i, choices in enumerate(three):
                copies[i] += len({one.text for one in choices}) == 1
            both = self.sides[1].write(prompt, max_tokens=most, temperature=0, n=2)
            found += [(number, departure(self.plain[number], one.text)) for one in both]
        check = self._departures("n", found, " of several choices")
        if copies[1] == _NUM_FEW and not copies[0]:
            return replace(check, holds=False, problems=("all sampled choices are copies",))
        return check

    def _json(self) -> Check:
        """Ask for JSON of a schema, by prompts that do not mention it. If all plain answers fit,
        the server enforces the schema, so all drafted ones must fit."""
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        params = {"response_format": form, "max_tokens": 64}
        plain, drafted = (
            [one.text for one in self._write(side, PROMPTS, **params, temperature=1) if one.ended]
            for side in (replace(side, chats=True) for side in self.sides)
        )
        if not plain or not all(map(_fits, plain)):
            return _left_out("json", "not kept without speculation")
        wrong = [f"{text[:60]!r} does not fit" for text in drafted if not _fits(text)]
        summary = f"{len(drafted) - len(wrong)} of {len(drafted)} sampled answers fit the schema"
        return _check("json", not wrong, summary, wrong)


def logit_step(lists: Sequence[Mapping[bytes, float]]) -> float:
    """Return the step of a server's logits: log-probabilities of one list differ by multiples of
    it, as their logits do. 0 if there is none.

    Logits of one number format have larger steps where they are larger, so this is the step that
    four of five lists do not exceed. Log-probabilities that are bfloat16 themselves hide the step
    of their logits, and that of usual logits is assumed.
    """
    # A text that repeats itself has the same lists again.
    full = {tuple(sorted(one.values())) for one in lists if len(one) > 3}
    if full and all(_is_bfloat16(value) for one in full for value in one):
        return _ASSUMED_GAP / _TIMES_STEP
    found = sorted(filter(None, map(_step_of, full)))
    enough = full and len(found) >= _STEP_SHARE * len(full)
    return found[4 * len(found) // 5] if enough else 0.0


def _step_of(values: Sequence[float]) -> float | None:
    """Return the largest step that the differences of a list have, None without one."""
    gaps = [max(values) - value for value in values]
    fits = (s for s in _STEPS if all(abs(math.remainder(g, s)) <= _STEP_ERROR for g in gaps))
    return next(fits, None)


def _is_bfloat16(value: float) -> bool:
    try:
        data = struct.pack("<f", value)
    except OverflowError:
        return False
    return data[:2] == b"\0\0" and struct.unpack("<f", data)[0] == value


def _check(
    name: str,
    holds: bool | None,
    summary: str,
    problems: Sequence[str] = (),
    warnings: Sequence[str] = (),
    **facts: Any,
) -> Check:
    return Check(
        name=name,
        title=TITLES[name],
        holds=holds,
        summary=summary,
        facts={"offered": True, "num_problems": len(problems)} | facts,
        problems=tuple(problems[:_MAX_SHOWN]),
        warnings=tuple(warnings[:_MAX_SHOWN]),
    )


def _left_out(name: str, why: str) -> Check:
    """Return the check of what a server does not offer, which does not count against it."""
    return _check(name, None, why, offered=False)


def _alike(plain: Token, other: Token, tolerance: float) -> bool:
    """True if the other side reports the plain one's log-probability, and lists alternatives that
    agree with it."""
    if plain.logprob is None or other.logprob is None or not other.top:
        return False
    own = plain.top.get(plain.piece, math.inf) - plain.logprob
    others = other.top.get(other.piece, other.logprob) - other.logprob
    alike = abs(own) > _OWN_ROUNDING or abs(others) <= _OWN_ROUNDING
    return alike and abs(plain.logprob - other.logprob) <= tolerance


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _sample(answer: Answer, by_token: bool, listed: bool) -> Sample:
    """Return the text in tokens, or in words, with the statistics that its lists allow."""
    tokens = answer.tokens if by_token and answer.tokens is not None else ()
    units = [token.piece.decode(errors="backslashreplace") for token in tokens]
    if not by_token:
        units = _WORDS.findall(answer.text)
    num = max(len(units), 1)
    values = {"repeated tokens": (len(units) - len(set(units))) / num}
    if listed:
        most = [max(token.top.values()) for token in tokens]
        own = [-math.inf if token.logprob is None else token.logprob for token in tokens]
        pairs = list(zip(own, most, strict=True))
        values["likeliest token"] = sum((p >= top) - math.exp(top) for p, top in pairs) / num
        values["unlikely tokens"] = sum(p < top + _UNLIKELY for p, top in pairs) / num
    return Sample(tuple(units), values)


def _explained(test: Permutation) -> str:
    effect = "" if test.effect is None else f" {test.effect:+.3f} with speculation,"
    return f"{test.statistic}:{effect} p = {test.p_value:.2g}"


def _stop_string(text: str) -> str | None:
    """Return five characters from the middle of the text, the first of their kind in it."""
    stops = ((at, text[at : at + 5]) for at in range(len(text) // 3, len(text) - 5))
    return next((s for at, s in stops if s.strip() == s and text.find(s) == at), None)


def _fits(text: str) -> bool:
    """True for JSON of SCHEMA."""
    try:
        return json.dumps(json.loads(text), sort_keys=True) in _VALID
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit. `about` says what was asked of whom."""

    about: Mapping[str, Any]
    checks: Sequence[Check]
    next_command: None = None

    def titles(self, holds: bool | None) -> str:
        """The titles of checks with this result, without those that the server does not offer."""
        found = [one.title for one in self.checks if one.holds is holds and one.facts["offered"]]
        return " and ".join(found)

    @property
    def holds(self) -> bool | None:
        """False if a check failed, None if one was not decidable."""
        return False if self.titles(False) else None if self.titles(None) else True

    @property
    def verdict(self) -> str:
        """The verdict, in one sentence."""
        if self.holds is False:
            return f"SPECULATION CHANGES THE OUTPUT: {self.titles(False)} differ."
        if self.holds is None:
            return f"Not decidable with what the server shows: {self.titles(None)}."
        near = sum(one.facts.get("num_near_ties", 0) for one in self.checks)
        but = f" but {near} near-ties within rounding" if near else ""
        return f"Speculation changes nothing{but} in {self.about['requests']} requests."

    def to_dict(self) -> dict[str, Any]:
        checks = [check.to_dict() for check in self.checks]
        return {"holds": self.holds, "verdict": self.verdict, "about": self.about, "checks": checks}


def page_of(report: Report, marks: Mapping[bool | None, str]) -> str:
    """Return the report as a page without scripts."""
    from jinja2 import Environment, PackageLoader

    shared = Environment(loader=PackageLoader("outrider.api", "assets"), autoescape=True)
    page = {"title": "Does speculation change this server's texts?"}
    return shared.get_template("audit.html.j2").render(page=page, report=report, marks=marks)
