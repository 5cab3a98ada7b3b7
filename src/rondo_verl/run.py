"""The run: what verl's keys of data, engines, schedules, devices and length mean together.

Each function returns settings in rondo's spelling; one that follows from others reads them in `tree`, where
what the other functions said and what is written in rondo's spelling are together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rondo.config.tree import Node
from rondo_verl.algorithm import ESTIMATORS, POLICY_LOSSES
from rondo_verl.defaults import default
from rondo_verl.values import NoCounterpartError, Note, Setting, Values, choice, number

_ACTOR, _ROLLOUT, _REFERENCE = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.ref.",
)
_HYBRID = "actor_rollout_ref.hybrid_engine"
ENGINES = {"hf": "native", "vllm": "vllm", "sglang": "sglang"}
_PARALLEL = "tensor_model_parallel_size"
_VLLM = ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager", "enable_chunked_prefill")
# Each engine's key for verl's keys below actor_rollout_ref.rollout.
ENGINE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {_PARALLEL: "tensor_parallel", **{key: key for key in _VLLM}},
    "sglang": {
        _PARALLEL: "tensor_parallel",
        "gpu_memory_utilization": "mem_fraction_static",
        "enforce_eager": "disable_cuda_graph",
    },
}
ENGINE_KEYS = (*ENGINE_OPTIONS["vllm"], "engine_kwargs.vllm", "engine_kwargs.sglang")
# What lets an engine sleep: verl sets it where free_cache_engine is set.
_SLEEP_OPTIONS = {"vllm": "enable_sleep_mode", "sglang": "enable_memory_saver"}
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}
_whole = number("give a whole number", whole=True)


# ---- keys that depend on one another


def data(values: Values) -> list[Setting]:
    """Translates files and the column of the prompt. Several files are one data set in verl: each row of
    them comes once in an epoch.
    """
    given = values.below("data.")
    settings: list[Setting] = []
    for theirs, ours in (("train_files", "data.train"), ("val_files", "data.eval")):
        if theirs in given.nodes:
            sources = given.converted(theirs, _sources)
            together = {"weight": None} if theirs == "train_files" and len(sources) > 1 else {}
            sources = [{**source, "prompt_key": given.nodes["prompt_key"], **together} for source in sources]
            settings.append((ours, given.made(sources, theirs)))
    if not settings and given.written("prompt_key"):
        raise given.refused("prompt_key", "set prompt_key on each source of data.train")
    return settings


def _sources(value: Any) -> list[dict[str, Any]]:
    """Makes files sources; the type follows from the ending."""
    files = value if isinstance(value, list) else [value]
    if not all(isinstance(file, str) and file.endswith((".parquet", ".jsonl")) for file in files):
        raise NoCounterpartError("name .parquet or .jsonl files, or write data.train: [{type: …, path: …}]")
    return [{"type": file.rsplit(".", 1)[1], "path": file} for file in files]


def overlong(values: Values) -> list[Setting]:
    """Says what happens to prompts that are too long."""
    given = values.below("data.")
    if given.plain("filter_overlong_prompts"):
        return [("data.overlong_prompts", given.made("drop", "filter_overlong_prompts"))]
    how = choice({"error": "error", "left": "truncate_left", "right": "truncate_right"})
    error = given.converted("truncation", how)
    return [("data.overlong_prompts", given.made(error, "truncation", "filter_overlong_prompts"))]


def engine(values: Values) -> list[Setting]:
    """Chooses the rollout engine, with what verl hands on to it."""
    given = values.below(_ROLLOUT)
    name = given.converted("name", choice(ENGINES))
    settings: list[Setting] = [("rollout.engine.name", given.made(name, "name"))] if name else []
    known = ENGINE_OPTIONS.get(name, {})
    for key in (key for key in ENGINE_KEYS if key in given.nodes):
        node = given.nodes[key]
        if key in known:
            settings.append((f"rollout.engine.{known[key]}", node))
        elif known and key == f"engine_kwargs.{name}":
            settings += [(f"rollout.engine.{k}", v) for k, v in node.value.items()]
        elif key == _PARALLEL:
            if node.plain() != 1:
                raise given.refused(key, "the native engine runs on one device; name vllm or sglang")
        elif given.written(key):
            theirs = f"the {name} engine" if name else "the native engine, the default here,"
            settings.append(Note(_ROLLOUT + key, f"{theirs} has no such option"))
    return settings


def checkpointing(values: Values, tree: Node) -> list[Setting]:
    """Has blocks computed again, from inputs on the device or, offloaded, in host memory."""
    on, offload = "enable_gradient_checkpointing", "enable_activation_offload"
    settings: list[Setting] = []
    for theirs, section in (("actor_rollout_ref.model.", "actor"), ("critic.model.", "critic")):
        given = values.below(theirs)
        again, offloaded = given.plain(on), given.plain(offload)
        if offloaded and not again:
            raise given.refused(offload, f"what waits in host memory is the input of blocks: set {on}=True")
        if again is not None:
            node = given.made("offload" if offloaded else again, on, offload)
            settings.append((f"{section}.gradient_checkpointing", node))
    return settings


def asynchrony(values: Values) -> list[Setting]:
    """Bounds the staleness: verl's rollouter may be that many batches ahead of the one that is trained on."""
    given, threshold = values.below("async_training."), "staleness_threshold"
    if not given.nodes:
        return []
    ahead = math.ceil(given.converted(threshold, number("give a number of batches, 0 or more", least=0)))
    settings: list[Setting] = [("trainer.max_staleness", given.made(ahead, threshold))]
    if ahead:
        on_update = given.made("resume" if given.plain("partial_rollout") else "finish", "partial_rollout")
        settings.append(("trainer.on_update", on_update))
    elif given.written("partial_rollout"):
        reason = "with staleness_threshold=0 nothing is in flight at an update"
        settings.append(Note(given.prefix + "partial_rollout", reason))
    mode, says = "bypass", "use_rollout_log_probs"
    if given.plain("compute_prox_log_prob"):
        mode, says = "decoupled", "compute_prox_log_prob"
    if given.plain(says):
        settings.append(("algorithm.rollout_correction.mode", given.made(mode, says, *given.nodes)))
    return settings


