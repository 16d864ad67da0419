"""The HTTP server: OpenAI's and Anthropic's APIs, playground and dashboard over one engine.

`app.py` combines the routes, `port.py` is the interface to the engine, and `events.py` the common
form of an answer that every API's encoder reads. Nothing here sees tensors.
"""
