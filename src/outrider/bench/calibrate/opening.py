"""Engines are opened within an answer's time and memory; a pass of the target is timed in any case.

Of a target that takes longer to load than there is time the answer comes late, and says so: a plan
without a single pass of the model says nothing of this machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.bench.calibrate.engines import TimedEngines, TimedLLM, open_engines
from outrider.bench.calibrate.found import Answer, Asked, Watch
from outrider.bench.studies.drafters_lineup import Contestant
from outrider.bench.workload import ECHO, builtin_texts
from outrider.core.env import cache_folder, compiler
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.kernels.native.build import built_kernels, must_compile

# Of what is left of the time, what opening engines may take.
_OPENING_SHARE = 0.4
# Tokens of a text that is read for the first pass, and the most passes that are timed of it.
_FIRST_TOKENS, _FIRST_PASSES = 8, 8


def refusal_of(asked: Asked) -> str | None:
    """Why nothing is measured at all, if so."""
    if not asked.bounds.seconds:
        return "nothing was measured: --seconds 0 estimates all"
    try:
        asked.bounds.must_fit(f"loading {asked.target}", num_bytes=asked.spec.weight_bytes)
    except CapacityError as error:
        return f"nothing was measured: {error}"
    return None


def compile_kernels(asked: Asked, watch: Watch) -> None:
    """Kernels that are not compiled yet, which happens once and does not count."""
    if asked.engine.device not in ("auto", "cpu"):
        return
    if must_compile(compiler(), cache_folder()):
        bounds = asked.bounds
        watch.warns("kernels are compiled first, once; that takes a minute and does not count")
        began = bounds.clock()
        built_kernels(compiler(), cache_folder())
        bounds.add_time(bounds.clock() - began)


@contextmanager
def opened(so_far: Answer, watch: Watch) -> Generator[TimedEngines]:
    """Engines with the target's weights, as many as there is time and memory for. As soon as the
    target is loaded a pass of it is timed."""
    asked = so_far.asked
    bounds, extent = asked.bounds, asked.extent
    watch.hear("loading", 0.0)
    expected = bounds.loading_seconds(asked.spec.weight_bytes)
    if expected > bounds.left:
        watch.warns(
            f"loading {asked.target} takes about {expected:.0f} s, which is more than is left of "
            f"--seconds {bounds.seconds:g}: the answer comes after it, and little is measured"
        )
    began, until, num_opened, loading = bounds.clock(), 0.0, 0, 0

    def admit(one: Contestant, before: Sequence[TimedLLM]) -> None:
        nonlocal began, until, num_opened, loading
        num_opened += 1
        if num_opened == 1:
            return
        if num_opened == 2:
            _note_target(so_far, before[0], bounds.clock() - began)
            until = bounds.part(_OPENING_SHARE)
        else:
            bounds.note_loading(loading, bounds.clock() - began)
        watch.hear("loading", num_opened / len(asked.contestants))
        size = asked.num_bytes.get(one.name, 0)
        bounds.must_fit("it", num_bytes=size + extent.engine_bytes(asked.spec))
        is_late = size and num_opened > 2 and bounds.clock() > until
        if is_late or bounds.loading_seconds(size) > bounds.left:
            raise CapacityError("too little time is left to load it.", hint="--seconds gives more")
        began, loading = bounds.clock(), size

    base = replace(
        asked.engine,
        batch_size=extent.batch_size,
        arena_tokens=extent.room,
        # A request without an end asks for a whole window.
        context=min(asked.engine.context or asked.spec.max_tokens, extent.room),
        prefill_chunk=min(asked.engine.prefill_chunk, extent.chunk),
    )
    engines = open_engines(
        asked.contestants,
        asked.target,
        asked.drafts,
        base,
        most_k=extent.deepest,
        admit=admit,
    )
    try:
        if so_far.pass_seconds is None:
            _note_target(so_far, engines.plain.llm, bounds.clock() - began)
        yield engines
    finally:
        engines.close()


def _note_target(so_far: Answer, llm: TimedLLM, seconds: float) -> None:
    """The target was loaded in so many seconds: a pass of it is timed, whatever that takes."""
    asked, bounds = so_far.asked, so_far.asked.bounds
    bounds.note_loading(asked.spec.weight_bytes, seconds)
    if bounds.left <= 0:
        so_far.notes.append(
            f"the target was loaded after {bounds.spent:.1f} s, and nothing was left of "
            f"--seconds {bounds.seconds:g} but for one pass of it; give more"
        )
    so_far.pass_seconds = first_pass(llm, lambda: bounds.left > 0)


def first_pass(llm: TimedLLM, goes_on: Callable[[], bool]) -> float:
    """Seconds of a pass that goes on from a short text: the median of a few, or as many as there is
    time for, one at the least."""
    ids = llm.tokenizer.encode(builtin_texts(ECHO)[0])[:_FIRST_TOKENS]
    params = SamplingParams(max_tokens=_FIRST_PASSES + 1, ignore_eos=True)
    handle, seconds = llm.submit(ids, params), list[float]()
    try:
        while not handle.done and (not seconds or goes_on()):
            has_read = handle.has_read
            llm.advance()
            seconds += [llm.wall / llm.delay] if has_read else []
    finally:
        llm.cancel(handle)
    return statistics.median(seconds)
