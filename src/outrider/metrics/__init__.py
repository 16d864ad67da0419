"""Metrics from traces: no other code adds up tokens, passes or seconds. No tensors.

Open summary.py first: acceptance, tokens per round, latencies. profile.py has the profile of a
request, timeline.py and lanes.py the use of lanes over time, and chrome_trace.py writes jobs for
Perfetto.
"""
