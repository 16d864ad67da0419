"""Several replicas of one model under load, one of which is killed: what clients see of that.

Seeded requests of some families of prompts come at even distances, whatever becomes of those before
them: first all is well, then, at four times the pace, a replica is killed in the middle. When it is
back some come at once, and all replicas are told to end while these run. What a `Fleet` is, and how
replicas are killed, is its owner's: processes of one server, servers behind a gateway, a cluster.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_SECONDS = 300.0
_TRIES = 8
_LOOK_SECONDS = 0.01
_HURRY = 4
_BEGINNING = (
    "# Module number {0}.\nimport os\nimport sys\n\n\nclass Parser{0}:\n"
    '    """Reads lines of kind {0} and sums what they say."""\n\n    def part_{1}(self'
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """`home_header` names the header of an answer that says which replica it is of; `kill` ends the
    replica of this name at once, `num_ready` are those that would answer, and `end` asks all of
    them to end in order and gives their exit status."""

    url: str
    home_header: str
    kill: Callable[[str], None]
    num_ready: Callable[[], int]
    end: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Ask:
    """A streamed completion, and the family of its prompt."""

    family: int
    body: Mapping[str, Any]


def asks(families: int, members: int, max_tokens: int) -> list[Ask]:
    """Members of each family in turns, each with a seed of its own."""
    return [
        Ask(
            family,
            {
                "prompt": _BEGINNING.format(family, member),
                "seed": member * families + family,
                "max_tokens": max_tokens,
                "temperature": 0.8,
                "ignore_eos": True,
            },
        )
        for member in range(members)
        for family in range(families)
    ]


@dataclass(slots=True)
class Answer:
    """What a client has of an answer so far; `is_whole` once it ended as it should."""

    text: str = ""
    home: str = ""
    is_whole: bool = False
    problem: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def runs(self) -> bool:
        """Whether it has begun and has not ended."""
        return bool(self.text) and not self.ended.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of `num` requests each time. `num_moved` had begun at the replica that was killed and had not
    ended; `affinity` is the share of requests that went where most of their family did, while all
    was well."""

    num: int
    num_equal: int
    num_equal_when_killed: int
    num_moved: int
    num_moved_equal: int
    num_errors: int
    num_beginnings: int
    affinity: float
    num_homes: int
    recovery_seconds: float
    num_homes_again: int
    num_drained: int
    num_drained_equal: int
    status: int

    @property
    def holds(self) -> bool:
        """All that does not depend on how busy the machine is."""
        return (
            self.num == self.num_equal == self.num_equal_when_killed
            and 0 < self.num_moved == self.num_moved_equal
            and self.num_errors == 0
            and min(self.num_homes, self.num_homes_again) == 2
            and 0 < self.num_drained == self.num_drained_equal
            and self.status == 0
        )


