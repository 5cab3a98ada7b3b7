"""The second pass over a configuration: what needs algorithms, scorers and engines to be known. Before
anything starts.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rondo.agents.external import load_agent
from rondo.algorithms import Kind, check_algorithm, columns_read, lookup, registered_by_user
from rondo.columns import GREEDY_REWARD, TOPK_IDS
from rondo.config import (
    DEVICES,
    Config,
    FunctionConfig,
    KlConfig,
    LoadedConfig,
    collected,
    config_for,
    did_you_mean,
    recipe_path,
)
from rondo.controller import planned_device
from rondo.data import check_source
from rondo.errors import ConfigError, DataError, about
from rondo.models import check_model_folder, load_model_config
from rondo.rewards import BUILTINS, load_functions
from rondo.roles import ROLES
from rondo.rollout import check_engine
from rondo.tracking import check_trackers
from rondo.trainers.program import (
    Program,
    Recorded,
    engine_of,
    model_source,
    path_of,
    placement_of,
    plan_program,
    source_of,
    warmup_steps,
)
from rondo.trainers.replay import check_replay, recorded_rollouts

# What the built-in loop does by configuration, and a program by a line of its own.
YOURS: Mapping[str, str] = {
    "trainer.replay": "nothing writes a journal, or follows one",
    "reference.refresh_every": "await reference.follow(actor)",
    "rollout.recorded": "read the rows: cluster.put(Batch.read_parquet(file), index_columns())",
}


@contextmanager
def located(loaded: LoadedConfig) -> Iterator[None]:
    """A ConfigError raised inside that knows its key only (`errors.about`) begins with where that was set."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError.of([_located(loaded, one) for one in error.problems]) from error.__cause__


def _located(loaded: LoadedConfig, error: ConfigError) -> ConfigError:
    key, text = error.key, str(error)
    where = _where(loaded, key) if key is not None else ""
    if key is None or not where or text.startswith(where):
        return error
    named = key.startswith(re.split("[ :=]", text, maxsplit=1)[0])
    return ConfigError(f"{where}{'' if named else f'{key}: '}{text}", key=key)


def check_rl(loaded: LoadedConfig) -> Program:
    """What `rondo train` will do; raises ConfigError for all that it cannot do as configured."""
    config, problems = loaded.config, list[ConfigError]()
    with located(loaded):
        recorded = recorded_rollouts(config)
        with collected(problems):
            check_algorithm(config.algorithm)
        program = None if problems else _planned(loaded, recorded, problems)
        problems += _unread(loaded)
        checks: list[Callable[[], None]] = [
            lambda: check_trackers(config.tracking.trackers),
            lambda: check_backend(loaded),
            lambda: check_files(loaded),
            lambda: check_replay(config),
        ]
        if recorded is None:
            problems += _missing(config)
            checks += [lambda: check_rollout_engine(loaded)]
            with collected(problems), about("rollout.agent"):
                if config.rollout.agent is not None:
                    load_agent(config.rollout.agent)
        for check in checks:
            with collected(problems):
                check()
        if problems or program is None:
            raise ConfigError.of(problems)
        return program


def _planned(loaded: LoadedConfig, recorded: Recorded | None, problems: list[ConfigError]) -> Program | None:
    """The program of a configuration whose algorithm stands by itself; what does not fit joins `problems`."""
    with collected(problems):
        _check_group_size(loaded)
    with collected(problems):
        _check_scores(loaded, recorded)
    with collected(problems):
        program = plan_program(loaded.config, recorded)
        with collected(problems):
            _check_combinations(loaded, program)
        _check_roles(loaded, program)
        return program
    return None


def _missing(config: Config) -> Iterator[ConfigError]:
    """What a run needs that generates its own samples."""
    if not config.data.train:
        text = "data.train is empty: there is nothing to learn from; add a source (see docs/data.md)"
        yield ConfigError(text, key="data.train")
    if not config.reward.functions and not config.reward.models:
        yield ConfigError(
            "reward.functions is empty: nothing says what is good; add a scorer, for example {name: gsm8k}, "
            "or a model under reward.models",
            key="reward.functions",
        )
    if config.trainer.evaluation.every is not None and not config.data.eval:
        yield ConfigError(
            "trainer.evaluation.every is set, but data.eval is empty; add a source of held-out prompts",
            key="trainer.evaluation.every",
        )


