"""Metrics from traces: no other code adds up tokens, passes or seconds. No tensors.

summary.py has acceptance, tokens per round, latencies, and the profile of a request.
"""