def evaluation(values: Values) -> list[Setting]:
    """Chooses greedy or sampled answers: the temperature says which, and do_sample is for 0.6.1's engines."""
    given = values.below(_ROLLOUT + "val_kwargs.")
    ours = "trainer.evaluation."
    temperature = given.converted("temperature", number("give a number, 0 or more", least=0))
    greedy = given.made(not temperature, "temperature", "do_sample")
    if not temperature:
        settings: list[Setting] = [
            Note(given.prefix + key, "at temperature 0, verl's default, all answers are the greedy one")
            for key in given.written("do_sample", "n", "top_p")
            if given.plain(key) not in (False, 1)
        ]
        return [*settings, (ours + "greedy", greedy), (ours + "samples", given.made(0, "temperature"))]
    if given.written("do_sample") and not given.plain("do_sample"):
        remedy = (
            "with a temperature above 0 verl's asynchronous engines sample all the same, and 0.6.1's "
            "synchronous ones do not: set do_sample=True, or temperature=0"
        )
        raise given.refused("do_sample", remedy)
    return [
        (ours + "greedy", greedy),
        (ours + "samples", given.nodes["n"]),
        (ours + "temperature", given.nodes["temperature"]),
        (ours + "top_p", given.nodes["top_p"]),
    ]


# ---- keys that follow from settings, in whichever spelling those are


def idle(tree: Node) -> Mapping[str, str]:
    """Returns the sections of verl's whose models the run does not have, and why. A function that verl does
    not have may read anything.
    """
    advantage = _chosen(tree, "algorithm.advantage", "grpo")
    loss, kl = _chosen(tree, "algorithm.policy_loss", "ppo_clip"), tree.at("algorithm.kl")
    found: dict[str, str] = {}
    if advantage in set(ESTIMATORS.values()) - {"gae"}:
        found["critic."] = f"the estimator {advantage} reads no values, so there is no critic"
    if advantage in ESTIMATORS.values() and loss in POLICY_LOSSES.values() and (kl is None or not kl.value):
        found[_REFERENCE] = "no KL is on, so there is no reference model"
    return found


