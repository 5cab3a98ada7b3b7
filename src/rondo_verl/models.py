"""The models: what verl's keys of adapters, axes, offloading and checkpointing mean together.

As in `run.py`, each function returns settings in rondo's spelling, and may read in `tree` what others said.
"""

from __future__ import annotations

from typing import Any

from rondo.config.tree import Node
from rondo_verl import megatron
from rondo_verl.defaults import default
from rondo_verl.values import NoCounterpartError, Note, Setting, Values, number

_ACTOR, _REFERENCE = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
_MODELS = (("actor_rollout_ref.model.", "actor"), ("critic.model.", "critic"))
# verl's sections for how a model is sharded, by ours; the critic's has one name in 0.6.1, the other in main.
_FSDP = {
    "actor": (_ACTOR + "fsdp_config.",),
    "critic": ("critic.model.fsdp_config.", "critic.fsdp."),
    "reference": (_REFERENCE + "fsdp_config.",),
}
_SECTIONS = {"actor": _ACTOR, "critic": "critic.", "reference": _REFERENCE}
_CONTEXT, _SHARDS = "ulysses_sequence_parallel_size", "fsdp_size"
_VISION = (".*visual.*", ".*vision.*")  # patterns that leave the parts for images out


def checkpointing(values: Values, tree: Node) -> list[Setting]:
    """Has blocks computed again, from inputs on the device or, offloaded, in host memory."""
    on, offload = "enable_gradient_checkpointing", "enable_activation_offload"
    settings: list[Setting] = []
    for theirs, section in _MODELS:
        given = values.below(theirs)
        again, offloaded = given.plain(on), given.plain(offload)
        if offloaded and not again:
            raise given.refused(offload, f"what waits in host memory is the input of blocks: set {on}=True")
        if again is not None:
            node = given.made("offload" if offloaded else again, on, offload)
            settings.append((f"{section}.gradient_checkpointing", node))
    return settings


def adapters(values: Values, tree: Node) -> list[Setting]:
    """Trains adapters of low rank where lora_rank is above 0. vLLM gets them alone, as from verl."""
    settings: list[Setting] = []
    for theirs, section in _MODELS:
        given, ours = values.below(theirs), f"{section}.lora"
        others = ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
        if "lora_rank" not in given.nodes:  # idle
            continue
        started = given.plain("lora_adapter_path") is not None
        if started and not given.plain("lora_rank"):
            remedy = (
                "verl takes its rank and alpha: set lora_rank and lora_alpha to r and lora_alpha of its "
                "adapter_config.json"
            )
            raise given.refused("lora_adapter_path", remedy)
        if not given.plain("lora_rank"):
            settings.append((ours, given.made(None, "lora_rank")))
            settings += [Note(given.prefix + key, "lora_rank is 0") for key in given.written(*others)]
            continue
        _refuse_tower(given, values, tree, ours)
        settings += [
            (f"{ours}.rank", given.nodes["lora_rank"]),
            (f"{ours}.alpha", given.nodes["lora_alpha"]),
            (f"{ours}.targets", given.node("target_modules", _targets)),
        ]
        if started:
            settings.append((f"{ours}.path", given.nodes["lora_adapter_path"]))
        engine = tree.at("rollout.engine.name") or tree.at("rollout.engine")
        if section == "actor" and engine is not None and engine.plain() == "vllm":
            settings.append((f"{ours}.send", given.made("adapters", "lora_rank")))
    return settings


def _refuse_tower(given: Values, values: Values, tree: Node, ours: str) -> None:
    """Raises ConfigError where verl would give the parts for images adapters, too: here they are named."""
    left_out = given.plain("exclude_modules")
    if tree.at(f"{ours}.parts") is not None:
        return
    if left_out is None and values.written("data.image_key"):
        raise given.refused(
            "target_modules",
            "of a model with images verl gives every part adapters, here the language part gets them: set "
            f"exclude_modules='.*visual.*', or {ours}.parts=[tower, projector, language]",
        )
    if left_out is not None and left_out not in _VISION:
        raise given.refused(
            "exclude_modules",
            f"name the modules that get adapters ({ours}.targets), and the parts ({ours}.parts)",
        )


