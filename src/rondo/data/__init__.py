"""Prompts, conversations and pairs as streams; trajectories to rows."""

from __future__ import annotations

from rondo.data.conversations import ConversationStream
from rondo.data.pairs import PairStream
from rondo.data.prompts import PromptStream, eval_prompts

__all__ = ["ConversationStream", "PairStream", "PromptStream", "eval_prompts"]
