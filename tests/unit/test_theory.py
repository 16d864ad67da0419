"""docs/theory.md computed again, sections 1 to 4: its walk-through by the shipped rule, the rest by
its formulas. test_theory_costs.py has the other sections."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import outrider_lab.planner.rounds as closed_form
from checks.documents import Document
from doubles.racing import Written
from doubles.rig import Request, Rig, model_drafter
from outrider.core.clock import host_ints
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import VerifyRow
from outrider.core.sampling import Distributions
from outrider.estimate.acceptance import expected_tokens
from outrider.verify.exact import TokenRule, residual
from outrider_lab.models.scripted import Script, ScriptedLM

PAGE = Document.named("docs/theory.md").between("# Theory", "## 5.")
PROSE = PAGE.prose
WORDS = ("the", "cat", "sat", "on", "mat")
PARAMETERS, FLOPS, BANDWIDTH = 7e9, 300e12, 900e9
RIDGE = FLOPS / BANDWIDTH


def distributions_under(header: str) -> Tensor:
    return torch.tensor(
        [[float(cell) for cell in row[1:]] for row in PAGE.rows_under(header)], dtype=torch.float64
    )


def speed_up(beta: float, k: int, c: float) -> float:
    return closed_form.speed_up(expected_tokens(beta, k), c * k)


Q = distributions_under("| after | q(the)")
P = distributions_under("| after | p(the)")
DRAFT = [WORDS.index(word) for word in ("cat", "sat", "mat", "on")]


def test_the_numbers_of_a_pass() -> None:
    reading, computing = 2 * PARAMETERS / BANDWIDTH, 2 * PARAMETERS / FLOPS
    found = {row[0]: row[1] for row in PAGE.rows_under("| quantity | value |")}
    assert list(found.values()) == [
        f"{2 * PARAMETERS / 1e9:.0f} GFLOP",
        f"{2 * PARAMETERS / 1e9:.0f} GB",
        "1 FLOP/byte",
        f"{RIDGE:.0f} FLOP/byte",
        f"{1e3 * reading:.1f} ms a token",
        f"{1e3 * computing:.3f} ms a token",
        f"{100 * computing / reading:.1f} %",
    ]
    assert (f"{RIDGE:.0f}", f"{1e3 * reading:.1f}") == ("333", "15.6")
    assert f"{100 / RIDGE:.1f}" == "0.3"


def test_the_time_of_a_prompt() -> None:
    def milliseconds(num_tokens: int) -> str:
        per_token = 2 * PARAMETERS / FLOPS
        return f"{1e3 * max(2 * PARAMETERS / BANDWIDTH, num_tokens * per_token):.1f} ms"

    assert 100 < RIDGE < 1024
    assert f"prompt of 100 tokens is below the ridge and takes {milliseconds(100)}," in PROSE
    assert f"prompt of 1024 tokens is above it and takes {milliseconds(1024)}." in PROSE


def test_the_distributions_are_distributions() -> None:
    assert (Q.shape, P.shape) == ((4, 5), (5, 5))
    for distributions in (Q, P):
        assert torch.allclose(
            distributions.sum(-1), torch.ones(distributions.shape[0], dtype=distributions.dtype)
        )


def test_the_decisions_are_those_of_the_shipped_rule() -> None:
    table = PAGE.rows_under("| position | word |")
    for place, (row, word) in enumerate(zip(table, DRAFT, strict=True)):
        p, q = float(P[place, word]), float(Q[place, word])
        assert row[:5] == [str(place + 1), WORDS[word], f"{p:.2f}", f"{q:.2f}", f"{p / q:.3f}"]
    coins = tuple(float(row[5] or "nan") for row in table)
    last = float(re.findall(r"second uniform number, (\d\.\d+), falls on `on`", PROSE)[0])
    draft = Draft.chain(DRAFT, Q)
    (verdict,) = TokenRule()([VerifyRow(draft, Distributions(probs_NV=P), Written(coins, last))])
    assert [row[6].split(";")[0].split(":")[0] for row in table] == [
        "accepted",
        "accepted",
        "rejected",
        "not reached",
    ]
    assert verdict.path == (0, 1)
    emitted = [WORDS[DRAFT[node]] for node in verdict.path] + [WORDS[verdict.next_token]]
    assert f"The round emits `{' '.join(emitted)}`" in PROSE


def test_the_residual_is_that_of_the_shipped_rule() -> None:
    left_V = residual(P[2], Q[2])
    assert isinstance(left_V, Tensor)
    difference_V = P[2] - Q[2]
    mass = float(difference_V.clamp_min(0).sum())
    assert f"Z = {mass:.2f}," in PROSE
    assert f"{float(torch.minimum(P[2], Q[2]).sum()):.2f} = the sum of min(p, q)" in PROSE
    on, the, cat = (f"{float(left_V[WORDS.index(word)]):.3f}" for word in ("on", "the", "cat"))
    assert f"gives `on` {on}, `the` {the} and `cat` {cat}." in PROSE
    assert float(left_V[WORDS.index("sat")]) == float(left_V[WORDS.index("mat")]) == 0


def test_both_cases_of_the_proof_in_numbers() -> None:
    accepted_V, left_V = torch.minimum(P[2], Q[2]), (P[2] - Q[2]).clamp_min(0)
    assert torch.allclose(accepted_V + left_V, P[2])
    on, mat = WORDS.index("on"), WORDS.index("mat")
    assert (
        f"`on` comes out accepted with probability {float(accepted_V[on]):.2f} and recovered with "
        f"{float(left_V[on]):.2f}, together {float(P[2, on]):.2f} = p(on)"
    ) in PROSE
    assert f"accepted with {float(accepted_V[mat]):.2f} and recovered never" in PROSE
    assert float(left_V[mat]) == 0


@pytest.mark.parametrize(
    "row", PAGE.rows_under("| beta | E | S |"), ids=lambda row: f"beta {row[0]}"
)
def test_the_speed_up_at_k_4(row: list[str]) -> None:
    beta = float(row[0])
    assert row[1] == f"{expected_tokens(beta, 4):.3f}"
    assert row[2] == f"{speed_up(beta, 4, 0.1):.3f}"
    assert expected_tokens(beta, 4) == pytest.approx((1 - beta**5) / (1 - beta))


def test_when_it_hurts() -> None:
    expected = expected_tokens(0.8, 4)
    batch = expected / (0.4 + 5)
    normal = speed_up(0.8, 4, 0.1)
    short = (20 + 8) / (20 + 0.1 * 20 + 8 / normal)
    found = [row[2] for row in PAGE.rows_under("| cause | example | S |")]
    numbers = [speed_up(0.3, 8, 0.1), speed_up(0.8, 4, 0.7), speed_up(0.8, 32, 0.1), batch, short]
    assert found == [f"{number:.3f}" for number in numbers]
    assert f"S = {expected:.3f} / (0.4 + 5) = {batch:.3f}" in PROSE
    best = max(range(1, 65), key=lambda k: speed_up(0.8, k, 0.1))
    assert f"the best K is {best}, with S = {speed_up(0.8, best, 0.1):.3f}" in PROSE


@pytest.mark.parametrize("row", PAGE.rows_under("| beta | c | best K |"), ids=lambda row: row[:2])
def test_the_usual_claim(row: list[str]) -> None:
    beta, c = float(row[0]), float(row[1])
    best = max(range(1, 65), key=lambda k: speed_up(beta, k, c))
    assert row[2:] == [
        str(best),
        f"{expected_tokens(beta, best):.3f}",
        f"{speed_up(beta, best, c):.3f}",
    ]
    assert 1.95 < speed_up(beta, best, c) < 3.15


def test_accepted_over_drafted_is_lower_than_beta() -> None:
    expected = expected_tokens(0.8, 4)
    assert f"({expected:.3f} - 1) / 4 = {100 * (expected - 1) / 4:.0f} %" in PROSE


def test_the_engine_counts_what_the_formula_says() -> None:
    """A scripted draft that agrees in 80 % of all contexts, over some thousand tokens."""
    beta, k, num_tokens = 0.8, 4, 600
    target = ScriptedLM(Script(vocab_size=512))
    drafter = model_drafter(ScriptedLM(Script(vocab_size=512, agreement=beta)))
    rig = Rig(target, drafter, k=k)
    params = SamplingParams(max_tokens=num_tokens)
    rig.run([Request((i, 2 * i + 1, 7), params) for i in range(6)])
    traces = [trace for trace in rig.traces if trace.num_drafted == k]
    emitted = torch.tensor([trace.num_emitted for trace in traces])
    mean, error = float(emitted.double().mean()), float(emitted.double().std())
    assert len(traces) > 800
    assert abs(mean - expected_tokens(beta, k)) < 4 * error / len(traces) ** 0.5
    counts = host_ints(torch.bincount(emitted, minlength=k + 2))
    assert sum(counts[1:]) == len(traces)


def test_every_number_of_the_page_is_computed_or_given() -> None:
    """A number that is new in the prose belongs in one of these sets, if computed in a test too."""
    given = {"14", "300", "900", "100", "1024", "333", "0.60", "70", "80", "10", "20", "32"}
    computed = {
        "15.6",
        "47.8",
        "0.31",
        "0.69",
        "0.20",
        "0.25",
        "0.45",
        "0.806",
        "0.129",
        "0.065",
        "2.470",
        "3.362",
    }
    computed |= {"0.623", "59"}
    named = {"0.7", "0.8", "0.1", "0.4", "0.10", "0.05"}
    assert PAGE.numbers <= given | computed | named, PAGE.numbers - given - computed - named
