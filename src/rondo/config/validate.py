"""Combinations that cannot work, one function per section; `commands/check.py` asks algorithms and engines.

Every message names the keys, their values, and where they were set.
"""

from __future__ import annotations

from collections.abc import Mapping

from rondo.config.checker import Check
from rondo.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    KlConfig,
    OptimizerConfig,
    SourceConfig,
    TrainerConfig,
)
from rondo.config.tree import Origin
from rondo.config.validate_cluster import engines_of_rollout, placement
from rondo.roles import ENGINE_SECTIONS, ROLES, TRAINED_SECTIONS


def validate(config: Config, origins: Mapping[str, Origin]) -> None:
    """Raises ConfigError for the first value or combination that cannot work."""
    check = Check(config, origins)
    _model(check)
    _data(check)
    _engines(check)
    _rollout(check)
    _reward(check)
    _algorithm(check)
    _rollout_correction(check)
    _trainer(check)
    _cluster(check)
    _checkpoint_and_tracking(check)


def _model(check: Check) -> None:
    keys = ("model.path", "model.config", "trainer.warm_start")
    given = [key for key in keys if check.value(key) is not None]
    if not given:
        check.fail(
            "model",
            "nothing says where the model comes from: set model.path (a folder or hub id), model.config (a "
            "new "
            "model with random weights), or trainer.warm_start (an SFT recipe that is run first)",
        )
    if len(given) > 1:
        named = " and ".join(check.named(key) for key in given[:2])
        check.fail(given[1], f"{named} both say where the model comes from; keep one, set the other to null")
    if check.value("model.config") is not None:
        if not check.value("model.config").get("model_type"):
            check.fail(
                "model.config", "model.config lacks model_type (qwen3, llama, …), which chooses the model"
            )
        if check.value("model.tokenizer") is None:
            check.fail(
                "model.config",
                "model.config makes a new model, which has no tokenizer; set model.tokenizer to a folder, "
                "a hub id "
                "or a function",
            )


def _data(check: Check) -> None:
    check.at_least("data.batch_size", 1)
    check.at_least("data.max_prompt_tokens", 1)
    for part in ("train", "eval", "pretrain"):
        for index, source in enumerate(check.value(f"data.{part}")):
            _source(check, f"data.{part}.{index}", source)


# Keys of a source besides those that all types have: (needed, possible).
_SOURCE_KEYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "parquet": ("path", ()),
    "jsonl": ("path", ()),
    "huggingface": ("path", ("split", "options")),
    "reasoning_gym": ("task", ("options", "seed")),
    "function": ("task", ("options", "seed")),
}


def _source(check: Check, key: str, source: SourceConfig) -> None:
    needed, possible = _SOURCE_KEYS[source.type]
    defaults = SourceConfig(type=source.type)
    if not getattr(source, needed):
        check.fail(f"{key}.type", f"{key} is of type {source.type} and needs the key '{needed}'")
    for name in ("path", "task", "split", "options", "seed"):
        if name not in (needed, *possible) and getattr(source, name) != getattr(defaults, name):
            check.fail(
                f"{key}.{name}", f"{key}.{name} has no meaning for a source of type {source.type}; remove it"
            )
    check.at_least(f"{key}.size", 1)
    check.require(f"{key}.weight", source.weight > 0, "above 0 (leave a source out to switch it off)")


