"""A long run on one engine: requests come, end, stop, are cancelled, and leave nothing behind."""

from __future__ import annotations

import gc
import random
from functools import cache
from itertools import combinations

import pytest

from checks.state import VOCAB
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.round import LiveSequence
from outrider.verify.exact import MatchRule

pytestmark = pytest.mark.wide

NUM_WAVES, SETTLED = 8, 3
WAVE = 20
# What an interpreter holds varies a little; one object that stayed of each request would be 80.
FEW_OBJECTS = 60


def kinds_of_requests() -> list[Request]:
    """Prompts of 1 to 40 tokens, some with common beginnings; greedy and drawn; some stop early."""
    rng = random.Random(11)
    found: list[Request] = []
    for number in range(12):
        prompt = ((1, 2, 3, 0, 2) * 8)[: rng.randint(1, 40)] if number % 2 else (number % VOCAB,)
        params = SamplingParams(
            temperature=(0.0, 0.9)[number % 3 == 0], seed=number, max_tokens=rng.randint(1, 14)
        )
        found.append(Request(prompt, params, stop_ids=frozenset({3} if number % 4 == 0 else ())))
    return found


REQUESTS = kinds_of_requests()


@cache
def plain(number: int) -> list[int]:
    """What the request gets by itself, without speculation."""
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), rule=MatchRule(), k=0)
    return rig.run([REQUESTS[number]])[0]


def play(engine: Engine, rig: Rig, rng: random.Random, first: int) -> None:
    """A wave: requests arrive while others run, and one in five is cancelled on the way."""
    waiting = [(first + i, rng.randrange(len(REQUESTS))) for i in range(WAVE)]
    running: dict[int, tuple[int, LiveSequence]] = {}
    cancelled: set[int] = set()
    for _ in range(100 * WAVE):
        if waiting and rng.random() < 0.5:
            seq_id, number = waiting.pop()
            seq = rig.live(seq_id, REQUESTS[number])
            engine.submit(seq)
            running[seq_id] = number, seq
        if running and rng.random() < 0.1:
            seq_id = rng.choice(list(running))
            engine.cancel(seq_id)
            cancelled.add(seq_id)
        engine.step()
        if not waiting and not engine.has_work:
            break
    assert not engine.has_work
    for seq_id, (number, seq) in running.items():
        text = seq.tokens[seq.prompt_length :]
        wanted = plain(number)
        assert text == (wanted[: len(text)] if seq_id in cancelled else wanted)


@pytest.mark.slow
def test_hundreds_of_requests_leave_nothing_behind() -> None:
    """Every text is the one without speculation, and neither pages nor objects pile up."""
    target = TinyAttentionLM(vocab_size=VOCAB, num_slots=256)
    draft = TinyAttentionLM(vocab_size=VOCAB, seed=5, num_slots=256)
    rig = Rig(target, model_drafter(draft, chunk=5), MatchRule(), k=3, batch_size=4, chunk=6)
    engine, rng = rig.engine(), random.Random(3)
    num_objects: list[int] = []
    for wave in range(NUM_WAVES):
        play(engine, rig, rng, first=wave * WAVE)
        rig.traces.clear()
        for model in (target, draft):
            model.state.check()
            assert model.state.num_free_tokens == 256
            # The double's own notes of what it wrote, which nobody tells of the end.
            model._staged.clear()  # pyright: ignore[reportPrivateUsage]
        gc.collect()
        num_objects.append(len(gc.get_objects()))
    settled = num_objects[SETTLED:]
    # What other tests left may end meanwhile, so objects may become fewer.
    more = max(later - earlier for earlier, later in combinations(settled, 2))
    assert more <= FEW_OBJECTS, num_objects
