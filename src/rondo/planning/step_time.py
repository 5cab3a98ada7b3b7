"""How long the phases of a run's step take. Pure; the formulas are those of `planning.time`.

    generate     all answers, without what rewards and tools take
    score        the passes of those who score rows, one role after the other
    update       the passes and optimizer steps of those who learn, one role after the other
    sync         the weights' way to the engines

Phases follow each other, wherever roles stand; with trainer.max_staleness above 0 what trains and what
generates run at one time, and the longer of the two is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rondo.config.schema import Config
from rondo.core.roles import ROLES, ROLLOUT
from rondo.planning import time
from rondo.planning.devices import DeviceRow
from rondo.planning.engine_memory import engine_on_device
from rondo.planning.memory import on_device, snapshot_bytes, total_of
from rondo.planning.plan import Step
from rondo.planning.roles import (
    columns_read,
    effective_correction,
    engine_of,
    one_update,
    reference_in_actor,
)
from rondo.planning.runs import ITEMSIZE, Runs
from rondo.planning.time import Parts
from rondo.planning.weights import adapters_of, plan_weights, rollout_dtype

# Of each engine, after every sync; the trainer computes it again in a pass, for which weights are gathered.
CANARY = time.StepRows(1, 32, (8,))


@dataclass(frozen=True)
class TimePlan:
    """How long a step will take."""

    phases: Mapping[Step, Parts]
    """Seconds of each phase, by what they are spent on."""
    overlaps: bool
    """Whether what trains and what generates run at one time."""
    checkpoint: float
    """Seconds of writing one checkpoint, beside the next step's episodes."""
    evaluation: float
    """Seconds of the answers to a thousand prompts of data.eval, or to all where there are fewer."""
    flops: float
    """Operations of a step's training (MFU), all devices together."""
    tokens: float
    """Tokens of a step's rows."""

    def seconds(self, phase: Step) -> float:
        """Adds up a phase."""
        return time.seconds_of(self.phases.get(phase, {}))

    @property
    def step(self) -> float:
        """Returns the seconds from one step to the next."""
        generating, training = self.seconds("generate"), self.seconds("score") + self.seconds("update")
        both = max(generating, training) if self.overlaps else generating + training
        return both + self.seconds("sync")


def plan_time(runs: Runs, device: DeviceRow) -> TimePlan:
    """Plans the time of a step on devices of one kind."""
    config, rows = runs.config, runs.rows
    phases: dict[Step, Parts] = {}
    slots, ahead = slots_of(runs, device), config.trainer.max_staleness
    if runs.engine is not None:
        parts = time.generation_parts(runs.engine, rows, device, runs.engines, slots, ahead=ahead)
        phases["generate"] = parts
    phases |= training_parts(runs, device)
    learners = [role for role, run in runs.models.items() if run.trains]
    if runs.engine is not None and "actor" in runs.models:
        phases["sync"] = _sync(runs, device)
    actor = runs.models[learners[0]].shape
    return TimePlan(
        {phase: parts for phase, parts in phases.items() if parts},
        config.trainer.max_staleness > 0 and runs.engine is not None,
        _checkpoint(runs, learners, device),
        _evaluation(runs, device, slots),
        time.model_flops(actor, rows.tokens, rows.pairs) * config.actor.epochs,
        rows.tokens,
    )


def training_parts(runs: Runs, device: DeviceRow) -> dict[Step, Parts]:
    """Plans the phases of those who train and score."""
    scored = [_pass(runs, role, device, learns=False) for role in _scoring(runs)]
    learners = [role for role, run in runs.models.items() if run.trains]
    learnt = [_pass(runs, role, device, learns=True) for role in learners]
    return {"score": _together(scored), "update": _together(learnt)}