def _targets(value: Any) -> list[str]:
    if isinstance(value, list):
        return value
    if value != "all-linear":  # a pattern over whole names, in verl
        raise NoCounterpartError("give all-linear, or a list of names: [q_proj, v_proj]")
    return [value]


def offload(values: Values, tree: Node) -> list[Setting]:
    """Says what rests in host memory. FSDP2's own policy for that takes parameters and optimizer state."""
    settings: list[Setting] = []
    for section, prefixes in _FSDP.items():
        for prefix in prefixes:
            given, policy = values.below(prefix), "offload_policy"
            by_policy = bool(given.plain(policy)) and _is_fsdp2(values, section, given)
            if given.plain(policy) and not by_policy:
                settings.append(Note(prefix + policy, "verl reads it with strategy=fsdp2 only"))
            options = {"param_offload": "offload_params", "optimizer_offload": "offload_optimizer"}
            if section == "reference":
                del options["optimizer_offload"]
            for theirs, ours in options.items():
                if by_policy:
                    settings.append((f"{section}.{ours}", given.made(True, policy)))
                elif theirs in given.nodes:
                    settings.append((f"{section}.{ours}", given.nodes[theirs]))
    return settings


def _is_fsdp2(values: Values, section: str, given: Values) -> bool:
    said = values.plain(_ACTOR + "strategy") if section == "reference" else None
    said = values.plain(_SECTIONS[section] + "strategy", said)
    return "fsdp2" in (said, given.plain("strategy"))


def axes(values: Values, tree: Node) -> list[Setting]:
    """Spreads the models over the ranks: sequences over some of them (Ulysses), and copies of a model where
    fsdp_size ranks hold a whole one (HSDP).
    """
    settings: list[Setting] = []
    if megatron.trains(values):
        return []
    by_actor: tuple[int, int] | None = None
    for section, prefix in _SECTIONS.items():
        if not values.below(prefix).nodes and section != "actor":  # idle
            continue
        keys = [prefix + _CONTEXT, *(below + _CONTEXT for below in _FSDP[section])]
        sizes = {
            key: values.converted(key, number("give a whole number", whole=True, least=1), 1) for key in keys
        }
        above = {size for size in sizes.values() if size > 1}
        if len(above) > 1:
            raise values.refused(keys[0], f"{keys[1]} says another number; keep one of them")
        context = next(iter(above), 1)
        if section == "reference" and by_actor is not None and not values.written(*keys):
            context = by_actor[0]
        copies, notes, shards = _copies(values, tree, section, context)
        settings += notes
        if section == "reference" and (context, copies) == by_actor:
            continue  # as the actor is
        by_actor = (context, copies) if section == "actor" else by_actor
        said = any(key in values.nodes for key in keys)
        node = values.made(context, *keys) if said else default(keys[0], context)
        settings.append((f"{section}.parallel.context", node))
        if shards is not None:
            settings.append((f"{section}.parallel.replicate", values.made(copies, shards)))
    return settings


def _copies(values: Values, tree: Node, section: str, context: int) -> tuple[int, list[Setting], str | None]:
    """Returns how many copies of the model there are, a note where verl's number of shards does not go into
    the devices here, and the key that says it.
    """
    keys = [below + _SHARDS for below in _FSDP[section] if below + _SHARDS in values.nodes]
    if not keys:
        return 1, [], None
    key = keys[-1]
    shards = values.converted(key, number("give a whole number", whole=True))
    counted = values.written("trainer.n_gpus_per_node", "trainer.nnodes")
    devices = tree.at("cluster.devices")
    ranks = 1 if devices is None else devices.plain()
    if counted:
        ranks = values.plain("trainer.n_gpus_per_node", 1) * values.plain("trainer.nnodes", 1)
    if shards <= 0 or not isinstance(ranks, int) or shards >= ranks:
        return 1, [], key
    if ranks % shards or shards % context:
        reason = (
            f"{shards} do not go into {ranks} devices, in groups of {context}: all of them hold one model"
        )
        return 1, [Note(key, reason)], key
    return ranks // shards, [], key
