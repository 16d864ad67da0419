"""Audits of a real engine: silent over many requests, and loud under a bug in verification."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from doubles.asgi_client import Client
from doubles.scripted_site import app_of
from outrider import LLM
from outrider.core.config import EngineConfig
from outrider.plugins.metrics import Auditor
from outrider.server.site import Site
from outrider.server.thread_port import ThreadPort
from outrider_lab.proof.mutants import Mutant, planted

pytestmark = [pytest.mark.weights, pytest.mark.wide, pytest.mark.slow]
# A round in Python, which is what a bug can be planted in.
CONFIG = EngineConfig(threads=1, k=4, fused_round=False)
WORDS = ("def", "class", "return", "the", "import", "once")
BUGS = (
    Mutant(
        "match: a draft kept unlooked-at",
        "outrider.verify.exact",
        "if row.draft.tokens[c] == token)",
        "if row.draft.tokens[c] >= 0)",
    ),
    Mutant(
        "coupled: one race for all positions",
        "outrider.verify.exact",
        "rng.race_at(distribution, depth)",
        "rng.race_at(distribution, 0)",
    ),
)


async def audited(num_requests: int) -> Counter[str]:
    """Outcomes of audits of greedy and of seeded requests, in turns."""
    port = ThreadPort(lambda: LLM(config=CONFIG))
    await port.start()
    site = Site(port=port, names=("m",))
    outcomes = Counter[str]()

    def tell(outcome: str, _: str) -> None:
        outcomes[outcome] += 1

    auditor = Auditor(site, 1.0, tell)
    site.observers.append(auditor)
    running = asyncio.ensure_future(auditor.run())
    app = app_of(site)
    for i in range(num_requests):
        prompt = f"{WORDS[i % len(WORDS)]} x{i}(a, b):"
        how = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}
        body = {"prompt": prompt, "max_tokens": 16} | how
        got = await Client(app).ask("/v1/completions", body)
        assert got.status == 200
        while outcomes.total() < i + 1:
            await asyncio.sleep(0.005)
    running.cancel()
    await port.aclose()
    return outcomes


# Thirty have every word five times, greedy or seeded, and a bug rings within six; the soak is
# deep.
@pytest.mark.parametrize("num_requests", [16, pytest.param(120, marks=pytest.mark.deep)])
def test_audits_of_what_is_right_are_silent(num_requests: int) -> None:
    assert asyncio.run(audited(num_requests)) == {"same": num_requests}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_in_verification_rings(bug: Mutant) -> None:
    with planted(bug):
        assert asyncio.run(audited(6))["different"] > 0
