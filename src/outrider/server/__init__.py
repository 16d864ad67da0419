"""The HTTP server: OpenAI's chat and completions, playground and dashboard over one engine.

`app.py` combines the routes, `exchange.py` is one request of any API, and `port.py` the interface
to the engine. Nothing here sees tensors.
"""
