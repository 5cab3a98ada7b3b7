"""The second pass over an RL configuration: what needs algorithms, scorers and engines to be known. Before
anything starts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack

from rondo.agents.external import agent_of, asks_over_http, load_agent
from rondo.agents.tools import loaded_tools
from rondo.agents.worlds import check_reads
from rondo.algorithms import Kind, check_algorithm, columns_read, lookup
from rondo.config import Config, FunctionConfig, LoadedConfig
from rondo.core.columns import GREEDY_REWARD, TOPK_IDS
from rondo.core.errors import ConfigError, about, did_you_mean
from rondo.core.roles import ROLES, ROLLOUT
from rondo.data import source_name
from rondo.environments.registry import load_environments
from rondo.planning import engine_of, placement_of, reference_in_actor
from rondo.rewards import load_functions, score_names
from rondo.system.border import users_code
from rondo.tracking import check_trackers
from rondo.trainers.commands.check_machine import (
    check_backend,
    check_files,
    check_reward_models,
    check_rollout_engine,
    check_run_dir,
)
from rondo.trainers.commands.recipe import Findings, changed_keys, check_stages, second_pass
from rondo.trainers.program import (
    Program,
    Recorded,
    check_named_models,
    check_parallel,
    check_pictures,
    check_profile,
    checked_mixer,
    checked_sampler,
    comparing,
    path_of,
    plan_program,
    warmup_steps,
)
from rondo.trainers.replay import check_replay, recorded_rollouts

SUPERVISED = ("data.max_tokens", "data.turns", "data.drop_last", "trainer.evaluation.each_epoch")
OF_OTHER_COMMANDS = {
    "algorithm.preference_loss": "rondo preference",
    "algorithm.reward_model_loss": "rondo reward-model",
    **dict.fromkeys(SUPERVISED, "rondo sft"),
}


def check_rl(loaded: LoadedConfig, opened: ExitStack | None = None) -> Program:
    """Returns what `rondo train` will do; raises ConfigError for all that it cannot do as configured. opened:
    has the tools stay (MCP servers run) until it is closed; None: no longer than it takes.
    """
    if opened is None:
        with ExitStack() as opened:
            return check_rl(loaded, opened)
    config = loaded.config
    with second_pass(loaded) as found:
        recorded = recorded_rollouts(config)
        found.of(check_algorithm, config.algorithm)
        program = None if found.problems else _planned(config, recorded, found)
        found.problems += _unread(loaded, program)
        if program is not None:
            found.of(check_stages, config, program)
        found.of(check_trackers, config.tracking)
        found.of(check_backend, config)
        found.of(functools.partial(check_files, context=recorded is None), loaded)
        found.of(check_run_dir, loaded)
        found.of(check_replay, config)
        found.of(check_profile, config, config.trainer.total_steps)
        if recorded is None:
            found.problems += without_data(config)
            found.problems += _without_rewards(config)
            found.of(check_rollout_engine, config)
            found.of(_check_agent, config, opened)
            found.of(_check_rewards, config, program)
            found.of(lambda: checked_sampler(config, checked_mixer(config)))
    assert program is not None  # else something was found
    return program


def _planned(config: Config, recorded: Recorded | None, found: Findings) -> Program | None:
    """Returns the program of a configuration whose algorithm stands by itself, and what does not fit it."""
    found.of(_check_group_size, config)
    found.of(_check_scores, config, recorded)
    program = found.of(plan_program, config, recorded)
    if program is None:
        return None
    found.of(_check_combinations, config, program)
    found.of(_check_mix, config, program)
    found.of(check_reward_models, config, program.reward_models)
    for role in ("actor", *program.roles):
        found.of(check_token_budget, role, config)
    if found.of(placement_of, config, program.all_roles) is not None:
        for role in program.all_roles:
            if role != ROLLOUT:
                found.of(check_parallel, role, config)
    if recorded is not None:
        found.of(_check_recorded, config, program, recorded)
    elif program.greedy_baseline:
        found.of(_check_greedy_baseline, config)
    for role in program.roles:
        if role in ROLES:
            found.of(path_of, role, config)
    found.of(check_named_models, config, program, recorded)
    return program


def without_data(config: Config) -> Iterator[ConfigError]:
    """Yields what a run lacks that reads prompts, conversations or pairs."""
    if not config.data.train:
        text = "data.train is empty: there is nothing to learn from; add a source (see docs/data.md)"
        yield ConfigError(text, key="data.train")


def _without_rewards(config: Config) -> Iterator[ConfigError]:
    if not config.reward.functions and not config.reward.models:
        yield ConfigError(
            "reward.functions is empty: nothing says what is good; add a scorer, for example {name: gsm8k}, "
            "{name: environment} for what rollout.environments give, or a model under reward.models",
            key="reward.functions",
        )


def _check_agent(config: Config, opened: ExitStack) -> None:
    with about("rollout.environments"):
        environments = load_environments(config.rollout.environments)
        for environment in environments:
            if environment.check is not None:
                with users_code(f"the check of environment {environment.name}", ConfigError):
                    environment.check()
    with about("rollout.tools"):
        tools = opened.enter_context(loaded_tools(config.rollout.tools))
        for tool in tools:
            if tool.check is not None:
                with users_code(f"the check of tool {tool.name}", ConfigError):
                    tool.check()
    agent = agent_of(config.rollout)
    if agent is not None:
        with about("rollout.agent"):
            function = load_agent(agent)
            check_reads(agent.name, function, environments=environments, tools=tools)
    if config.model.path or config.model.config:  # else the model is what a warm start will make
        check_pictures(config, tools)
    workers = config.rollout.episode_workers
    if workers and not environments and (agent is None or not asks_over_http(function)):
        raise ConfigError(
            f"rollout.episode_workers={workers}, and nothing would run in them: environments do "
            "(rollout.environments), and an agent of yours that asks over HTTP and takes neither policy nor "
            "tools; set one of these, or remove the key",
            key="rollout.episode_workers",
        )


def _check_rewards(config: Config, program: Program | None) -> None:
    sources = [source_name(source) for source in config.data.train]
    if sources and config.reward.functions:
        reads_accuracy = program is not None and program.reads_accuracy
        score_names(config.reward, sources, reads_accuracy=reads_accuracy)
    for place, function in enumerate(load_functions(config.reward.functions)):
        if function.marks.trl and agent_of(config.rollout) is not None:
            raise ConfigError(
                f"{function.spec} is written for TRL, which gives it all messages of an episode, and here it "
                "would get one. An agent, tools or environments need a function f(prompt, trajectory)",
                key=f"reward.functions.{place}",
            )
        if function.marks.check is not None:
            key = f"reward.functions.{place}"
            with about(key), users_code(f"{key}: the check of {function.name}", ConfigError):
                function.marks.check(**function.options)


def _unread(loaded: LoadedConfig, program: Program | None) -> Iterator[ConfigError]:
    """Yields keys that are set and that nothing reads. program: None where it is not known."""
    columns = _columns_of_unread(program) if program is not None else {}
    if program is not None and "ref_log_probs" in {c for p in program.producers for c in p.columns}:
        columns.pop("reference", None)
        yield from unread_of_reference(loaded)
    for key, _ in changed_keys(loaded):
        above = {key} | {key[:end] for end, letter in enumerate(key) if letter == "."}
        for command in (OF_OTHER_COMMANDS[section] for section in above & set(OF_OTHER_COMMANDS)):
            yield ConfigError(f"{key} is read by `{command}` only; remove it", key=key)
        for read in (columns[section] for section in above & set(columns)):
            yield ConfigError(
                f"{key} is set, but no chosen function reads {read}: there is nothing for it to configure; "
                "remove the key, or choose a function that reads them",
                key=key,
            )


def unread_of_reference(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yields keys of a reference's engine where the actor without its adapters is the reference."""
    if not reference_in_actor(loaded.config):
        return
    for key, _ in changed_keys(loaded):
        if key.startswith("reference.") and not key.startswith(("reference.path", "reference.override")):
            yield ConfigError(
                f"{key} is set, but with actor.lora the reference is the actor without its adapters, on the "
                "actor's engine; remove it",
                key=key,
            )


