"""Rows with names: what travels between data, episodes, rollout engines, buffer and trainer.

Arrays are numpy, never lists of ints. Nothing here does work; a missing field fails where the row is made.
Those that are `Lendable` are read-only from where code of the user's gets them, or has made them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from rondo.core.images import ImageRef, each_once
from rondo.core.readonly import Lendable

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
MAX_ROWS = 1 << 12  # of a trajectory
# Who wrote what stands in an agent's prompt between two answers of the policy, and who writes at all.
InsertedKind = Literal["tool", "environment", "user"]
TurnKind = Literal["policy", InsertedKind]
TURN_KINDS: tuple[TurnKind, ...] = get_args(TurnKind)
# What an environment says of what the policy did in a turn.
TurnFlag = Literal["invalid", "success", "truncated", "aside"]
TURN_FLAGS: tuple[TurnFlag, ...] = get_args(TurnFlag)

# How weights get from the host's process to an engine's own: opened on the device (ipc), so where that works
# (auto), or through the host's memory.
Hop = Literal["auto", "ipc", "host"]

# How the trajectories of a prompt group ended, as a run's journal keeps it (`agents/ended.py`).
Ended = Mapping[str, Any]

# The outcome of a trajectory: a score, or a typed failure. Failures are in no baseline and are never a zero
# reward.
SCORED = "scored"
Outcome = Literal[
    "scored",
    "reward_error",
    "reward_timeout",
    "rollout_error",
    "tool_error",
    "environment_error",
    "context_full",
]


def request_seed(run_seed: int, *key: object) -> int:
    """Returns a 63-bit seed that is a function of what a request *is* (run seed, prompt, sample, turn), never
    of when it ran.
    """
    digest = hashlib.blake2b(repr((run_seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Prompt(Lendable):
    """One prompt of the stream, tokenised."""

    seq: int
    """Position in the (infinite) prompt stream."""
    prompt_id: str
    """`source/epoch/row`, unique in a run; where a sampler chooses, `source/seq/row`."""
    source: str
    """The name of its data source (`data.train.0.name`), as metrics have it."""
    token_ids: np.ndarray
    """int32 [P]."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns (answer, …), as rewards get them."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages behind `token_ids`; empty for a raw text prompt."""
    opening: str = ""
    """What the chat template writes before every answer, at the end of the prompt: a header, and perhaps
    `<think>`.
    """
    images: tuple[ImageRef, ...] = ()
    """In the order of their tokens, which `token_ids` has; `<image>` in `messages` stands for each."""
    text: str = ""
    """What the row asks, whole, where that is one text; empty: it has messages, or token ids alone."""

    def column(self, key: str) -> Any:
        """Returns what the row's other columns have at `key`: a column, or what is inside one
        (`reward_model.ground_truth`), also where the column is the JSON text of an object. None: nothing.
        """
        value: Any = self.fields
        for name in [key] if key in self.fields else key.split("."):
            value = value_of_json(value)
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def value_of_json(value: Any) -> Any:
    """Returns what a text says that is a JSON object or list; everything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Reported log-probs are those after temperature and *before* truncation (top-p/top-k/min-p): only these
    match the trainer's. Greedy requests report log-probs at temperature 1.

    A response ends with the first token that is in `stop_token_ids`, or after which its text has one of the
    strings `stop`. That token is part of it.
    """

    max_tokens: int
    """Of the whole response, with the request's prefix."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """1: off."""
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    """0: off."""
    stop_token_ids: tuple[int, ...] = ()
    """Empty: no token ends a response, not even the EOS of the tokenizer."""
    stop: tuple[str, ...] = ()
    """Looked for in the text without special tokens."""


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to generate."""

    request_id: str
    """Unique among the requests in flight, or the engine refuses it; `cancel` takes it."""
    token_ids: np.ndarray
    """int32 [P]."""
    sampling: SamplingParams
    """For the whole response: `max_tokens` counts the prefix, too."""
    seed: int = 0
    """With the token index, the only source of randomness."""
    affinity: str = ""
    """`n` samples of a prompt are n requests with one key; the engine finds the prefix that they share."""
    deadline_seconds: float | None = None
    """From when the engine gets it; then it ends with what there is. None: no deadline."""
    prefix: Completion | None = None
    """Response tokens that a partial rollout has already; they are part of the completion that comes back."""
    urgent: bool = False
    """Goes before all waiting requests that are not, as something waits for its answer. Running ones go on.
    """
    images: tuple[ImageRef, ...] = ()
    """Of the prompt, in the order of their tokens, which `token_ids` has: each placeholder as many times as
    its image has tokens.
    """


@dataclass(frozen=True)
class RouteShape:
    """The routes of a mixture at one token: which k experts each layer chose, layer after layer."""

    width: int
    """Numbers per token, W."""
    num_experts: int
    """Of each layer; it decides how many bytes a number takes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns the type of the numbers, whose largest one says that a route is not known."""
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16)

    def padded(self, routes: np.ndarray | None, length: int) -> np.ndarray:
        """Returns routes [length, W]: the given ones, then unknown ones."""
        out = np.full((length, self.width), np.iinfo(self.dtype).max, self.dtype)
        if routes is not None:
            out[: len(routes)] = routes[:length]
        return out


def longer_routes(known: np.ndarray | None, new: np.ndarray, start: int = 0) -> np.ndarray:
    """Extends the known routes [n, W] of a sequence by those of `new`, which begin at token `start`. Where
    both have a token the known route stays: it is that of the weights that sampled the token.
    """
    return new if known is None else np.concatenate([known, new[max(0, len(known) - start) :]])


@dataclass(frozen=True)
class Completion(Lendable):
    """What an engine answered."""

    request_id: str
    """That of the `GenerateRequest`."""
    prompt_ids: np.ndarray
    """int32 [P], the engine's own; the caller compares them with what it sent."""
    token_ids: np.ndarray
    """int32 [T]."""
    log_probs: np.ndarray
    """float32 [T]."""
    policy_versions: np.ndarray
    """int32 [T], the version that sampled each token."""
    finish_reason: FinishReason
    """stop: a token or text of `SamplingParams`; length: its `max_tokens`; the others: cut short."""
    routes: np.ndarray | None = None
    """[P + T - 1, W] or fewer, of prompt and response: the last token is never run. None: no mixture, or its
    engine keeps none (`EngineSpec.routes`).
    """
    images: tuple[ImageRef, ...] = ()
    """Those of the prompt."""

    @staticmethod
    def empty(request: GenerateRequest, finish_reason: FinishReason) -> Completion:
        """Returns the completion of a request for which nothing was made; its prefix is not in it."""
        ids = np.empty(0, np.int32)
        prompt_ids = np.array(request.token_ids, np.int32)
        floats = np.empty(0, np.float32)
        return Completion(
            request.request_id, prompt_ids, ids, floats, ids, finish_reason, images=request.images
        )

    def part(self, start: int, stop: int | None = None) -> Completion:
        """Returns the tokens [start, stop) alone, without a copy, and without routes."""
        cut = slice(start, stop)
        return replace(
            self,
            token_ids=self.token_ids[cut],
            log_probs=self.log_probs[cut],
            policy_versions=self.policy_versions[cut],
            routes=None,
        )

    def after(self, *earlier: Completion | None) -> Completion:
        """Returns the whole response of which this is the end: the tokens of `earlier`, then its own.

        Everything else is this one's; routes are the latest that some part has.
        """
        parts = [part for part in (*earlier, self) if part is not None and len(part.token_ids)]
        if not parts:
            return self
        return replace(
            self,
            token_ids=np.concatenate([part.token_ids for part in parts], dtype=np.int32),
            log_probs=np.concatenate([part.log_probs for part in parts], dtype=np.float32),
            policy_versions=np.concatenate([part.policy_versions for part in parts], dtype=np.int32),
            routes=next((part.routes for part in reversed(parts) if part.routes is not None), self.routes),
        )


