"""`python -m rondo.system.actor_program MODULE:CLASS SOCKET`: the process behind an `ActorHandle`."""

from __future__ import annotations

import socket
import sys

from rondo.system.actor import main

if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
