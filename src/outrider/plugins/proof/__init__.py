"""Contracts of drafters and of acceptance rules, by enumeration: what `outrider.testing` offers.

Open contracts.py first. cases.py has pairs of distributions, distributions.py runs code once for
each outcome of its draws, algebra.py proves a rule by that, and reports.py checks drafters.
"""
