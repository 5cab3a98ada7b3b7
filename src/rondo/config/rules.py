"""Combinations that cannot work, one function per section; `commands/check.py` asks algorithms and engines.

What one value may be stands beside it in the schema.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rondo.config.build import BuiltConfig
from rondo.config.keys import within
from rondo.config.schema import BestConfig, DataConfig
from rondo.config.stages import stages_of
from rondo.config.tree import shown
from rondo.core.errors import ConfigError
from rondo.core.masking import masked
from rondo.core.roles import ROLES, TRAINED_SECTIONS


def violations(built: BuiltConfig) -> list[ConfigError]:
    """Returns what is wrong with the combination of values, in the order of the schema."""
    check = Check(built)
    rules = (_model, _models, _trained, _replay, _rollout, _reward, _algorithm, _rollout_correction, _trainer)
    for rule in (*rules, _cluster, _tracking, _best, _stages):
        rule(check)
    return check.problems


class Check:
    """The configuration under its rules, and what they have found."""

    def __init__(self, built: BuiltConfig) -> None:
        self.config = built.config
        self.problems: list[ConfigError] = []
        self.built = built

    def wrong(self, message: str, *keys: str) -> None:
        """Notes a problem of `keys`: `recipe.yaml:3: <message>`, at the place of the first of them.

        `{0}` in the message is `rollout.n = 4`; `{1}` and so on also say where. Where a key has its default
        because of another problem, nothing is noted.
        """
        broken = self.built.broken
        if any(within(key, broken) for key in keys) or any(within(key, keys) for key in broken):
            return
        where = self._where(keys[0])
        for number, key in enumerate(keys):
            place = f" ({self._where(key) or 'default'})" if number else ""
            value = shown(masked(key.rpartition(".")[2], self.config.at(key)))
            message = message.replace(f"{{{number}}}", f"{key} = {value}{place}")
        self.problems.append(ConfigError(f"{where}: {message}" if where else message, key=keys[0]))

    def _where(self, key: str) -> str | None:
        origins = self.built.origins
        below = (origin for known, origin in origins.items() if origin.written and within(known, [key]))
        origin = origins.get(key) or next(below, None)
        return None if origin is None else origin.where


def _model(check: Check) -> None:
    model = check.config.model
    sources = {
        "model.path": model.path,
        "model.config": model.config,
        "trainer.warm_start": check.config.trainer.warm_start,
    }
    given = [key for key, value in sources.items() if value is not None]
    if not given:
        check.wrong(
            "nothing says where the model comes from: set model.path (a folder or hub id), model.config (a "
            "new model with random weights), or trainer.warm_start (an SFT recipe that is run first)",
            "model",
            "trainer.warm_start",
        )
    if len(given) > 1:
        check.wrong(
            "{0} and {1} both say where the model comes from; keep one, set the other to null",
            given[1],
            given[0],
        )
    if model.config is not None and not model.config.get("model_type"):
        lacks = "model.config lacks model_type (qwen3, llama, …), which chooses the model"
        check.wrong(lacks, "model.config")
    if model.config is not None and model.override:
        check.wrong(
            "model.override is for the config.json of model.path: write its values into model.config",
            "model.override",
            "model.config",
        )
    for section in ("critic", "reference", "teacher"):
        own = getattr(check.config, section)
        if own.override and own.path is None:
            check.wrong(
                f"{section}.override is for the config.json of {section}.path, which is not set: the model "
                "is the policy's initial one, for which model.override is there",
                f"{section}.override",
                f"{section}.path",
            )
    if model.config is not None and model.tokenizer is None:
        check.wrong(
            "model.config makes a new model, which has no tokenizer; set model.tokenizer to a folder, a hub "
            "id or a function",
            "model.config",
            "model.tokenizer",
        )


# What the names of metrics begin with that are of no role.
_TAKEN = (
    *("agent", "buffer", "environment", "eval", "mix", "perf", "reward", "rollout_correction", "sampler"),
    *("timing", "trainer", "weights"),
)


# What the names of other columns of log-probs begin with that are of no role.
_LOG_PROBS = ("given", "old", "ref", "teacher_topk", "topk")


def _models(check: Check) -> None:
    config = check.config
    scorers = [model.name for model in config.reward.models]
    for name, model in config.models.items():
        key = f"models.{name}"
        if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name):
            check.wrong("{0}: names of models are letters, digits and _; a letter comes first", key)
        elif name in (*ROLES, *scorers, *_TAKEN):
            what = "what other metrics begin with" if name in _TAKEN else "a role or reward model"
            check.wrong(f"{{0}}: {name} is {what}; choose another name", key)
        elif name in _LOG_PROBS:
            check.wrong(f"{{0}}: there is a column {name}_log_probs already; choose another name", key)
        if model.override and model.path is None:
            text = f"{{0}} is for the config.json of {key}.path, which is not set"
            check.wrong(text, f"{key}.override", f"{key}.path")
        if model.like == "teacher" and model.path is None:
            text = "{0}: a teacher needs a path; the policy's initial model is what `reference` has"
            check.wrong(text, key)
        if model.like == "teacher" and model.lr is not None:
            check.wrong("{0}: a teacher is frozen; remove it, or set like=actor", f"{key}.lr", f"{key}.like")
    teachers = [name for name, model in config.models.items() if model.like == "teacher"]
    for source, name in config.teacher.by_source.items():
        if name not in teachers:
            known = ", ".join(teachers) or "there are none: models={…: {like: teacher, path: …}}"
            text = f"{{0}}: no teacher of `models` is called so ({known})"
            check.wrong(text, f"teacher.by_source.{source}")


def _trained(check: Check) -> None:
    batch_size, models = check.config.data.batch_size, check.config.reward.models
    with_scores = {"critic": check.config.critic, **{f"reward.models.{n}": m for n, m in enumerate(models)}}
    for section, scorer in with_scores.items():
        if scorer.logits_bytes is None:
            check.wrong("{0}: this model has a value head, and makes no logits", f"{section}.logits_bytes")
    for section in TRAINED_SECTIONS:
        engine = getattr(check.config, section)
        if engine.lora is None and engine.param_dtype in ("bfloat16", "float16"):
            check.wrong(
                "{0} would sum gradients over micro-batches, and learn, in numbers of "
                f"{8 if engine.param_dtype == 'bfloat16' else 11} bits, in which an update is mostly lost; "
                f"remove it, and set {section}.compute_dtype={engine.param_dtype} for fast products",
                f"{section}.param_dtype",
            )
        mini = engine.mini_batch_size
        if mini is not None and batch_size % mini:
            divisors = (n for n in range(1, batch_size + 1) if batch_size % n == 0)
            check.wrong(
                "{0} does not divide {1}; both count prompt groups. "
                f"Choose one of {', '.join(map(str, divisors))}",
                f"{section}.mini_batch_size",
                "data.batch_size",
            )


def _replay(check: Check) -> None:
    """Checks that routes of a mixture of experts are there to be replayed."""
    config, key = check.config, "actor.router.replay"
    replay = config.actor.router.replay
    if replay is None:
        return
    if config.algorithm.pretrain_coef > 0:
        check.wrong(
            "{0}, and the rows of data.pretrain, which join the update, have no routes ({1}); leave out one",
            key,
            "algorithm.pretrain_coef",
        )
    correction = config.algorithm.rollout_correction
    if replay == "trainer" and correction is not None and correction.mode == "bypass":
        check.wrong(
            "{0} replays the pass that computes old log-probs, and {1} has none; set mode=decoupled, "
            "or replay=sampler",
            key,
            "algorithm.rollout_correction.mode",
        )
    if replay == "sampler" and config.rollout.recorded is not None:
        check.wrong("{0}: recorded rollouts ({1}) have no routes; leave it out", key, "rollout.recorded")
    elif replay == "sampler" and not config.rollout.engine.routes:
        check.wrong(
            "{0}, and {1} does not say where tokens went; set replay=trainer, or another engine",
            key,
            "rollout.engine.name",
        )


def _rollout(check: Check) -> None:
    """Checks where engines run and how weights reach them; `commands/check_machine.py` asks the engine."""
    rollout = check.config.rollout
    if rollout.recorded is not None and check.config.data.sampler is not None:
        check.wrong(
            "data.sampler chooses prompts, and those of {1} were chosen when they were recorded; set "
            "data.sampler=null",
            "data.sampler",
            "rollout.recorded",
        )
    if rollout.recorded is not None and check.config.algorithm.mix is not None:
        check.wrong(
            "algorithm.mix gives rows that engines' ranks score, and with {1} none run; the rows that a run "
            "with a mix has recorded have those of its mix: set algorithm.mix=null",
            "algorithm.mix",
            "rollout.recorded",
        )
    if rollout.replicas > 1 and rollout.engine.process == "host":
        check.wrong("{0} needs a process for each: remove {1}", "rollout.replicas", "rollout.engine.process")
    if rollout.sleep and check.config.trainer.max_staleness > 0:
        check.wrong(
            "{0} empties the engines while the trainer updates, but with {1} they go on then; use "
            "max_staleness=0, or sleep=false",
            "rollout.sleep",
            "trainer.max_staleness",
        )
    acts = rollout.agent is not None or rollout.tools or rollout.environments
    if rollout.on_full == "drop" and not acts:
        check.wrong(
            "{0} is for episodes of agents, and there is neither rollout.agent nor rollout.tools nor "
            "rollout.environments; an answer that is cut off carries no loss with algorithm.mask_truncated",
            "rollout.on_full",
        )


def _reward(check: Check) -> None:
    for index, model in enumerate(check.config.reward.models):
        if model.name in ROLES:
            key = f"reward.models.{index}.name"
            check.wrong(f"{{0}} is the name of a role ({', '.join(ROLES)}); choose another", key)


def _algorithm(check: Check) -> None:
    algorithm = check.config.algorithm
    if algorithm.advantage.name == "gdpo" and "weights" not in algorithm.advantage.options:
        reward = check.config.reward
        weights = {
            f"reward.functions.{index}.weight": one.weight for index, one in enumerate(reward.functions)
        }
        weights |= {f"reward.models.{index}.weight": one.weight for index, one in enumerate(reward.models)}
        for key, weight in weights.items():
            if weight != 1:
                check.wrong(
                    "{0}, and {1} adds scores up by weights of its own (default: all 1); say them there: "
                    "algorithm.advantage={name: gdpo, weights: […]}, one for each score",
                    key,
                    "algorithm.advantage.name",
                )
    if algorithm.pretrain_coef > 0 and check.config.rollout.temperature != 1:
        check.wrong(
            "{0} and {1}: the policy's log-probs are at that temperature, so it would not be the "
            "language-model loss; set rollout.temperature=1, or pretrain_coef=0",
            "algorithm.pretrain_coef",
            "rollout.temperature",
        )
    has_data, has_coef = bool(check.config.data.pretrain), algorithm.pretrain_coef > 0
    if has_data != has_coef:
        keys = ("data.pretrain", "algorithm.pretrain_coef")
        check.wrong(
            "data.pretrain and algorithm.pretrain_coef belong together; set both, or neither",
            *(keys if has_data else reversed(keys)),
        )
    if not has_data and check.config.data.pretrain_batch_size != DataConfig.pretrain_batch_size:
        check.wrong(
            "{0} is for data.pretrain, which is empty; remove it", "data.pretrain_batch_size", "data.pretrain"
        )


def _rollout_correction(check: Check) -> None:
    correction, key = check.config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if correction is None:
        return
    importance = correction.importance
    if importance is not None:
        _lower_bound(check, f"{key}.importance", importance.lower, importance.upper)
    for index, rule in enumerate(correction.reject):
        where = f"{key}.reject.{index}"
        if rule.statistic != "k1":
            continue
        if rule.lower is None and rule.upper < 1:
            what = "{0} is below k1's lower bound, which is 1/upper by default; set lower for another"
            check.wrong(what, f"{where}.upper")
        _lower_bound(check, where, rule.lower, rule.upper)


def _lower_bound(check: Check, key: str, lower: float | None, upper: float) -> None:
    if lower is not None and lower > upper:
        check.wrong("{0} is above {1}", f"{key}.lower", f"{key}.upper")


def _trainer(check: Check) -> None:
    trainer = check.config.trainer
    if trainer.total_steps is None and trainer.epochs is None and check.config.rollout.recorded is None:
        check.wrong(
            "nothing says how long to train: set trainer.total_steps or trainer.epochs",
            "trainer",
            "rollout.recorded",
        )
    if trainer.max_staleness == 0 and trainer.on_update.name not in ("auto", "finish"):
        check.wrong(
            "{0} has no meaning with {1}: nothing is in flight when weights arrive; set "
            "trainer.max_staleness, or remove it",
            "trainer.on_update.name",
            "trainer.max_staleness",
        )
    if trainer.max_staleness == 0 and trainer.order != "prompt":
        check.wrong(
            "{0} has no meaning with {1}: every step trains on all that was started; set "
            "trainer.max_staleness, or remove it",
            "trainer.order",
            "trainer.max_staleness",
        )
    evaluation, key = trainer.evaluation, "trainer.evaluation"
    if evaluation.every is not None and not evaluation.greedy and not evaluation.samples:
        check.wrong(
            f"{{0}}, but there is nothing to evaluate: set {key}.greedy or {key}.samples",
            f"{key}.every",
            f"{key}.greedy",
            f"{key}.samples",
        )
    if evaluation.every is not None and not check.config.data.eval and check.config.rollout.recorded is None:
        check.wrong(
            f"{{0}}, but data.eval is empty: add a source of held-out rows, or evaluate nothing: {key}.every="
            "null",
            f"{key}.every",
            "data.eval",
        )


def _stages(check: Check) -> None:
    """Checks the configuration of each stage as if it were the run's."""
    if not check.config.trainer.stages:
        return
    if check.config.rollout.recorded is not None:
        check.wrong(
            "trainer.stages, and {1} was sampled as it was: remove one of them",
            "trainer.stages",
            "rollout.recorded",
        )
    try:
        stages = stages_of(check.config)
    except ConfigError as error:
        check.wrong(str(error), str(error.key))
        return
    known = set(map(str, check.problems))
    for stage in stages:
        whole = dataclasses.replace(stage.config.trainer, stages=())
        config = dataclasses.replace(stage.config, trainer=whole)
        problems = violations(dataclasses.replace(check.built, config=config))
        where = f"trainer.stages, {stage.describe()}: "
        new = [ConfigError(where + str(one), key=one.key) for one in problems if str(one) not in known]
        check.problems += new


