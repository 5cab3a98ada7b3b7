"""What an evaluation keeps of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rondo.chat import decode
from rondo.core.types import Trajectory
from rondo.data.rows import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluated trajectory, small enough to travel."""

    prompt_id: str
    source: str
    sample_index: int
    reward: float
    response_length: int
    finish_reason: str
    outcome: str
    prompt: str
    text: str
    transcript: str = ""
    answer: str | None = None
    scores: dict[str, float] = field(default_factory=dict)


def record_of(t: Trajectory, answer: str | None, tokenizer: PreTrainedTokenizerBase) -> EvaluationRecord:
    """Returns the record of a trajectory that is scored. answer: what it votes for. tokenizer: reads a prompt
    that is token ids only.
    """
    return EvaluationRecord(
        prompt_id=t.prompt.prompt_id,
        source=t.prompt.source,
        sample_index=t.sample_index,
        reward=float(t.reward),
        response_length=t.num_tokens,
        finish_reason=t.finish_reason,
        outcome=t.outcome,
        prompt=prompt_text(t.prompt) or decode(tokenizer, t.prompt.token_ids),
        text=t.text,
        transcript=t.transcript,
        answer=answer,
        scores=dict(t.scores),
    )
