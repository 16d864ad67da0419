"""Engines on a Ray cluster: replicas behind a gateway for Ray Serve, and batches by Ray Data.

`deployment.py` is what `serve run` and `serve deploy` import, `gateway.py` the HTTP application,
`engine.py` a replica, `handle_port.py` how the one reaches the other, and `prefix_router.py` which
replica gets a request. `batch_run.py` maps the lines of a batch over actors. Nothing else of the
program imports Ray; ADR 0015 says what it may pickle.
"""