@dataclass(frozen=True)
class PolicyCall(Lendable):
    """One call of the policy by an agent: what the engine got and what it made of that."""

    completion: Completion
    """As the engine gave it: prompt, answer, log-probs and versions."""
    inserted: InsertedKind = "environment"
    """Who wrote the tokens of the prompt that come after the context so far."""
    reward: float | None = None
    """As its `Turn` has it."""
    anchor: str = ""
    """As its `Turn` has it."""
    flags: tuple[TurnFlag, ...] = ()
    """As its `Turn` has it."""
    note: str = ""
    """As its `Turn` has it."""
    states: tuple[Mapping[str, Any], ...] = ()
    """As its `Turn` has it."""


@dataclass(frozen=True)
class Turn(Lendable):
    """One stretch of a row's response: positions [start, stop) and who wrote it."""

    kind: TurnKind
    """Who wrote it; the fields from `reward` on are empty unless the policy did."""
    start: int
    """The index of its first token in the row's response."""
    stop: int
    """The index behind its last token."""
    reward: float | None = None
    """What the agent loop gave for it."""
    anchor: str = ""
    """Names what the policy saw before it. Equal observations have equal names."""
    flags: tuple[TurnFlag, ...] = ()
    """What came of it: an invalid action, the task done, an end by a limit; or that it asked for no action,
    but for a note (aside).
    """
    note: str = ""
    """Lines that say so in a transcript."""
    states: tuple[Mapping[str, Any], ...] = ()
    """True states of the environment: the one in which the policy's turn began, and the one after each of its
    steps. Empty unless the environment has keep_state.
    """


