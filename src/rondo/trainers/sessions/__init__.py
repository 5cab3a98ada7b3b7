"""RL algorithms as programs of the user: roles as handles."""

# ruff: noqa: F401
from rondo.trainers.sessions.handles import Actor, per_group
from rondo.trainers.sessions.opening import open_session
from rondo.trainers.sessions.session import Session
