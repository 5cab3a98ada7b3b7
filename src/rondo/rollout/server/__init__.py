"""An engine in its own process.

client.EngineProcess (host) ══ calls, replies and tokens of `wire` ══ child.EngineServer (engine's process)
"""

from rondo.rollout.server.client import EngineProcess, start_engine

__all__ = ["EngineProcess", "start_engine"]
