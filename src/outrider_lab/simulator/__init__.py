"""Simulator: an engine, or a fleet of engines, that takes the planner's times and runs no model.

Open simulate.py first. engine.py runs the scheduler's own queues over simulated passes, events.py
says what a pass costs and accepts, load.py when requests arrive, fleet.py has several engines,
study.py compares settings, and replicas.py plans how many engines a machine should have.
"""
