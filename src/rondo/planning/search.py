"""Placement, layout, passes and engines for the shortest step that fits: `rondo plan --auto`. Pure.

What is searched is every combination of the values below. A step's time is a sum (or a maximum) of what the
trainer's values decide and of what the engine's do, so combinations are tried in the order of a bound: the
trainer's seconds, and those of engines with room for all that they may decode at one time. One that fits, and
is no slower than the bound of the next, is the best, as if all had been tried.

Roles that train stay together: each is sharded over all of their devices, and their phases follow each other,
so that in pools of their own they would be slower and need more.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rondo.config.schema import Config
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLLOUT
from rondo.planning.devices import DeviceRow
from rondo.planning.engine_memory import EngineRun
from rondo.planning.plan import plan_memory, with_key
from rondo.planning.runs import Lengths, Runs, runs_of
from rondo.planning.shapes import ModelShape
from rondo.planning.step_time import TimePlan, plan_time, training_parts
from rondo.planning.time import generation_parts, seconds_of

Settings = Mapping[str, Any]
Shapes = Callable[[str], ModelShape]

AXIS = (1, 2, 4, 8)
LONG_AXIS = (1, 2, 4, 8, 16, 32)  # of tokens, and of experts
IN_A_PASS = (1, 2, 4, 8, 16)  # of the longest row
AT_ONE_TIME = (64, 128, 256, 512, 1024)
RECOMPUTING = (False, True, "offload")
OFFLOADING = ((False, False), (True, False), (True, True))  # moments, weights
ROOM = 0.92  # of a device, that plans may fill: their own error is about a tenth
FEW = 16  # devices of which every split is tried; of more, eighths


@dataclass(frozen=True)
class Combination:
    """Values that were planned together."""

    settings: Settings
    """Key → value, where it differs from the recipe."""
    time: TimePlan
    """Of a step with them."""
    peak: int
    """Bytes of the fullest device."""

    @property
    def placement(self) -> str:
        """Says where the engines stand."""
        pools = self.settings.get("cluster.pools")
        if not pools:
            return "all on all devices"
        return " and ".join(f"{number} of {name}" for name, number in pools.items())


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    best: tuple[Combination, ...]
    """The best of each placement that fits, the shortest step first."""
    nearest: Combination | None
    """Where none fits: of what needs the least of a device."""
    tried: int
    """How many combinations were planned whole."""


@dataclass(frozen=True)
class Space:
    """Which values are tried."""

    placements: tuple[Settings, ...]
    """Of engines."""
    trainer: tuple[Settings, ...]
    """Of layouts and passes."""
    engine: tuple[Settings, ...]
    """Of engines."""


def space_of(config: Config, roles: Collection[str], shape: ModelShape, longest: int) -> Space:
    """Returns what is searched for a run. longest: tokens of a row."""
    learners = [one for one in ("actor", "critic") if one in roles]
    placements = tuple(_placements(config, roles))
    trainer = tuple(_trainer(config, learners, shape, longest))
    return Space(placements, trainer, tuple(_engines(config, roles, shape)))


def _placements(config: Config, roles: Collection[str]) -> Iterator[Settings]:
    devices = config.cluster.devices
    together: Settings = {"cluster.pools": {}, "cluster.placement": {}}
    if ROLLOUT not in roles:
        yield together
        return
    for sleeps in (False, True) if config.trainer.max_staleness == 0 else (False,):
        yield {**together, "rollout.sleep": sleeps}
    parts = range(1, devices) if devices <= FEW else [devices * part // 8 for part in range(1, 8)]
    for part in parts:
        pools = {"train": devices - part, "rollout": part}
        yield {"cluster.pools": pools, "cluster.placement": {ROLLOUT: "rollout"}, "rollout.sleep": False}


def _trainer(config: Config, learners: Sequence[str], shape: ModelShape, longest: int) -> Iterator[Settings]:
    experts = [one for one in LONG_AXIS if shape.experts and shape.experts % one == 0] or [1]
    replicas = {1} | ({config.cluster.devices // 8} if config.cluster.devices > 8 else set())
    layouts = itertools.product(sorted(replicas), AXIS, LONG_AXIS, experts)
    frozen = ["reference"] if config.algorithm.kl is not None else []
    for replicate, tensor, context, expert in layouts:
        if not _divides(shape, tensor, context) or replicate * tensor * context > config.cluster.devices:
            continue
        axes = {"replicate": replicate, "tensor": tensor, "context": context, "expert": expert}
        layout = {f"actor.parallel.{axis}": size for axis, size in axes.items()}
        for rows, recompute, (moments, weights) in itertools.product(IN_A_PASS, RECOMPUTING, OFFLOADING):
            found: dict[str, Any] = dict(layout)
            for role in learners:
                found[f"{role}.token_budget"] = rows * longest
                found[f"{role}.gradient_checkpointing"] = recompute
                found[f"{role}.offload_optimizer"] = moments
            for role in (*learners, *frozen):
                found[f"{role}.offload_params"] = weights
            yield found


def _divides(shape: ModelShape, tensor: int, context: int) -> bool:
    """Says whether heads can be cut so: as the training backend does (`torch_backend.axes`)."""
    if tensor == context == 1:
        return True
    if not shape.heads or shape.heads % tensor or shape.kv_heads % tensor:
        return False
    heads, kv_heads = shape.heads // tensor, shape.kv_heads // tensor
    return heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0)


def _engines(config: Config, roles: Collection[str], shape: ModelShape) -> Iterator[Settings]:
    if ROLLOUT not in roles:
        yield {}
        return
    foreign = config.rollout.engine.name in ("vllm", "sglang")
    rows = config.data.batch_size * config.rollout.n
    for tensor in AXIS if foreign else (1,):
        if shape.heads % tensor:
            continue
        for slots in AT_ONE_TIME:
            size = {"rollout.engine.tensor_parallel": tensor} if foreign else {}
            yield size | {"rollout.max_concurrent": slots}
            if slots >= rows:  # more would change nothing
                break


def search(
    config: Config,
    roles: Sequence[str],
    trained: Collection[str],
    shape: Shapes,
    lengths: Lengths,
    device: DeviceRow,
    space: Space | None = None,
) -> SearchResult:
    """Finds the shortest step that fits. The first five as for `runs_of`. space: None: all of it."""
    space = space or space_of(config, roles, shape("actor"), lengths.row)
    room = int(ROOM * device.memory)
    best: list[Combination] = []
    smallest: tuple[int, Settings, Settings] | None = None
    tried = 0

    def runs_with(*settings: Settings) -> Runs | None:
        try:
            one = with_settings(config, _joined(*settings))
            return runs_of(one, roles, trained, shape, lengths, on_host=device.is_host)
        except ConfigError:  # they do not go together
            return None

    for placement in space.placements:
        trainers, engines = list[tuple[float, Settings]](), list[tuple[float, Settings]]()
        for settings in space.engine:
            runs = runs_with(placement, settings)
            if runs is not None and plan_memory(replace(runs, models={}), card=device.memory).peak <= room:
                engines.append((_with_room(runs, device), settings))
        for settings in space.trainer:
            runs = runs_with(placement, settings)
            if runs is None:
                continue
            alone = plan_memory(replace(runs, engine=_least(runs.engine)), card=device.memory).peak
            if smallest is None or alone < smallest[0]:
                smallest = alone, placement, settings
            if alone <= room:
                seconds = sum(map(seconds_of, training_parts(runs, device).values()))
                trainers.append((seconds, settings))
        found: Combination | None = None
        overlaps = config.trainer.max_staleness > 0
        for bound, first, second in _in_order(trainers, engines, max if overlaps else operator.add):
            if found is not None and bound >= found.time.step:
                break
            runs = runs_with(placement, first, second)
            if runs is None:
                continue
            tried += 1
            peak = plan_memory(runs, card=device.memory).peak
            if peak > room:
                continue
            time = plan_time(runs, device)
            if found is None or time.step < found.time.step:
                found = Combination(_joined(placement, first, second), time, peak)
        if found is not None:
            best.append(found)
    nearest = None
    if not best and smallest is not None:
        nearest = _nearest(runs_with, smallest[1], smallest[2], space, device)
    return SearchResult(tuple(sorted(best, key=lambda one: one.time.step)), nearest, tried)


def _nearest(
    runs_with: Callable[..., Runs | None],
    placement: Settings,
    trainer: Settings,
    space: Space,
    device: DeviceRow,
) -> Combination | None:
    found: Combination | None = None
    for settings in space.engine:
        runs = runs_with(placement, trainer, settings)
        if runs is None:
            continue
        peak = plan_memory(runs, card=device.memory).peak
        if found is None or peak < found.peak:
            found = Combination(_joined(placement, trainer, settings), plan_time(runs, device), peak)
    return found


def _least(engine: EngineRun | None) -> EngineRun | None:
    """Returns an engine that no other of the search has less of a device than."""
    if engine is None or not engine.foreign:
        return None
    return replace(engine, tensor=AXIS[-1], tokens=0)


def _with_room(runs: Runs, device: DeviceRow) -> float:
    """Returns the seconds of generation where a cache never limits it."""
    if runs.engine is None:
        return 0.0
    config = runs.config
    slots, ahead = config.rollout.max_concurrent, config.trainer.max_staleness
    return seconds_of(generation_parts(runs.engine, runs.rows, device, runs.engines, slots, ahead=ahead))


def _in_order(
    trainers: list[tuple[float, Settings]],
    engines: list[tuple[float, Settings]],
    both: Callable[[float, float], float],
) -> Iterator[tuple[float, Settings, Settings]]:
    """Yields all pairs, each with the bound of its seconds, the smallest first."""
    trainers, engines = (sorted(each, key=lambda one: one[0]) for each in (trainers, engines))
    if not trainers or not engines:
        return

    def place(row: int, column: int) -> tuple[float, int, int]:
        return both(trainers[row][0], engines[column][0]), row, column

    waiting = [place(0, column) for column in range(len(engines))]
    heapq.heapify(waiting)
    while waiting:
        bound, row, column = heapq.heappop(waiting)
        yield bound, trainers[row][1], engines[column][1]
        if row + 1 < len(trainers):
            heapq.heappush(waiting, place(row + 1, column))


def with_settings(config: Config, settings: Settings) -> Config:
    """Returns a configuration with these values."""
    for key, value in settings.items():
        config = with_key(config, key, value)
    return config


def _joined(*settings: Settings) -> Settings:
    return {key: value for one in settings for key, value in one.items()}


def differing(config: Config, settings: Settings) -> dict[str, Any]:
    """Returns those of the values that the configuration has not."""
    found = {}
    for key, value in settings.items():
        section = config.at(key.rpartition(".")[0])
        old = 1 if section is None else getattr(section, key.rpartition(".")[2])  # no parallel: no axes
        if old != value:
            found[key] = value
    return found
