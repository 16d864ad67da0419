"""Scheduler: which sequence runs which stage next, on which lane. No tensors.

Open jobs.py first: stages, jobs, the `Schedule` protocol and the schedule of one lane;
plugins/lanes/ has those of several. It has the state machine of sequences too. batch_limit.py
bounds the prompt tokens of a job and the number of running requests, and routing.py says which of
several engines gets a request. The engine, the server and the simulator run the same code.
"""
