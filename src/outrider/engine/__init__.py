"""Engine: requests in, verified tokens out; it knows token ids only.

Open engine.py first (`Engine.step`), then round.py (the protocol of a round) and stages.py, the
round stage by stage; native_round.py and plugins/gpu/rounds/ compute the same outcomes faster.
requests.py admits, pre-empts and frees requests and handles failed jobs, lanes.py runs jobs,
drafting.py guards drafters. build.py wires all of it from a configuration.
"""