def _columns_of_unread(program: Program) -> dict[str, str]:
    """Returns the sections of roles that a run does not have, and the columns that would bring the role."""
    made = {column for producer in program.producers for column in producer.columns}
    sections = {ROLES[role].section for role in program.all_roles if role in ROLES}
    sections |= {ROLES[producer.role].section for producer in program.producers}
    unread = {r.section: r.read_by for r in ROLES.values() if r.read_by and r.section not in sections}
    if "critic" in unread:
        unread["algorithm.value_loss"] = unread["critic"]
    if "teacher" not in unread and TOPK_IDS not in made:
        unread["teacher.top_k"] = "teacher_topk_* (algorithm.policy_loss: …_topk)"
    return unread


def _check_group_size(config: Config) -> None:
    """What reads group_id compares the trajectories of one prompt."""
    n, who = config.rollout.n, comparing(config)
    if n < 2 and who:
        raise ConfigError(
            f"rollout.n = {n}, but {who} compares the trajectories of one prompt and needs at least 2; raise "
            "rollout.n, or choose another one (gae, reinforce_pp; ppo_clip)",
            key="rollout.n",
        )
    estimator, given = config.algorithm.advantage, (config.data.sampler, config.algorithm.mix)
    k = estimator.options.get("k") if estimator.name == "passk_analytic" else None
    if isinstance(k, int) and k > n and given == (None, None) and config.rollout.recorded is None:
        raise ConfigError(
            f"algorithm.advantage.k = {k}, but a prompt has rollout.n = {n} answers, and passk_analytic "
            "gives 0 to those of fewer than k: nothing would be learnt; raise rollout.n, or lower k",
            key="algorithm.advantage.k",
        )


