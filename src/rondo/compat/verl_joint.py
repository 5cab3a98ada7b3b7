"""What keys in verl's spelling mean together: a value, or several keys, become settings in rondo's spelling.

The table of keys is in `verl.py`. A key that verl reads only beside another one (the coefficient of a KL that
is off, the bounds of a correction that is off) sets nothing here either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rondo.config.tree import Node, describe
from rondo.errors import ConfigError

Values = Mapping[str, Node]  # the keys of one joint function that are set
Setting = tuple[str, Any]  # our key, and the node with its value: written where the value comes from

KL_K3 = {"low_var_kl": "k3", "k3": "k3", "k1+": "k1+", "k3+": "k3+"}
ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "opo": "opo",
    "grpo_passk": "passk",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb",  # with turn_aligned
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
POLICY_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "gpg": "gpg",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
_ACTOR = "actor_rollout_ref.actor."
_BOUNDS = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
_CLIP = {"clip_ratio": "clip", **_BOUNDS}
_DPPO = {"clip_ratio": "threshold", "clip_ratio_low": "threshold_low", "clip_ratio_high": "threshold_high"}
# Our option for each key below actor_rollout_ref.actor that verl's loss of that name reads.
LOSS_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "ppo_clip": {**_CLIP, "clip_ratio_c": "dual_clip"},
    "gspo": _BOUNDS,
    "gpg": {},
    "gmpo": _CLIP,
    "cispo": _BOUNDS,
    "sapo": {"tau_pos": "tau_positive", "tau_neg": "tau_negative"},
    "clip_cov": {
        **_CLIP,
        "policy_loss.clip_cov_ratio": "fraction",
        "policy_loss.clip_cov_lb": "low",
        "policy_loss.clip_cov_ub": "high",
    },
    "kl_cov": {"policy_loss.kl_cov_ratio": "fraction", "policy_loss.ppo_kl_coef": "beta"},
    "dppo_tv": {**_DPPO, "clip_ratio_c": "cap"},
    "dppo_kl": {**_DPPO, "clip_ratio_c": "cap"},
}
_ROLLOUT, _ASYNC, _HYBRID = "actor_rollout_ref.rollout.", "async_training.", "actor_rollout_ref.hybrid_engine"
NOTE = ""  # instead of a key of ours: the value is (their key, why it has no meaning)
ENGINES = {"hf": "native", "vllm": "vllm", "sglang": "sglang"}
_PARALLEL = _ROLLOUT + "tensor_model_parallel_size"
_VLLM = ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager", "enable_chunked_prefill")
# Each engine's key for verl's keys below actor_rollout_ref.rollout.
ENGINE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "tensor_model_parallel_size": "tensor_parallel",
        **{key: key for key in _VLLM},
    },
    "sglang": {
        "tensor_model_parallel_size": "tensor_parallel",
        "gpu_memory_utilization": "mem_fraction_static",
        "enforce_eager": "disable_cuda_graph",
    },
}
ENGINE_KEYS = (*ENGINE_OPTIONS["vllm"], "engine_kwargs.vllm", "engine_kwargs.sglang")
LOSS_KEYS = tuple(dict.fromkeys(key for options in LOSS_OPTIONS.values() for key in options))
# verl's levels of rejection; each is followed by the statistic: token_k1, seq_max_k3, …
_LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


def refused(key: str, node: Node, remedy: str) -> ConfigError:
    """The error for a key whose value has no counterpart here."""
    value = node.plain()
    shown = describe(value) if isinstance(value, bool | dict | list | None) else value
    text = f"{key} (verl's spelling) cannot be {shown} here: {remedy}"
    return ConfigError(f"{node.origin.where}: {text}", key=key)


def converted(key: str, node: Node, convert: Callable[[Any], Any]) -> Any:
    """The node's value through `convert`; its NoCounterpartError becomes `refused`."""
    try:
        return convert(node.plain())
    except NoCounterpartError as error:
        raise refused(key, node, str(error)) from None


class NoCounterpartError(Exception):
    """A value without a counterpart; the text is the remedy."""


# ---- converters of one value


