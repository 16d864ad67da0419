"""Scheduler: which sequence runs which stage next, on which lane. No tensors.

Open schedules.py first: single, pd, pdv and ssd by name. jobs.py has stages, jobs and the
`Schedule` protocol, ledger.py the state machine of sequences. overlap.py measures whether parallel
lanes pay, lane_order.py says which idle lane is asked first, pace.py bounds the prompt tokens of a
job, batch_limit.py how many requests may be live, and routing.py which of several engines gets a
request. The engine, the server and the simulator run the same code.
"""
