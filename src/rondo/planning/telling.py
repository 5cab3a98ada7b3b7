"""A plan in words: memory by owner, seconds by phase, what to lower, and the warning before a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rondo.config.schema import Config
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLLOUT
from rondo.planning.devices import DeviceRow, known_devices
from rondo.planning.memory import GIB, total_of
from rondo.planning.plan import Held, MemoryPlan, Remedy
from rondo.planning.roles import engine_of
from rondo.planning.search import Combination, SearchResult, differing, with_settings
from rondo.planning.step_time import TimePlan

# What to lower for an owner that is no role's, or is any role's.
_KEYS = {
    "host processes": ("cluster.devices",),
    "the rows of a batch": ("data.batch_size", "rollout.n"),
    "engine processes": ("rollout.replicas",),
    "rollout weights": ("rollout.replicas", "rollout.dtype"),
    "rollout cache": ("rollout.max_concurrent", "rollout.engine.cache_bytes"),
    "weights in transit": ("rollout.bucket_bytes",),
    "checkpoint": ("checkpoint.every",),
    "images": ("model.images.max_pixels", "model.images.per_prompt"),
}
# What to lower for an owner of a role's, below the section of its engine.
_OF_A_ROLE = {
    "moments": "offload_optimizer",
    "activations": "token_budget",
    "logits": "logits_bytes",
    "at rest": "offload_params",
}


@dataclass(frozen=True)
class Need:
    """What one owner will hold."""

    owner: str
    """Who will hold it, as messages say it."""
    nbytes: int
    """How many bytes it will hold at least."""
    keys: tuple[str, ...] = ()
    """What to lower."""


def check_fits(needs: Sequence[Need], free: int, where: str) -> None:
    """Raises ConfigError where the needs together are more than what is free. where: of which memory."""
    total = sum(need.nbytes for need in needs)
    if total <= free:
        return
    ordered = sorted((need for need in needs if need.nbytes), key=lambda need: -need.nbytes)
    listed = ", ".join(f"{need.owner} {need.nbytes / GIB:,.2f}" for need in ordered)
    raise ConfigError(
        f"this run will hold at least {total / GIB:,.2f} GiB of {where}, and {free / GIB:,.2f} GiB are "
        f"free: {listed}; lower {' or '.join(ordered[0].keys)}, or use a machine with more",
        key=ordered[0].keys[0],
    )


def needs_of(held: Held, config: Config) -> list[Need]:
    """Returns what owners certainly hold, each with the keys that lower it."""
    return [Need(owner, size.least, keys_of(owner, config)) for owner, size in held.items() if size.least]


def keys_of(owner: str, config: Config) -> tuple[str, ...]:
    """Returns the keys that an owner's bytes depend on."""
    if owner in _KEYS:
        return _KEYS[owner]
    role, _, what = owner.partition(" ")
    if what in _KEYS:
        return _KEYS[what]
    if role in (ROLLOUT, "host"):
        return ("rollout.engine",) if role == ROLLOUT else ("cluster.devices",)
    return (f"{engine_of(role, config)[0]}.{_OF_A_ROLE.get(what, 'param_dtype')}",)


def warning(held: Held, config: Config, free: int, where: str) -> str:
    """Returns the warning for what is expected to be more than there is; "": it is not. where: of which
    memory.
    """
    total = total_of(held).expected
    if total <= free:
        return ""
    ordered = sorted(held, key=lambda owner: -held[owner].expected)
    listed = ", ".join(f"{owner} {held[owner].expected / GIB:,.1f}" for owner in ordered[:4])
    keys = dict.fromkeys(key for owner in ordered[:3] for key in keys_of(owner, config))
    return (
        f"this run will probably need {total / GIB:,.1f} GiB of {where}, and {free / GIB:,.1f} GiB are free: "
        f"{listed}; look at {', '.join(keys)}. `rondo plan` says by how much each helps; cluster.plan=off "
        "says nothing"
    )


def table(
    plan: MemoryPlan, time: TimePlan | None, config: Config, card: DeviceRow | None, helps: Sequence[Remedy]
) -> Iterator[str]:
    """Yields the lines of a plan. time: None: how fast the devices are is not known."""
    yield f"Lengths: {plan.lengths.said}."
    for pool in plan.pools:
        yield ""
        yield f"Pool {pool.name}: {pool.devices} device{'s' if pool.devices > 1 else ''}, GiB on each"
        yield from _grid({str(step): held for step, held in pool.phases.items()})
        highest = pool.highest
        held = pool.phases[highest]
        largest = max(held, key=lambda owner: held[owner].expected)
        yield f"  The fullest phase is {highest}, and its largest owner {largest}."
        yield f"  {_fits(pool.total(highest).expected, pool.total(pool.least).least, card)}"
    machine = plan.of_machine(lambda pool: pool.highest)
    yield ""
    yield "The machine's own memory, GiB" + (" (its devices are the machine)" if plan.on_host else "")
    yield from _grid({"in all": machine})
    if time is not None and card is not None:
        yield ""
        yield from _seconds(time, config, card)
    if helps:
        yield ""
        yield "What would help on the fullest device, each by itself:"
        for one in helps:
            longer = "" if time is None else f" {one.seconds:+8.2f} s"
            key = f"{one.key}={_written(one.value)}"
            yield f"  {key:44} - {one.saves / GIB:6.2f} GiB{longer}   {one.cost}"


