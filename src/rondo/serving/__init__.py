"""The OpenAI-compatible endpoint and its session recorder, in front of a `generate` callable. Knows chat
templates, nothing of engines, rewards or training. `serving.http` alone needs aiohttp.
"""

from __future__ import annotations

from rondo.serving.endpoint import Endpoint, prompt_key
from rondo.serving.problems import ApiError
from rondo.serving.sessions import RecordedCall, Session, SessionRules, Sessions

__all__ = ["ApiError", "Endpoint", "RecordedCall", "Session", "SessionRules", "Sessions", "prompt_key"]
