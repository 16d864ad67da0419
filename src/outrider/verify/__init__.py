"""Acceptance rules: they choose which draft tokens to accept, from distributions alone.

Open exact.py first: it explains why the output is exact (token rule for trees, block rule for
chains). match.py ties the text to the seed, lossy.py has rules that may change the distribution,
rules.py has the rules by name, and batched.py has the rules on tensors.
"""
