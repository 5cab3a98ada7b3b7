"""An engine in its own process.

client.EngineProcess (host) ══ one socket pair, frames of wire ══ child.Server (engine's process)
process.ChildProcess ── starts and watches ── guard.py ── starts, and ends with all its children ── the engine
"""

from rondo.rollout.server.client import EngineProcess

__all__ = ["EngineProcess"]
