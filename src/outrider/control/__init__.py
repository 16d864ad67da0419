"""Controllers: how many tokens each request drafts in the next round. No tensors.

Open heuristics.py first (fixed lengths, and the watchdog, which turns drafting off for requests
whose drafts are hardly ever accepted), then goodput.py, which learns which lengths pay. scored.py
cuts scored drafts and bounds the time spent on other lengths.
"""
