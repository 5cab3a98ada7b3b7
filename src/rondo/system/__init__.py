"""What starts, guards, stores and signals: processes and calls to them, files, URLs; and what
turns errors in your code into clear messages.

    Child (host) ══ socket pair, frames ══ serve (the process)
    ChildProcess ── starts and watches ── guard.py ── starts, and ends with all its children ── the process

Rollout engines, scorers and the hosts of `cluster.backend: process` stand on it. Standard library and
`core/errors` only; fsspec and the hubs' packages are imported where they are used (urls, hub).
"""