def _engines(check: Check) -> None:
    config = check.config
    for section in TRAINED_SECTIONS:
        _optimizer(check, f"{section}.optimizer", check.value(f"{section}.optimizer"))
        check.at_least(f"{section}.epochs", 1)
        check.at_least(f"{section}.mini_batch_size", 1)
        mini = check.value(f"{section}.mini_batch_size")
        if mini is not None and config.data.batch_size % mini:
            key = f"{section}.mini_batch_size"
            check.fail(
                key,
                f"{key} = {mini} does not divide {check.named('data.batch_size')}; both count prompt groups. "
                f"Choose one of {', '.join(map(str, _divisors(config.data.batch_size)))}",
            )
    check.at_least("critic.warmup_steps", 0)
    models = (f"reward.models.{index}" for index in range(len(config.reward.models)))
    for section in (*ENGINE_SECTIONS, *models):
        check.at_least(f"{section}.token_budget", 1)
        check.at_least(f"{section}.logits_chunk", 1)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _optimizer(check: Check, key: str, optimizer: OptimizerConfig) -> None:
    check.require(f"{key}.lr", optimizer.lr > 0, "above 0")
    for i, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            check.fail(f"{key}.betas.{i}", f"{key}.betas must be at least 0 and below 1, got {beta}")
    check.require(f"{key}.eps", optimizer.eps > 0, "above 0")
    check.require(f"{key}.weight_decay", optimizer.weight_decay >= 0, "at least 0")
    clip = optimizer.grad_clip
    check.require(f"{key}.grad_clip", clip is None or clip > 0, "above 0 (null: no clipping)")
    schedule, name = optimizer.schedule, f"{key}.schedule"
    check.at_least(f"{name}.warmup_steps", 0)
    check.at_least(f"{name}.decay_steps", 1)
    check.require(f"{name}.min_ratio", 0 <= schedule.min_ratio <= 1, "between 0 and 1")
    if schedule.name != "wsd" and schedule.decay_steps is not None:
        check.fail(
            f"{name}.decay_steps", f"{name}.decay_steps is for schedule wsd only, not for {schedule.name}"
        )
    if schedule.name == "constant" and schedule.min_ratio != 0:
        check.fail(
            f"{name}.min_ratio",
            f"{name}.min_ratio has no meaning for the constant schedule; choose linear, cosine or wsd, or "
            "remove it",
        )


def _rollout(check: Check) -> None:
    rollout = check.config.rollout
    engines_of_rollout(check)
    check.at_least("rollout.n", 1)
    check.at_least("rollout.max_tokens", 1)
    check.at_least("rollout.max_concurrent", 1)
    check.at_least("rollout.top_k", 0)
    check.require(
        "rollout.temperature",
        rollout.temperature > 0,
        "above 0 (training samples; for greedy answers in evaluation see trainer.evaluation.greedy)",
    )
    check.require("rollout.top_p", 0 < rollout.top_p <= 1, "above 0 and at most 1")
    check.require("rollout.min_p", 0 <= rollout.min_p < 1, "at least 0 and below 1")
    deadline = rollout.deadline_seconds
    check.require("rollout.deadline_seconds", deadline is None or deadline > 0, "above 0 (null: none)")


def _reward(check: Check) -> None:
    reward = check.config.reward
    for index, model in enumerate(reward.models):
        key = f"reward.models.{index}.name"
        check.require(key, model.name not in ROLES, f"another name than those of roles ({', '.join(ROLES)})")
    check.require("reward.timeout_seconds", reward.timeout_seconds > 0, "above 0")
    check.at_least("reward.max_retries", 0)
    check.require("reward.max_dropped_share", 0 <= reward.max_dropped_share <= 1, "between 0 and 1")
    for index, function in enumerate(reward.functions):
        if function.sources is not None and not function.sources:
            key = f"reward.functions.{index}.sources"
            check.fail(key, f"{key} is empty, so the scorer would never run; name sources, or remove the key")


def _algorithm(check: Check) -> None:
    algorithm = check.config.algorithm
    _algorithm_terms(check)
    kl = algorithm.kl
    if kl is None:
        return
    check.require("algorithm.kl.coef", kl.coef > 0, "above 0 (no KL is algorithm.kl: null)")
    check.require("algorithm.kl.target", kl.target > 0, "above 0")
    check.require("algorithm.kl.horizon", kl.horizon > 0, "above 0")
    for name in ("target", "horizon"):
        if kl.controller == "fixed" and getattr(kl, name) != getattr(KlConfig, name):
            check.fail(
                f"algorithm.kl.{name}",
                f"algorithm.kl.{name} is for the adaptive controller; set algorithm.kl.controller: adaptive, "
                "or remove it",
            )


