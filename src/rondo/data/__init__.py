"""Prompts, conversations and pairs as streams, the trajectory buffer and its ledger, trajectories to rows."""

from __future__ import annotations

from rondo.data.pairs import PairStream
from rondo.data.stream import ConversationStream, PromptStream, eval_prompts

__all__ = ["ConversationStream", "PairStream", "PromptStream", "eval_prompts"]
