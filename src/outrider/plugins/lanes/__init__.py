"""Lanes: schedules of several lanes, drafting ahead of verdicts, a drafter in its own process.

Open schedules.py first: pd, pdv and ssd. overlap.py measures whether parallel lanes pay,
lane_order.py says which idle lane gets the next job, threads.py has a thread and a stream a lane,
and build.py wires them. ahead/ drafts ahead of verdicts, process/ runs a drafter elsewhere.
"""
