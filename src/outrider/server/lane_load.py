"""Load of an engine's lanes, for the dashboard and `outrider top`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import JobTrace

# The load is of the last seconds, or of the last jobs if these are fewer.
SECONDS = 4.0
_MOST_JOBS = 4096


class LaneLoad:
    """Load of all lanes. The engine's thread calls `note` for each job; any may read `words`."""

    def __init__(self, clock: Clock = HOST_CLOCK) -> None:
        self._clock = clock
        self._jobs: deque[JobTrace] = deque(maxlen=_MOST_JOBS)
        self._lanes: dict[str, None] = {}

    def note(self, job: JobTrace) -> None:
        self._lanes.setdefault(job.lane)
        self._jobs.append(job)

    @property
    def words(self) -> Mapping[str, str]:
        """The busy share of each lane in the last seconds, in words."""
        now, jobs = self._clock(), tuple(self._jobs)
        # In a burst, the stored jobs may cover less time: then the share is of that time.
        whole = len(jobs) == _MOST_JOBS and jobs[0].began > now - SECONDS
        since = jobs[0].began if whole else now - SECONDS
        busy = dict.fromkeys(tuple(self._lanes), 0.0)
        for job in jobs:
            busy[job.lane] += max(job.ended - max(job.began, since), 0.0)
        return {
            lane: f"{min(seconds / (now - since), 1):.0%} busy" for lane, seconds in busy.items()
        }
