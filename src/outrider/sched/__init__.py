"""Scheduler: which sequence runs which stage next, on which lane. No tensors.

Open single.py first, the schedule of one lane; plugins/lanes/ has those of several. jobs.py has
stages, jobs and the `Schedule` protocol, ledger.py the state machine of sequences. pace.py bounds
the prompt tokens of a job, batch_limit.py the number of running requests, and routing.py says which
of several engines gets a request. The engine, the server and the simulator run the same code.
"""
