"""Formulas and estimates of speculative rounds: expected tokens, costs, acceptance. No tensors.

Open theory.py first: closed forms of tokens per round, speed-up and drafting ahead. acceptance.py
and cost.py learn acceptance and seconds from rounds while they run; calibration.py is what was
measured beforehand, for the planner.
"""
