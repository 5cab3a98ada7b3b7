"""verl's Megatron strategy: which of its two engines trains, and what the keys of this one mean together.

Its fields of megatron-core's are data: `megatron.tsv` has those that go on to it (no values), those that have
no meaning here (`*`), and the values of others that are fine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rondo.config.load import collected
from rondo.config.tree import Node
from rondo.core.errors import ConfigError
from rondo_verl.defaults import default
from rondo_verl.values import Note, Setting, Values, choice, count, rows

_MODEL = "actor_rollout_ref.model."
_SECTIONS = {"actor": "actor_rollout_ref.actor.", "critic": "critic.", "reference": "actor_rollout_ref.ref."}
ENGINE = "actor_rollout_ref.actor.strategy"
AXES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}
VIRTUAL = "virtual_pipeline_model_parallel_size"
_STAGES = {
    "num_layers_in_first_pipeline_stage": "first_stage_layers",
    "num_layers_in_last_pipeline_stage": "last_stage_layers",
}
_ON_PROCESSORS = "optimizer_cpu_offload"  # a step is computed there, by the same formulas
_AGAIN, _METHOD, _LAYERS = "recompute_granularity", "recompute_method", "recompute_num_layers"
_FIELDS = {field: (values, why) for field, values, why in rows("megatron.tsv")}
# What only one of verl's engines reads: sections, and keys.
_OF_FSDP = tuple(key for key, (values, _) in _FIELDS.items() if values == "fsdp")


def trains(values: Values) -> bool:
    """Says whether it is Megatron that trains: a key says so, or the actor has keys of its section."""
    said = values.plain(ENGINE, values.plain("model_engine"))
    return said == "megatron" or (said is None and bool(values.below(_SECTIONS["actor"] + "megatron.").nodes))


def unread(values: Values) -> Mapping[str, str]:
    """Returns the sections and keys of the engine that does not train, and why they mean nothing."""
    if trains(values):
        return dict.fromkeys(_OF_FSDP, "verl's Megatron does not read it")
    return {
        prefix + "megatron.": "verl reads it with strategy=megatron only" for prefix in _SECTIONS.values()
    }


def layout(values: Values, tree: Node) -> list[Setting]:
    """Chooses the framework, and spreads the models over the ranks: all as the actor where nothing else is
    written, since verl's processes make one mesh, the actor's.
    """
    for given in map(values.below, _SECTIONS.values()):
        if given.written("strategy") and (given.plain("strategy") == "megatron") != trains(values):
            raise given.refused("strategy", "all models have one framework, the actor's: actor.backend")
    if not trains(values):
        return []
    for key in (_MODEL + "lora_rank", "critic.model.lora_rank"):
        if values.plain(key):
            raise values.refused(key, "verl's Megatron does not read it; rondo's has adapters: actor.lora")
    said = [key for key in (ENGINE, "model_engine") if values.plain(key) == "megatron"] or [
        key for key in values.nodes if key.startswith(_SECTIONS["actor"] + "megatron.")
    ]
    settings: list[Setting] = [("actor.backend.name", values.made("megatron", *said))]
    by_actor: dict[str, int] = {}
    of_actor = values.below(_SECTIONS["actor"] + "megatron.")
    chunks = of_actor.converted(VIRTUAL, _chunks, 1)
    if chunks > 1:
        settings.append(("actor.backend.virtual", of_actor.made(chunks, VIRTUAL)))
    for section, prefix in _SECTIONS.items():
        given = values.below(prefix)
        if not given.nodes and section != "actor":  # idle
            continue
        own = given.below("megatron.")
        if own.converted(VIRTUAL, _chunks, chunks) != chunks:
            raise own.refused(VIRTUAL, "all models have the actor's, which is another: actor.backend.virtual")
        sizes = {theirs: own.converted(theirs, count, by_actor.get(theirs, 1)) for theirs in AXES}
        if sizes == by_actor:
            continue
        by_actor = by_actor or sizes
        for theirs, size in sizes.items():
            is_said = theirs in own.nodes
            node = own.made(size, theirs) if is_said else default(own.prefix + theirs, size)
            settings.append((f"{section}.parallel.{AXES[theirs]}", node))
    return settings


def fields(values: Values, tree: Node) -> list[Setting]:
    """Translates override_transformer_config. Each model has one in verl; here all have the actor's, but for
    what is computed again. Raises ConfigError for all fields together that have no counterpart.
    """
    settings, problems = list[Setting](), list[ConfigError]()
    of_actor = _below(values, "actor_rollout_ref.actor.megatron.override_transformer_config")
    for section, prefix in _SECTIONS.items() if trains(values) else ():
        if not values.below(prefix).nodes and section != "actor":
            continue
        given = _below(values, prefix + "megatron.override_transformer_config")
        with collected(problems):
            settings += _again(given, of_actor, section)
        for name in (each for each in given.nodes if given.plain(each) is not None):
            is_carried = name in _STAGES or _FIELDS.get(name, ("*", ""))[0] == ""
            with collected(problems):
                if is_carried and given.plain(name) != of_actor.plain(name):
                    raise given.refused(name, "all models have the actor's, which is another: actor.backend")
                if not is_carried:
                    settings += _plain(given, name, name)
                elif section == "actor":
                    ours = _STAGES.get(name, f"options.{name}")
                    settings.append((f"actor.backend.{ours}", given.nodes[name]))
    if problems:
        raise ConfigError.of(problems)
    chosen = tree.at("actor.backend.name")  # whose keys actor.backend has
    return settings if chosen is None else [("actor.backend.name", chosen), *settings]


def optimizers(values: Values, tree: Node) -> list[Setting]:
    """Says where an optimizer's state rests: in host memory, where one of two keys asks for that. Of
    override_optimizer_config nothing else is carried.
    """
    settings, problems = list[Setting](), list[ConfigError]()
    for section in ("actor", "critic"):
        key = _SECTIONS[section] + "optim.override_optimizer_config"
        given = _below(values, key)
        if values.plain(key) and not (trains(values) and given.nodes):
            raise values.refused(key, f"set the keys of {section}.optimizer")
        resting = values.nodes.get(_SECTIONS[section] + "megatron.optimizer_offload")
        if given.plain(_ON_PROCESSORS):
            resting = given.made(True, _ON_PROCESSORS)
        if resting is not None:
            settings.append((f"{section}.offload_optimizer", resting))
        for name in given.nodes:
            with collected(problems):
                settings += _plain(given, name, f"optim.{name}")
    if problems:
        raise ConfigError.of(problems)
    return settings


def _below(values: Values, key: str) -> Values:
    """Returns what a mapping has, as keys of their own."""
    node = values.nodes.get(key)
    return Values(node.value if node is not None and isinstance(node.value, dict) else {}, f"{key}.")


def _plain(given: Values, name: str, field: str) -> list[Setting]:
    """Returns a note for a field without a meaning here. Raises ConfigError for a value that is not fine."""
    fine, why = _FIELDS.get(
        field, ("[]", "it is not translated: leave it out, or write it in actor.backend.options")
    )
    if fine == "*":
        return [Note(given.prefix + name, why)] if why else []
    if given.plain(name) not in json.loads(fine):
        raise given.refused(name, why)
    return []


def _again(given: Values, of_actor: Values, section: str) -> list[Setting]:
    """Says what a backward pass computes again."""
    if section == "reference":  # has none
        return []
    ours, what = f"{section}.gradient_checkpointing", given.converted(_AGAIN, _granularity)
    if what is None:
        return [(ours, default(given.prefix + _AGAIN, value=False))]
    wanted = ("uniform", 1) if what == "full" else (None, None)
    if (given.plain(_METHOD), given.plain(_LAYERS)) != wanted:
        how = f"with {_METHOD}=uniform and {_LAYERS}=1" if wanted[1] else f"without {_METHOD}, {_LAYERS}"
        raise given.refused(_AGAIN, f"rondo computes it again {how}")
    if what == "selective" and given.plain("recompute_modules", ["core_attn"]) != ["core_attn"]:
        raise given.refused("recompute_modules", "rondo's Megatron computes attention again: [core_attn]")
    if of_actor.plain(_AGAIN, what) not in (None, what):
        raise given.refused(_AGAIN, "all models have the actor's, which is another: actor.backend.recompute")
    return [(ours, given.made(True, _AGAIN)), ("actor.backend.recompute", given.made(what, _AGAIN))]


def _chunks(value: int | None) -> int:
    return 1 if value is None else int(count(value))


def _granularity(value: str | None) -> str | None:
    return None if value is None else str(choice({"full": "full", "selective": "selective"})(value))
