"""Engines on a Ray cluster: replicas behind a gateway for Ray Serve, and batches by Ray Data.

`serve run` and `serve deploy` import `gateway.py`, which is the HTTP application, and
`engine.py` a replica; the gateway calls replicas through `handle_port.py`, and `prefix_router.py`
chooses the replica of each request. `batch_run.py` maps the lines of a batch over actors. No other
part of the program imports Ray; ADR 0015 says what it may pickle.
"""
