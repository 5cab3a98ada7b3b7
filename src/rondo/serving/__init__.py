"""The OpenAI-compatible endpoint and its sessions, in front of a `generate` callable. Knows chat
templates, nothing of engines, rewards or training. `serving.http` alone needs aiohttp.
"""

from __future__ import annotations

from rondo.serving.endpoint import Endpoint
from rondo.serving.problems import ApiError
from rondo.serving.prompts import named, prompt_key
from rondo.serving.sessions import EndpointSession, Key, ModelCall, SessionRules, Sessions

__all__ = [
    "ApiError",
    "Endpoint",
    "EndpointSession",
    "Key",
    "ModelCall",
    "SessionRules",
    "Sessions",
    "named",
    "prompt_key",
]
