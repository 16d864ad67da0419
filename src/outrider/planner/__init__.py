"""Planner and simulator: what speculation would bring, predicted without running a model.

Open advise.py first (`outrider plan`), then candidates.py and rounds.py, which reckon one way to
decode. places.py has acceptance, roofline.py and devices.py seconds and joules from sizes and data
sheets, overlap.py trees, drafting ahead and lanes. simulate.py (`outrider bench simulate`) runs the
schedules of sched/ on an invented clock.
"""
