"""The HTTP server: OpenAI's and Anthropic's APIs, playground and dashboard over one engine.

`app.py` puts routes together, `port.py` is how the engine is reached, and `events.py` what every
API's encoder reads. Nothing here sees tensors.
"""
