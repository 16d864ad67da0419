"""Measurements of a run: its speed-up, its profile, and the parts on which the lab builds studies.

turns.py has contestants, ratios and the machine's other programs; timers.py times kernels.
compare.py and profile.py are options of `outrider generate`.
"""