def _check_scores(config: Config, recorded: Recorded | None) -> None:
    """Names of scores are unique, and what names a score names one that exists."""
    if recorded is None:
        names = [name for f in load_functions(config.reward.functions) for name in f.names]
    else:
        names = list(recorded.recording.scores)
    for index, model in enumerate(config.reward.models):
        if recorded is not None and model.name not in recorded.scored_by(config):
            continue
        if model.name in names:
            raise ConfigError(
                f"another scorer is called {model.name} too; set another name",
                key=f"reward.models.{index}",
            )
        names.append(model.name)
    algorithm = config.algorithm
    costs = {} if algorithm.constraint is None else {"constraint": algorithm.constraint.cost}
    for name, chosen in algorithm.coefficients.items():
        if chosen.name == "lagrange":
            costs[f"coefficients.{name}"] = str(chosen.options.get("cost"))
    for key, cost in costs.items():
        if cost not in names:
            raise ConfigError(
                f"algorithm.{key}.cost={cost} is no score of this run{did_you_mean(cost, names)} "
                f"There are: {', '.join(names)}",
                key=f"algorithm.{key}.cost",
            )


def _check_combinations(config: Config, program: Program) -> None:
    """Choices that are fine alone, and whose combination would not do what they say."""
    algorithm, reads = config.algorithm, program.advantage.reads
    name = algorithm.advantage.name
    if algorithm.constraint is not None and not {"multiplier", "token_costs"} & set(reads):
        raise ConfigError(
            f"algorithm.constraint is set, but algorithm.advantage={name} reads neither multiplier nor "
            "token_costs, so nothing would keep the cost down; use safe_rlhf, or remove the constraint",
            key="algorithm.constraint",
        )
    if algorithm.resample is not None and "group_id" in reads:
        raise ConfigError(
            f"algorithm.resample={algorithm.resample.name} changes how often each sample of a prompt counts, "
            f"and the baseline of algorithm.advantage={name} would not know; use an estimator that does not "
            "compare a prompt's samples (gae, reinforce_pp)",
            key="algorithm.resample",
        )
    if program.advantage.similarity < 1 and (config.rollout.recorded or agent_of(config.rollout) is None):
        raise ConfigError(
            f"algorithm.advantage={name}: similarity compares the texts of observations, which agents see in "
            "rollouts of this run (rollout.environments); set it to 1",
            key="algorithm.advantage.similarity",
        )
    if TOPK_IDS in {column for producer in program.producers for column in producer.columns}:
        _check_likeliest(config)
    if program.reward_models:
        _check_model_rewards(config, program)
    if config.trainer.total_steps is not None:
        warmup_steps(config, program.learners, config.trainer.total_steps)


def _check_likeliest(config: Config) -> None:
    """The likeliest tokens, and log-probs of tokens that were not sampled, come from logits in memory."""
    for section in ("actor", "teacher"):
        if getattr(config, section).logits_bytes is None:
            raise ConfigError(
                f"{section}.logits_bytes=null: its kernels compute the log-probs of the sampled tokens, and "
                "this run reads those of the teacher's likeliest (algorithm.policy_loss="
                f"{config.algorithm.policy_loss.name}); remove the key, or choose another loss",
                key=f"{section}.logits_bytes",
            )