def _chosen(tree: Node, key: str, otherwise: str) -> Any:
    """Returns the name at a key where a function or a choice stands."""
    node = tree.at(key)
    name = tree.at(f"{key}.name") or node
    return otherwise if name is None else name.plain()


def actor_schedule(values: Values, tree: Node) -> list[Setting]:
    """Sets the actor's schedule."""
    return _schedule(values.below(_ACTOR), tree, "actor")


def critic(values: Values, tree: Node) -> list[Setting]:
    """Lets mini-batches and epochs be the actor's where nothing is written, and asks for the model."""
    given, warmup = values.below("critic."), "trainer.critic_warmup"
    if not given.nodes:  # idle
        if values.plain(warmup):
            remedy = "without a critic verl trains nothing in these steps; remove it"
            raise values.refused(warmup, remedy)
        return []
    settings: list[Setting] = [("critic.warmup_steps", values.nodes[warmup])]
    for theirs, ours in (("ppo_mini_batch_size", "mini_batch_size"), ("ppo_epochs", "epochs")):
        settings += _following(given, theirs, f"critic.{ours}", tree.at(f"actor.{ours}"))
    where, chosen = tree.at("algorithm.advantage.name"), values.nodes["algorithm.adv_estimator"]
    if "model.path" in given.nodes:
        settings.append(("critic.path", given.nodes["model.path"]))
    elif where is not None and where.origin == chosen.origin and tree.at("critic.path") is None:
        remedy = (
            "it trains a critic, and critic.model.path is not set (verl's own default is a folder of its "
            "authors); set it, or another estimator"
        )
        raise values.refused("algorithm.adv_estimator", remedy)
    return settings


def critic_schedule(values: Values, tree: Node) -> list[Setting]:
    """Sets the critic's schedule."""
    given = values.below("critic.")
    return _schedule(given, tree, "critic") if given.nodes else []


def reference(values: Values, tree: Node) -> list[Setting]:
    """Lets the reference's micro-batches be as large as the actor's where nothing is written."""
    given, key = values.below(_REFERENCE), "log_prob_max_token_len_per_gpu"
    if not given.nodes:  # idle
        return []
    return _following(given, key, "reference.token_budget", tree.at("actor.token_budget"))


def _following(given: Values, theirs: str, ours: str, followed: Node | None) -> list[Setting]:
    """Returns verl's setting where it is set, else the one that verl copies in its place."""
    if theirs in given.nodes:
        return [(ours, given.nodes[theirs])]
    return [] if followed is None else [(ours, default(given.prefix + theirs, followed.plain()))]


def _schedule(given: Values, tree: Node, section: str) -> list[Setting]:
    """Sets the learning rate's schedule. verl's scheduler takes a step per trainer step, ours one per
    optimizer step.
    """
    older, kind = "optim.warmup_style", "optim.lr_scheduler_type"
    kind = kind if given.plain(older) is None else older
    ours, warmup = f"{section}.optimizer.schedule", "optim.lr_warmup_steps"
    settings: list[Setting] = [(f"{ours}.name", given.node(kind, choice(_SCHEDULES)))]
    if given.plain(kind) == "cosine":
        settings.append((f"{ours}.min_ratio", given.nodes["optim.min_lr_ratio"]))
    elif given.written("optim.min_lr_ratio"):
        settings.append(Note(given.prefix + "optim.min_lr_ratio", "the rate of a constant schedule stays"))
    steps = max(0, given.converted(warmup, _whole)) * _optimizer_steps(tree, section)
    return [*settings, (f"{ours}.warmup_steps", given.made(steps, warmup))]


def _optimizer_steps(tree: Node, section: str) -> int:
    """Returns how many optimizer steps a trainer step has; 1 where what is set is no number, which is an
    error elsewhere.
    """
    batch = _number(tree, "data.batch_size", 1)
    mini_batches = math.ceil(batch / _number(tree, f"{section}.mini_batch_size", batch))
    return mini_batches * _number(tree, f"{section}.epochs", 1)


def _number(tree: Node, key: str, otherwise: int) -> int:
    """Returns the whole number above 0 that is set; `otherwise` where there is none."""
    node = tree.at(key)
    number = None if node is None else node.plain()
    return number if type(number) is int and number > 0 else otherwise


