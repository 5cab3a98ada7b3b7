"""What runs inside a sandbox: imported by whatever Python it has, from `inside`, without the rest of rondo.

The head (`head.py`) starts what is asked of it, watches it, and says what came of it. It never runs a guest's
code itself: a guest is a child with its limits, its user and its filters on (`confinement.py`) before its
program (`programs.py`) begins. So a guest cannot reach the pipes to the host, or answer in the head's place.

    host ──(fd 0: length, marshalled request)──▶ head ──fork──▶ guest: one program, or a session's cells
    host ◀──(fd 1: ANSWER, stdout, stderr)────── head ◀──────── its stdout, stderr, and "this cell is done"

End of file on fd 0, at any time: the host is gone, or does not want this sandbox any more; everything ends.
Standard library only, and few modules of that: each costs every fresh sandbox milliseconds.
"""
