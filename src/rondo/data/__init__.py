"""Prompts, conversations and pairs as streams; trajectories to rows."""

from __future__ import annotations

from rondo.data.conversations import ConversationStream
from rondo.data.pairs import PairStream
from rondo.data.prompts import PromptStream, eval_prompts
from rondo.data.rows import index_columns, is_scored
from rondo.data.sources import check_source

__all__ = [
    "ConversationStream",
    "PairStream",
    "PromptStream",
    "check_source",
    "eval_prompts",
    "index_columns",
    "is_scored",
]
