"""Drafters for study: found by name as those of the program are (core/plugins.py).

Open recycling.py first: a table of the target's own candidates. Untrained heads (eagle_lite.py,
medusa_lite.py) and fewer layers (layer_skip.py) show how much of a trained drafter is training;
block.py drafts with nets of a format of our own, which `outrider train block` makes.
"""