@dataclass(frozen=True)
class ToolResult(Lendable):
    """What a tool said in one call."""

    text: str
    """What the policy read."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What it did not read, for rewards: `ids` of passages that were found."""
    tool: str = ""
    """The tool's name."""
    images: Sequence[Any] = ()
    """What the policy was shown before that text: `ImageRef`s. A tool returns what
    `core.images.EpisodeImages.keep` takes, too.
    """


@dataclass(frozen=True)
class Row(Lendable):
    """A context of a trajectory that only grew, with what the policy wrote in it: one sequence to train on.

    All per-token arrays have the response's length T.
    """

    prompt_ids: np.ndarray
    """int32 [P], of the context's first call."""
    response_ids: np.ndarray
    """int32 [T], what followed."""
    response_mask: np.ndarray
    """uint8 [T], 1 on tokens of the policy."""
    rollout_log_probs: np.ndarray
    """float32 [T], 0 where the mask is 0."""
    policy_versions: np.ndarray
    """int32 [T], -1 where the mask is 0."""
    turns: tuple[Turn, ...]
    """Ascending and without gaps: together they are the whole response."""
    finish_reason: FinishReason
    """Of its last call."""
    routes: np.ndarray | None = None
    """See `Completion`."""
    images: tuple[ImageRef, ...] = ()
    """Of prompt and response, in the order of their tokens."""

    @classmethod
    def empty(
        cls,
        prompt_ids: np.ndarray,
        finish_reason: FinishReason = "cancelled",
        images: tuple[ImageRef, ...] = (),
    ) -> Row:
        """Returns a row in which the policy has written nothing."""
        ids, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(prompt_ids, ids, np.empty(0, np.uint8), floats, ids, (), finish_reason, images=images)


@dataclass(frozen=True)
class Trajectory(Lendable):
    """One episode.

    A name for a row's data, such as `response_ids`, means the last row: the one with the last call.
    """

    prompt: Prompt
    """The same for all samples of its group."""
    trajectory_id: str
    """`purpose/prompt_id/sample_index`."""
    sample_index: int
    """Its place in its prompt group, from 0; random numbers follow from it."""
    rows: tuple[Row, ...]
    """At least one; several where an agent wrote its context anew. A failure's row may have no token."""
    outcome: Outcome = "scored"
    """Whether it has a score, or which failure kept it from one."""
    reward: float = float("nan")
    """The number that is trained on; NaN unless `outcome` is "scored"."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward, by name."""
    text: str = ""
    """The response as scorers read it; of an agent, what it returned."""
    transcripts: tuple[str, ...] = ()
    """Of an agent's episode, for each row: the text of its turns, behind who wrote it."""
    calls: tuple[PolicyCall, ...] = ()
    """Of an agent: what its rows were made of, in the order in which they ended."""
    record: str = ""
    """What its environment was told and showed, as JSON; empty unless that has keep_state and a `restore`."""
    tool_results: tuple[ToolResult, ...] = ()
    """Of `rollout.tools`, in the order of the calls; without calls that came to nothing."""
    tool_errors: int = 0
    """Counts the calls of `rollout.tools` that came to nothing: an error, or no call of a tool."""
    failure: str = ""
    """Why there is no score, for people; empty: there is no failure."""

    def __post_init__(self) -> None:
        assert self.rows, "a trajectory has a row"

    @property
    def transcript(self) -> str:
        """The text of all turns of an agent's episode, row by row."""
        return "\n".join(self.transcripts)

    @property
    def response_ids(self) -> np.ndarray:
        """Its tokens: int32 [T]."""
        return self.rows[-1].response_ids

    @property
    def response_mask(self) -> np.ndarray:
        """1 on tokens of the policy: uint8 [T]."""
        return self.rows[-1].response_mask

    @property
    def rollout_log_probs(self) -> np.ndarray:
        """Of the policy that sampled, 0 where the mask is 0: float32 [T]."""
        return self.rows[-1].rollout_log_probs

    @property
    def policy_versions(self) -> np.ndarray:
        """Which weights sampled each token, -1 where the mask is 0: int32 [T]."""
        return self.rows[-1].policy_versions

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Who wrote which stretch; together they are the whole response."""
        return self.rows[-1].turns

    @property
    def finish_reason(self) -> FinishReason:
        """Why its last call ended."""
        return self.rows[-1].finish_reason

    @property
    def num_tokens(self) -> int:
        """Counts the response tokens of all its rows."""
        return sum(len(row.response_ids) for row in self.rows)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images of its rows, each once."""
        return each_once(row.images for row in self.rows)


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluated trajectory, small enough to travel."""

    prompt_id: str
    """The prompt's id."""
    source: str
    """The data source of the prompt."""
    sample_index: int
    """Which of the answers to its prompt it is, from 0."""
    reward: float
    """The reward of the whole trajectory."""
    response_length: int
    """The response's length, in tokens."""
    finish_reason: str
    """Why generation ended."""
    outcome: str
    """"scored", or how it failed."""
    prompt: str
    """The prompt as text."""
    text: str
    """The response."""
    transcript: str = ""
    """What was said and done in its rows, for people; "" where no agent made them."""
    answer: str | None = None
    """The final answer, as the reward functions read it; None: they found none."""
    scores: dict[str, float] = field(default_factory=dict)
    """The scores, by reward function."""
    images: tuple[ImageRef, ...] = ()
    """Those of its rows, each once."""


