"""Planner: predictions of what speculation brings, without running a model.

Open advise.py first (`outrider plan`), then candidates.py and rounds.py, which compute the forecast
of one drafter and K. rounds.py also estimates acceptance, roofline.py seconds and joules from sizes
and data sheets, overlap.py trees, drafting ahead and lanes. calibration.py has what is measured
beforehand, suppose.py what is assumed instead.
"""
