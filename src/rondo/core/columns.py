"""Every column of a batch, declared once: what one number of it belongs to, its type, and who makes it.

A `Batch` is a general table and knows none of this. What lists columns asks here (`made_by`, `per_row`), and
a choice of some goes through `declared`, so that a name that nobody makes is an error where it is written.
A name that is not in the table belongs to the user: what a `prepare` of theirs makes, or what their program
adds to a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pyarrow as pa

from rondo.core.errors import DataError

ROW_ID = "row_id"
GREEDY_REWARD = "greedy_reward"
BRANCH_VALUES = "branch_values"
UNIT = "unit"
TOPK_IDS = "teacher_topk_ids"
TRANSCRIPT = "transcript"
IMAGES = "images"
RECORD = "environment_record"
ROUTED, PROMPT_ROUTED = ROUTES = ("routed_experts", "prompt_routed_experts")

# Who makes a column, where it is not a role (roles.py), whose name is then the maker's.
EPISODE = "episode"  # with the scorers' part in it: the rows of a prompt group as they enter the buffer
GREEDY_ANSWER = "greedy answer"
TOKENIZER = "tokenizer"
AGENT = "agent"
IMAGE_READER = "image reader"
SCORERS = "scorers and reward models"
PAIRS = "preference pairs"
UPDATE_PLAN = "plan of the update"
MIXING = "mix"
RESAMPLING = "resampling"
BRANCHES = "branches"
ADVANTAGE_STAGE = "advantage stage"
ESTIMATOR = "advantage estimator"
CORRECTION = "rollout correction"
UPDATE = "the update itself"


@dataclass(frozen=True)
class Column:
    """One column of a batch."""

    name: str
    """Its key in a Batch; functions ask for it by this name."""
    per: Literal["row", "turn", "token", "choice", "batch"]
    """What one number belongs to. turn: a stretch of the response. choice: K numbers for each token. batch:
    only functions see it.
    """
    dtype: pa.DataType
    """The type of one number (or text)."""
    made_by: str
    """A role, or one of the makers above: who makes it first. Others may replace it."""
    doc: str
    """A sentence for the table of columns in the docs."""

    @property
    def type(self) -> pa.DataType:
        """The Arrow type of the whole column, which has a list for each row where it is per turn or token."""
        return pa.list_(self.dtype) if self.per in ("turn", "token") else self.dtype

    @property
    def is_float(self) -> bool:
        return bool(pa.types.is_floating(self.dtype))

    @property
    def type_name(self) -> str:
        """The type of one number as people write it; Arrow says float and double."""
        return str(self.dtype).replace("float", "float32").replace("double", "float64")


@dataclass(frozen=True)
class ColumnFamily(Column):
    """Columns that differ in one part of the name, which stands in `<>` in the family's."""

    def __call__(self, member: str) -> str:
        """Returns the name of a member's column."""
        before, after = self._around
        return f"{before}{member}{after}"

    def member(self, column: str) -> str | None:
        """Returns whose column this is, or None for a column of another kind."""
        before, after = self._around
        inside = column[len(before) : len(column) - len(after)]
        return inside if inside and column == f"{before}{inside}{after}" else None

    @cached_property
    def _around(self) -> tuple[str, str]:
        return self.name.partition("<")[0], self.name.partition(">")[2]


_INT, _ID, _TEXT, _MASK = pa.int32(), pa.int64(), pa.string(), pa.uint8()
_FLOAT, _DOUBLE = pa.float32(), pa.float64()

SCORE = ColumnFamily("score/<name>", "row", _FLOAT, SCORERS, "a score by its name; NaN where a row has none")
SCORE_PREFIX = SCORE("")  # what the columns of scores, and no others, begin with
TIMEOUT = "timeout"  # the part of a score that says why that is 0: the response spent the scorer's limits
LOG_PROBS = ColumnFamily(
    "<name>_log_probs", "token", _FLOAT, "teacher", "of one of `models`, in a program (`session.scorer`)"
)
MINI_BATCH = ColumnFamily(
    "<role>_mini_batch", "row", _ID, UPDATE_PLAN, "`mini_batch` of a role beside the actor"
)
LOSS_WEIGHT = ColumnFamily("<role>_loss_weight", "row", _DOUBLE, UPDATE_PLAN, "`loss_weight` of such a role")


def judges(score: str) -> bool:
    """Says whether a score (its name, or its column) judges responses, as all but `<name>/timeout` do."""
    return not score.endswith(f"/{TIMEOUT}")


