"""The algorithm: what verl's keys of losses, advantages, KL, filter and correction mean together.

Each function returns settings in rondo's spelling. A key that verl reads only beside another one (the
coefficient of a KL that is off, the bounds of a correction that is off) sets nothing here either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rondo.config.tree import Node
from rondo_verl.defaults import default
from rondo_verl.values import NoCounterpartError, Note, Setting, Values, choice, number

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
_SAME_NAME = ("gspo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
POLICY_LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "gpg": "reinforce"} | {n: n for n in _SAME_NAME}
_ACTOR = "actor_rollout_ref.actor."
_BOUNDS = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
_CLIP = {"clip_ratio": "clip", **_BOUNDS}
_DPPO = {"clip_ratio": "threshold", "clip_ratio_low": "threshold_low", "clip_ratio_high": "threshold_high"}
# Our option for each key below actor_rollout_ref.actor that verl's loss of that name reads.
LOSS_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "ppo_clip": {**_CLIP, "clip_ratio_c": "dual_clip"},
    "gspo": _BOUNDS,
    "reinforce": {},
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
LOSS_KEYS = tuple(dict.fromkeys(key for options in LOSS_OPTIONS.values() for key in options))
# Losses that verl always averages per response, whatever loss_agg_mode says.
_PER_RESPONSE = ("gspo", "geo_mean", "sapo")
PER_RESPONSE = "seq-mean-token-mean"
# verl's levels of rejection; each is followed by the statistic: token_k1, seq_max_k3, …
_count = number("give a whole number, 1 or more (there is a bound here)", whole=True, least=1)
_LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


def kl(values: Values) -> list[Setting]:
    """Puts the KL into the loss or the reward; a coefficient alone switches nothing on, 0 switches it off."""
    actor, algorithm = values.below(_ACTOR), values.below("algorithm.")
    in_loss, in_reward = actor.plain("use_kl_loss"), algorithm.plain("use_kl_in_reward")
    if in_loss and in_reward:
        remedy = "the KL is in the loss already; choose one of the two"
        raise algorithm.refused("use_kl_in_reward", remedy)
    if in_loss:
        given, switch, kind, coef = actor, "use_kl_loss", "kl_loss_type", "kl_loss_coef"
    else:
        given, switch, kind, coef = algorithm, "use_kl_in_reward", "kl_penalty", "kl_ctrl.kl_coef"
    if not in_loss and not in_reward:
        return [("algorithm.kl", values.made(None, _ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward"))]
    control = algorithm.below("kl_ctrl.")
    adaptive = in_reward and control.plain("type") == "adaptive"
    if given.plain(coef) == 0 and not adaptive:
        reason = "a KL with the coefficient 0 changes nothing, and is not computed"
        return [("algorithm.kl", given.made(None, switch, coef)), Note(given.prefix + switch, reason)]
    kl: dict[str, Any] = {
        "name": given.node(kind, choice(KL_ESTIMATORS)),
        "where": given.made("loss" if in_loss else "reward", switch),
        "coef": given.nodes[coef],
    }
    if adaptive:
        kl["controller"] = {
            "name": control.nodes["type"],
            "target": control.nodes["target_kl"],
            "horizon": control.nodes["horizon"],
        }
    return [("algorithm.kl", given.made(kl, switch))]


def advantage(values: Values) -> list[Setting]:
    """Chooses the estimator, with the options that it reads."""
    given, key = values.below("algorithm."), "adv_estimator"
    name = given.converted(key, choice(ESTIMATORS))
    settings: list[Setting] = [("algorithm.advantage.name", given.made(name, key))]
    if given.plain(key) == "tir_optimal_token_baseline":
        settings.append(("algorithm.advantage.turn_aligned", given.made(True, key)))
    options = ADVANTAGE_OPTIONS.get(name, {})
    return settings + [
        (f"algorithm.advantage.{ours}", given.nodes[theirs]) for theirs, ours in options.items()
    ]


def policy_loss(values: Values) -> list[Setting]:
    """Chooses the loss, with the options that verl's loss of that name reads (others are noted)."""
    given, chosen = values.below(_ACTOR), "policy_loss.loss_mode"
    name, mode = given.converted(chosen, _loss), given.plain(chosen)
    options = LOSS_OPTIONS[name]
    settings: list[Setting] = [
        Note(given.prefix + key, f"verl's loss {mode} does not read it")
        for key in given.written(*LOSS_KEYS)
        if key not in options
    ]
    settings.append(("algorithm.policy_loss.name", given.made(name, chosen)))
    nodes = {key: given.nodes[key] for key in options}
    for bound in _BOUNDS:
        if bound in nodes and nodes[bound].value is None:
            nodes[bound] = given.nodes["clip_ratio"]
    if "clip_ratio" in nodes:
        if given.written("clip_ratio") and nodes["clip_ratio"] not in [nodes[bound] for bound in _BOUNDS]:
            reason = "clip_ratio_low and clip_ratio_high, which verl gives defaults, overrule it"
            settings.append(Note(given.prefix + "clip_ratio", reason))
        if given.written(*_BOUNDS):
            del nodes["clip_ratio"]
        else:
            nodes["clip_ratio"] = nodes["clip_ratio_low"]
            nodes = {key: node for key, node in nodes.items() if key not in _BOUNDS}
    return settings + [(f"algorithm.policy_loss.{options[key]}", node) for key, node in nodes.items()]