def _algorithm_terms(check: Check) -> None:
    """What a named algorithm adds to advantage and loss."""
    algorithm, key = check.config.algorithm, "algorithm"
    check.require(f"{key}.max_refills", algorithm.max_refills > 0, "above 0")
    if algorithm.filter is None and algorithm.max_refills != AlgorithmConfig.max_refills:
        check.fail(
            f"{key}.max_refills", f"{key}.max_refills is for algorithm.filter, which is not set; remove it"
        )
    check.require(f"{key}.entropy_coef", algorithm.entropy_coef >= 0, "at least 0 (0: off)")
    check.require(f"{key}.positive_lm_coef", algorithm.positive_lm_coef >= 0, "at least 0 (0: off)")
    check.require(f"{key}.pretrain_coef", algorithm.pretrain_coef >= 0, "at least 0 (0: off)")
    temperature = check.config.rollout.temperature
    if algorithm.pretrain_coef > 0 and temperature != 1:
        check.fail(
            f"{key}.pretrain_coef",
            f"{check.named(f'{key}.pretrain_coef')} and {check.named('rollout.temperature')}: the policy's "
            "log-probs are at that temperature, so it would not be the language-model loss; set "
            "rollout.temperature=1, or pretrain_coef=0",
        )
    has_data, has_coef = bool(check.config.data.pretrain), algorithm.pretrain_coef > 0
    if has_data != has_coef:
        check.fail(
            "data.pretrain" if has_data else f"{key}.pretrain_coef",
            f"data.pretrain and {check.named(f'{key}.pretrain_coef')} belong together; set both, or neither",
        )
    check.at_least("data.pretrain_batch_size", 1)
    if not has_data and check.config.data.pretrain_batch_size != DataConfig.pretrain_batch_size:
        check.fail(
            "data.pretrain_batch_size",
            f"{check.named('data.pretrain_batch_size')} is for data.pretrain, which is empty; remove it",
        )
    check.at_least("reference.refresh_every", 1)
    check.require("prm.lr", check.config.prm.lr > 0, "above 0")
    check.require("prm.beta", check.config.prm.beta > 0, "above 0")
    check.at_least("teacher.top_k", 1)
    if algorithm.constraint is not None:
        constraint, name = algorithm.constraint, f"{key}.constraint"
        check.require(f"{name}.initial", constraint.initial > 0, "above 0 (its logarithm is what changes)")
        check.require(f"{name}.lr", constraint.lr >= 0, "at least 0")
        check.require(f"{name}.smoothing", 0 <= constraint.smoothing < 1, "at least 0 and below 1")


def _rollout_correction(check: Check) -> None:
    config, key = check.config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if config is None:
        return
    for name in ("importance", "reject"):
        if config.mode == "bypass" and getattr(config, name):
            check.fail(
                f"{key}.{name}",
                f"{key}.{name} has nothing to correct with {check.named(f'{key}.mode')}: bypass takes the "
                "sampler's log-probs for the old ones, so that every π_old/π_rollout is 1 (the policy loss "
                "itself clips against the sampler then). Use mode: decoupled, or remove it",
            )
    importance = config.importance
    if importance is not None:
        check.require(f"{key}.importance.upper", importance.upper > 0, "above 0")
        _lower_bound(check, f"{key}.importance", importance.lower, importance.upper)
    for index, rule in enumerate(config.reject):
        where = f"{key}.reject.{index}"
        check.require(f"{where}.upper", rule.upper > 0, "above 0")
        if rule.statistic == "k1":
            check.require(
                f"{where}.level", rule.level != "max", "token, sum or mean for k1, which has a sign"
            )
            if rule.lower is None:
                what = "at least 1, since k1's lower bound is 1/upper by default; set lower for another"
                check.require(f"{where}.upper", rule.upper >= 1, what)
            _lower_bound(check, where, rule.lower, rule.upper)
        else:
            what = f"left out: {rule.statistic} is bounded by upper alone, only k1 has two bounds"
            check.require(f"{where}.lower", rule.lower is None, what)


