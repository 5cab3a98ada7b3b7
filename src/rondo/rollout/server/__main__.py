"""`python -m rondo.rollout.server DESCRIPTOR`: the engine's process, as `process.ChildProcess` starts it."""

from __future__ import annotations

import sys

from rondo.rollout.server.child import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
