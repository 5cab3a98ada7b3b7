"""The run: what verl's keys of data, engines, schedules, devices and length mean together.

Each function returns settings in rondo's spelling; one that follows from others reads them in `tree`, where
what the other functions said and what is written in rondo's spelling are together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rondo.config.tree import Node
from rondo_verl.algorithm import ESTIMATORS, POLICY_LOSSES
from rondo_verl.defaults import ASYNC, VERSION, default
from rondo_verl.values import NoCounterpartError, Note, Setting, Values, choice, count, number, whole

_ACTOR, _ROLLOUT, _REFERENCE = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.ref.",
)
_HYBRID = "actor_rollout_ref.hybrid_engine"
ENGINES = {"hf": "native", "vllm": "vllm", "sglang": "sglang"}
_PARALLEL = "tensor_model_parallel_size"
_VLLM = ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager", "enable_chunked_prefill")
_BATCHES, _SYNC = ASYNC + "require_batches", ASYNC + "trigger_parameter_sync_step"
# Each engine's key for verl's keys below actor_rollout_ref.rollout.
ENGINE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        _PARALLEL: "tensor_parallel",
        **{key: key for key in _VLLM},
        "enable_prefix_caching": "enable_prefix_caching",
        "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
    },
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
_share = number("give a number from 0 to 1", least=0)


# ---- keys that depend on one another


def batch(values: Values) -> list[Setting]:
    """Says how many prompts a step takes: those of one update of the engines' weights.

    verl's fully asynchronous trainer counts them in mini-batches; without a filter gen_batch_size prompts are
    asked, and all of them are trained on.
    """
    given, mini = values.below("data."), _ACTOR + "ppo_mini_batch_size"
    if ahead(values):
        keys = (mini, _BATCHES, _SYNC)
        number = math.prod(values.converted(key, count) for key in keys)
        for key, wanted in (("train_batch_size", 0), ("gen_batch_size", 1)):
            if given.written(key) and given.plain(key) != wanted:
                remedy = (
                    f"with keys of async_training a step takes ppo_mini_batch_size · require_batches · "
                    f"trigger_parameter_sync_step prompts ({number}), and verl wants {wanted} here"
                )
                raise given.refused(key, remedy)
        return [("data.batch_size", values.made(number, *keys))]
    asked = given.plain("gen_batch_size") is not None
    filtered = values.plain("algorithm.filter_groups.enable")
    taken = "gen_batch_size" if asked and not filtered else "train_batch_size"
    return [("data.batch_size", given.nodes[taken])]


def ahead(values: Values) -> bool:
    """Says whether keys of the fully asynchronous trainer are written."""
    return bool(values.below(ASYNC).nodes)


def data(values: Values) -> list[Setting]:
    """Translates files and the columns of prompt and images. Several files are one data set in verl: each row
    of them comes once in an epoch.
    """
    given = values.below("data.")
    settings: list[Setting] = []
    for theirs, ours in (("train_files", "data.train"), ("val_files", "data.eval")):
        if theirs in given.nodes:
            found = given.converted(theirs, sources)
            together = {"weight": None} if theirs == "train_files" and len(found) > 1 else {}
            columns = {key: given.nodes[key] for key in ("prompt_key", "image_key") if key in given.nodes}
            found = [{**source, **columns, **together} for source in found]
            settings.append((ours, given.made(found, theirs)))
    if not settings:
        for key in given.written("prompt_key", "image_key"):
            raise given.refused(key, f"set {key} on each source of data.train")
    return settings


def sources(value: Any) -> list[dict[str, Any]]:
    """Makes files sources; the type follows from the ending."""
    files = value if isinstance(value, list) else [value]
    if not all(isinstance(file, str) and file.endswith((".parquet", ".jsonl")) for file in files):
        raise NoCounterpartError("name .parquet or .jsonl files, or write data.train: [{type: …, path: …}]")
    paths = [PurePosixPath(file) for file in files]
    named = [path.stem for path in paths]
    if len(set(named)) < len(named):  # gsm8k/train.parquet and math/train.parquet
        named = [f"{path.parent.name}-{path.stem}" for path in paths]
    own: list[dict[str, Any]] = [{} for _ in files]
    if len(files) > 1 and len(set(named)) == len(named):
        own = [{"name": name} for name in named]
    pairs = zip(paths, files, own, strict=True)
    return [{"type": path.suffix[1:], "path": file, **name} for path, file, name in pairs]


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
    return settings


# ---- keys that follow from settings, in whichever spelling those are


def idle(values: Values, tree: Node) -> Mapping[str, str]:
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
    elif values.plain("actor_rollout_ref.model.lora_rank"):
        found[_REFERENCE] = "with adapters the reference is the actor without them, as in verl"
    return found


def _chosen(tree: Node, key: str, otherwise: str) -> Any:
    """Returns the name at a key where a function or a choice stands."""
    node = tree.at(key)
    name = tree.at(f"{key}.name") or node
    return otherwise if name is None else name.plain()


def actor_schedule(values: Values, tree: Node) -> list[Setting]:
    """Sets the actor's schedule."""
    return _schedule(values.below(_ACTOR), tree, "actor", values)


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
    return _schedule(given, tree, "critic", values) if given.nodes else []


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


