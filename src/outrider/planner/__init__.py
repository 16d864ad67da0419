"""Planner: predicts what speculation would bring, without running a model.

Open advise.py first (`outrider plan`), then candidates.py and rounds.py, which compute one way to
decode. places.py has acceptance, roofline.py and devices.py seconds and joules from sizes and data
sheets, overlap.py trees, drafting ahead and lanes.
"""
