"""What `outrider explain` can explain, in the order in which one would read it."""

from __future__ import annotations

from outrider.cli.explain_ahead import ahead, fan_out
from outrider.cli.explain_energy import energy
from outrider.cli.explain_machine import batch, roofline
from outrider.cli.explain_page import Topic
from outrider.cli.explain_published import published
from outrider.cli.explain_round import one_round
from outrider.cli.explain_rounds import acceptance, longest, speed_up

_DEVICE = ("parameters", "bandwidth", "tflops")

TOPICS = (
    Topic(
        name="round",
        text="One round by hand: accept, refuse, recover.",
        explain=one_round,
    ),
    Topic(
        name="acceptance",
        text="How much of a draft is kept.",
        explain=acceptance,
        takes=("alpha", "k"),
    ),
    Topic(
        name="speed-up",
        text="What a round brings over plain decoding.",
        explain=speed_up,
        takes=("alpha", "k", "c", "verify"),
    ),
    Topic(
        name="best-k",
        text="How long to draft, and when not to.",
        explain=longest,
        takes=("alpha", "c", "verify"),
    ),
    Topic(
        name="roofline",
        text="What a pass waits for: memory or arithmetic.",
        explain=roofline,
        takes=_DEVICE,
    ),
    Topic(
        name="batch",
        text="Speculation for many sequences at once, and with long contexts.",
        explain=batch,
        takes=("alpha", "k", "c", "batch", "context", *_DEVICE),
    ),
    Topic(
        name="ssd",
        text="Drafting ahead of the verdict.",
        explain=ahead,
        takes=("alpha", "k", "c", "p_hit", "batch"),
    ),
    Topic(
        name="fan-out",
        text="Which verdicts to draft for.",
        explain=fan_out,
        takes=("alpha", "k", "branches"),
    ),
    Topic(
        name="energy",
        text="Joules a token: saved too, but not as much as time.",
        explain=energy,
        takes=("alpha", "k", "c", "watts", *_DEVICE),
    ),
    Topic(
        name="published",
        text="A published prediction that does not follow from its inputs.",
        explain=published,
    ),
)
