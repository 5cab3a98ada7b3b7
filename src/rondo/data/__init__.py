"""Prompts, conversations and pairs as streams; trajectories to rows."""

# ruff: noqa: F401
from __future__ import annotations

from rondo.data.chosen import (
    SAMPLER,
    ChosenPrompts,
    Given,
    Heard,
    Mixer,
    Sampler,
    parameters_of,
    reads_accuracy,
)
from rondo.data.content import looking
from rondo.data.conversations import ConversationStream
from rondo.data.encoding import digest_of
from rondo.data.mixes import MIX
from rondo.data.pairs import PairStream
from rondo.data.prompts import PromptStream, eval_prompts
from rondo.data.rows import (
    FIRST_GIVEN,
    firsts,
    index_columns,
    is_cut_off,
    is_given,
    is_scored,
    lasts,
    trajectory_of_rows,
)
from rondo.data.sources import check_source, source_name
