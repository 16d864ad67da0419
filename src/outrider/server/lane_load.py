"""How busy the lanes of an engine are, for the dashboard and `outrider top`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from outrider.core.budget import JobTrace
from outrider.core.clock import HOST_CLOCK, Clock

# What is told is of so many seconds, as far as so many jobs go back.
SECONDS = 4.0
_MOST_JOBS = 4096


class LaneLoad:
    """Hears of every job of every lane, on the engine's thread; is asked on any."""

    def __init__(self, clock: Clock = HOST_CLOCK) -> None:
        self._clock = clock
        self._jobs: deque[JobTrace] = deque(maxlen=_MOST_JOBS)
        self._lanes: dict[str, None] = {}

    def note(self, job: JobTrace) -> None:
        self._lanes.setdefault(job.lane)
        self._jobs.append(job)

    @property
    def words(self) -> Mapping[str, str]:
        """Each lane that ran anything, and how much of the last seconds it was at work."""
        now, jobs = self._clock(), tuple(self._jobs)
        # A burst of jobs may not fit: then the time is that of those that do.
        whole = len(jobs) == _MOST_JOBS and jobs[0].began > now - SECONDS
        since = jobs[0].began if whole else now - SECONDS
        busy = dict.fromkeys(tuple(self._lanes), 0.0)
        for job in jobs:
            busy[job.lane] += max(job.ended - max(job.began, since), 0.0)
        return {
            lane: f"{min(seconds / (now - since), 1):.0%} busy" for lane, seconds in busy.items()
        }