def _loss(value: Any) -> Any:
    if value == "bypass_mode":
        raise NoCounterpartError("it is algorithm.rollout_correction.mode=bypass, with any loss")
    return choice(POLICY_LOSSES)(value)


def aggregation(values: Values, tree: Node) -> list[Setting]:
    """Says how the losses of tokens become one number."""
    given, chosen, divisor = values.below(_ACTOR), "loss_agg_mode", "loss_scale_factor"
    mode, name = given.plain(chosen), "algorithm.aggregation.name"
    settings: list[Setting] = []
    if mode != "seq-mean-token-sum-norm" and given.written(divisor):
        reason = "only the loss_agg_mode seq-mean-token-sum-norm reads it"
        settings.append(Note(given.prefix + divisor, reason))
    if mode != PER_RESPONSE and given.plain("policy_loss.loss_mode") in _PER_RESPONSE:
        return settings + _per_response(given)
    settings.append((name, given.nodes[chosen]))
    if mode == "seq-mean-token-sum-norm":
        longest, key = tree.at("rollout.max_tokens"), given.prefix + divisor
        node = given.nodes[divisor] if given.plain(divisor) is not None else None
        if node is None and longest is not None:
            node = default(key, longest.plain())
        if node is not None:
            settings.append(("algorithm.aggregation.divisor", node))
    return settings


def _per_response(given: Values) -> list[Setting]:
    """Averages per response, as the loss does in verl where another mode is set; KL and entropy follow that
    mode there, which one number here cannot.
    """
    loss, mode = given.plain("policy_loss.loss_mode"), "loss_agg_mode"
    kl = given.plain("use_kl_loss") and given.plain("kl_loss_coef") != 0
    for what, is_on in (("the KL in the loss", kl), ("the entropy", given.plain("entropy_coeff") != 0)):
        if is_on:
            raise given.refused(
                mode,
                f"verl averages the loss {loss} per response whatever is set, and {what} as this says; here "
                f"one setting is for both: set loss_agg_mode={PER_RESPONSE}",
            )
    by_loss = given.made(PER_RESPONSE, "policy_loss.loss_mode")
    settings: list[Setting] = [("algorithm.aggregation.name", by_loss)]
    if given.written(mode):
        reason = f"verl averages the loss {loss} per response ({PER_RESPONSE}) whatever it says"
        settings.append(Note(given.prefix + mode, reason))
    return settings


def group_filter(values: Values) -> list[Setting]:
    """Switches dynamic sampling on or off.

    verl generates batches of gen_batch_size until enough groups are left, at most max_num_gen_batches of
    them; here each filtered group is replaced by another one: as many may be filtered as there are groups in
    all of these batches, without those of the training batch.
    """
    given, asked, kept = (
        values.below("algorithm.filter_groups."),
        "data.gen_batch_size",
        "data.train_batch_size",
    )
    if not given.plain("enable"):
        return [("algorithm.filter", given.made(None, "enable"))]
    if given.plain("metric", "acc") != "acc":
        remedy = (
            "the built-in filters read the column accuracy (acc; see reward.accuracy); a function of yours "
            "may read others: algorithm.filter=path/to/file.py:function"
        )
        raise given.refused("metric", remedy)
    settings: list[Setting] = [("algorithm.filter", given.made({"name": "mixed_accuracy"}, "enable"))]
    times = 1.0
    if values.plain(asked) is not None:
        times = values.converted(asked, _count) / values.converted(kept, _count)
        reason = "a filtered group is replaced by one other; what it asks beyond a batch verl drops"
        settings.append(Note(asked, reason))
    if "max_num_gen_batches" in given.nodes:
        refills = given.converted("max_num_gen_batches", _count) * times - 1
        if refills <= 0:
            remedy = "no group could be replaced: set algorithm.filter.max_refills, in batches, above 0"
            raise given.refused("max_num_gen_batches", remedy)
        settings.append(("algorithm.filter.max_refills", given.made(refills, "max_num_gen_batches")))
    return settings