def _unread(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Keys that belong to other commands."""
    for key, command in (
        ("algorithm.preference_loss", "rondo preference"),
        ("algorithm.reward_model_loss", "rondo reward-model"),
    ):
        for known, _ in changed_keys(loaded):
            if known.startswith(key):
                yield ConfigError(f"{known} is read by `{command}` only; remove it", key=known)


def _check_group_size(loaded: LoadedConfig) -> None:
    """An estimator that reads group_id compares the trajectories of one prompt."""
    n, name = loaded.config.rollout.n, loaded.config.algorithm.advantage.name
    if n < 2 and "group_id" in columns_read(lookup("advantage", name)):
        raise ConfigError(
            f"rollout.n = {n}, but algorithm.advantage = {name} compares the trajectories of one prompt and "
            "needs at least 2; raise rollout.n, or choose another estimator (gae, reinforce_pp)",
            key="rollout.n",
        )


def _check_scores(loaded: LoadedConfig, recorded: Recorded | None) -> None:
    """Names of scores are unique, and whoever names a score names one that exists."""
    config = loaded.config
    if recorded is None:
        names = [name for f in load_functions(config.reward.functions, BUILTINS) for name in f.names]
    else:
        names = list(recorded.recording.scores)
    for index, model in enumerate(config.reward.models):
        if recorded is not None and model.name not in recorded.scored_by(config):
            continue
        with about(f"reward.models.{index}"):
            if model.path is None:
                raise ConfigError(f"{model.name} has no path; name the export of `rondo reward-model`")
            if model.name in names:
                raise ConfigError(f"another scorer is called {model.name} too; set another name")
        names.append(model.name)
    constraint = config.algorithm.constraint
    if constraint is not None and constraint.cost not in names:
        raise ConfigError(
            f"algorithm.constraint.cost={constraint.cost} is no score of this run"
            f"{did_you_mean(constraint.cost, names)} There are: {', '.join(names)}",
            key="algorithm.constraint.cost",
        )


def _where(loaded: LoadedConfig, key: str) -> str:
    """Where the key, or something below it, was set; for the start of a message."""
    set_here = (known for known in loaded.origins if known == key or known.startswith(key + "."))
    return next((f"{loaded.origins[known].where}: " for known in set_here), "")


def _check_combinations(loaded: LoadedConfig, program: Program) -> None:
    """Choices that are fine alone, and whose combination would not do what they say."""
    algorithm, reads = loaded.config.algorithm, program.advantage.reads
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
    if program.reward_models:
        _check_model_rewards(loaded, program)
    if loaded.config.trainer.total_steps is not None:
        warmup_steps(loaded.config, program.learners, loaded.config.trainer.total_steps)


def _check_model_rewards(loaded: LoadedConfig, program: Program) -> None:
    """The scores of reward.models are added to `reward` when a batch is taken; what is read before is
    without them, and so are the rewards of steps.
    """
    algorithm = loaded.config.algorithm
    late = {"algorithm.filter": {"reward", "step_reward"}, "algorithm.resample": {"step_reward"}}
    read = {
        "algorithm.filter": (algorithm.filter, _columns("filter", algorithm.filter)),
        "algorithm.resample": (algorithm.resample, _columns("resample", algorithm.resample)),
        "algorithm.advantage": (algorithm.advantage, program.advantage.reads),
    }
    for key, (function, columns) in read.items():
        wrong = [column for column in columns if column in late.get(key, {"step_reward"})]
        if function is not None and wrong:
            raise ConfigError(
                f"{key}={function.name} reads {wrong[0]}, which is without the scores of reward.models: use "
                "reward functions, or a function that reads another column",
                key=key,
            )


def _columns(kind: Kind, chosen: FunctionConfig | None) -> tuple[str, ...]:
    return columns_read(lookup(kind, chosen.name)) if chosen is not None else ()


def _check_greedy_baseline(config: Config) -> None:
    """The greedy answer is scored alone, when it is generated, and is not kept."""
    name = config.algorithm.advantage.name
    group = [f.name for f in load_functions(config.reward.functions, BUILTINS) if f.group]
    if group:
        raise ConfigError(
            f"algorithm.advantage={name} reads the reward of one greedy answer, and reward.functions has "
            f"{group[0]}, which scores a whole group of answers; remove either"
        )
    if config.reward.models:
        raise ConfigError(
            f"algorithm.advantage={name} reads the reward of one greedy answer, which reward.models do not "
            "score; use reward functions, or an estimator with another baseline (rloo, grpo)"
        )


def _check_recorded(loaded: LoadedConfig, program: Program, recorded: Recorded) -> None:
    """What a run without engines cannot do."""
    config, path = loaded.config, recorded.recording.path
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
            "estimator with another baseline (rloo, grpo)"
        )


def _check_roles(loaded: LoadedConfig, program: Program) -> None:
    """Sections of roles that this run does not have are not read, so setting them is an error; others must
    fit.
    """
    config, made = loaded.config, {column for p in program.producers for column in p.columns}
    sections = {ROLES[role].section for role in program.all_roles if role in ROLES}
    unread = {r.section: r.read_by for r in ROLES.values() if r.read_by and r.section not in sections}
    if "critic" in unread:
        unread["algorithm.value_loss"] = unread["critic"]
    if TOPK_IDS not in made:
        unread["teacher.top_k"] = "teacher_topk_* (algorithm.policy_loss: …_topk)"
    for key, columns in unread.items():
        _check_unset(loaded, key, columns)
    for role in ("actor", *program.roles):
        check_token_budget(role, config)
    if program.recorded is not None:
        _check_recorded(loaded, program, program.recorded)
    placement_of(config, program.all_roles)
    if program.greedy_baseline and program.recorded is None:
        _check_greedy_baseline(config)
    for role in program.roles:
        if role in ROLES:  # the folders of reward models are looked into with the others
            path_of(role, config)


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


def _check_unset(loaded: LoadedConfig, key: str, columns: str) -> None:
    """ConfigError when something is set that nobody reads: no chosen function reads `columns`."""
    for known, _ in changed_keys(loaded):
        if known == key or known.startswith(key + "."):
            raise ConfigError(
                f"{known} is set, but no chosen function reads {columns}: there is nothing for it to "
                "configure; remove the key, or choose a function that reads them",
                key=known,
            )


def changed_keys(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """(key, where it was set) of every key with another value than its default, whatever `auto` became."""
    defaults = (Config(), *(config_for(Config(), device) for device in DEVICES))
    for key, origin in loaded.origins.items():
        if all(_leaf(loaded.config, key) != _leaf(default, key) for default in defaults):
            yield key, origin.where


def _leaf(config: Config, key: str) -> Any:
    """The section or value below which the dotted `key` lies, as deep as there are fields."""
    value: Any = config
    for part in key.split("."):
        if not hasattr(value, part):
            break
        value = getattr(value, part)
    return value


def check_backend(loaded: LoadedConfig) -> None:
    """Raises ConfigError for a backend or compiler that is not here."""
    config = loaded.config
    if config.cluster.backend.name == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError('cluster.backend=ray, but Ray is not installed: pip install "rondo-rl[ray]"')
    check_names(config)
    rollout = config.rollout
    if rollout.engine.decode == "compiled" and rollout.recorded is None and shutil.which("cc") is None:
        raise ConfigError(
            "rollout.engine.decode=compiled needs a C compiler (cc); install one, or set "
            "rollout.engine.decode=auto"
        )


def check_names(config: Config) -> None:
    """Raises ConfigError for a short name, registered by the user's code in this process, of a function that
    runs in workers that are other processes.
    """
    algorithm = config.algorithm
    in_workers: tuple[tuple[str, Kind, FunctionConfig | KlConfig | None], ...] = (
        ("algorithm.policy_loss", "policy_loss", algorithm.policy_loss),
        ("algorithm.value_loss", "value_loss", algorithm.value_loss),
        ("algorithm.kl", "kl", algorithm.kl),
        ("algorithm.preference_loss", "pair_loss", algorithm.preference_loss),
        ("algorithm.reward_model_loss", "pair_loss", algorithm.reward_model_loss),
    )
    for key, kind, chosen in in_workers if config.cluster.backend.name != "local" else ():
        place = registered_by_user(kind, chosen.name) if chosen is not None else None
        if chosen is not None and place is not None:
            with about(key):
                raise ConfigError(
                    f"{key}: the name {chosen.name!r} is registered in this process only, and the "
                    f"workers of cluster.backend={config.cluster.backend.name} are other processes; name "
                    f"the function with its file, {place} (a program can also "
                    "pass the function itself)"
                )


def check_rollout_engine(loaded: LoadedConfig) -> None:
    """Raises ConfigError for an engine that is not installed, or cannot do what it will be asked for.

    On a cluster elsewhere (cluster.backend.address) the engines' own processes find that out.
    """
    rollout, cluster = loaded.config.rollout, loaded.config.cluster
    if cluster.backend.address is not None:
        return
    try:
        check_engine(
            rollout.engine.name,
            rollout.engine.options,
            device="cuda:0" if planned_device(cluster) == "cuda" else "cpu",
            sleep=rollout.sleep,
            min_p=rollout.min_p > 0,
        )
    except ConfigError as error:
        named = [key for key in ("rollout.sleep", "rollout.min_p") if key in str(error)]
        raise ConfigError(str(error), key=[*named, "rollout.engine"][0]) from error


def check_files(loaded: LoadedConfig) -> None:
    """Raises ConfigError for all files and model folders that a key names and that are not there."""
    problems: list[ConfigError] = []
    with collected(problems):
        _check_models(loaded)
    unread = () if loaded.config.rollout.recorded is None else ("train", "eval")
    for part in (part for part in ("train", "eval", "pretrain") if part not in unread):
        for index, source in enumerate(getattr(loaded.config.data, part)):
            with collected(problems), about(f"data.{part}.{index}"):
                check_source(source)
    for key, path in (
        ("model.chat_template", loaded.config.model.chat_template),
        ("trainer.warm_start", loaded.config.trainer.warm_start),
    ):
        if path is not None:
            with collected(problems):
                beside_recipe(loaded, key, path)
    if problems:
        raise ConfigError.of(problems)


def _check_models(loaded: LoadedConfig) -> None:
    """On a cluster elsewhere (cluster.backend.address) the workers' own machines have the folders."""
    config = loaded.config
    if config.model.config is not None:
        with about("model.config"):
            load_model_config(model_source(config))
    if config.cluster.backend.address is not None:
        return
    paths = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "reference.path": config.reference.path,
        "teacher.path": config.teacher.path,
    }
    for key, path in paths.items():
        if path is not None:
            _check_model(key, path)
    if config.rollout.recorded is not None:  # those that are asked again are checked where they are made
        return
    for index, model in enumerate(config.reward.models):
        key = f"reward.models.{index}.path"
        if not Path(model.path or "").is_dir():  # its value head is read from a folder
            raise ConfigError(
                f"{key}: there is no folder {model.path}; name the export folder of `rondo reward-model`",
                key=key,
            )
        _check_model(key, str(model.path))
        with about(key):
            source_of(model.name, config)  # is there a value head?


