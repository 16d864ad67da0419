"""False alarms and finds of `outrider verify --against` on toy servers: `run.py audits`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from common import Report, note, study
from options import Options

from outrider_lab.proof.against import FAMILY_LEVEL, Amount, Audit
from outrider_lab.proof.against import Report as Found
from outrider_lab.proof.served import sides_of

TESTS = Path(__file__).parents[1] / "tests"
PLANTED = ("argmax", "zero_logprob", "off_by_one", "penalties")
OTHERS = ("min_p", "stop", "copies", "json", "one_seed", "draft_accepted")
# Standard deviations of the noise of logits in passes with drafts, as rounding of batches makes it.
ROUNDINGS = (0.0, 1e-4, 3e-3, 3e-2)
MOST_ALARMS, LEAST_FOUND = 0.01, 0.99


@study(honest=400, first=0, faulty=100, others=10, texts=48)
def audits(options: Options, report: Report) -> bool:
    """How often does an audit accuse an honest server, and how often does it find a planted fault?

    Each server has a toy model and a drafter of its own, and rounding of one of four sizes. Every
    fourth honest one shows no log-probabilities; every second one is two servers, not one with a
    switch. The four faults of the bar are found if the verdict is that texts differ: at least 99 of
    100, with at most 1 % of alarms on honest servers. Other faults, and servers without
    log-probabilities, are counted besides. Honest servers are counted from the number `first` on.
    """
    if options.quick:
        options.honest, options.faulty, options.others, options.texts = 2, 4, 0, 24
    report["family_level"] = FAMILY_LEVEL
    each = max(options.faulty // len(PLANTED), 1)
    honest = _group(options, "honest", options.honest, fault="", first=options.first)
    note(report, **honest)
    planted = [_group(options, name, each, fault=name) for name in PLANTED]
    for group in planted:
        note(report, **group)
    for name in OTHERS if options.others else ():
        note(report, **_group(options, name, options.others, fault=name))
    for name in () if not options.others else [name for name in PLANTED if name != "zero_logprob"]:
        title = f"{name}, no log-probabilities"
        note(report, **_group(options, title, each, fault=name, shows_logprobs=False))
    found = sum(group["differs"] for group in planted)
    report["alarms"], report["found"] = honest["differs"], found
    alarms_hold = honest["differs"] <= MOST_ALARMS * options.honest
    return alarms_hold and found >= LEAST_FOUND * each * len(PLANTED)


def _group(
    options: Options, name: str, number: int, *, fault: str, first: int = 0, **more: Any
) -> dict[str, Any]:
    verdicts: Counter[bool | None] = Counter()
    failed: Counter[str] = Counter()
    requests: list[int] = []
    seconds: list[float] = []
    servers = zip(range(first + number), _settings(fault), strict=False)
    for seed, settings in islice(servers, first, None):
        began = perf_counter()
        found, num_requests = _audited(options, seed, fault, settings | more)
        seconds.append(perf_counter() - began)
        requests.append(num_requests)
        verdicts[found.holds] += 1
        failed.update(check.name for check in found.checks if check.holds is False)
    return {
        "group": name,
        "audits": number,
        "differs": verdicts[False],
        "undecided": verdicts[None],
        "requests": median(requests),
        "seconds": median(seconds),
        "failed": dict(failed),
    }


def _settings(fault: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of one server after another."""
    number = 0
    while True:
        shows = bool(fault) or number % 4 != 3
        rounding = ROUNDINGS[number // 4 % len(ROUNDINGS)]
        yield {"rounding": rounding, "shows_logprobs": shows, "two": number % 2 == 1}
        number += 1


def _audited(
    options: Options, seed: int, fault: str, settings: Mapping[str, Any]
) -> tuple[Found, int]:
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from doubles.toy_endpoint import ToyEndpoint

    settings = dict(settings)
    two = settings.pop("two")
    server = ToyEndpoint(seed=seed, fault=fault, **settings)
    shows = settings["shows_logprobs"]
    other = ToyEndpoint(seed=seed, speculates=False, shows_logprobs=shows) if two else None
    audit = Audit(sides_of(server, other), Amount(texts=options.texts, seed=seed))
    checks = tuple(event for event in audit.run() if not isinstance(event, str))
    return Found({"requests": audit.num_requests}, checks), audit.num_requests