def choice(names: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A converter that knows these names only."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise NoCounterpartError(f"use one of {', '.join(names)}, or rondo's own keys (docs/config.md)")
        return names[value]

    return convert


def off_at(off: int, becomes: Any = None) -> Callable[[Any], Any]:
    """A converter of a number whose value `off` switches something off (here: `becomes`)."""
    return lambda value: becomes if value == off else value


def trackers(value: Any) -> list[Any]:
    """Without verl's console and file."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name not in ("console", "file")]  # these two are always there


def source_list(value: Any, prompt_key: Node | None = None) -> list[Any]:
    """Files as sources; the type follows from the ending."""
    files = value if isinstance(value, list) else [value]
    if not all(isinstance(file, str) and file.endswith((".parquet", ".jsonl")) for file in files):
        raise NoCounterpartError("name .parquet or .jsonl files, or write data.train: [{type: …, path: …}]")
    extra = {} if prompt_key is None or prompt_key.value is None else {"prompt_key": prompt_key}
    return [{"type": file.rsplit(".", 1)[1], "path": file, **extra} for file in files]


# ---- keys that depend on one another


def made(values: Values, value: Any, *keys: str) -> Node:
    """A value that follows from those of `keys` that are set: written where the last layer of them is, and
    within a layer where the first of them is. Nodes in it stay as they are.
    """
    return like(max((values[key] for key in keys if key in values), key=lambda node: node.layer), value)


def like(node: Node, value: Any) -> Node:
    """A plain value as a tree that was written where `node` was. Nodes in it stay as they are."""
    if isinstance(value, Node):
        return value
    if isinstance(value, dict):
        return Node({key: like(node, child) for key, child in value.items()}, node.origin, node.layer)
    if isinstance(value, list):
        return Node([like(node, child) for child in value], node.origin, node.layer)
    return Node(value, node.origin, node.layer)


def plain(values: Values, key: str, default: Any = None) -> Any:
    """The value of a key that may not be set."""
    return values[key].plain() if key in values else default


def data(values: Values) -> list[Setting]:
    """Files and the column of the prompt."""
    prompt_key = values.get("data.prompt_key")
    settings: list[Setting] = []
    for theirs, ours in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        if theirs in values:
            sources = converted(theirs, values[theirs], lambda value: source_list(value, prompt_key))
            settings.append((ours, made(values, sources, theirs)))
    if not settings:
        raise refused(
            "data.prompt_key", values["data.prompt_key"], "set prompt_key on each source of data.train"
        )
    return settings


def overlong(values: Values) -> list[Setting]:
    """What happens to prompts that are too long."""
    dropped, truncated = "data.filter_overlong_prompts", "data.truncation"
    if plain(values, dropped, False):
        return [("data.overlong_prompts", made(values, "drop", dropped))]
    names = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    how = converted(truncated, values[truncated], choice(names)) if truncated in values else "error"
    return [("data.overlong_prompts", made(values, how, truncated if truncated in values else dropped))]


def kl(values: Values) -> list[Setting]:
    """The KL term, in the loss or in the reward; a coefficient alone switches nothing on."""
    actor, algorithm = "actor_rollout_ref.actor.", "algorithm."
    in_loss, in_reward = plain(values, actor + "use_kl_loss"), plain(values, algorithm + "use_kl_in_reward")
    estimators = choice({"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2"} | KL_K3)
    if in_loss and in_reward:
        node = values[algorithm + "use_kl_in_reward"]
        raise refused(
            algorithm + "use_kl_in_reward", node, "the KL is in the loss already; choose one of the two"
        )
    if in_loss:
        switch, kind, coef = (actor + name for name in ("use_kl_loss", "kl_loss_type", "kl_loss_coef"))
        default = "k3"
    elif in_reward:
        switch, kind, coef = (
            algorithm + name for name in ("use_kl_in_reward", "kl_penalty", "kl_ctrl.kl_coef")
        )
        default = "k1"
    elif in_loss is None and in_reward is None:
        return []  # coefficients of a term that nobody switched on
    else:
        return [("algorithm.kl", made(values, None, actor + "use_kl_loss", algorithm + "use_kl_in_reward"))]
    estimator = converted(kind, values[kind], estimators) if kind in values else default
    kl: dict[str, Any] = {
        "name": made(values, estimator, kind if kind in values else switch),
        "where": made(values, "loss" if in_loss else "reward", switch),
        "coef": values.get(coef, made(values, 0.001, switch)),
    }
    control = algorithm + "kl_ctrl."
    if in_reward and plain(values, control + "type") == "adaptive":
        kl["controller"] = {
            "name": values[control + "type"],
            "target": values.get(control + "target_kl", made(values, 0.1, control + "type")),
            "horizon": values.get(control + "horizon", made(values, 10000, control + "type")),
        }
    return [("algorithm.kl", made(values, kl, *values))]


def advantage(values: Values) -> list[Setting]:
    """The estimator, and the options that it reads."""
    settings: list[Setting] = []
    node = values.get("algorithm.adv_estimator")
    name = converted("algorithm.adv_estimator", node, choice(ESTIMATORS)) if node else "gae"  # verl's default
    if node:
        settings.append(("algorithm.advantage.name", like(node, name)))
    options = {"gae": ("gamma", "lam"), "reinforce_pp": ("gamma",)}.get(name, ())
    if node and node.plain() == "tir_optimal_token_baseline":
        settings.append(("algorithm.advantage.turn_aligned", like(node, True)))
    settings += [
        (f"algorithm.advantage.{option}", values[f"algorithm.{option}"])
        for option in options
        if f"algorithm.{option}" in values
    ]
    if name in ("grpo", "passk") and "algorithm.norm_adv_by_std_in_grpo" in values:
        settings.append(("algorithm.advantage.normalize_std", values["algorithm.norm_adv_by_std_in_grpo"]))
    return settings


def length(values: Values) -> list[Setting]:
    """How long to train."""
    steps = values.get("trainer.total_training_steps")
    if steps is not None and steps.value is not None:  # verl: steps overrule epochs
        return [("trainer.total_steps", steps)]
    return [
        (
            "trainer.epochs",
            made(values, plain(values, "trainer.total_epochs"), "trainer.total_epochs", *values),
        )
    ]


def devices(values: Values) -> list[Setting]:
    """Devices over all nodes; more than one needs Ray. verl's rollout.* are those of a second pool."""
    for key, node in values.items():
        if key != _HYBRID and not isinstance(node.value, int):
            raise refused(key, node, "give a number of devices")
    trained = plain(values, "trainer.n_gpus_per_node", 1) * plain(values, "trainer.nnodes", 1)
    apart = plain(values, "rollout.n_gpus_per_node", 1) * plain(values, "rollout.nnodes", 1)
    split = "rollout.n_gpus_per_node" in values or "rollout.nnodes" in values
    if _HYBRID in values and plain(values, _HYBRID) == split:
        remedy = "rollout.n_gpus_per_node gives the rollout devices of its own: remove either"
        if not split:
            remedy = "name the devices of the rollout: cluster.pools and cluster.placement"
        raise refused(_HYBRID, values[_HYBRID], remedy)
    if list(values) == [_HYBRID]:
        return []
    theirs = ("rollout.n_gpus_per_node", "rollout.nnodes") if split else ()
    ours = [key for key in ("trainer.n_gpus_per_node", "trainer.nnodes") if key in values] or theirs
    number = trained + apart if split else trained
    settings: list[Setting] = [("cluster.devices", made(values, number, *ours, *theirs))]
    if split:
        pools = {"train": made(values, trained, *ours), "rollout": made(values, apart, *theirs)}
        settings += [("cluster.pools", made(values, pools, *theirs))]
        settings += [("cluster.placement", made(values, {"rollout": "rollout"}, *theirs))]
    return settings + ([("cluster.backend", made(values, "ray", *ours, *theirs))] if number > 1 else [])


def engine(values: Values) -> list[Setting]:
    """The rollout engine, and what verl hands on to it."""
    name = None
    if _ROLLOUT + "name" in values:
        node = values[_ROLLOUT + "name"]
        name = converted(_ROLLOUT + "name", node, choice(ENGINES))
    settings: list[Setting] = [("rollout.engine.name", like(node, name))] if name else []
    known = ENGINE_OPTIONS.get(name or "native", {})
    parallel = values.get(_PARALLEL)
    if parallel is not None and name not in ENGINE_OPTIONS and parallel.plain() != 1:
        raise refused(_PARALLEL, parallel, "the native engine runs on one device; name vllm or sglang")
    for key, node in values.items():
        short = key.removeprefix(_ROLLOUT)
        if short == "name" or (node is parallel and name not in ENGINE_OPTIONS):
            continue
        if short in known:
            settings.append((f"rollout.engine.{known[short]}", node))
        elif name in ("vllm", "sglang") and short == f"engine_kwargs.{name}":
            settings += [(f"rollout.engine.{k}", v) for k, v in node.value.items()]
        else:
            theirs = f"the {name} engine" if name else "the native engine, the default here,"
            settings.append((NOTE, (key, f"{theirs} has no such option")))
    return settings


def asynchrony(values: Values) -> list[Setting]:
    """verl's rollouter may be staleness_threshold batches ahead of the one that is trained on."""
    settings: list[Setting] = []
    ahead = 0
    if _ASYNC + "staleness_threshold" in values:
        key = _ASYNC + "staleness_threshold"
        ahead = converted(key, values[key], _batches)
        settings.append(("trainer.max_staleness", like(values[key], ahead)))
    partial = plain(values, _ASYNC + "partial_rollout")
    if partial is not None:
        if ahead:
            on_update = "resume" if partial else "finish"
            settings.append(("trainer.on_update", made(values, on_update, _ASYNC + "partial_rollout")))
        else:
            key = _ASYNC + "partial_rollout"
            settings.append((NOTE, (key, "with staleness_threshold=0 nothing is in flight at an update")))
    for name in ("use_rollout_log_probs", "compute_prox_log_prob"):
        if _ASYNC + name in values and not ahead:
            reason = "with staleness_threshold=0 the sampler's policy is the trainer's"
            settings.append((NOTE, (_ASYNC + name, reason)))
    sampled = plain(values, _ASYNC + "use_rollout_log_probs")
    recomputed = plain(values, _ASYNC + "compute_prox_log_prob", False)
    if ahead and (sampled or recomputed):
        mode, says = (
            ("decoupled", "compute_prox_log_prob") if recomputed else ("bypass", "use_rollout_log_probs")
        )
        settings.append(("algorithm.rollout_correction.mode", made(values, mode, _ASYNC + says)))
    return settings


def megabytes(value: Any) -> int:
    """In bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NoCounterpartError("give a whole number of megabytes")
    return value << 20


def _batches(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise NoCounterpartError("give a number of batches, 0 or more")
    return math.ceil(value)


def evaluation(values: Values) -> list[Setting]:
    """Greedy or sampled answers."""
    switch, n = (f"actor_rollout_ref.rollout.val_kwargs.{name}" for name in ("do_sample", "n"))
    sampled = plain(values, switch)
    if sampled is None:
        return [("trainer.evaluation.samples", made(values, plain(values, n), n, *values))]
    samples = values.get(n, made(values, 1, switch)) if sampled else made(values, 0, switch)
    greedy = made(values, not sampled, switch)
    return [("trainer.evaluation.greedy", greedy), ("trainer.evaluation.samples", samples)]


def policy_loss(values: Values) -> list[Setting]:
    """The loss, and the options that verl's loss of that name reads (it ignores others: here an error)."""
    node, settings, name = values.get(_ACTOR + "policy_loss.loss_mode"), [], "ppo_clip"
    if node is not None:
        name = converted(_ACTOR + "policy_loss.loss_mode", node, _loss)
        settings.append(("algorithm.policy_loss.name", like(node, name)))
    options = LOSS_OPTIONS[name]
    for key, value in values.items():
        if value is node:
            continue
        option = options.get(key.removeprefix(_ACTOR))
        if option is None:
            mode = next(theirs for theirs, ours in POLICY_LOSSES.items() if ours == name)
            raise refused(
                key, value, f"the loss {mode} does not read it; remove it, or set another loss_mode"
            )
        settings.append((f"algorithm.policy_loss.{option}", value))
    return settings


def _loss(value: Any) -> Any:
    if value == "bypass_mode":
        raise NoCounterpartError("it is algorithm.rollout_correction.mode=bypass, with any loss")
    return choice(POLICY_LOSSES)(value)


def group_filter(values: Values) -> list[Setting]:
    """Dynamic sampling. verl generates whole batches until enough groups are left, at most
    max_num_gen_batches of them; here each filtered group is replaced by another one: with batches of the
    training batch's size, all but the last may be filtered.
    """
    prefix, size = "algorithm.filter_groups.", values.get("data.gen_batch_size")
    if size is not None:
        remedy = "a filtered group is replaced by one other; remove it, and set algorithm.filter.max_refills"
        raise refused("data.gen_batch_size", size, remedy)
    enabled = values.get(prefix + "enable")
    if enabled is None:
        return []
    if not enabled.plain():
        return [("algorithm.filter", like(enabled, None))]
    metric, batches = values.get(prefix + "metric"), values.get(prefix + "max_num_gen_batches")
    if metric is not None and metric.plain() != "acc":
        remedy = (
            "the built-in filters read the column accuracy (acc; see reward.accuracy); a function of yours "
            "may read others: algorithm.filter=path/to/file.py:function"
        )
        raise refused(prefix + "metric", metric, remedy)
    settings: list[Setting] = [("algorithm.filter", like(enabled, {"name": "mixed_accuracy"}))]
    if batches is not None:
        number = batches.plain()
        if not isinstance(number, int) or number < 2:
            remedy = "there is a bound, and it is above 0: set algorithm.filter.max_refills, in batches"
            raise refused(prefix + "max_num_gen_batches", batches, remedy)
        settings.append(("algorithm.filter.max_refills", like(batches, number - 1)))
    return settings


def rollout_correction(values: Values) -> list[Setting]:
    """Importance weights and rejection; both off and no bypass: no correction."""
    prefix = "algorithm.rollout_correction."
    level, modes = plain(values, prefix + "rollout_is"), plain(values, prefix + "rollout_rs")
    correction: dict[str, Any] = {}
    if plain(values, prefix + "bypass_mode", False):
        correction["mode"] = made(values, "bypass", prefix + "bypass_mode")
    if level is not None:
        correction["importance"] = _importance(values, prefix)
    if modes is not None:
        correction["reject"] = _rejections(values, prefix)
    return [("algorithm.rollout_correction", made(values, correction or None, *values))]


def _importance(values: Values, prefix: str) -> Node:
    key, threshold = prefix + "rollout_is", prefix + "rollout_is_threshold"
    converted(key, values[key], choice({"token": "token", "sequence": "sequence"}))
    importance = {"level": values[key], "upper": made(values, 2.0, key)}
    if threshold in values:
        bounds = converted(threshold, values[threshold], _bounds)
        if "lower" in bounds:  # verl: two bounds are IcePop's
            bounds["outside"] = "mask"
        importance |= {name: like(values[threshold], bound) for name, bound in bounds.items()}
    if plain(values, prefix + "rollout_is_batch_normalize", False):
        importance["normalize"] = values[prefix + "rollout_is_batch_normalize"]
    return made(values, importance, key)


def _rejections(values: Values, prefix: str) -> Node:
    """Bounds are those of π_old/π_rollout, as verl documents them (its code bounds the inverse)."""
    modes, bounds = values[prefix + "rollout_rs"], values.get(prefix + "rollout_rs_threshold")
    if bounds is None:
        raise refused(prefix + "rollout_rs", modes, "it needs rollout_rs_threshold")
    known = {f"{theirs}_{k}": (ours, k) for theirs, ours in _LEVELS.items() for k in ("k1", "k2", "k3")}
    del known["seq_max_k1"]
    chosen = converted(prefix + "rollout_rs", modes, lambda value: [choice(known)(x) for x in _listed(value)])
    limits = converted(
        prefix + "rollout_rs_threshold", bounds, lambda value: [_bounds(x) for x in _listed(value)]
    )
    if len(limits) not in (1, len(chosen)):
        remedy = "give one for all of rollout_rs, or one for each"
        raise refused(prefix + "rollout_rs_threshold", bounds, remedy)
    if len(limits) == 1:
        limits = limits * len(chosen)
    rules = [
        {
            "statistic": statistic,
            "level": level,
            **{name: like(bounds, bound) for name, bound in limit.items()},
        }
        for (level, statistic), limit in zip(chosen, limits, strict=True)
    ]
    return like(modes, rules)


def _listed(value: Any) -> list[str]:
    return [part.strip() for part in str(value).split(",")]


def _bounds(value: Any) -> dict[str, float]:
    """2.0 is an upper bound, "0.5_2.0" a lower and an upper one."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or isinstance(value, bool):
        raise NoCounterpartError("give a number, or lower_upper, for example 0.5_2.0")
    return {"upper": numbers[0]} if len(numbers) == 1 else {"lower": numbers[0], "upper": numbers[1]}
