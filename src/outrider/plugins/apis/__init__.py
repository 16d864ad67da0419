"""APIs of OpenAI (Responses) and of Anthropic (Messages), with routes that count tokens.

routes.py has what the server reads. An answer is a sequence of events (events.py), and the object
that these add up to.
"""
