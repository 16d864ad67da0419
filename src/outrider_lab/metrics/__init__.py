"""Use of lanes over time, from traces: timeline.py; chrome_trace.py writes jobs for Perfetto."""