def _schedule(given: Values, tree: Node, section: str, values: Values) -> list[Setting]:
    """Sets the learning rate's schedule. verl's scheduler takes a step per trainer step, ours one per
    optimizer step.
    """
    older, kind = "optim.warmup_style", "optim.lr_scheduler_type"
    kind = kind if given.plain(older) is None else older
    ours = f"{section}.optimizer.schedule"
    settings: list[Setting] = [(f"{ours}.name", given.node(kind, choice(_SCHEDULES)))]
    if given.plain(kind) == "cosine":
        settings.append((f"{ours}.min_ratio", given.nodes["optim.min_lr_ratio"]))
    elif given.written("optim.min_lr_ratio"):
        settings.append(Note(given.prefix + "optim.min_lr_ratio", "the rate of a constant schedule stays"))
    steps, said = _warmup(given, tree)
    if isinstance(steps, float):
        if _optimizer_steps(tree, section) > 1:
            remedy = (
                "verl rounds the share down to trainer steps, of several optimizer steps each, and how many "
                f"there are is not known: set trainer.total_training_steps, or {given.prefix}{said[1]}"
            )
            raise given.refused(said[0], remedy)
        return [*settings, (f"{ours}.warmup_ratio", given.made(steps, *said))]
    syncs = values.plain(_SYNC, 1)  # asynchronous: the scheduler's steps between two syncs, one step of ours
    if not isinstance(syncs, int) or syncs < 1:
        syncs = 1  # an error elsewhere
    return [
        *settings,
        (f"{ours}.warmup_steps", given.made(steps * _optimizer_steps(tree, section) // syncs, *said)),
    ]


def _warmup(given: Values, tree: Node) -> tuple[int | float, tuple[str, ...]]:
    """Returns the trainer steps of the warm-up, and the keys that say so: a share of all where their number
    is none, or below 0. A share, as a float, where the number of all is known when the data is.
    """
    warmup, share = "optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio"
    steps = given.converted(warmup, lambda value: -1 if value is None else whole(value))
    ratio = given.converted(share, _share)
    if steps >= 0 or not ratio:
        return max(0, steps), (warmup,)
    total = _number(tree, "trainer.total_steps", 0)
    return int(ratio * total) if total else float(ratio), (share, warmup)


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


def evaluation(values: Values, tree: Node) -> list[Setting]:
    """Chooses greedy or sampled answers: the temperature says which; do_sample counts with the synchronous
    engines of 0.6.1 only.
    """
    given = values.below(_ROLLOUT + "val_kwargs.")
    ours = "trainer.evaluation."
    temperature = given.converted("temperature", number("give a number, 0 or more", least=0))
    reason = "at temperature 0, verl's default, all answers are the greedy one"
    if temperature and given.written("do_sample") and not given.plain("do_sample"):
        mode = _mode(values)
        if mode is None:
            remedy = (
                "with a temperature above 0 verl's asynchronous engines sample all the same, and 0.6.1's "
                "synchronous ones do not: set do_sample=True, or temperature=0"
            )
            raise given.refused("do_sample", remedy)
        if mode == "sync":
            temperature, reason = 0, "with do_sample=False all answers are the greedy one"
    greedy = given.made(not temperature, "temperature", "do_sample")
    if not temperature:
        settings: list[Setting] = [
            Note(given.prefix + key, reason)
            for key in given.written("do_sample", "n", "top_p", "top_k")
            if given.plain(key) not in (-1, 0, 1)
        ]
        return [*settings, (ours + "greedy", greedy), (ours + "samples", given.made(0, "temperature"))]
    cut, trained = max(0, given.converted("top_k", whole)), tree.at("rollout.top_k")
    if cut != (0 if trained is None else trained.plain()):
        remedy = "evaluation samples from as many tokens as training here: set rollout.top_k to it, too"
        raise given.refused("top_k", remedy)
    return [
        (ours + "greedy", greedy),
        (ours + "samples", given.nodes["n"]),
        (ours + "temperature", given.nodes["temperature"]),
        (ours + "top_p", given.nodes["top_p"]),
    ]


def folder(values: Values, tree: Node) -> list[Setting]:
    """Names the run for trackers, and its folder, after project and experiment where nothing else does."""
    given = values.below("trainer.")
    written = given.written("project_name", "experiment_name")
    ours = {"project_name": "tracking.project", "experiment_name": "tracking.run_name"}
    settings: list[Setting] = [(ours[key], given.nodes[key]) for key in written]
    path, name = given.plain("default_local_dir"), given.plain("experiment_name", "gsm8k")
    if path is not None:
        settings.append(("trainer.run_dir", given.nodes["default_local_dir"]))
    elif written and tree.at("trainer.run_dir") is None:
        path = f"checkpoints/{given.plain('project_name', 'verl_examples')}/{name}"
        settings.append(("trainer.run_dir", given.made(path, *written)))
    return settings


def testing(values: Values, tree: Node) -> list[Setting]:
    """Says when to evaluate; where verl does not in between, it does not at the end either."""
    key = "rollout.test_freq" if values.written("rollout.test_freq") else "trainer.test_freq"
    if tree.at("trainer.evaluation.every") is not None and not values.written(key):
        return []
    every = max(0, values.converted(key, whole)) or None
    return [
        ("trainer.evaluation.every", values.made(every, key)),
        ("trainer.evaluation.after", values.made(every is not None, key)),
    ]


def length(values: Values, tree: Node) -> list[Setting]:
    """Says how long to train: steps or epochs, whichever end first. A length in rondo's spelling has no
    default of verl's beside it. The fully asynchronous trainer counts prompts instead of steps.
    """
    given, prompts, passes = values.below("trainer."), "rollout.total_rollout_steps", "rollout.total_epochs"
    lengths = ("trainer.total_steps", "trainer.epochs", "rollout.recorded")
    theirs = ("trainer.total_epochs", "trainer.total_training_steps", prompts, passes)
    if any(tree.at(key) for key in lengths) and not values.written(*theirs):
        return []
    epochs = values.nodes.get(passes, given.nodes["total_epochs"])
    settings: list[Setting] = [("trainer.epochs", epochs)]
    counted = (*(key for key in (prompts,) if key in values.nodes), tree.at(lengths[0]))
    if ahead(values) and not any(counted) and given.plain("total_training_steps") is None:
        remedy = "say how many prompts the asynchronous trainer takes: rollout.total_rollout_steps"
        raise values.refused("async_training.staleness_threshold", remedy)
    if given.plain("total_training_steps") is not None:
        settings.append(("trainer.total_steps", given.nodes["total_training_steps"]))
    elif prompts in values.nodes:
        steps = values.converted(prompts, whole) // _number(tree, "data.batch_size", 1)
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


_CONFIGS = {  # verl's files of tools and interactions, by the options of the tools here
    "path": "tool_config_path",
    "functions": "function_tool_path",
    "interactions": "interaction_config_path",
}
_FORMATS = {"hermes": "hermes", "gpt-oss": "gpt_oss", "qwen3_coder": "qwen_xml"}
LOOPS = ("single_turn_agent", "tool_agent")
TURNS = (
    *("enable", "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length"),
    *("tool_response_truncate_side", *_CONFIGS.values(), "format"),
)


def turns(values: Values, tree: Node) -> list[Setting]:
    """Has verl's loops play the episodes where there are tools or interactions, or several turns are asked
    for.
    """
    agent, given = values.below(_ROLLOUT + "agent."), values.below(_ROLLOUT + "multi_turn.")
    loop, files = agent.plain("default_agent_loop"), [key for key in _CONFIGS.values() if given.plain(key)]
    if loop not in LOOPS:
        remedy = f"it is none of {', '.join(LOOPS)}: write it as rollout.agent=path/to/file.py:function"
        raise agent.refused("default_agent_loop", remedy)
    for key in values.written("data.tool_config_path"):
        if values.plain(key) != given.plain("tool_config_path"):
            raise values.refused(key, "prompts show the tools of rollout.multi_turn.tool_config_path")
    written = [f"multi_turn.{key}" for key in given.written(*TURNS)]
    written += [f"agent.{key}" for key in agent.written("default_agent_loop")]
    mode, takes = _mode(values), bool(files or given.plain("enable") or loop != LOOPS[0])
    own = next((key for key in ("rollout.agent", "rollout.tools") if tree.at(key) is not None), None)
    in_step = _synchronous(values, given, files, mode) if takes else False
    takes = bool(files) if in_step else takes and mode != "sync"
    if not takes or own:
        why = f"{own} says what turns are taken" if own else "an episode has one turn: there are no tools"
        return [Note(_ROLLOUT + key, why) for key in written if values.plain(_ROLLOUT + key) is not None]
    version = values.plain(VERSION) or ("0.6.1" if mode == "sync" else "main")
    side = choice({name: name for name in ("left", "middle", "right")})
    longest = tree.at("rollout.max_tokens")
    options = {ours: given.nodes[theirs] for ours, theirs in _CONFIGS.items() if theirs in files}
    tools = {
        "name": "rondo_verl.multi_turn:VerlTools",
        **options,
        "most_characters": given.node("max_tool_response_length", count),
        "cut": given.node("tool_response_truncate_side", side),
        "version": version,
        "timeout_seconds": 3600,  # verl waits for ever
        "max_tokens": 512 if longest is None else longest.plain(),  # more than that is in no response
    }
    bounds = {key: given.nodes[key] for key in ("max_assistant_turns", "max_user_turns")}
    played = {
        "name": "rondo_verl.multi_turn:tool_agent",
        "default_agent_loop": agent.nodes["default_agent_loop"],
        **bounds,
        "max_parallel_calls": given.node("max_parallel_calls", count),
        **{key: node for key, node in options.items() if key == "interactions"},
        "version": version,
    }
    keys = (*files, *given.written(*TURNS), "enable")
    settings: list[Setting] = []
    if in_step:
        played["synchronous"] = options.get("path", "")
        tools["most_characters"] = None
        why = "0.6.1's synchronous SGLang does not read it"
        settings += [Note(_ROLLOUT + key, why) for key in written if key.endswith(_UNREAD)]
    settings.append(("rollout.agent", given.made(played, *keys)))
    settings.append(("rollout.tools", given.made([tools], *keys)))
    if tree.at("model.tool_format") is None and not in_step and {"path", "functions"} & options.keys():
        settings.append(("model.tool_format", given.node("format", choice(_FORMATS))))
    return settings


_UNREAD = ("max_parallel_calls", "max_tool_response_length", "truncate_side", "format", "agent_loop")


def _synchronous(values: Values, given: Values, files: list[str], mode: str | None) -> bool:
    """Says whether 0.6.1's synchronous engines take the turns, of which SGLang's has a loop of its own."""
    is_sglang = values.plain(_ROLLOUT + "name") == "sglang"
    if mode is None and is_sglang:
        remedy = "0.6.1's synchronous SGLang has another loop than all others: say which (rollout.mode=async)"
        raise given.refused((*files, "enable")[0], remedy)
    if mode == "sync" and files and not (is_sglang and given.plain("enable")):
        remedy = "0.6.1's synchronous engines take one turn: set rollout.mode=async"
        if is_sglang:
            remedy += ", or multi_turn.enable=True"
        raise given.refused(files[0], remedy)
    return mode == "sync" and is_sglang


def _mode(values: Values) -> str | None:
    """Returns how verl's engines are asked; None: what is written does not tell."""
    known = {"main": "async", "0.6.1": "sync"}.get(values.plain(VERSION))
    mode: str | None = values.plain(_ROLLOUT + "mode", known)
    return mode


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