def examine(
    fleet: Fleet, asked: Sequence[Ask], expected: Sequence[str], gap: float, *, at_once: int = 8
) -> Findings:
    """All of it. `expected` are the texts of `asked`, `gap` the seconds between two of them."""
    calm = _storm(fleet, asked, gap)
    _join(calm)
    homes = _homes(asked, calm)
    gap /= _HURRY
    killed = _storm(fleet, asked[: len(asked) // 2], gap)
    victim, moved = _victim(killed)
    fleet.kill(victim)
    began = time.monotonic()
    killed += _storm(fleet, asked[len(asked) // 2 :], gap)
    _join(killed)
    while fleet.num_ready() < 2:
        if time.monotonic() - began > _SECONDS:
            raise RuntimeError("the replica that was killed does not come back")
        time.sleep(_LOOK_SECONDS)
    recovery = time.monotonic() - began
    last, drained = _under_way(fleet, asked[:at_once])
    status = fleet.end()
    _join(last)
    return Findings(
        num=len(asked),
        num_equal=_num_equal(calm, expected),
        num_equal_when_killed=_num_equal(killed, expected),
        num_moved=len(moved),
        num_moved_equal=sum(_is_equal(killed[number], expected[number]) for number in moved),
        num_errors=sum(bool(answer.problem) for answer in (*calm, *killed, *last)),
        num_beginnings=sum(
            text.startswith(answer.text) for answer, text in zip(killed, expected, strict=True)
        ),
        affinity=sum(max(found.values()) for found in homes.values()) / len(asked),
        num_homes=len({answer.home for answer in calm}),
        recovery_seconds=round(recovery, 2),
        num_homes_again=len({answer.home for answer in last}),
        num_drained=len(drained),
        num_drained_equal=sum(_is_equal(last[number], expected[number]) for number in drained),
        status=status,
    )


def _under_way(fleet: Fleet, asked: Sequence[Ask]) -> tuple[list[Answer], list[int]]:
    """Answers that have begun, and the numbers of those that have not ended. On a machine that
    pauses all may have ended, so they are requested again."""
    for _ in range(_TRIES):
        answers = _storm(fleet, asked, 0.0)
        while any(not answer.text and not answer.ended.is_set() for answer in answers):
            time.sleep(_LOOK_SECONDS)
        running = [number for number, answer in enumerate(answers) if answer.runs]
        if running:
            return answers, running
    return answers, []


def gap_for(fleet: Fleet, ask: Ask, *, load: float = 0.5) -> float:
    """Seconds between requests that keep two replicas busy for a share of `load`, by how long one
    takes alone."""
    began = time.monotonic()
    _join(_storm(fleet, [ask], 0.0))
    return (time.monotonic() - began) / (2 * load)


def _storm(fleet: Fleet, asked: Sequence[Ask], gap: float) -> list[Answer]:
    """Ask, one after another; does not wait for the last ones."""
    answers: list[Answer] = []
    due = time.monotonic()
    for ask in asked:
        time.sleep(max(0.0, due - time.monotonic()))
        answers.append(Answer())
        threading.Thread(target=_read, args=(fleet, ask, answers[-1]), daemon=True).start()
        due += gap
    return answers


def _read(fleet: Fleet, ask: Ask, answer: Answer) -> None:
    parts = urlsplit(fleet.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_SECONDS)
    try:
        body = json.dumps({**ask.body, "stream": True}).encode()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        got = connection.getresponse()
        answer.home = got.headers.get(fleet.home_header, "")
        if got.status != 200:
            answer.problem = f"status {got.status}"
        for line in got:
            if line == b"data: [DONE]\n":
                answer.is_whole = True
            elif line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]))
    except (OSError, http.client.HTTPException) as error:
        answer.problem = type(error).__name__
    finally:
        if not answer.is_whole and not answer.problem:
            answer.problem = "no end"
        connection.close()
        answer.ended.set()


def _take(answer: Answer, piece: Mapping[str, Any]) -> None:
    if "error" in piece:
        answer.problem = "an error event"
    for choice in piece.get("choices", ()):
        answer.text += choice["text"]


def _join(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if not answer.ended.wait(_SECONDS):
            raise RuntimeError("an answer did not end")


def _victim(answers: Sequence[Answer]) -> tuple[str, list[int]]:
    """The replica with most answers under way, and which those are."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        running = [number for number, answer in enumerate(answers) if answer.runs]
        if running:
            ((home, _),) = Counter(answers[number].home for number in running).most_common(1)
            return home, [number for number in running if answers[number].home == home]
        if all(answer.ended.is_set() for answer in answers):
            raise RuntimeError("all answers ended before one could be broken off")
        time.sleep(_LOOK_SECONDS)
    raise RuntimeError("no answer begins")


def _homes(asked: Sequence[Ask], answers: Sequence[Answer]) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for ask, answer in zip(asked, answers, strict=True):
        found.setdefault(ask.family, Counter())[answer.home] += 1
    return found


def _is_equal(answer: Answer, text: str) -> bool:
    return answer.is_whole and answer.text == text


def _num_equal(answers: Sequence[Answer], expected: Sequence[str]) -> int:
    return sum(map(_is_equal, answers, expected))
