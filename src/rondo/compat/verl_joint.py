"""What keys in verl's spelling mean together: a value, or several keys, become settings in rondo's spelling.

The table of keys is in `verl.py`. A key that verl reads only beside another one (the coefficient of a KL that
is off, the bounds of a correction that is off) sets nothing here either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rondo.config.tree import Node, describe
from rondo.errors import ConfigError


@dataclass(frozen=True)
class Note:
    """A key of theirs that has no meaning here beside the others, and why."""

    key: str
    reason: str


# Our key, and the node with its value: written where the value comes from.
Setting = tuple[str, Node] | Note

KL_ESTIMATORS = {
    **{"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2"},
    **{"low_var_kl": "k3", "k3": "k3", "k1+": "k1+", "k3+": "k3+"},
}
ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "remax", "rloo", "opo", "gpg", "gdpo")},
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_passk": "passk",
    "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb",  # with turn_aligned
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
_NORMALIZE = {"norm_adv_by_std_in_grpo": "normalize_std"}
# Our option for each key below algorithm that verl's estimator of that name reads.
ADVANTAGE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "gae": {"gamma": "gamma", "lam": "lam"},
    "reinforce_pp": {"gamma": "gamma"},
    "grpo": _NORMALIZE,
    "passk": _NORMALIZE,
}
_SAME_NAME = ("gspo", "gpg", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
POLICY_LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo", **{name: name for name in _SAME_NAME}}
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
_ROLLOUT, _HYBRID = "actor_rollout_ref.rollout.", "actor_rollout_ref.hybrid_engine"
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
LOSS_KEYS = tuple(dict.fromkeys(key for options in LOSS_OPTIONS.values() for key in options))
# verl's levels of rejection; each is followed by the statistic: token_k1, seq_max_k3, …
_LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


class NoCounterpartError(Exception):
    """A value without a counterpart; the text is the remedy."""


@dataclass(frozen=True)
class Values:
    """Keys that are set, and their nodes; errors name them behind `prefix`."""

    nodes: Mapping[str, Node]
    prefix: str = ""

    def below(self, prefix: str) -> Values:
        """Returns the keys below this one, by their names there."""
        own = {key.removeprefix(prefix): node for key, node in self.nodes.items() if key.startswith(prefix)}
        return Values(own, self.prefix + prefix)

    def plain(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key that may not be set."""
        return self.nodes[key].plain() if key in self.nodes else default

    def converted(self, key: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
        """Returns the value through `convert`, whose NoCounterpartError becomes `refused`."""
        try:
            return convert(self.nodes[key].plain()) if key in self.nodes else default
        except NoCounterpartError as error:
            raise self.refused(key, str(error)) from None

    def made(self, value: Any, *keys: str) -> Node:
        """Makes a node of a value that follows from those of `keys` that are set.

        It counts as written where the last layer of them is, and within a layer where the first of them is.
        """
        known = (self.nodes[key] for key in keys if key in self.nodes)
        return like(max(known, key=lambda node: node.layer), value)

    def node(self, key: str, default: Any, beside: str, convert: Callable[[Any], Any] | None = None) -> Node:
        """Returns the key's node, converted, or `default` as if it was written where `beside` is."""
        if key not in self.nodes:
            return self.made(default, beside)
        return self.made(self.converted(key, convert), key) if convert else self.nodes[key]

    def refused(self, key: str, remedy: str) -> ConfigError:
        """Returns the error for a key whose value has no counterpart here."""
        node = self.nodes[key]
        value = node.plain()
        shown = describe(value) if isinstance(value, bool | dict | list | None) else value
        text = f"{self.prefix}{key} (verl's spelling) cannot be {shown} here: {remedy}"
        return ConfigError(f"{node.origin.where}: {text}", key=self.prefix + key)


def like(node: Node, value: Any) -> Node:
    """Makes a plain value a tree that was written where `node` was. Nodes in it stay as they are."""
    if isinstance(value, Node):
        return value
    if isinstance(value, dict):
        return Node({key: like(node, child) for key, child in value.items()}, node.origin, node.layer)
    if isinstance(value, list):
        return Node([like(node, child) for child in value], node.origin, node.layer)
    return Node(value, node.origin, node.layer)


# ---- converters of one value


def choice(names: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Returns a converter that knows these names only."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise NoCounterpartError(f"use one of {', '.join(names)}, or rondo's own keys (docs/config.md)")
        return names[value]

    return convert


def source_list(value: Any, prompt_key: Node | None = None) -> list[Any]:
    """Makes files sources; the type follows from the ending."""
    files = value if isinstance(value, list) else [value]
    if not all(isinstance(file, str) and file.endswith((".parquet", ".jsonl")) for file in files):
        raise NoCounterpartError("name .parquet or .jsonl files, or write data.train: [{type: …, path: …}]")
    extra = {} if prompt_key is None or prompt_key.value is None else {"prompt_key": prompt_key}
    return [{"type": file.rsplit(".", 1)[1], "path": file, **extra} for file in files]


# ---- keys that depend on one another: each function returns the settings that they are together


def data(values: Values) -> list[Setting]:
    """Translates files and the column of the prompt."""
    given = values.below("data.")
    prompt_key = given.nodes.get("prompt_key")
    settings: list[Setting] = []
    for theirs, ours in (("train_files", "data.train"), ("val_files", "data.eval")):
        if theirs in given.nodes:
            sources = given.converted(theirs, lambda value: source_list(value, prompt_key))
            settings.append((ours, given.made(sources, theirs)))
    if not settings:
        raise given.refused("prompt_key", "set prompt_key on each source of data.train")
    return settings


def overlong(values: Values) -> list[Setting]:
    """Says what happens to prompts that are too long."""
    given = values.below("data.")
    if given.plain("filter_overlong_prompts", False):
        return [("data.overlong_prompts", given.made("drop", "filter_overlong_prompts"))]
    how = choice({"error": "error", "left": "truncate_left", "right": "truncate_right"})
    return [("data.overlong_prompts", given.node("truncation", "error", "filter_overlong_prompts", how))]


def kl(values: Values) -> list[Setting]:
    """Puts the KL into the loss or the reward; a coefficient alone switches nothing on."""
    actor, algorithm = values.below(_ACTOR), values.below("algorithm.")
    in_loss, in_reward = actor.plain("use_kl_loss"), algorithm.plain("use_kl_in_reward")
    if in_loss is None and in_reward is None:
        return []
    if in_loss and in_reward:
        remedy = "the KL is in the loss already; choose one of the two"
        raise algorithm.refused("use_kl_in_reward", remedy)
    if in_loss:
        given, switch, kind, coef, default = actor, "use_kl_loss", "kl_loss_type", "kl_loss_coef", "k3"
    elif in_reward:
        given, switch, kind, coef = algorithm, "use_kl_in_reward", "kl_penalty", "kl_ctrl.kl_coef"
        default = "k1"
    else:
        off = values.made(None, _ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward")
        return [("algorithm.kl", off)]
    kl: dict[str, Any] = {
        "name": given.node(kind, default, switch, choice(KL_ESTIMATORS)),
        "where": given.made("loss" if in_loss else "reward", switch),
        "coef": given.node(coef, 0.001, switch),
    }
    control = algorithm.below("kl_ctrl.")
    if in_reward and control.plain("type") == "adaptive":
        kl["controller"] = {
            "name": control.nodes["type"],
            "target": control.node("target_kl", 0.1, "type"),
            "horizon": control.node("horizon", 10000, "type"),
        }
    return [("algorithm.kl", values.made(kl, *values.nodes))]


def advantage(values: Values) -> list[Setting]:
    """Chooses the estimator, with the options that it reads; verl's default is gae."""
    given, key = values.below("algorithm."), "adv_estimator"
    name = given.converted(key, choice(ESTIMATORS), "gae")
    settings: list[Setting] = []
    if key in given.nodes:
        settings.append(("algorithm.advantage.name", given.made(name, key)))
    if given.plain(key) == "tir_optimal_token_baseline":
        settings.append(("algorithm.advantage.turn_aligned", given.made(True, key)))
    options = ADVANTAGE_OPTIONS.get(name, {})
    return settings + [
        (f"algorithm.advantage.{ours}", given.nodes[theirs])
        for theirs, ours in options.items()
        if theirs in given.nodes
    ]


def length(values: Values) -> list[Setting]:
    """Says how long to train; in verl steps overrule epochs."""
    given = values.below("trainer.")
    if given.plain("total_training_steps") is not None:
        return [("trainer.total_steps", given.nodes["total_training_steps"])]
    return [("trainer.epochs", given.made(given.plain("total_epochs"), "total_epochs", *given.nodes))]


def devices(values: Values) -> list[Setting]:
    """Counts devices over all nodes; more than one needs Ray. verl's rollout.* are those of a second pool."""
    for key, node in values.nodes.items():
        if key != _HYBRID and not isinstance(node.value, int):
            raise values.refused(key, "give a number of devices")
    ours = [key for key in values.nodes if key.startswith("trainer.")]
    theirs = [key for key in values.nodes if key.startswith("rollout.")]
    trained, apart = (
        values.plain(f"{pool}.n_gpus_per_node", 1) * values.plain(f"{pool}.nnodes", 1)
        for pool in ("trainer", "rollout")
    )
    if values.plain(_HYBRID) == bool(theirs):
        remedy = "name the devices of the rollout: cluster.pools and cluster.placement"
        if theirs:
            remedy = "rollout.n_gpus_per_node gives the rollout devices of its own: remove either"
        raise values.refused(_HYBRID, remedy)
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


def engine(values: Values) -> list[Setting]:
    """Chooses the rollout engine, with what verl hands on to it."""
    given = values.below(_ROLLOUT)
    name = given.converted("name", choice(ENGINES))
    settings: list[Setting] = [("rollout.engine.name", given.made(name, "name"))] if name else []
    known = ENGINE_OPTIONS.get(name, {})
    for key, node in given.nodes.items():
        if key in known:
            settings.append((f"rollout.engine.{known[key]}", node))
        elif known and key == f"engine_kwargs.{name}":
            settings += [(f"rollout.engine.{k}", v) for k, v in node.value.items()]
        elif key == _PARALLEL:
            if node.plain() != 1:
                raise given.refused(key, "the native engine runs on one device; name vllm or sglang")
        elif key != "name":
            theirs = f"the {name} engine" if name else "the native engine, the default here,"
            settings.append(Note(_ROLLOUT + key, f"{theirs} has no such option"))
    return settings


def asynchrony(values: Values) -> list[Setting]:
    """Bounds the staleness: verl's rollouter may be that many batches ahead of the one that is trained on."""
    given = values.below("async_training.")
    ahead = given.converted("staleness_threshold", _batches, 0)
    settings: list[Setting] = []
    if "staleness_threshold" in given.nodes:
        settings.append(("trainer.max_staleness", given.made(ahead, "staleness_threshold")))
    if not ahead:
        same = "the sampler's policy is the trainer's"
        for name, reason in (
            ("partial_rollout", "nothing is in flight at an update"),
            ("use_rollout_log_probs", same),
            ("compute_prox_log_prob", same),
        ):
            if name in given.nodes:
                settings.append(Note(given.prefix + name, f"with staleness_threshold=0 {reason}"))
        return settings
    partial = given.plain("partial_rollout")
    if partial is not None:
        on_update = given.made("resume" if partial else "finish", "partial_rollout")
        settings.append(("trainer.on_update", on_update))
    mode, says = "bypass", "use_rollout_log_probs"
    if given.plain("compute_prox_log_prob", False):
        mode, says = "decoupled", "compute_prox_log_prob"
    if given.plain(says):
        settings.append(("algorithm.rollout_correction.mode", given.made(mode, says)))
    return settings


def _batches(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise NoCounterpartError("give a number of batches, 0 or more")
    return math.ceil(value)


def evaluation(values: Values) -> list[Setting]:
    """Chooses greedy or sampled answers."""
    given = values.below(_ROLLOUT + "val_kwargs.")
    sampled = given.plain("do_sample")
    if sampled is None:
        return [("trainer.evaluation.samples", given.made(given.plain("n"), "n", *given.nodes))]
    samples = given.node("n", 1, "do_sample") if sampled else given.made(0, "do_sample")
    greedy = given.made(not sampled, "do_sample")
    return [("trainer.evaluation.greedy", greedy), ("trainer.evaluation.samples", samples)]


def policy_loss(values: Values) -> list[Setting]:
    """Chooses the loss, with the options that verl's loss of that name reads (others it ignores: here an
    error).
    """
    given, chosen = values.below(_ACTOR), "policy_loss.loss_mode"
    name = given.converted(chosen, _loss, "ppo_clip")
    settings: list[Setting] = []
    if chosen in given.nodes:
        settings.append(("algorithm.policy_loss.name", given.made(name, chosen)))
    for key in [key for key in given.nodes if key != chosen]:
        option = LOSS_OPTIONS[name].get(key)
        if option is None:
            mode = next(theirs for theirs, ours in POLICY_LOSSES.items() if ours == name)
            remedy = f"the loss {mode} does not read it; remove it, or set another loss_mode"
            raise given.refused(key, remedy)
        settings.append((f"algorithm.policy_loss.{option}", given.nodes[key]))
    return settings


def _loss(value: Any) -> Any:
    if value == "bypass_mode":
        raise NoCounterpartError("it is algorithm.rollout_correction.mode=bypass, with any loss")
    return choice(POLICY_LOSSES)(value)


def group_filter(values: Values) -> list[Setting]:
    """Switches dynamic sampling on or off.

    verl generates whole batches until enough groups are left, at most max_num_gen_batches of them; here each
    filtered group is replaced by another one: with batches of the training batch's size, all but the last
    may be filtered.
    """
    if "data.gen_batch_size" in values.nodes:
        remedy = "a filtered group is replaced by one other; remove it, and set algorithm.filter.max_refills"
        raise values.refused("data.gen_batch_size", remedy)
    given = values.below("algorithm.filter_groups.")
    if not given.plain("enable"):
        is_set = "enable" in given.nodes
        return [("algorithm.filter", given.made(None, "enable"))] if is_set else []
    if given.plain("metric", "acc") != "acc":
        remedy = (
            "the built-in filters read the column accuracy (acc; see reward.accuracy); a function of yours "
            "may read others: algorithm.filter=path/to/file.py:function"
        )
        raise given.refused("metric", remedy)
    settings: list[Setting] = [("algorithm.filter", given.made({"name": "mixed_accuracy"}, "enable"))]
    most = given.converted("max_num_gen_batches", _refills)
    if most is not None:
        settings.append(("algorithm.filter.max_refills", given.made(most, "max_num_gen_batches")))
    return settings


def _refills(batches: Any) -> int:
    if not isinstance(batches, int) or batches < 2:
        remedy = "there is a bound, and it is above 0: set algorithm.filter.max_refills, in batches"
        raise NoCounterpartError(remedy)
    return batches - 1


def rollout_correction(values: Values) -> list[Setting]:
    """Translates importance weights and rejection; both off and no bypass: no correction."""
    given = values.below("algorithm.rollout_correction.")
    correction: dict[str, Any] = {}
    if given.plain("bypass_mode", False):
        correction["mode"] = given.made("bypass", "bypass_mode")
    if given.plain("rollout_is") is not None:
        correction["importance"] = _importance(given)
    if given.plain("rollout_rs") is not None:
        correction["reject"] = _rejections(given)
    return [("algorithm.rollout_correction", given.made(correction or None, *given.nodes))]


def _importance(given: Values) -> Node:
    level = given.converted("rollout_is", choice({"token": "token", "sequence": "sequence"}))
    importance = {"level": level, "upper": 2.0}
    bounds = given.converted("rollout_is_threshold", _bounds, {})
    if "lower" in bounds:  # verl: two bounds are IcePop's
        bounds["outside"] = "mask"
    for name, bound in bounds.items():
        importance[name] = given.made(bound, "rollout_is_threshold")
    if given.plain("rollout_is_batch_normalize", False):
        importance["normalize"] = given.nodes["rollout_is_batch_normalize"]
    return given.made(importance, "rollout_is")


def _rejections(given: Values) -> Node:
    """Makes a rule of each of rollout_rs.

    Bounds are those of π_old/π_rollout, as verl documents them (its code bounds the inverse).
    """
    modes, threshold = "rollout_rs", "rollout_rs_threshold"
    if threshold not in given.nodes:
        raise given.refused(modes, "it needs rollout_rs_threshold")
    known = {f"{theirs}_{k}": (ours, k) for theirs, ours in _LEVELS.items() for k in ("k1", "k2", "k3")}
    del known["seq_max_k1"]
    chosen = given.converted(modes, lambda value: [choice(known)(one) for one in _listed(value)])
    limits = given.converted(threshold, lambda value: [_bounds(one) for one in _listed(value)])
    if len(limits) == 1:
        limits = limits * len(chosen)
    if len(limits) != len(chosen):
        raise given.refused(threshold, "give one for all of rollout_rs, or one for each")
    rules = []
    for (level, statistic), limit in zip(chosen, limits, strict=True):
        bounds = {name: given.made(bound, threshold) for name, bound in limit.items()}
        rules.append({"statistic": statistic, "level": level, **bounds})
    return given.made(rules, modes)


def _listed(value: Any) -> list[str]:
    return [part.strip() for part in str(value).split(",")]


def _bounds(value: Any) -> dict[str, Any]:
    """Reads 2.0 as an upper bound, "0.5_2.0" as a lower and an upper one."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or isinstance(value, bool):
        raise NoCounterpartError("give a number, or lower_upper, for example 0.5_2.0")
    return {"upper": numbers[0]} if len(numbers) == 1 else {"lower": numbers[0], "upper": numbers[1]}
