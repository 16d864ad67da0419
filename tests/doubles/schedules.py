"""Every schedule by name, made of the same sizes."""

from __future__ import annotations

from collections.abc import Callable

from outrider.sched.draft_ahead import DraftAheadLanes
from outrider.sched.jobs import Schedule
from outrider.sched.prefill_decode import PrefillDecode
from outrider.sched.prefill_draft_verify import PrefillDraftVerify
from outrider.sched.single import SingleLane
from outrider.sched.works import LaneSizes

SCHEDULES: dict[str, Callable[[LaneSizes], Schedule]] = {
    "single": lambda s: SingleLane(s.chunk, batch=s.decode, prefill_batch=s.prefill),
    "pd": lambda s: PrefillDecode(s.chunk, batch=s.decode, prefill_batch=s.prefill),
    "pdv": PrefillDraftVerify,
    "pdv, always separate": lambda s: PrefillDraftVerify(s, threshold=0),
    "ssd": DraftAheadLanes,
}
