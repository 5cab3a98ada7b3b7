"""Evaluation: scored answers to held-out prompts; greedy, and mean / best / majority at n for sampled
ones. And its files in the run folder.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rondo.config import EvaluationConfig
from rondo.controller import WorkerGroup
from rondo.core.errors import CheckpointError, WorkerError
from rondo.core.images import images_of_text
from rondo.core.types import SCORED, Prompt, SamplingParams
from rondo.system.storage import DAMAGE, make_folder, storing, write_atomic
from rondo.workers import EvaluationRecord, RolloutWorker

# Metrics that an evaluation may lack and the next one have: nothing could be scored, or named an answer.
OF_SCORED = re.compile(
    r"eval/(greedy|sampled)/(reward|response_length|truncated_share|best@\d+|majority@\d+)"
)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found."""

    metrics: dict[str, float]
    """eval/… by name."""
    samples: tuple[EvaluationRecord, ...]
    """Greedy answers (or the first sampled ones), in prompt order."""


async def evaluate(
    rollout: WorkerGroup,
    prompts: Sequence[Prompt],
    evaluation: EvaluationConfig,
    sampling: SamplingParams,
) -> EvaluationResult:
    """Generates and scores answers to the held-out prompts. sampling: what ends a response of the run, and
    its length limit; temperature and top-p are evaluation's own.

    The noise of a prompt's samples does not depend on the step, so that two evaluations differ by the policy
    alone.
    """
    metrics: dict[str, float] = {}
    samples: list[EvaluationRecord] = []
    plain = SamplingParams(sampling.max_tokens, stop_token_ids=sampling.stop_token_ids, stop=sampling.stop)
    if evaluation.greedy:
        greedy = replace(plain, temperature=0.0)
        records = await _run(rollout, prompts, greedy, 1, "eval-greedy")
        metrics |= summarise(records, "greedy")
        samples = samples or records
    if evaluation.samples:
        sampled = replace(plain, temperature=evaluation.temperature, top_p=evaluation.top_p)
        records = await _run(rollout, prompts, sampled, evaluation.samples, "eval-sampled")
        metrics |= summarise(records, "sampled")
        samples = samples or [record for record in records if record.sample_index == 0]
    return EvaluationResult(metrics, tuple(samples))


async def _run(
    rollout: WorkerGroup, prompts: Sequence[Prompt], sampling: SamplingParams, n: int, purpose: str
) -> list[EvaluationRecord]:
    records: list[EvaluationRecord] = []
    left = list(prompts)
    while left:  # a second time only where a rank was lost and others are left
        ranks = rollout.alive or range(rollout.size)
        parts = {rank: left[i :: len(ranks)] for i, rank in enumerate(ranks) if left[i :: len(ranks)]}
        results = await asyncio.gather(
            *(
                rollout.call_rank(rank, RolloutWorker.evaluate, part, sampling, n, purpose)
                for rank, part in parts.items()
            ),
            return_exceptions=True,
        )
        left = []
        for part, result in zip(parts.values(), results, strict=True):
            if isinstance(result, WorkerError) and result.died and rollout.alive:
                left += part
            elif isinstance(result, BaseException):
                raise result
            else:
                records += result
    order = {prompt.prompt_id: i for i, prompt in enumerate(prompts)}
    return sorted(records, key=lambda r: (order[r.prompt_id], r.sample_index))


def summarise(records: Sequence[EvaluationRecord], kind: str) -> dict[str, float]:
    """Returns the metrics of one set of answers.

    `eval/<kind>/reward` is the mean over prompts of the mean over answers (mean@n). With n > 1 also best@n
    (mean over prompts of the best answer) and, where the scorer names a final answer, majority@n (the reward
    of the most frequent answer, the earliest of equals). Failed scorings are left out and counted in
    `eval/<kind>/failed_share`. `eval/<kind>/score/<name>` is each named score's mean, where the reward is not
    the only score itself. Of several sources, each has both for itself (`…/<source>`). Answers that no
    function scores (reward.models judge that source alone, and score only what is trained on) are in no
    reward metric, and without others there is none.
    """
    scored = [record for record in records if record.outcome == SCORED]
    out = {f"eval/{kind}/failed_share": 1 - len(scored) / len(records) if records else 0.0}
    if not scored:
        return out
    out |= _rewards([record for record in scored if record.scores], kind)
    out[f"eval/{kind}/response_length"] = float(np.mean([r.response_length for r in scored]))
    out[f"eval/{kind}/truncated_share"] = float(np.mean([r.finish_reason == "length" for r in scored]))
    return out


