"""`rondo.train`, `sft`, `preference` and `reward_model`: a recipe from arguments, and the command on it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rondo.api.inputs import Inputs
from rondo.api.run import RECIPE, Run, has_begun
from rondo.checkpoint.durable import free_name, make_folder, write_atomic
from rondo.config import LoadedConfig, load, to_yaml
from rondo.config.tree import RECIPES
from rondo.errors import ConfigError, RondoError, WorkerError

if TYPE_CHECKING:
    from rondo.trainers.commands.open_run import OnStep

_log = logging.getLogger(__name__)
Recipes = str | Path | Sequence[str | Path]
Command = Callable[..., Any]


def train(
    recipe: Recipes = (),
    /,
    *,
    model: str | Path | None = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    algorithm: Any = None,
    steps: int | None = None,
    size: int | None = None,
    on_step: OnStep | None = None,
    config: Mapping[str, Any] = {},
    **settings: Any,
) -> Run:
    """Trains by reinforcement learning; blocks until the end, shows progress, returns the run.

    recipe: the name of one that rondo ships, a YAML file, or several, merged in order; none: the schema's
    defaults. model: a folder or a hub id. data, eval_data: prompts, see `Inputs.sources` for what they may
    be. reward: a function `(prompt, trajectory) -> float`, the name of one, {"name": …, **options}, or a list
    of them. algorithm: a recipe's name, whose `algorithm` section is taken ("grpo", "dapo"), or that section.
    steps: trainer.total_steps. size: rows taken of a generator. on_step: called with each step's metrics;
    returns True to end the run there. config: further settings, nested or by dotted key; settings: the same
    as keywords, `**{"rollout.n": 8}`. Functions may stand wherever a recipe has a function's name.

    What it did is in the run folder (`trainer.run_dir`; default: a new one in `runs/`) as a recipe, which
    `rondo train` repeats. Raises RondoError; KeyboardInterrupt where it was stopped by Ctrl-C.
    """
    given: dict[str, Any] = {}
    if reward is not None:
        given["reward.functions"] = functions_of(reward)
    if algorithm is not None:
        given["algorithm"] = _algorithm(algorithm)
    return _trained(
        "train", recipe, given, model=model, data=data, eval_data=eval_data, steps=steps, size=size,
        on_step=on_step, config=config, **settings,
    )  # fmt: skip


def sft(recipe: Recipes = (), /, **arguments: Any) -> Run:
    """Fine-tunes on conversations. Arguments as of `train`, without reward and algorithm."""
    return _trained("sft", recipe, {}, **arguments)


def preference(recipe: Recipes = (), /, **arguments: Any) -> Run:
    """Trains on preference pairs (DPO and its relatives). Arguments as of `sft`."""
    return _trained("preference", recipe, {}, **arguments)


def reward_model(recipe: Recipes = (), /, **arguments: Any) -> Run:
    """Trains a reward model on preference pairs. Arguments as of `sft`."""
    return _trained("reward-model", recipe, {}, **arguments)


def _trained(
    name: str,
    recipe: Recipes,
    given: dict[str, Any],
    *,
    model: str | Path | None = None,
    data: Any = None,
    eval_data: Any = None,
    steps: int | None = None,
    size: int | None = None,
    on_step: OnStep | None = None,
    config: Mapping[str, Any] = {},
    **settings: Any,
) -> Run:
    """Writes the recipe and what it names, and runs the command. given: settings from further arguments."""
    files = files_of(recipe)
    if model is not None:
        given |= {"model.path": str(model), "model.config": None, "trainer.warm_start": None}
    if steps is not None:
        given["trainer.total_steps"] = steps
    given = {**config, **given, **settings}
    folder = Path(given.get("trainer.run_dir") or _free_folder(name, files))
    given["trainer.run_dir"] = str(folder)
    with _given_to(folder):
        inputs = Inputs(folder / "inputs")
        for part, rows in (("train", data), ("eval", eval_data)):
            if rows is not None:
                given[f"data.{part}"] = inputs.sources(rows, part, size)
        loaded = load(files, settings=inputs.named(given))
        _write_recipe(name, folder, loaded)
        _run(name, loaded, on_step)
    return Run(folder)


@contextmanager
def _given_to(folder: Path) -> Iterator[None]:
    """What is written for a run that does not begin, of a new folder, is removed again."""
    is_new = not folder.exists()
    try:
        yield
    except BaseException:
        if is_new and not has_begun(folder):
            shutil.rmtree(folder / "inputs", ignore_errors=True)
            (folder / RECIPE).unlink(missing_ok=True)
            with suppress(OSError):  # there are logs, or there is no folder
                folder.rmdir()
        raise


def resumed(run: Run, steps: int | None, on_step: OnStep | None, settings: Mapping[str, Any]) -> Run:
    """Goes on with a run from the recipe that is in its folder."""
    recipe = run.path / RECIPE
    if not recipe.is_file():
        raise ConfigError(
            f"{run.path} has no {RECIPE}: it was not made from Python; run the command that made it once more"
        )
    name = recipe.read_text(encoding="utf-8").split(maxsplit=3)[2]  # "# rondo train …"
    given = {"trainer.run_dir": str(run.path), **settings}
    if steps is not None:
        given["trainer.total_steps"] = steps
    loaded = load([str(recipe)], settings=Inputs(run.path / "inputs").named(given))
    _run(name, loaded, on_step)
    return Run(run.path)


def _run(name: str, loaded: LoadedConfig, on_step: OnStep | None) -> None:
    from rondo.trainers.commands import supervised, train

    for note in loaded.notes:
        _log.warning("%s", note)
    commands: Mapping[str, Command] = {
        "train": train.train,
        "sft": supervised.sft,
        "preference": supervised.preference,
        "reward-model": supervised.reward_model,
    }
    try:
        commands[name](loaded, on_step)
    except WorkerError as error:
        if isinstance(error.cause_error, RondoError):  # said by rondo itself, in a worker
            raise error.cause_error from error
        raise
    except KeyboardInterrupt:
        folder = str(loaded.config.trainer.run_dir)
        if has_begun(Path(folder)):  # calling `train` again would begin a new one
            raise KeyboardInterrupt(f"stopped; rondo.load({folder!r}).resume() goes on with it") from None
        raise


def functions_of(reward: Any) -> list[Any]:
    """Returns `reward.functions` from one function or several, each with options or without."""
    functions = reward if isinstance(reward, list | tuple) else [reward]
    return [one if isinstance(one, Mapping) else {"name": one} for one in functions]


def files_of(recipe: Recipes) -> list[str]:
    """Returns the names of one recipe or several."""
    return [str(one) for one in ([recipe] if isinstance(recipe, str | Path) else recipe)]


def _free_folder(name: str, files: Sequence[str]) -> Path:
    """Returns a folder of `runs/` that is not there: a call without a name of its own is a new run."""
    return free_name(Path("runs") / (Path(files[0]).stem if files else name))


def _algorithm(algorithm: Any) -> Any:
    """Returns the `algorithm` section that is meant."""
    if not isinstance(algorithm, str):
        return algorithm
    path = RECIPES / f"{algorithm}.yaml"
    section = yaml.safe_load(path.read_text(encoding="utf-8")).get("algorithm") if path.is_file() else None
    if section is None:
        raise ConfigError(
            f"algorithm={algorithm!r}: no recipe of that name has an `algorithm` section; see rondo recipes, "
            'or give the section: {"advantage": "grpo", "policy_loss": "ppo_clip"}'
        )
    return section


def _write_recipe(name: str, folder: Path, loaded: LoadedConfig) -> None:
    """Writes into the run folder what the CLI repeats the run with: all of the configuration, so that a
    recipe of the user's may change afterwards.
    """
    make_folder(folder)
    text = f"# rondo {name} {folder / RECIPE}  repeats this run, in the same working directory\n"
    write_atomic(folder / RECIPE, text + to_yaml(loaded.config), private=True)