@dataclass
class StepStats:
    """Metrics in the only forms that reduce the same over any sharding.

    A sum (bytes, tokens, counts) is a mean whose denominator is never added to: use `add_sum`.
    """

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(numerator, denominator)."""
    sums: dict[str, float] = field(default_factory=dict)
    """Added up when stats are merged."""
    maxima: dict[str, float] = field(default_factory=dict)
    """The largest of all values that were added."""
    minima: dict[str, float] = field(default_factory=dict)
    """The smallest of all values that were added."""

    def add_mean(self, name: str, numerator: float, denominator: float = 1.0) -> None:
        """Adds to a mean: the sums of both are divided in the end. A denominator of 0 adds nothing to it."""
        old_numerator, old_denominator = self.means.get(name, (0.0, 0.0))
        self.means[name] = (old_numerator + numerator, old_denominator + denominator)

    def add_sum(self, name: str, value: float) -> None:
        """Adds to a sum."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def add_max(self, name: str, value: float) -> None:
        """Keeps the value where it is the largest so far."""
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def add_min(self, name: str, value: float) -> None:
        """Keeps the value where it is the smallest so far."""
        self.minima[name] = min(self.minima.get(name, value), value)

    def merge(self, *others: StepStats) -> StepStats:
        """Folds `others` into this one (associative and commutative up to float rounding); returns self."""
        for other in others:
            for name, (numerator, denominator) in other.means.items():
                self.add_mean(name, numerator, denominator)
            for name, value in other.sums.items():
                self.add_sum(name, value)
            for name, value in other.maxima.items():
                self.add_max(name, value)
            for name, value in other.minima.items():
                self.add_min(name, value)
        return self

    def without(self, names: Iterable[str]) -> StepStats:
        """Returns these metrics but for some."""
        left_out = set(names)
        kinds = (self.means, self.sums, self.maxima, self.minima)
        kept = [{name: value for name, value in kind.items() if name not in left_out} for kind in kinds]
        return StepStats(*kept)  # type: ignore[arg-type]

    def under(self, name: str) -> StepStats:
        """Returns the metrics of another policy than the run's: `name` stands in place of actor/, and before
        all others.
        """

        def renamed(metric: str) -> str:
            return metric if metric.startswith(f"{name}/") else f"{name}/{metric.removeprefix('actor/')}"

        kinds = (self.means, self.sums, self.maxima, self.minima)
        made = [{renamed(metric): value for metric, value in kind.items()} for kind in kinds]
        return StepStats(*made)  # type: ignore[arg-type]

    def values(self) -> dict[str, float]:
        """Returns plain numbers; a mean over nothing is left out."""
        out = {name: n / d for name, (n, d) in self.means.items() if d}
        return out | self.sums | self.maxima | self.minima
