"""Processes of ours on one machine, and calls to them: the standard library only.

    Child (host) ══ socket pair, frames ══ serve (the process)
    ChildProcess ── starts and watches ── guard.py ── starts, and ends with all its children ── the process

Rollout engines, scorers and the hosts of `cluster.backend: process` stand on it.
"""