def _check_model(key: str, path: str) -> None:
    try:
        check_model_folder(path)
    except DataError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error


def beside_recipe(loaded: LoadedConfig, key: str, path: str) -> Path:
    """The file that `key` names: relative to the working directory, else to the recipe that set the
    key, else a recipe that rondo ships.

    Raises ConfigError naming both places.
    """
    origin = loaded.origins.get(key)
    recipe = Path(origin.where.rpartition(":")[0]) if origin else Path()
    places = [Path(path), recipe.parent / path, Path(recipe_path(path))]
    for place in places:
        if place.is_file():
            return place
    where = f"{origin.where}: " if origin else ""
    looked = " and ".join(dict.fromkeys(str(place) for place in places[:2]))
    raise ConfigError(f"{where}{key}: no such file: looked for {looked}{_near(places[1])}", key=key)


def _near(path: Path) -> str:
    names: Iterable[str] = (
        sorted(p.name for p in path.parent.glob("*" + path.suffix)) if path.parent.is_dir() else ()
    )
    return "; there are: " + ", ".join(names) if names else ""


def check_session(loaded: LoadedConfig) -> None:
    """What a program of the user's can do as configured; raises ConfigError for what it cannot."""
    config = loaded.config
    if not config.data.train:
        raise ConfigError("data.train is empty: there are no prompts; add a source (see docs/data.md)")
    for key, instead in YOURS.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) is not None:
            raise ConfigError(f"{key} is for the built-in loop; in a program of your own, {instead}")
    correction = config.algorithm.rollout_correction
    if correction is not None and correction.mode == "bypass":
        raise ConfigError(
            "algorithm.rollout_correction.mode=bypass is for the built-in loop: here compute_log_prob gives "
            "old_log_probs; use mode=decoupled, or `rondo train`"
        )
    check_backend(loaded)
    check_files(loaded)