TABLE: tuple[Column, ...] = (
    Column(ROW_ID, "row", _ID, EPISODE, "a number that no other row of the run has"),
    Column("seq", "row", _ID, EPISODE, "the prompt's place in the stream"),
    Column("group_id", "row", _ID, EPISODE, "one number per prompt group"),
    Column("prompt_id", "row", _TEXT, EPISODE, "source/epoch/row"),
    Column("source", "row", _TEXT, EPISODE, "the name of the prompt's source"),
    Column("trajectory_id", "row", _TEXT, EPISODE, "functions see it as a number"),
    Column("sample_index", "row", _INT, EPISODE, "which of the group's n samples it is"),
    Column("step_index", "row", _INT, EPISODE, "which of its trajectory's rows it is"),
    Column("prompt_length", "row", _INT, EPISODE, "tokens"),
    Column("response_length", "row", _INT, EPISODE, "tokens"),
    Column("num_trained_tokens", "row", _INT, EPISODE, "how often `response_mask` is 1"),
    Column(
        "oldest_version", "row", _INT, EPISODE, "the lowest of `policy_versions`; -1 without a trained token"
    ),
    Column("finish_reason", "row", _TEXT, EPISODE, "`length` where it was cut off"),
    Column("outcome", "row", _TEXT, EPISODE, "`scored`, or what failed"),
    Column("reward", "row", _FLOAT, EPISODE, "what is trained on; reward models add theirs"),
    Column("accuracy", "row", _FLOAT, EPISODE, "the score that `reward.accuracy` names"),
    Column(
        "step_reward", "row", _FLOAT, EPISODE, "sum of its turns, or `reward` on the last row; NaN: a note"
    ),
    Column("anchor_id", "row", _ID, EPISODE, "one number per observation; by default per prompt"),
    Column("prompt_ids", "token", _INT, EPISODE, "the prompt's tokens"),
    Column(
        IMAGES,
        "row",
        _TEXT,
        IMAGE_READER,
        "of a model that is given images: those of the row in the order of their tokens, as JSON (reference, "
        "hash, grid, tokens, turn), never pixels; empty: none",
    ),
    Column("response_ids", "token", _INT, EPISODE, "the response's tokens"),
    Column("response_mask", "token", _MASK, EPISODE, "1: a token of the policy; correction may clear it"),
    Column("rollout_log_probs", "token", _FLOAT, EPISODE, "of the policy that sampled"),
    Column(
        "policy_versions", "token", _INT, EPISODE, "which weights sampled the token; -1 where the mask is 0"
    ),
    Column("prompt_text", "row", _TEXT, TOKENIZER, "the prompt as people read it"),
    Column("text", "row", _TEXT, TOKENIZER, "the response as people read it"),
    Column(
        TRANSCRIPT,
        "row",
        _TEXT,
        AGENT,
        "of a run with `rollout.agent`: the row's turns, and who wrote them",
    ),
    Column("anchor", "row", _TEXT, AGENT, "the observation that anchor_id numbers; empty: the prompt"),
    Column("failure", "row", _TEXT, AGENT, "why its episode failed; empty: it did not"),
    Column(RECORD, "row", _TEXT, AGENT, "what its environment showed, as JSON, where `restore` needs it"),
    Column("turn_stops", "turn", _INT, AGENT, "where each turn of the response ends"),
    Column("turn_kinds", "turn", _MASK, AGENT, "0 policy, 1 tool, 2 environment, 3 user; no turn: stop 0"),
    Column("turn_rewards", "turn", _FLOAT, AGENT, "what the agent gave for it; NaN: nothing"),
    Column("turn_flags", "turn", _MASK, AGENT, "sum of 1: invalid, 2: task done, 4: cut off, 8: a note"),
    Column(GREEDY_REWARD, "row", _FLOAT, GREEDY_ANSWER, "of an answer that is not trained on"),
    SCORE,
    Column(UNIT, "row", _ID, PAIRS, "equal for rows that are computed together: a pair"),
    Column("margin", "row", _FLOAT, PAIRS, "by how much the chosen answer should lead"),
    Column("safe", "row", _FLOAT, PAIRS, "1: harmless, -1: not; where the data say it"),
    Column("mini_batch", "row", _ID, UPDATE_PLAN, "of the actor's update"),
    Column("loss_weight", "row", _DOUBLE, UPDATE_PLAN, "of each of the row's tokens in the actor's loss"),
    Column("lm_weight", "row", _DOUBLE, UPDATE_PLAN, "the same in the language-model loss"),
    Column("kl_coef", "row", _FLOAT, UPDATE_PLAN, "the step's KL coefficient"),
    Column(
        "given",
        "row",
        _MASK,
        UPDATE_PLAN,
        "1: not sampled by the policy in this step (`algorithm.mix`, `session.rows`)",
    ),
    MINI_BATCH,
    LOSS_WEIGHT,
    Column(
        "given_log_probs",
        "token",
        _FLOAT,
        MIXING,
        "of such a row: what its sampler said (`algorithm.mix`); 0 elsewhere",
    ),
    Column("selected", "row", _MASK, RESAMPLING, "1: kept by `algorithm.select`"),
    Column("sample_weight", "row", _FLOAT, RESAMPLING, "how often `algorithm.resample` drew the row"),
    Column("parent_id", "row", _ID, BRANCHES, "`row_id` of the row that it goes on from; -1: of none"),
    Column("fork", "row", _INT, BRANCHES, "how many of its response's tokens are its parent's"),
    Column("tree_id", "row", _ID, BRANCHES, "`row_id` of the first row of its tree"),
    Column(
        BRANCH_VALUES,
        "token",
        _FLOAT,
        BRANCHES,
        "mean reward of answers that go on from before the token; NaN where none do",
    ),
    Column("old_log_probs", "token", _FLOAT, "actor", "of the policy before the update"),
    Column("sum_p_squared", "token", _FLOAT, "actor", "Σ_j p_j² of the same policy"),
    Column(
        "entropy", "token", _FLOAT, "actor", "of the same; to a loss the current policy's, differentiable"
    ),
    Column(
        ROUTED,
        "choice",
        _MASK,
        "actor",
        "with `actor.router.replay`: the k experts of each layer where the token was predicted; the largest "
        "number: not known (16 bits where 8 are too few)",
    ),
    Column(PROMPT_ROUTED, "choice", _MASK, "actor", "the same, at all tokens of the prompt but its last"),
    Column("ref_log_probs", "token", _FLOAT, "reference", "of the reference model"),
    Column("values", "token", _FLOAT, "critic", "of the state *before* the token"),
    Column("cost_values", "token", _FLOAT, "cost_critic", "the same of the cost"),
    Column("process_rewards", "token", _FLOAT, "prm", "β log(π_prm / π_ref)"),
    Column("teacher_log_probs", "token", _FLOAT, "teacher", "of the teacher"),
    Column(TOPK_IDS, "choice", _INT, "teacher", "its K likeliest tokens"),
    Column("teacher_topk_log_probs", "choice", _FLOAT, "teacher", "theirs"),
    LOG_PROBS,
    Column(
        "token_rewards",
        "token",
        _FLOAT,
        ADVANTAGE_STAGE,
        "the outcome on the last trained token (of the trajectory, for what reads `trajectory_id`), and a KL",
    ),
    Column("token_costs", "token", _FLOAT, ADVANTAGE_STAGE, "the same of the cost"),
    Column("scores", "row", _FLOAT, ADVANTAGE_STAGE, "all named scores but `<name>/timeout`, [B, K]"),
    Column("multiplier", "batch", _FLOAT, ADVANTAGE_STAGE, "λ of `algorithm.constraint`"),
    Column("advantages", "token", _FLOAT, ESTIMATOR, "per row, where the estimator returns [B]"),
    Column("returns", "token", _FLOAT, ESTIMATOR, "what the critic learns"),
    Column("cost_returns", "token", _FLOAT, ESTIMATOR, "what the cost critic learns"),
    Column("rollout_weights", "token", _FLOAT, CORRECTION, "importance weights"),
    Column("log_probs", "token", _FLOAT, UPDATE, "of the current policy, differentiable"),
    Column("topk_log_probs", "choice", _FLOAT, UPDATE, "of the tokens `teacher_topk_ids`, differentiable"),
    Column("old_values", "token", _FLOAT, UPDATE, "`values` or `cost_values`, to a value loss"),
    Column("cu_seqlens", "batch", _INT, UPDATE, "where responses begin and end in [N]: [B+1]"),
)
_PLAIN = {column.name: column for column in TABLE if not isinstance(column, ColumnFamily)}
_FAMILIES = tuple(column for column in TABLE if isinstance(column, ColumnFamily))


def column(name: str) -> Column:
    """Returns the declaration of a column. Raises DataError for a name that is not in the table."""
    found = _PLAIN.get(name) or next((family for family in _FAMILIES if family.member(name)), None)
    if found is None:
        raise DataError(f"there is no column {name!r}; rondo/core/columns.py declares {', '.join(_PLAIN)}")
    return found


def declared(*names: str) -> tuple[str, ...]:
    """Returns the names, each of which is in the table. Raises DataError for another."""
    for name in names:
        column(name)
    return names


def made_by(*makers: str, per: str | None = None) -> tuple[str, ...]:
    """Returns the columns of these makers in the table's order, without families. per: only such columns."""
    return tuple(c.name for c in _PLAIN.values() if c.made_by in makers and per in (None, c.per))


def per_row(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that the table declares as one number (or text) per row."""
    return tuple(name for name in names if column(name).per == "row")


def documented() -> str:
    """Returns the table as a page of the docs has it."""
    lines = ["| column | one per | type | made by | |", "|---|---|---|---|---|"]
    lines += [f"| `{c.name}` | {c.per} | {c.type_name} | {c.made_by} | {c.doc} |" for c in TABLE]
    return "\n".join(lines)