def _check_model_rewards(config: Config, program: Program) -> None:
    """The scores of reward.models are added to `reward` when a batch is taken; what is read before is
    without them, and so are the rewards of steps.
    """
    algorithm = config.algorithm
    late = {"step_reward"}
    for key, function, columns, without in (
        ("filter", algorithm.filter, _columns("filter", algorithm.filter), {"reward", *late}),
        ("select", algorithm.select, _columns("select", algorithm.select), late),
        ("resample", algorithm.resample, _columns("resample", algorithm.resample), late),
        ("advantage", algorithm.advantage, program.advantage.reads, late),
    ):
        wrong = [column for column in columns if column in without]
        if function is not None and wrong:
            raise ConfigError(
                f"algorithm.{key}={function.name} reads {wrong[0]}, which is without the scores of "
                "reward.models: use reward functions, or a function that reads another column",
                key=f"algorithm.{key}",
            )


def _columns(kind: Kind, chosen: FunctionConfig | None) -> tuple[str, ...]:
    return columns_read(lookup(kind, chosen.name)) if chosen is not None else ()


def _check_greedy_baseline(config: Config) -> None:
    """The greedy answer is scored alone, when it is generated, and is not kept."""
    name = config.algorithm.advantage.name
    group = [f.name for f in load_functions(config.reward.functions) if f.marks.group]
    if group:
        raise ConfigError(
            f"algorithm.advantage={name} reads the reward of one greedy answer, and reward.functions has "
            f"{group[0]}, which scores a whole group of answers; remove either",
            key="algorithm.advantage",
        )
    if config.reward.models:
        raise ConfigError(
            f"algorithm.advantage={name} reads the reward of one greedy answer, which reward.models do not "
            "score; use reward functions, or an estimator with another baseline (rloo, grpo)",
            key="algorithm.advantage",
        )


def _check_mix(config: Config, program: Program) -> None:
    """Raises ConfigError where rows of another sampler would not be what the algorithm takes them for."""
    chosen = config.algorithm.mix
    if chosen is None:
        return
    why = None
    if agent_of(config.rollout) is not None:
        why = "gives answers, and the trajectories of this run are an agent's episodes"
    elif program.bypass:
        why = (
            "gives rows whose sampler says nothing, and with algorithm.rollout_correction.mode=bypass the "
            "old log-probs are the sampler's; use mode=decoupled"
        )
    elif config.algorithm.filter is not None:
        why = (
            "adds rows to groups that are taken, and algorithm.filter judges groups before, without them; "
            "leave out one"
        )
    elif program.greedy_baseline:
        name = config.algorithm.advantage.name
        why = f"gives rows without the greedy answer that algorithm.advantage={name} reads"
    elif group := [f.name for f in load_functions(config.reward.functions) if f.marks.group]:
        why = f"gives rows that are scored by themselves, and {group[0]} scores a whole group of answers"
    if why is not None:
        raise ConfigError(f"algorithm.mix={chosen.name} {why}", key="algorithm.mix")


def _check_recorded(config: Config, program: Program, recorded: Recorded) -> None:
    """What a run without engines cannot do."""
    path = recorded.recording.path
    if "rollout" in config.cluster.placement:
        raise ConfigError(
            "cluster.placement.rollout gives devices to engines, and with rollout.recorded="
            f"{path} none run; remove it, and its pool from cluster.pools",
            key="cluster.placement.rollout",
        )
    if program.greedy_baseline and not recorded.recording.has_greedy_reward:
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage.name} reads {GREEDY_REWARD}, which "
            f"rollout.recorded={path} does not have; use rollouts that were recorded with it, or an "
            "estimator with another baseline (rloo, grpo)",
            key="algorithm.advantage",
        )


def check_token_budget(role: str, config: Config) -> None:
    """Raises ConfigError where the longest sequence, which is computed whole, does not fit a micro-batch."""
    section, engine = engine_of(role, config)
    budget, key = engine.token_budget, f"{section}.token_budget"
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    if budget < prompt + response:
        raise ConfigError(
            f"{key}={budget} is less than the longest sequence, data.max_prompt_tokens={prompt} + "
            f"rollout.max_tokens={response} tokens; raise the budget to {prompt + response}, or lower one of "
            "the two",
            key=key,
        )
