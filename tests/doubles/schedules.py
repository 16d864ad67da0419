"""Every schedule by name, made of the same sizes."""

from __future__ import annotations

from collections.abc import Callable

from outrider.sched.jobs import LaneSizes, Schedule
from outrider.sched.schedules import DraftAheadLanes, PrefillDecode, PrefillDraftVerify, SingleLane

SCHEDULES: dict[str, Callable[[LaneSizes], Schedule]] = {
    "single": lambda s: SingleLane(s.chunk, batch=s.decode, prefill_batch=s.prefill),
    "pd": lambda s: PrefillDecode(s.chunk, batch=s.decode, prefill_batch=s.prefill),
    "pdv": PrefillDraftVerify,
    "pdv, always separate": lambda s: PrefillDraftVerify(s, threshold=0),
    "ssd": DraftAheadLanes,
}
