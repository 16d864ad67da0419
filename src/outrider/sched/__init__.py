"""Scheduler: which sequence runs which stage next, on which lane. No tensors.

Open jobs.py first: stages, jobs, the `Schedule` protocol and the schedule of one lane;
plugins/lanes/ has those of several. It has the state machine of sequences too. admission.py says
which of several engines gets a request, which key's request starts next, and how many requests and
prompt tokens run at once. The engine, the server and the simulator run the same code.
"""