def _lower_bound(check: Check, key: str, lower: float | None, upper: float) -> None:
    """Both are bounds of a ratio."""
    fits = lower is None or 0 < lower <= upper
    check.require(f"{key}.lower", fits, f"above 0 and at most {key}.upper ({upper})")


def _trainer(check: Check) -> None:
    trainer = check.config.trainer
    if trainer.total_steps is None and trainer.epochs is None and check.config.rollout.recorded is None:
        check.fail("trainer", "nothing says how long to train: set trainer.total_steps or trainer.epochs")
    if trainer.total_steps is not None and trainer.epochs is not None:
        check.fail(
            "trainer.epochs",
            f"{check.named('trainer.epochs')} and {check.named('trainer.total_steps')} both say how long "
            "to train; "
            "keep one, set the other to null",
        )
    check.at_least("trainer.total_steps", 1)
    check.require("trainer.epochs", trainer.epochs is None or trainer.epochs > 0, "above 0")
    check.at_least("trainer.max_staleness", 0)
    if trainer.max_staleness == 0 and trainer.on_update not in (None, "finish"):
        check.fail(
            "trainer.on_update",
            f"{check.named('trainer.on_update')} has no meaning with {check.named('trainer.max_staleness')}: "
            "nothing is in flight when weights arrive; set trainer.max_staleness, or remove it",
        )
    check.at_least("trainer.max_aborts", 0)
    if trainer.on_update != "abort" and trainer.max_aborts != TrainerConfig.max_aborts:
        check.fail(
            "trainer.max_aborts",
            f"{check.named('trainer.max_aborts')} is for trainer.on_update=abort; remove it",
        )
    if trainer.max_staleness == 0 and trainer.order != "prompt":
        check.fail(
            "trainer.order",
            f"{check.named('trainer.order')} has no meaning with {check.named('trainer.max_staleness')}: "
            "every step trains on all that was started; set trainer.max_staleness, or remove it",
        )
    evaluation, key = trainer.evaluation, "trainer.evaluation"
    check.at_least(f"{key}.every", 1)
    check.at_least(f"{key}.samples", 0)
    check.at_least(f"{key}.limit", 1)
    check.require(f"{key}.temperature", evaluation.temperature > 0, "above 0 (greedy answers: greedy: true)")
    check.require(f"{key}.top_p", 0 < evaluation.top_p <= 1, "above 0 and at most 1")
    if evaluation.every is not None and not evaluation.greedy and not evaluation.samples:
        check.fail(
            f"{key}.every",
            f"{key}.every is set, but there is nothing to evaluate: set {key}.greedy or {key}.samples",
        )


def _cluster(check: Check) -> None:
    cluster = check.config.cluster
    check.at_least("cluster.devices", 1)
    check.at_least("cluster.threads", 1)
    if cluster.backend == "local" and cluster.devices > 1:
        check.fail(
            "cluster.devices",
            f"cluster.devices = {cluster.devices} needs one process per device, and "
            f"{check.named('cluster.backend')} has one process; use "
            "cluster.backend=process (on this machine), or ray",
        )
    placement(check)
    if cluster.backend != "ray" and cluster.ray_address is not None:
        check.fail(
            "cluster.ray_address",
            f"cluster.ray_address is set, but {check.named('cluster.backend')}; use cluster.backend=ray, "
            "or remove it",
        )
    if cluster.backend != "local" and cluster.inline:
        check.fail(
            "cluster.inline",
            f"cluster.inline runs workers in this process, which {check.named('cluster.backend')} cannot; "
            "use "
            "cluster.backend=local, or cluster.inline=false",
        )


def _checkpoint_and_tracking(check: Check) -> None:
    check.at_least("checkpoint.every", 1)
    check.at_least("checkpoint.keep", 1)
    check.at_least("tracking.samples", 0)
    names = [tracker.name for tracker in check.config.tracking.trackers]
    for index, name in enumerate(names):
        if name in names[:index]:
            check.fail(f"tracking.trackers.{index}", f"tracking.trackers lists {name} twice; keep one")