def _rewards(scored: Sequence[EvaluationRecord], kind: str) -> dict[str, float]:
    """Returns the metrics that are rewards."""
    by_prompt: dict[str, list[EvaluationRecord]] = defaultdict(list)
    for record in scored:
        by_prompt[record.prompt_id].append(record)
    if not scored:
        return {}
    groups = list(by_prompt.values())
    n = max(len(group) for group in groups)
    out = {f"eval/{kind}/reward": float(np.mean([np.mean([r.reward for r in group]) for group in groups]))}
    if n > 1:
        out[f"eval/{kind}/best@{n}"] = float(np.mean([max(r.reward for r in group) for group in groups]))
        if any(record.answer is not None for record in scored):
            out[f"eval/{kind}/majority@{n}"] = float(np.mean([_majority(group) for group in groups]))
    sources = {record.source for record in scored}
    if len(sources) > 1:
        for source in sorted(sources):
            rewards = [record.reward for record in scored if record.source == source]
            out[f"eval/{kind}/reward/{source}"] = float(np.mean(rewards))
    if all(list(record.scores.values()) == [record.reward] for record in scored):
        return out
    for name in sorted({name for record in scored for name in record.scores}):
        having = [record for record in scored if name in record.scores]
        out[f"eval/{kind}/score/{name}"] = float(np.mean([record.scores[name] for record in having]))
        for source in sorted({record.source for record in having}) if len(sources) > 1 else ():
            values = [record.scores[name] for record in having if record.source == source]
            out[f"eval/{kind}/score/{name}/{source}"] = float(np.mean(values))
    return out


def _majority(group: Sequence[EvaluationRecord]) -> float:
    """Returns the reward of the first answer among the most frequent ones; answers that name nothing do not
    vote.
    """
    votes = Counter(record.answer for record in group if record.answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    return next(
        record.reward for record in group if record.answer is not None and votes[record.answer] == most
    )


def table_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Returns what people are shown of an evaluation: rewards, scores and lengths, in words."""
    shown = {}
    for name, value in (metrics or {}).items():
        kind, _, what = name.partition("/")
        if (
            what == "reward"
            or "@" in what
            or what.startswith(("reward/", "score/"))
            or what == "response_length"
        ):
            words = what.replace("_", " ").replace("/", ", ")
            shown[f"{kind} {words}"] = value
    return shown


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the evaluation's part of a step's metrics, by names without `eval/`."""
    return {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}


def evaluation_file(run: Path, step: int) -> Path:
    """Returns where the answers to a step's evaluation are, in a run folder."""
    return run / "evaluations" / f"step-{step:06d}.jsonl"


def write_evaluation(run: Path, step: int, records: Sequence[EvaluationRecord]) -> None:
    """Writes answers as JSON lines; the reward of one that could not be scored is null."""
    lines = []
    for record in records:
        fields = asdict(record)
        fields["reward"] = record.reward if math.isfinite(record.reward) else None
        if not record.transcript:  # no agent's
            del fields["transcript"]
        if not record.images:
            del fields["images"]
        lines.append(json.dumps(fields, ensure_ascii=False, allow_nan=False))
    file = evaluation_file(run, step)
    make_folder(file.parent)
    write_atomic(file, "\n".join(lines) + "\n")


def read_evaluation(run: Path, step: int) -> dict[str, EvaluationRecord]:
    """Returns the scored answers by prompt id; none where that step had no evaluation."""
    file = evaluation_file(run, step)
    if not file.exists():
        return {}
    try:
        with storing(file, "read"):
            lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        return {line["prompt_id"]: _record(line) for line in lines if line["reward"] is not None}
    except DAMAGE as error:
        raise CheckpointError(
            f"{file}: damaged ({error}). Remove it: it is shown, and not trained on"
        ) from error


def _record(line: Mapping[str, Any]) -> EvaluationRecord:
    images = images_of_text(json.dumps(line.get("images", [])))
    return EvaluationRecord(**{**line, "images": images})
