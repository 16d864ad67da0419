"""The public name of a plugin: engines in child processes, for programs without a server."""

from outrider.plugins.replicas import EnginePool

__all__ = ["EnginePool"]
