"""Acceptance rules: which draft tokens are kept, from distributions alone.

Open exact.py first: why the output is exact (token rule for trees, block rule for chains). match.py
ties the text to the seed, lossy.py may change the distribution and says so, rules.py has the rules
by name, and batched.py is the rules on tensors.
"""