_GOVERNED = {
    "CUDA_VISIBLE_DEVICES": "cluster.devices, and the variable of the command itself",
    "OMP_NUM_THREADS": "cluster.threads",
    "PYTHONPATH": "nothing: the hosts import what the command can import",
}


def _cluster(check: Check) -> None:
    cluster = check.config.cluster
    for section in ("actor", "critic", "reference", "teacher"):
        parallel = check.config.at(section).parallel
        if parallel is not None and parallel.pipeline > 1 and check.config.actor.backend.name == "torch":
            check.wrong(
                "{0}: torch has no pipelines; set actor.backend=megatron, or leave it out",
                f"{section}.parallel.pipeline",
            )
    if cluster.backend.name == "local" and cluster.devices > 1:
        check.wrong(
            "{0} needs one process per device, and {1} has one process; use cluster.backend=process (on this "
            "machine), or ray",
            "cluster.devices",
            "cluster.backend.name",
        )
    if cluster.inline and cluster.backend.name != "local":
        check.wrong(
            "{0} runs workers in this process, which {1} cannot; use cluster.backend=local, or remove it",
            "cluster.inline",
            "cluster.backend.name",
        )
    for name in cluster.env:
        if cluster.backend.name == "local":
            check.wrong(
                "{0}, and {1} has no process to give it to: set it before the command, or use "
                "cluster.backend=process",
                f"cluster.env.{name}",
                "cluster.backend.name",
            )
        elif name in _GOVERNED:
            check.wrong(f"{{0}}: rondo sets this; it is governed by {_GOVERNED[name]}", f"cluster.env.{name}")
    total = sum(cluster.pools.values())
    if cluster.pools and total != cluster.devices:
        check.wrong(
            f"cluster.pools have {total} devices together, and {{1}}; make them equal",
            "cluster.pools",
            "cluster.devices",
        )
    roles = (*ROLES, *(model.name for model in check.config.reward.models), *check.config.models)
    for role, pool in cluster.placement.items():
        key = f"cluster.placement.{role}"
        if role not in roles:
            check.wrong(f"{key}: there is no role {role!r}; the roles are {', '.join(roles)}", key)
        if pool not in cluster.pools:
            known = ", ".join(cluster.pools) or "none is named in cluster.pools"
            check.wrong(f"{key}={pool}: there is no such pool ({known})", key, "cluster.pools")