def rollout_correction(values: Values) -> list[Setting]:
    """Translates importance weights and rejection; both off and no bypass: no correction.

    In its bypass mode verl leaves importance weights out, and takes the loss vanilla whatever loss_mode says.
    The asynchronous trainer says in keys of its own which log-probs are the old ones.
    """
    given, ahead = values.below("algorithm.rollout_correction."), values.below("async_training.")
    correction: dict[str, Any] = {}
    settings: list[Setting] = []
    weighed, rejected = (given.plain(key) is not None for key in ("rollout_is", "rollout_rs"))
    bypass, recomputed, sampled = "bypass_mode", "compute_prox_log_prob", "use_rollout_log_probs"
    if given.plain(bypass, False):
        correction["mode"] = given.made("bypass", bypass)
        if values.plain(_ACTOR + "policy_loss.loss_mode") != "vanilla":
            remedy = (
                "verl trains with the loss vanilla then, whatever loss_mode says: set vanilla, or False here"
            )
            raise given.refused(bypass, remedy)
    elif ahead.plain(recomputed, False):
        correction["mode"] = ahead.made("decoupled", recomputed)
    elif ahead.plain(sampled, False):
        correction["mode"] = ahead.made("bypass", sampled)
        if weighed or rejected:
            remedy = (
                "with the sampler's log-probs as the old ones every weight is 1, and nothing is rejected: "
                f"set async_training.{recomputed}=True, or remove rollout_is and rollout_rs"
            )
            raise ahead.refused(sampled, remedy)
    if weighed and given.plain(bypass, False):
        reason = (
            "in bypass mode the ratio of the policy loss is the one to the sampler, and verl weighs nothing"
        )
        settings.append(Note(given.prefix + "rollout_is", reason))
    elif weighed:
        correction["importance"] = _importance(given)
    if rejected:
        correction["reject"] = _rejections(given)
    said = [given.prefix + key for key in given.nodes] + [ahead.prefix + key for key in (recomputed, sampled)]
    return [*settings, ("algorithm.rollout_correction", values.made(correction or None, *said))]


def _importance(given: Values) -> Node:
    level = given.converted("rollout_is", choice({name: name for name in ("token", "sequence", "geometric")}))
    importance = {"level": level}
    bounds = given.converted("rollout_is_threshold", _bounds)
    if "lower" in bounds:  # verl: two bounds are IcePop's
        bounds["outside"] = "mask"
    for name, bound in bounds.items():
        importance[name] = given.made(bound, "rollout_is_threshold")
    if given.plain("rollout_is_batch_normalize"):
        importance["normalize"] = given.nodes["rollout_is_batch_normalize"]
    return given.made(importance, "rollout_is")


def _rejections(given: Values) -> Node:
    """Makes a rule of each of rollout_rs.

    Bounds are those of π_old/π_rollout, as verl documents them (its code bounds the inverse).
    """
    modes, threshold, lower = "rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower"
    if threshold not in given.nodes:
        raise given.refused(modes, "it needs rollout_rs_threshold")
    known = {f"{theirs}_{k}": (ours, k) for theirs, ours in _LEVELS.items() for k in ("k1", "k2", "k3")}
    del known["seq_max_k1"]
    known |= {"token": ("token", "k1"), "sequence": ("sum", "k1"), "geometric": ("mean", "k1")}  # 0.6.1
    chosen = given.converted(modes, lambda value: [choice(known)(one) for one in _listed(value)])
    limits = given.converted(threshold, lambda value: [_bounds(one) for one in _listed(value)])
    if len(limits) == 1:
        limits = limits * len(chosen)
    if len(limits) != len(chosen):
        raise given.refused(threshold, "give one for all of rollout_rs, or one for each")
    least = given.plain(lower)
    rules = []
    for (level, statistic), limit in zip(chosen, limits, strict=True):
        if least is not None and statistic == "k1":
            limit = {"lower": least, **limit}
        bounds = {
            name: given.made(bound, lower if bound is least else threshold) for name, bound in limit.items()
        }
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
