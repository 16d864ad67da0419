"""Simulator: an engine that takes the planner's times and runs no model.

Open simulate.py first. engine.py runs the scheduler's own queues over simulated passes, events.py
says what a pass costs and accepts, load.py when requests arrive, and
study.py compares settings.
"""
