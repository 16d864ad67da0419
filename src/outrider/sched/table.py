"""Schedules and lane orders by the names that settings give them."""

from __future__ import annotations

from outrider.core.config import EngineConfig
from outrider.sched.draft_ahead import DraftAheadLanes
from outrider.sched.jobs import Schedule
from outrider.sched.prefill_decode import PrefillDecode
from outrider.sched.prefill_draft_verify import PrefillDraftVerify
from outrider.sched.single import SingleLane
from outrider.sched.works import LaneSizes


def resolve_schedule(config: EngineConfig, *, has_draft: bool) -> str:
    """The schedule that `config` means.

    Lanes on one memory share its bandwidth, and one packed pass already uses that, so `auto` keeps
    one lane. Drafting ahead pays where the draft model has a memory or cores of its own.
    """
    if config.schedule != "auto":
        return config.schedule
    elsewhere = "auto" not in (config.device, config.drafter_device)
    elsewhere = elsewhere and config.device != config.drafter_device
    apart = config.drafter_home == "process" or elsewhere
    drafts = has_draft and config.k > 0 and config.drafter in ("auto", "model")
    return "ssd" if apart and drafts else "single"


def schedule_for(config: EngineConfig) -> Schedule:
    """That of a configuration whose schedule is resolved."""
    batch = config.batch_size
    sizes = LaneSizes(
        chunk=config.prefill_chunk,
        prefill=config.prefill_batch or batch,
        decode=config.decode_batch or batch,
        verify=config.verify_batch or batch,
    )
    match config.schedule:
        case "pd":
            return PrefillDecode(sizes.chunk, batch=sizes.decode, prefill_batch=sizes.prefill)
        case "pdv":
            return PrefillDraftVerify(sizes, threshold=config.hybrid_threshold)
        case "ssd":
            return DraftAheadLanes(sizes, always=_always_ahead(config))
        case _:
            return SingleLane(sizes.chunk, batch=sizes.decode, prefill_batch=sizes.prefill)


def _always_ahead(config: EngineConfig) -> bool:
    """Who forces hits studies drafting ahead. Seconds a turn tell which way is better only if both
    bring the same: with another fallback than jit a miss is not drafted for by the draft model."""
    return config.force_hits >= 0 or config.fallback != "jit" or config.hybrid_threshold == 0
