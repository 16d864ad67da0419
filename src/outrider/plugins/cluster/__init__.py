"""Engines on a Ray cluster: replicas behind a gateway for Ray Serve.

`serve run` and `serve deploy` import `gateway.py`, which is the HTTP application, and
`engine.py` a replica; the gateway calls replicas through `handle_port.py`, and `prefix_router.py`
chooses the replica of each request. `verbs.py` writes the configuration. Only
`batches/on_ray.py` imports Ray as well; ADR 0015 says what it may pickle.
"""