def _tracking(check: Check) -> None:
    tracking = check.config.tracking
    if tracking.keep_rollouts is not None and not tracking.save_rollouts:
        check.wrong(
            "{0} has no meaning where none are written: remove it, or set tracking.save_rollouts=true",
            "tracking.keep_rollouts",
            "tracking.save_rollouts",
        )
    if tracking.keep_token_columns is not None and tracking.token_columns is None:
        check.wrong(
            "{0} has no meaning where none are written: remove it, or set tracking.token_columns=1",
            "tracking.keep_token_columns",
            "tracking.token_columns",
        )
    names: Sequence[str] = [tracker.name for tracker in tracking.trackers]
    for index, name in enumerate(names):
        if name in names[:index]:
            check.wrong(f"tracking.trackers lists {name} twice; keep one", f"tracking.trackers.{index}")


def _best(check: Check) -> None:
    best, evaluation, key = check.config.checkpoint.best, check.config.trainer.evaluation, "checkpoint.best"
    if best.metric is None:
        for name in ("mode", "patience", "min_delta"):
            if getattr(best, name) != getattr(BestConfig(), name):
                check.wrong(
                    f"{{0}} has no meaning without {key}.metric: set that, or remove it", f"{key}.{name}"
                )
        return
    if evaluation.every is None:
        check.wrong(
            "{0} compares evaluations, and there is only the last: set trainer.evaluation.every",
            f"{key}.metric",
            "trainer.evaluation.every",
        )
    of_answers = {"eval/greedy/": evaluation.greedy, "eval/sampled/": evaluation.samples > 0}
    kind = next((kind for kind in of_answers if best.metric.startswith(kind)), None)
    if kind is not None and not of_answers[kind]:
        setting = "greedy" if kind == "eval/greedy/" else "samples"
        check.wrong(
            f"{{0}}, but no such answers are made: set trainer.evaluation.{setting}",
            f"{key}.metric",
            f"trainer.evaluation.{setting}",
        )
    elif kind is not None and "@" in best.metric and not best.metric.endswith(f"@{evaluation.samples}"):
        check.wrong(
            "{0}, but there are as many answers as {1} says",
            f"{key}.metric",
            "trainer.evaluation.samples",
        )
    elif not best.metric.startswith("eval/"):
        check.wrong("{0} is no metric of an evaluation, as eval/greedy/reward is", f"{key}.metric")
    elif best.sign == 0:
        check.wrong(
            f"{{0}}: whether the highest is best, or the lowest, is not known: set {key}.mode to max or min",
            f"{key}.metric",
            f"{key}.mode",
        )