def slots_of(runs: Runs, device: DeviceRow) -> int:
    """Returns how many sequences one engine decodes at one time, as its settings and its cache allow; 0 where
    none generates.
    """
    engine, config = runs.engine, runs.config
    if engine is None:
        return 0
    pool = runs.placement.pool(ROLLOUT)
    there = [run for role, run in runs.models.items() if runs.placement.pool(role) == pool]
    held = sum(total_of(on_device(run, "rest", 0)).expected for run in there)
    cache = engine_on_device(engine, device.memory, held).get("cache")
    row = (runs.rows.prompt + runs.rows.mean) * engine.cached_bytes
    room = config.rollout.max_concurrent if cache is None else int(cache.expected // max(1.0, row))
    return max(1, min(config.rollout.max_concurrent, room))


def _scoring(runs: Runs) -> Iterator[str]:
    """Yields the role of each pass over all rows before the update."""
    config = runs.config
    if runs.engine is None:  # supervised: the reference, where there is one
        yield from (role for role, run in runs.models.items() if not run.trains)
        return
    read, correction = columns_read(config), effective_correction(config)
    if correction is not None and correction.mode != "bypass":
        yield "actor"
    elif correction is None and "old_log_probs" in read and not one_update(config):
        yield "actor"
    if "ref_log_probs" in read and reference_in_actor(config):
        yield "actor"
    for role, run in runs.models.items():
        row = ROLES.get(role)
        if role != "actor" and (not run.trains or row is None or row.makes in read):
            yield role


def _pass(runs: Runs, role: str, device: DeviceRow, *, learns: bool) -> Parts:
    """Returns what one role's passes over the rows of a step take, and its optimizer steps."""
    run, config = runs.models[role], runs.config
    rows, engine = runs.rows, engine_of(role, config)[1]
    batches, epochs = 1, 1
    if learns:
        size = getattr(engine, "mini_batch_size", None) or config.data.batch_size
        batches, epochs = math.ceil(config.data.batch_size / size), getattr(engine, "epochs", 1)
    groups = run.layout.ranks // run.layout.together
    in_pass = max(engine.token_budget, runs.lengths.row)
    # Whole rows: groups of ranks with one less wait for the others.
    each = math.ceil(rows.count / batches / groups)
    spread = replace(rows, count=each * groups * batches)
    passes = batches * max(1, math.ceil(spread.tokens / groups / batches / in_pass))
    found = [
        time.pass_parts(run, spread, device, passes, batches, learns=learns),
        time.waking_parts(run, device),
    ]
    if learns:
        found.append(time.optimizer_parts(run, device, batches))
    one = _together(found)
    return {name: seconds * epochs for name, seconds in one.items()}


def _together(parts: list[Parts]) -> Parts:
    """Adds up what is spent on the same."""
    names = dict.fromkeys(name for one in parts for name in one)
    found = {name: sum(one.get(name, 0.0) for one in parts) for name in names}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _sync(runs: Runs, device: DeviceRow) -> Parts:
    config, run, engine = runs.config, runs.models["actor"], runs.engine
    assert engine is not None
    mine, theirs = runs.placement.devices("actor"), runs.placement.devices(ROLLOUT)
    route = plan_weights(config, mine, theirs).route
    parameters = run.shape.parameters()
    if adapters_of(config) == "alone":
        parameters = run.shape.adapted * (run.lora or 0)
    nbytes = parameters * ITEMSIZE[rollout_dtype(config)]
    hop = engine.own_process and not _opens_memory(config, runs.on_host)
    apart = len(set(mine) | set(theirs))
    sent = time.sync_parts(nbytes, run, device, route, hop=hop, apart=apart)
    # Adapters are compared with the model without them, too.
    probes = 1 if run.lora is None else 2
    return _together([sent, *[time.pass_parts(run, CANARY, device, 1, learns=False)] * probes])


def _opens_memory(config: Config, on_host: bool) -> bool:
    """Says whether engines of another process open the trainer's buckets on the card."""
    rollout = config.rollout
    return not on_host and rollout.engine.tensor_parallel == 1 and rollout.weight_transport in ("auto", "ipc")


def _checkpoint(runs: Runs, learners: list[str], device: DeviceRow) -> float:
    models = [runs.models[role] for role in learners]
    # Of ranks with the same parameters each writes a part with Megatron, and else one copy is written.
    nbytes = sum(
        snapshot_bytes(one) * (one.layout.ranks if one.megatron else one.layout.copy) for one in models
    )
    machines = max(1, math.ceil(runs.config.cluster.devices / device.together))
    return nbytes / machines / time.DISK


def _evaluation(runs: Runs, device: DeviceRow, slots: int) -> float:
    settings = runs.config.trainer.evaluation
    answers = int(settings.greedy) + settings.samples
    if runs.engine is None or not runs.config.data.eval or not answers:
        return 0.0
    prompts = min(settings.limit or 1000, 1000)
    rows = replace(runs.rows, count=prompts * answers, n=answers)
    parts = time.generation_parts(runs.engine, rows, device, runs.engines, slots)
    return time.seconds_of(parts)