def _seconds(time: TimePlan, config: Config, device: DeviceRow) -> Iterator[str]:
    devices = config.cluster.devices
    yield f"Seconds of a step on {devices} {device.name}, without rewards and tools"
    for phase, parts in time.phases.items():
        largest = sorted(parts, key=lambda name: -parts[name])
        told = ", ".join(f"{name} {parts[name]:.2f}" for name in largest if parts[name] >= 0.005)
        yield f"  {phase:10}{time.seconds(phase):10.2f}   {told}".rstrip()
    beside = " (what generates and what trains at one time)" if time.overlaps else ""
    rate = time.tokens / time.step / devices
    yield f"  {'step':10}{time.step:10.2f}   {rate:,.0f} tokens a second and device{beside}"
    update = time.seconds("update")
    utilised = time.flops / update / devices / device.flops if update else 0.0
    peak = f"{device.flops / 1e12:,.0f} TFLOP/s a device"
    yield f"  Model FLOPs utilisation of the update: {utilised:.0%} of {peak}."
    if time.checkpoint >= 0.005:
        yield f"  A checkpoint: {time.checkpoint:.2f} s of writing, beside the next step's episodes."
    if time.evaluation:
        yield f"  An evaluation of at most 1,000 prompts: {time.evaluation:.2f} s."


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _grid(columns: dict[str, Held]) -> Iterator[str]:
    owners = list(dict.fromkeys(owner for held in columns.values() for owner in held))
    width = max([len(owner) for owner in owners] + [22])
    yield f"  {'':{width}}" + "".join(f"{name:>11}" for name in columns)
    for owner in owners:
        cells = (
            f"{held[owner].expected / GIB:11.2f}" if owner in held else f"{'':11}"
            for held in columns.values()
        )
        yield f"  {owner:{width}}" + "".join(cells).rstrip()
    totals = {name: total_of(held) for name, held in columns.items()}
    yield f"  {'expected':{width}}" + "".join(f"{one.expected / GIB:11.2f}" for one in totals.values())
    yield f"  {'at least':{width}}" + "".join(f"{one.least / GIB:11.2f}" for one in totals.values())


def _fits(expected: int, least: int, card: DeviceRow | None) -> str:
    if card is None:
        fitting = [row.name for row in known_devices().values() if row.memory >= expected]
        return f"Cards of the table that are large enough: {', '.join(fitting) or 'none'}."
    there = f"the {card.memory / GIB:.0f} GiB of a {card.name}"
    if least > card.memory:
        return f"It does not fit {there}: a run would be refused. --auto looks for what does."
    if expected > card.memory:
        return f"It probably does not fit {there}: a run would warn. --auto looks for what does."
    return f"It fits {there}, with {(card.memory - expected) / GIB:.1f} GiB to spare."


def advice(found: SearchResult, config: Config, card: DeviceRow) -> Iterator[str]:
    """Yields the lines of a search: the keys of the best, and why not the best of other placements."""
    if not found.best:
        near = found.nearest
        yield f"Nothing fits the {card.memory / GIB:.0f} GiB of a {card.name} ({found.tried:,} plans)."
        if near is not None:
            yield f"The nearest needs {near.peak / GIB:.1f} GiB, with"
            yield from _keys(differing(config, near.settings))
        return
    first = found.best[0]
    yield f"The shortest step that fits ({found.tried:,} plans): {first.time.step:.2f} s, {first.placement},"
    yield f"{first.peak / GIB:.1f} of {card.memory / GIB:.0f} GiB at most. Set"
    yield from _keys(differing(config, first.settings))
    for other in found.best[1:3]:
        slower = [
            (other.time.seconds(phase) - first.time.seconds(phase), phase)
            for phase in {**other.time.phases, **first.time.phases}
        ]
        longer, phase = max(slower)
        more = other.time.step / first.time.step - 1
        yield f"Not {_where(other)}: {other.time.step:.2f} s ({more:+.0%}), {phase} {longer:+.2f} s. There"
        changed = differing(with_settings(config, first.settings), other.settings)
        yield from _keys(changed)


def _where(choice: Combination) -> str:
    sleeps = ", engines asleep in an update" if choice.settings.get("rollout.sleep") else ""
    return f"{choice.placement}{sleeps}"


def _keys(settings: Mapping[str, Any]) -> Iterator[str]:
    if not settings:
        yield "  nothing: it is what the recipe says"
    for key, value in settings.items():
        written = json.dumps(value) if isinstance(value, (dict, bool)) else value
        yield f"  {key}={written}"


def as_data(plan: MemoryPlan, time: TimePlan | None, helps: Sequence[Remedy]) -> dict[str, Any]:
    """Returns a plan as JSON has it: bytes and seconds."""

    def sizes(held: Held) -> dict[str, Any]:
        return {owner: {"least": size.least, "expected": size.expected} for owner, size in held.items()}

    lengths = plan.lengths
    return {
        "lengths": {"prompt": lengths.prompt, "response": lengths.response, "from": lengths.said},
        "pools": {
            pool.name: {
                "devices": pool.devices,
                "highest": pool.highest,
                "phases": {step: sizes(held) for step, held in pool.phases.items()},
            }
            for pool in plan.pools
        },
        "host": sizes(plan.of_machine(lambda pool: pool.highest)),
        "time": None if time is None else {"step": time.step, **asdict(time)},
        "helps": [asdict(one) for one in helps],
    }


def advice_data(found: SearchResult) -> dict[str, Any]:
    """Returns a search as JSON has it."""
    near = found.nearest
    return {
        "plans": found.tried,
        "best": [asdict(one) | {"step": one.time.step} for one in found.best],
        "nearest": None if near is None else asdict(near) | {"step": near.time.step},
    }
