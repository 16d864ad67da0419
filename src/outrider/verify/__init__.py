"""Acceptance rules: they choose which draft tokens to accept, from distributions alone.

Open exact.py first: it explains why the output is exact (token rule for trees, block rule for
chains). rules.py has rules that may change the distribution, and all rules by name.
"""