def testing(values: Values, tree: Node) -> list[Setting]:
    """Says when to evaluate; where verl does not in between, it does not at the end either."""
    key = "trainer.test_freq"
    if tree.at("trainer.evaluation.every") is not None and not values.written(key):
        return []
    every = max(0, values.converted(key, _whole)) or None
    return [
        ("trainer.evaluation.every", values.made(every, key)),
        ("trainer.evaluation.after", values.made(every is not None, key)),
    ]


def length(values: Values, tree: Node) -> list[Setting]:
    """Says how long to train: steps or epochs, whichever end first. A length in rondo's spelling has no
    default of verl's beside it. The fully asynchronous trainer counts prompts instead of steps.
    """
    given, prompts = values.below("trainer."), "rollout.total_rollout_steps"
    lengths = ("trainer.total_steps", "trainer.epochs", "rollout.recorded")
    theirs = ("trainer.total_epochs", "trainer.total_training_steps", prompts)
    if any(tree.at(key) for key in lengths) and not values.written(*theirs):
        return []
    settings: list[Setting] = [("trainer.epochs", given.nodes["total_epochs"])]
    if given.plain("total_training_steps") is not None:
        settings.append(("trainer.total_steps", given.nodes["total_training_steps"]))
    elif prompts in values.nodes:
        steps = values.converted(prompts, _whole) // _number(tree, "data.batch_size", 1)
        settings.append(("trainer.total_steps", values.made(steps, prompts)))
    return settings


def devices(values: Values, tree: Node) -> list[Setting]:
    """Counts devices over all nodes; more than one needs Ray. verl's rollout.* are those of a second pool."""
    keys = [f"{pool}.{count}" for pool in ("trainer", "rollout") for count in ("n_gpus_per_node", "nnodes")]
    ours, theirs = values.written(*keys[:2]), values.written(*keys[2:])
    for key in (*ours, *theirs):
        if not isinstance(values.plain(key), int):
            raise values.refused(key, "give a number of devices")
    trained, apart = (
        values.plain(f"{pool}.n_gpus_per_node", 1) * values.plain(f"{pool}.nnodes", 1)
        for pool in ("trainer", "rollout")
    )
    if values.plain(_HYBRID) == bool(theirs):
        remedy = "name the devices of the rollout: cluster.pools and cluster.placement"
        if theirs:
            remedy = "rollout.n_gpus_per_node gives the rollout devices of its own: remove either"
        raise values.refused(_HYBRID, remedy)
    if theirs and tree.at("trainer.max_staleness") is None:
        remedy = (
            "in verl a rollout with devices of its own runs ahead of the training, by one batch in the "
            "one-step-off trainer, by async_training.staleness_threshold in the fully asynchronous one: say "
            "by how many (trainer.max_staleness=1)"
        )
        raise values.refused(theirs[0], remedy)
    if not ours and not theirs:
        return []
    number = trained + apart if theirs else trained
    settings: list[Setting] = [("cluster.devices", values.made(number, *ours, *theirs))]
    if theirs:
        pools = {"train": values.made(trained, *(ours or theirs)), "rollout": apart}
        settings.append(("cluster.pools", values.made(pools, *theirs)))
        settings.append(("cluster.placement", values.made({"rollout": "rollout"}, *theirs)))
    if number > 1:
        settings.append(("cluster.backend", values.made("ray", *ours, *theirs)))
    return settings


def sleep(values: Values, tree: Node) -> list[Setting]:
    """Lets the engine give its memory back while the trainer updates; verl's default, where the two share
    devices and neither runs ahead.
    """
    key = _ROLLOUT + "free_cache_engine"
    node, ours, ahead = values.nodes[key], tree.at("rollout.sleep"), tree.at("trainer.max_staleness")
    apart = tree.at("cluster.placement.rollout") or (ahead is not None and ahead.plain())
    if not values.written(key) and (ours is not None or apart):
        return []
    settings: list[Setting] = [("rollout.sleep", node)]
    name = tree.at("rollout.engine.name") or tree.at("rollout.engine")
    option = None if name is None else _SLEEP_OPTIONS.get(name.plain())
    if name is not None and option is not None and node.plain():
        settings += [("rollout.engine.name", name), (f"rollout.engine.{option}", node)]
    return settings
