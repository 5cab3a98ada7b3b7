"""What a run will take, predicted from shapes and settings before any of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rondo.config import Config
from rondo.core.errors import ConfigError, about
from rondo.core.roles import ROLES, ROLLOUT
from rondo.models import ModelSource, count_parameters, load_model_config
from rondo.planning import placement_of
from rondo.planning.devices import DeviceRow, device_like, find_device
from rondo.planning.plan import PoolPlan, Step, plan_memory
from rondo.planning.runs import lengths_of, runs_of
from rondo.planning.shapes import ModelShape, only_counted, shape_of
from rondo.planning.telling import check_fits, needs_of, warning
from rondo.platform import planned
from rondo.system.usage import reachable_bytes
from rondo.trainers.loop import PlannedRun, Speed
from rondo.trainers.program import source_of


def plan_run(config: Config, roles: Sequence[str], trained: Collection[str]) -> PlannedRun | None:
    """Plans a run; None: nothing is planned. Raises ConfigError for one that cannot fit this machine
    (cluster.plan: refuse); other machines' memory is not known here.

    config: with a complete model. roles: all of the run. trained: those of them that learn.
    """
    mode, free = config.cluster.plan, reachable_bytes()  # rather too much than too little
    if mode == "off" or config.cluster.backend.address is not None or not free:
        return None
    platform = planned(config.cluster.device)
    there = None
    if not platform.host and platform.available():
        devices = range(min(config.cluster.devices, platform.count()))
        if config.cluster.backend.name == "local":
            there = min(platform.memory(platform.device(index))[0] for index in devices)
        else:  # to ask what is free takes memory there until this process ends, and others are to compute
            there = min(map(platform.total, devices))
    lengths = lengths_of(config, None, rows_of_pairs=ROLLOUT not in roles)
    card = free if platform.host else there
    runs = runs_of(config, roles, trained, _shapes(config), lengths, on_host=platform.host)
    plan = plan_memory(runs, card=card)
    places = [(plan.of_machine(_least), plan.of_machine(_highest), free, "this machine's memory")]
    if there is not None:
        for pool in plan.pools:
            where = f"the memory of each {platform.title} of pool {pool.name}"
            places.append((pool.phases[pool.least], pool.phases[pool.highest], there, where))
    for certain, _, size, where in places:
        try:
            check_fits(needs_of(certain, config), size, where)
        except ConfigError as error:
            if mode == "refuse":
                raise
            return PlannedRun(runs, plan, str(error))
    found = (warning(expected, config, size, where) for _, expected, size, where in places)
    return PlannedRun(runs, plan, next(filter(None, found), ""))


def speed_of(config: Config, planned_run: PlannedRun | None) -> Speed:
    """Returns what measures a run's steps by its model's size and its device."""
    if planned_run is not None:
        shape: ModelShape | None = planned_run.runs.models["actor"].shape
    else:
        source = source_of("actor", config)
        try:
            shape = shape_of(load_model_config(source).to_dict(), source.path or "model.config")
        except ConfigError:
            shape = None
    return Speed(config, shape, placement_of(config), device_of(config), planned_run)


def device_of(config: Config) -> DeviceRow | None:
    """Returns what is known of a run's devices: cluster.card, or this machine's card; None: nothing. Raises
    ConfigError for a card that is not known.
    """
    if config.cluster.card is not None:
        with about("cluster.card"):
            return find_device(config.cluster.card)
    platform = planned(config.cluster.device)
    if platform.host or not platform.available():
        return None
    return device_like(platform.describe(0), platform.total(0))


def _least(pool: PoolPlan) -> Step:
    return pool.least


def _highest(pool: PoolPlan) -> Step:
    return pool.highest


def _shapes(config: Config) -> Callable[[str], ModelShape]:
    """Returns what finds a role's sizes, once for all roles with the same model. Where the sizes that its
    config names make another number of parameters than the model has, that number is all that is known.
    """
    found: dict[str, ModelShape] = {}

    def shape(role: str) -> ModelShape:
        source, row = source_of(role, config), ROLES.get(role)
        head = row is not None and not row.value_head
        key = str((source.path, source.config, source.override, head))
        if key not in found:
            count = count_parameters(source, output_head=head)
            found[key] = _told(source, count, head)
        return found[key]

    return shape


def _told(source: ModelSource, count: int, head: bool) -> ModelShape:
    name = source.path or "model.config"
    try:
        shape = shape_of(load_model_config(source).to_dict(), name)
    except ConfigError:
        return only_counted(count, name)
    return shape if shape.parameters(output_head=head) == count else only_counted(count, name)
