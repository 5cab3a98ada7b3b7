"""Prompts and conversations as streams, the trajectory buffer and its ledger, trajectories to rows."""

from __future__ import annotations

from rondo.data.stream import ConversationStream, PromptStream, eval_prompts

__all__ = ["ConversationStream", "PromptStream", "eval_prompts"]
