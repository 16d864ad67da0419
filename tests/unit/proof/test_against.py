"""The audit of a server: silent on honest ones, and each planted fault is found by its check."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from doubles.toy_endpoint import FAULTS, Request, ToyEndpoint
from outrider.core.errors import ConfigError, MachineError, SilentError
from outrider.plugins.proof.check import PROMPTS, Check
from outrider_lab.proof.against import (
    LEVEL,
    NUM_TESTS,
    SETTINGS,
    Amount,
    Audit,
    Report,
    departure,
    logit_step,
    page_of,
    stopped,
)
from outrider_lab.proof.served import Answer, Token, answers_of, sides_of

# The check that must find each fault; others may as well.
FINDERS = {
    "argmax": "sampled",
    "zero_logprob": "logprobs",
    "off_by_one": "greedy",
    "penalties": "penalties",
    "min_p": "min_p",
    "stop": "stop",
    "copies": "n",
    "json": "json",
    "one_seed": "seeds",
    "draft_accepted": "greedy",
}
LITTLE = Amount(texts=32, greedy_tokens=40, sampled_tokens=16)


def audited(
    server: Any, other: Any = None, last: str = "json", texts: int = LITTLE.texts
) -> dict[str, Check]:
    """The checks by name, up to the `last` that is needed."""
    found: dict[str, Check] = {}
    for event in Audit(sides_of(server, other), replace(LITTLE, texts=texts)).run():
        if not isinstance(event, str):
            found[event.name] = event
            if event.name == last:
                break
    return found


def reported(checks: Mapping[str, Check]) -> Report:
    return Report({"requests": 1}, tuple(checks.values()))


def test_every_planted_fault_has_a_finder() -> None:
    assert set(FINDERS) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_check(fault: str) -> None:
    checks = audited(ToyEndpoint(seed=3, fault=fault), last=FINDERS[fault])
    assert checks[FINDERS[fault]].holds is False
    assert checks[FINDERS[fault]].problems
    assert reported(checks).holds is False


def test_an_honest_server_passes_every_check() -> None:
    checks = audited(ToyEndpoint(seed=5))
    assert {name: check.holds for name, check in checks.items()} == dict.fromkeys(checks, True)
    assert len(checks) == 10
    assert reported(checks).verdict.startswith("Speculation changes nothing")


def test_near_ties_of_rounding_are_named_and_are_no_fault() -> None:
    found = [
        audited(
            ToyEndpoint(seed=seed, rounding=0.03),
            ToyEndpoint(seed=seed, speculates=False),
            last="greedy",
        )
        for seed in range(3)
    ]
    greedy = [checks["greedy"] for checks in found]
    assert [check.holds for check in greedy] == [True] * 3
    assert sum(check.facts["num_near_ties"] for check in greedy) > 0
    assert all("gap" in note for check in greedy for note in check.warnings)


def test_two_steps_of_rounded_logits_are_a_near_tie_and_three_are_none() -> None:
    """An error far below a step turns two logits that lie two steps apart, if both are rounded."""
    greedy = [
        audited(
            ToyEndpoint(seed=seed, rounding=0.01, step=0.125),
            ToyEndpoint(seed=seed, step=0.125, speculates=False),
            last="greedy",
        )["greedy"]
        for seed in range(8)
    ]
    assert [check.facts["step"] for check in greedy] == [0.125] * 8
    assert [check.holds for check in greedy] == [True] * 8
    gaps = [float(note.rpartition(" ")[2]) for check in greedy for note in check.warnings]
    assert {round(gap, 6) for gap in gaps} <= {0, 0.125, 0.25}
    assert max(gaps) == pytest.approx(0.125)
    # All but the steps is below the gap that is then a near-tie.
    assert all(10 * check.facts["rounding"] < 0.125 for check in greedy)
    wrong = audited(ToyEndpoint(seed=3, step=0.125, fault="off_by_one"), last="greedy")["greedy"]
    assert (wrong.holds, wrong.facts["tolerance"]) == (False, 0.25)


def rounded_lists(rounded: Callable[[float], float]) -> list[dict[bytes, float]]:
    """The likeliest tokens of 300 rows of logits between 8 and 32."""
    rng = random.Random(4)
    found: list[dict[bytes, float]] = []
    for _ in range(300):
        logits = [rounded(rng.uniform(17, 24)) for _ in range(5)]
        whole = math.log(sum(map(math.exp, logits)))
        found.append({b"%d" % i: value - whole for i, value in enumerate(logits)})
    return found


def bfloat16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).bfloat16())


def test_the_step_of_logits_is_read_from_lists_of_log_probabilities() -> None:
    assert logit_step(rounded_lists(bfloat16)) == 0.125
    assert logit_step(rounded_lists(lambda value: bfloat16(value / 2))) == 0.0625
    assert logit_step(rounded_lists(float)) == 0.0
    assert logit_step([]) == logit_step([{b"a": 0.0, b"b": -1.0}] * 9) == 0.0
    # Log-probabilities that are rounded themselves, and odd ones.
    lists = [{k: bfloat16(v) for k, v in one.items()} for one in rounded_lists(bfloat16)]
    assert logit_step(lists) == 0.125
    assert logit_step([{b"a": 0.0, b"b": -1e308, b"c": -1.1, b"d": -2.3}] * 9) == 0.0


def test_without_log_probabilities_a_greedy_difference_is_not_decidable() -> None:
    biased = ToyEndpoint(seed=3, fault="argmax", shows_logprobs=False)
    checks = audited(biased, last="sampled", texts=96)
    assert checks["logprobs"].facts["offered"] is False
    # Samples need no log-probabilities.
    assert checks["sampled"].holds is False
    wrong = ToyEndpoint(seed=3, fault="off_by_one", shows_logprobs=False)
    assert audited(wrong, last="greedy")["greedy"].holds is None
    honest = audited(ToyEndpoint(seed=3, rounding=0.03, shows_logprobs=False), last="logprobs")
    assert reported(honest).holds is None
    assert "Not decidable" in reported(honest).verdict


def test_a_server_whose_speculation_cannot_be_turned_off_needs_a_second_one() -> None:
    with pytest.raises(ConfigError, match="--plain"):
        sides_of(ToyEndpoint(shows_drafts=False), None)
    plain, drafted = sides_of(ToyEndpoint(), None, model="mine")
    assert plain.fields["speculative"] is False
    assert "speculative" not in drafted.fields
    assert drafted.model == "mine"
    studio = sides_of(ToyEndpoint(shows_drafts=False), None, draft="small")
    assert [side.fields.get("draft_model") for side in studio] == [None, "small"]


def test_a_plain_side_that_drafts_and_a_drafted_side_that_does_not_are_named() -> None:
    both = audited(ToyEndpoint(seed=1), ToyEndpoint(seed=1), last="speculation")
    assert both["speculation"].holds is None
    idle = Counting(ToyEndpoint(seed=1, speculates=False))
    neither = audited(idle, ToyEndpoint(seed=1), last="speculation")
    assert "drafted nothing" in " ".join(neither["speculation"].problems)


@dataclass(slots=True)
class Counting:
    """A server that reports drafts only on /metrics, as vLLM does, and refuses completions and
    fields that OpenAI does not have."""

    inner: ToyEndpoint
    drafted: int = 0
    refused: set[str] = field(default_factory=set[str])

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        if path == "/v1/completions" or (body and "top_k" in body):
            self.refused.add(path)
            raise MachineError(f"{path} answered 400")
        reply = self.inner.ask(path, body)
        shown = reply.pop("metrics", {}).get("speculative_decoding", {})
        self.drafted += shown.get("num_draft_tokens", 0)
        return reply

    def lines(self, path: str, body: Mapping[str, object] | None) -> Generator[str]:
        assert (path, body) == ("/metrics", None)
        yield "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens."
        yield f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(self.drafted)}'


def test_drafts_are_read_from_metrics_and_chats_serve_without_completions() -> None:
    server = Counting(ToyEndpoint(seed=2, fault="argmax"))
    checks = audited(server, Counting(ToyEndpoint(seed=2, speculates=False)), last="sampled")
    assert server.refused == {"/v1/completions", "/v1/chat/completions"}
    assert checks["speculation"].holds
    assert not checks["speculation"].summary.startswith("0 ")
    # Drafts were seen with log-probabilities too, so samples have them.
    assert "texts of tokens, 5 tests" in checks["sampled"].summary
    assert checks["sampled"].holds is False


def test_what_a_server_refuses_is_left_out_of_the_verdict() -> None:
    @dataclass(slots=True)
    class Refusing:
        inner: ToyEndpoint

        def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
            if body and (
                body.get("n", 1) != 1 or "response_format" in body or body.get("logprobs")
            ):
                raise MachineError("400: not supported")
            return self.inner.ask(path, body)

        def lines(self, path: str, body: Mapping[str, object] | None) -> Generator[str]:
            return self.inner.lines(path, body)

    checks = audited(Refusing(ToyEndpoint(seed=5)))
    left_out = {name for name, check in checks.items() if not check.facts["offered"]}
    assert left_out == {"logprobs", "n", "json"}
    assert reported(checks).holds is True


@dataclass(slots=True)
class Odd:
    """A server whose replies `change` changes; it may raise MachineError."""

    inner: ToyEndpoint
    change: Callable[[Mapping[str, Any], dict[str, Any]], object]

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        reply = self.inner.ask(path, body)
        self.change(body or {}, reply)
        return reply

    def lines(self, path: str, body: Mapping[str, object] | None) -> Generator[str]:
        return self.inner.lines(path, body)


def test_what_only_the_side_with_speculation_refuses_is_not_decided() -> None:
    def refused(body: Mapping[str, Any], _: object) -> None:
        if body.get("speculative") is not False and (body.get("logprobs") or body.get("n") == 3):
            raise MachineError("400: not with drafts")

    checks = audited(Odd(ToyEndpoint(seed=5), refused))
    assert checks["n"].summary == "refused with speculation: 400: not with drafts"
    assert reported(checks).titles(None) == "log-probabilities and several choices"
    assert reported(checks).holds is None


def choice(**values: object) -> Callable[[Mapping[str, Any], dict[str, Any]], object]:
    """A change of every choice of a reply; "..." stands for a value in a list as long as it was."""

    def changed(_: Mapping[str, Any], reply: dict[str, Any]) -> None:
        for one in reply.get("choices", ()):
            for name, value in values.items():
                place: dict[str, Any] = (one["logprobs"] or {}) if name in _LISTS else one
                if place is one or name in place:
                    place[name] = [value] * len(place[name]) if name in _LISTS else value

    return changed


_LISTS = ("tokens", "token_logprobs", "top_logprobs")


@pytest.mark.parametrize(
    "change",
    [
        choice(token_logprobs=math.nan),
        choice(token_logprobs=-math.inf),
        choice(token_logprobs="-1"),
        choice(token_logprobs=0.0),
        choice(top_logprobs={" an": math.nan, " or": "x"}),
        choice(top_logprobs={"?": 1e308}),
        choice(top_logprobs=["?"]),
        choice(tokens=1),
        choice(index=None, finish_reason=7),
    ],
)
def test_a_server_with_odd_numbers_on_both_sides_is_not_accused(change: Any) -> None:
    checks = audited(Odd(ToyEndpoint(seed=3), change), last="sampled", texts=8)
    assert reported(checks).holds is not False
    assert checks["greedy"].holds is True


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        {"choices": None},
        {"choices": [{"text": 5}]},
        {"choices": [{"text": ["a"]}]},
        {"choices": [{"text": "a", "logprobs": [1]}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": None}}]},
        {"choices": [None]},
        {"error": {"message": "no"}},
    ],
)
def test_a_reply_without_texts_is_an_error(reply: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match="no texts"):
        answers_of(reply)


def test_a_silent_server_is_asked_once() -> None:
    asked: list[object] = []

    def silent(body: Mapping[str, Any], _: object) -> None:
        asked.append(body)
        raise SilentError("timed out")

    with pytest.raises(SilentError):
        sides_of(Odd(ToyEndpoint(), silent), None, model="toy")
    assert len(asked) == 1


def test_empty_texts_prove_nothing_and_half_a_character_is_replaced() -> None:
    def emptied(body: Mapping[str, Any], reply: dict[str, Any]) -> None:
        choice(text="")(body, reply)
        reply |= {"data": "none"}

    found = reported(audited(Odd(ToyEndpoint(seed=3), emptied), last="n", texts=8))
    assert found.holds is None
    assert "empty texts" in found.checks[0].problems[0]
    assert answers_of({"choices": [{"text": "a\ud83d"}]})[0].text == "a?"


def test_a_server_that_ends_meanwhile_is_an_error() -> None:
    server = ToyEndpoint(seed=5)
    events = Audit(sides_of(server, None), LITTLE).run()
    while "log" not in str(next(events)):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyEndpoint, "ask", gone)
        with pytest.raises(MachineError, match="no answer"):
            list(events)


def gone(*_: object) -> dict[str, Any]:
    raise MachineError("no answer")


@pytest.mark.parametrize("shape", [{}, *SETTINGS.values()])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_toy_judges_drafts_by_a_distribution(shape: Mapping[str, Any], drafted: bool) -> None:
    """Masses that do not add up to 1 reject too many drafts."""
    request = Request({"temperature": 1, **shape}, 7, random.Random(1), tokens=[3, 5, 3])
    probs, _ = ToyEndpoint(seed=1).target(request, (), drafted=drafted)
    assert sum(probs) == pytest.approx(1.0)
    assert (min(probs) == 0) == ("min_p" in shape)


def test_the_level_of_all_tests_together_is_that_of_the_family() -> None:
    assert pytest.approx(0.005) == LEVEL * NUM_TESTS


def answer(*tokens: tuple[str, float, dict[str, float]], finish: str = "length") -> Answer:
    read = tuple(
        Token(piece.encode(), value, {other.encode(): p for other, p in top.items()})
        for piece, value, top in tokens
    )
    return Answer("".join(piece for piece, _, _ in tokens), finish, read, None)


PLAIN = answer(
    ("The", -0.1, {"The": -0.1, "A": -2.5}),
    (" cat", -0.7, {" cat": -0.7, " ca": -0.75, " dog": -3.0}),
    (" sat", -0.2, {" sat": -0.2, " ran": -2.0}),
)


@pytest.mark.parametrize(
    ("text", "position", "gap", "at_least"),
    [
        # The likeliest token with which the other text may go on counts.
        ("The car sat", 1, 0.05, False),
        ("The dog", 1, 2.3, False),
        # No listed token fits: the gap is at least that of the last one.
        ("The owl", 1, 2.3, True),
        # The text ended early, with a token that is not shown.
        ("The cat", 2, 1.8, False),
    ],
)
def test_a_departure_has_the_gap_of_its_tokens(
    text: str, position: int, gap: float, at_least: bool
) -> None:
    found = departure(PLAIN, text)
    assert found is not None
    assert (found.position, found.at_least) == (position, at_least)
    assert found.gap == pytest.approx(gap)
    assert found.near(3.0) is (None if at_least else True)
    assert found.near(gap - 0.01) is False


@pytest.mark.parametrize(
    ("text", "stop", "position", "gap", "at_least"),
    [
        # "car" was near, and the stop string begins within " ca" or after it.
        ("The ca", "r sat", 1, 0.05, False),
        ("The", " car ", 1, 0.05, False),
        # The stop string begins in " cat", after which another token was near.
        ("The ca", "t ran", 2, 1.8, False),
        # No listed token fits either with the stop string or without.
        ("The o", "wl is", 1, 2.3, True),
        # The text ended by itself, before any stop string.
        ("The cat", "no", 2, 1.8, False),
    ],
)
def test_a_text_may_stop_within_a_token(
    text: str, stop: str, position: int, gap: float, at_least: bool
) -> None:
    found = stopped(PLAIN, text, stop)
    assert found is not None
    assert (found.position, found.at_least) == (position, at_least)
    assert found.gap == pytest.approx(gap)


def test_a_departure_without_tokens_has_no_gap() -> None:
    assert departure(PLAIN, PLAIN.text) is None
    found = departure(replace(PLAIN, tokens=None), "The car")
    assert found is not None
    assert (found.position, found.plain, found.other, found.gap) == (6, "t sat", "r", None)
    # The plain text ended, with no token to say how sure that was.
    longer = departure(PLAIN, PLAIN.text + " on")
    assert longer is not None
    assert longer.gap is None


def test_answers_are_read_in_both_formats() -> None:
    item = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}
    ended = {"token": "<end>", "logprob": -0.1, "top_logprobs": [{"token": "é", "logprob": -3.0}]}
    message = {"content": "é", "reasoning_content": None}
    chat = {"message": message, "logprobs": {"content": [item, ended]}}
    (read,) = answers_of({"choices": [chat | {"finish_reason": "stop"}]})
    assert read.tokens == (Token("é".encode(), -0.5, {}), Token(b"", -0.1, {"é".encode(): -3.0}))
    flat = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -2.0}]}
    whole = {"choices": [{"text": "a", "logprobs": flat, "finish_reason": "length"}]}
    (read,) = answers_of(whole | {"timings": {"draft_n": 7}})
    assert read.tokens == (Token(b"a", -1.0, {b"a": -1.0, b"b": -2.0}),)
    assert (read.drafted, read.ended) == (7, False)
    with pytest.raises(MachineError, match="OpenAI's format"):
        answers_of({"choices": [{"text": 7}, {}]})


def test_the_page_shows_every_check_and_escapes_texts() -> None:
    checks = audited(ToyEndpoint(seed=3, fault="off_by_one"), last="logprobs")
    evil = replace(checks["greedy"], problems=("<script>alert(1)</script>",))
    page = page_of(reported(checks | {"greedy": evil}), {True: "ok", False: "FAILED", None: "-"})
    assert all(check.title in page for check in checks.values())
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_rounding_is_not_measured_where_drafted_tokens_have_no_alternatives() -> None:
    audit = Audit(sides_of(ToyEndpoint(seed=3, fault="zero_logprob"), None), LITTLE)
    found = [event for event, _ in zip(audit.run(), range(4), strict=False)][-1]
    assert isinstance(found, Check)
    assert (found.name, found.holds) == ("logprobs", False)
    assert "with speculation 0 and no alternatives" in found.problems[0]
    assert (audit.rounding, audit.tolerance) == (None, 0.25)


def test_rounding_is_the_median_difference_of_listed_log_probabilities() -> None:
    audit = Audit(sides_of(ToyEndpoint(seed=4, rounding=0.01), None), LITTLE)
    events = audit.run()
    assert next(events) == "greedy texts"
    next(events)
    assert audit.rounding is not None
    # Differences of one noisy and one exact logit: the median of a normal one is 0.67 of its
    # deviation, and the sum of all probabilities moves a little too.
    assert 0.003 < audit.rounding < 0.012
    assert math.isclose(audit.tolerance, 10 * audit.rounding)
    assert len(audit.plain) == len(PROMPTS)
