"""Text and messages to token ids and back. Knows tokenizers and templates, nothing of rows, rewards or
engines.
"""

from __future__ import annotations

from rondo.chat.encode import (
    Messages,
    as_messages,
    decode,
    encode_conversation,
    encode_conversations,
    encode_prompt,
    encode_prompts,
    stop_token_ids,
)

__all__ = [
    "Messages",
    "as_messages",
    "decode",
    "encode_conversation",
    "encode_conversations",
    "encode_prompt",
    "encode_prompts",
    "stop_token_ids",
]
