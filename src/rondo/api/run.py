"""`rondo.train` and its relatives, the run that comes of it, `rondo.generate` and `rondo.evaluate`.

A recipe is made from the arguments, written into the run folder, and the command of that name runs on it.
Serving is in `serving`; what a recipe cannot hold (rows, functions) in `inputs`.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rondo.api.inputs import (
    Inputs,
    Recipes,
    acted_in,
    are_named,
    checked,
    files_of,
    functions_of,
    merged,
)
from rondo.api.serving import Server, serve
from rondo.config import LoadedConfig, to_yaml, written
from rondo.config import load as load_recipe
from rondo.config.functions import check_options
from rondo.core.errors import ConfigError, DataError, RondoError, WorkerError, short_errors
from rondo.system.names import offered
from rondo.system.storage import free_name, make_folder, missing_folders, write_atomic

if TYPE_CHECKING:
    from rondo.tracking.trajectories import Trajectories
    from rondo.trainers.commands.restarts import OnCheckpoint, OnEvaluation, OnStep
    from rondo.trainers.loop import EvaluationResult

    Told = tuple[OnStep | None, OnEvaluation | None, OnCheckpoint | None]  # as `Callbacks` has them
else:  # what they are called with only a type checker reads
    OnStep = OnEvaluation = OnCheckpoint = Callable

_log = logging.getLogger(__name__)
Command = Callable[..., Any]
RECIPE = "recipe.yaml"  # what `rondo.train` was given, in the run folder


class Run:
    """A run folder, read when it is asked. path: the folder."""

    @checked
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not has_begun(self.path):
            raise DataError(f"{path} is not the folder of a run (it has no config.yaml)")

    def __repr__(self) -> str:
        summary = self.summary
        done = f"{summary['steps']} steps" if summary else "not finished"
        return f"Run({str(self.path)!r}, {done})"

    @property
    def summary(self) -> dict[str, Any]:
        """What the run came to (summary.json); empty where it has not ended."""
        from rondo.trainers.loop import read_summary

        file = self.path / "summary.json"
        return read_summary(file) if file.is_file() else {}

    @property
    def metrics(self) -> Any:
        """The metrics of every step: a pandas DataFrame, indexed by step."""
        from rondo.tracking import read_metrics

        return _pandas().DataFrame(read_metrics(self.path)).groupby("step").last()

    @short_errors
    @checked
    def samples(self, step: int | None = None) -> Any:
        """Returns the trajectories of a step (default: the last) as a pandas DataFrame, a row each."""
        import pyarrow.parquet as pq

        from rondo.tracking.trajectories import rollouts_of

        _, file = rollouts_of(self.path, step)
        _pandas()
        return pq.read_table(file).to_pandas()

    @short_errors
    def show(self, **options: Any) -> Trajectories:
        """Returns trajectories as `rondo show` prints them; a notebook shows them with their images.
        options: those of `rondo.tracking.trajectories.read_trajectories`.
        """
        from rondo.tracking.trajectories import read_trajectories

        check_options(read_trajectories, options, "show", given=1)
        return read_trajectories(self.path, **options)

    @short_errors
    def view(self) -> Any:
        """Returns the run's page as `rondo view` shows it: curves, rollouts, tokens. A notebook shows it; its
        `address` is for a browser, and `close` ends it. Raises ConfigError without what draws it.
        """
        return offered("commands")["view"].view(str(self.path))

    def plot(self) -> Any:
        """Returns a figure of the curves, which a notebook shows; also in curves.png. Needs matplotlib."""
        from rondo.tracking.curves import figure_of_curves

        figure = figure_of_curves(self.path)

        def png() -> bytes:
            picture = io.BytesIO()
            figure.savefig(picture, format="png")
            return picture.getvalue()

        figure._repr_png_ = png  # what notebooks ask for
        return figure

    @property
    def model(self) -> Path:
        """The folder of the trained model. Raises DataError where the run has not exported it."""
        folder = self.path / "export"
        if not (folder / "config.json").is_file():
            raise DataError(f"{self.path}: has no export yet; the end of a run writes it (checkpoint.export)")
        return folder

    @short_errors
    @checked
    def export(
        self,
        path: str | Path,
        step: int | None = None,
        dtype: str | None = None,
        *,
        model: str | None = None,
        trust_code: bool = False,
    ) -> int:
        """Writes the model of a checkpoint (default: the newest) to a folder; returns its step. dtype: of the
        weights; default: as checkpoint.export_dtype says. model: one of `models` that learnt, in place of the
        policy. trust_code: may run code that the run's config.yaml names (a tokenizer's).
        """
        from rondo.trainers.commands.export import export_checkpoint

        return export_checkpoint(str(self.path), str(path), step, dtype, model=model, trust_code=trust_code)

    @short_errors
    @checked
    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        replace: bool = False,
        step: int | None = None,
        dtype: str | None = None,
        model: str | None = None,
        trust_code: bool = False,
    ) -> str:
        """Sends the model to the repository `name` (owner/name) of Hugging Face, with a model card; returns
        its URL. It is what the run has exported at its end, or with a step or dtype that of a checkpoint.

        replace: a repository that has files has these alone from now on. dtype, model, trust_code: as of
        `export`. Raises ConfigError and StorageError, without a token or the network before anything is sent.
        """
        from rondo.trainers.commands.export import push

        url, _ = push(
            str(self.path), name, step, dtype,
            private=private, replace=replace, model=model, trust_code=trust_code,
        )  # fmt: skip
        return url

    def generate(self, prompts: str | Iterable[str], **options: Any) -> list[dict[str, Any]]:
        """As `rondo.generate`, with the trained model and the run's own chat template options."""
        options.setdefault("chat_template_options", self._template_options)
        return generate(self.model, prompts, **options)

    def serve(self, **options: Any) -> Server:
        """As `rondo.serve`, with the trained model; without a recipe with the run's chat template options."""
        given = options.get("config", {})
        if "recipe" not in options and isinstance(given, Mapping):
            options["config"] = {"model.chat_template_options": self._template_options, **given}
        return serve(self.model, **options)

    @property
    def _template_options(self) -> dict[str, Any]:
        """Returns what the run's own prompts were written with."""
        config = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        model = (config or {}).get("model") or {}
        return dict(model.get("chat_template_options") or {})

    def evaluate(self, data: Any = None, **settings: Any) -> Any:
        """As `rondo.evaluate`, with the trained model and the run's own settings; data: default data.eval."""
        return evaluate(self.model, data, recipe=self.path / "config.yaml", **settings)

    @short_errors
    @checked
    def resume(
        self,
        steps: int | None = None,
        *,
        on_step: OnStep | None = None,
        on_evaluation: OnEvaluation | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        **settings: Any,
    ) -> Run:
        """Goes on from the newest checkpoint, with more steps perhaps. Needs a run that Python has made."""
        return _resumed(self, steps, (on_step, on_evaluation, on_checkpoint), settings)


@short_errors
def load(path: str | Path) -> Run:
    """Returns a run from its folder, also one of another program. Raises DataError."""
    return Run(path)


def has_begun(folder: Path) -> bool:
    """Says whether a run has begun in a folder; a warm start counts."""
    return any((part / "config.yaml").is_file() for part in (folder, folder / "warm_start"))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("metrics as a table need pandas: pip install pandas") from error
    return pandas


# ---- training ----


@short_errors
@checked
def train(
    recipe: Recipes = (),
    /,
    *,
    model: str | Path | None = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    tools: Any = None,
    environment: Any = None,
    algorithm: Any = None,
    sampler: Any = None,
    steps: int | None = None,
    size: int | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    config: Mapping[str, Any] = {},
    **settings: Any,
) -> Run:
    """Trains by reinforcement learning; blocks until the end, shows progress, returns the run.

    recipe: the name of one that rondo ships, a YAML file, or several, merged in order; none: the schema's
    defaults. model: a folder or a hub id. data, eval_data: prompts, see `Inputs.sources` for what they may
    be. reward: a function `(prompt, trajectory) -> float`, the name of one, {"name": …, **options}, or a list
    of them. tools, environment: rollout.tools and rollout.environments, functions and classes, names, or
    {"name": …, **options}, one or a list. algorithm: a recipe's name, whose `algorithm` section is taken
    ("grpo", "dapo"), or that section. sampler: data.sampler, a class, a function, the name of one, or
    {"name": …, **options}. steps: trainer.total_steps. size: rows taken of a generator. on_step: called with
    each step's metrics; on_evaluation: with step and result (`metrics`, `samples`) of each evaluation;
    on_checkpoint: with step and folder of each checkpoint, once it is whole. One that returns True ends the
    run there; what one raises is the run's error. config: further settings, nested or by dotted key;
    settings: the same as keywords, `**{"rollout.n": 8}`. Functions may stand wherever a recipe has a
    function's name.

    What it did is in the run folder (`trainer.run_dir`; default: a new one in `runs/`) as a recipe, which
    `rondo train` repeats. Raises RondoError; KeyboardInterrupt where it was stopped by Ctrl-C.
    """
    given: dict[str, Any] = {}
    if reward is not None:
        given["reward.functions"] = functions_of(reward)
    if algorithm is not None:
        given["algorithm"] = _algorithm(algorithm)
    if sampler is not None:
        given["data.sampler"] = sampler if isinstance(sampler, Mapping) else {"name": sampler}
    return _trained(
        "train", recipe, given, model=model, data=data, eval_data=eval_data, steps=steps, size=size,
        tools=tools, environment=environment, on_step=on_step, on_evaluation=on_evaluation,
        on_checkpoint=on_checkpoint, config=config, **settings,
    )  # fmt: skip


@short_errors
def sft(recipe: Recipes = (), /, **arguments: Any) -> Run:
    """Fine-tunes on conversations. Arguments as of `train`, without reward, algorithm, sampler and
    environment. tools: their schemas are in every row's prompt, as they will be in training with them.
    """
    return _trained("sft", recipe, {}, **arguments)


@short_errors
def preference(recipe: Recipes = (), /, **arguments: Any) -> Run:
    """Trains on preference pairs (DPO and its relatives). Arguments as of `sft`, without tools."""
    return _trained("preference", recipe, {}, **arguments)


@short_errors
def reward_model(recipe: Recipes = (), /, **arguments: Any) -> Run:
    """Trains a reward model on preference pairs. Arguments as of `preference`."""
    return _trained("reward-model", recipe, {}, **arguments)


@checked
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
    tools: Any = None,
    environment: Any = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    config: Mapping[str, Any] = {},
    **settings: Any,
) -> Run:
    """Writes the recipe and what it names, and runs the command. given: settings from further arguments."""
    files = files_of(recipe)
    given |= acted_in(tools, environment, config, settings)
    if model is not None:
        given |= {"model.path": str(model), "model.config": None, "trainer.warm_start": None}
    if steps is not None:
        given["trainer.total_steps"] = steps
    _check_size(size, data, eval_data)
    given = merged(config, given, settings)
    where = written("trainer.run_dir", files, given)
    if where is None:
        where = given["trainer.run_dir"] = str(_free_folder(name, files))
    folder = Path(os.path.expanduser(str(where)))  # as `load` will have it
    with _given_to(folder):
        inputs, rows = Inputs(folder / "inputs"), {}
        for part, argument, of_part in (("train", "data", data), ("eval", "eval_data", eval_data)):
            if of_part is not None:
                rows[f"data.{part}"] = inputs.sources(of_part, part, size, argument=argument)
        loaded = load_recipe(files, settings=inputs.named(merged(given, rows)))
        _write_recipe(name, folder, loaded)
        _run(name, loaded, (on_step, on_evaluation, on_checkpoint))
    return Run(folder)


def _check_size(size: int | None, *data: Any) -> None:
    """Raises ConfigError where nothing reads `size`, or no number of rows is it."""
    if size is not None and size < 1:
        raise ConfigError(f"size must be 1 row or more, got {size}")
    if size is not None and all(one is None or are_named(one) for one in data):
        raise ConfigError(
            f"size={size} is for rows in memory, a generator's say, and there are none; for a file it is a "
            'key of the source: data={"type": "jsonl", "path": …, "size": …}'
        )


@contextmanager
def _given_to(folder: Path) -> Iterator[None]:
    """Removes what was written to a new folder, if the run does not begin inside."""
    made = missing_folders(folder)
    try:
        yield
    except BaseException:
        if made and not has_begun(folder):
            shutil.rmtree(folder / "inputs", ignore_errors=True)
            (folder / RECIPE).unlink(missing_ok=True)
            for one in made:
                with suppress(OSError):  # there are logs, or there is no folder
                    one.rmdir()
        raise


def _resumed(run: Run, steps: int | None, callbacks: Told, settings: Mapping[str, Any]) -> Run:
    """Resumes a run with the recipe in its folder."""
    recipe = run.path / RECIPE
    if not recipe.is_file():
        raise ConfigError(
            f"{run.path} has no {RECIPE}: it was not made from Python; run the command that made it once more"
        )
    name = recipe.read_text(encoding="utf-8").split(maxsplit=3)[2]  # "# rondo train …"
    given = merged({"trainer.run_dir": str(run.path)}, settings)
    if steps is not None:
        given = merged(given, {"trainer.total_steps": steps})
    loaded = load_recipe([str(recipe)], settings=Inputs(run.path / "inputs").named(given))
    _run(name, loaded, callbacks)
    return Run(run.path)


def _run(name: str, loaded: LoadedConfig, callbacks: Told) -> None:
    from rondo.trainers.commands import supervised, train
    from rondo.trainers.commands.restarts import Callbacks

    for note in loaded.notes:
        _log.warning("%s", note)
    commands: Mapping[str, Command] = {
        "train": train.train,
        "sft": supervised.sft,
        "preference": supervised.preference,
        "reward-model": supervised.reward_model,
    }
    try:
        commands[name](loaded, Callbacks(*callbacks))
    except WorkerError as error:
        if isinstance(error.cause_error, RondoError):  # said by rondo itself, in a worker
            raise error.cause_error from error
        raise
    except KeyboardInterrupt:
        folder = str(loaded.config.trainer.run_dir)
        if has_begun(Path(folder)):  # calling `train` again would begin a new one
            raise KeyboardInterrupt(f"stopped; rondo.load({folder!r}).resume() goes on with it") from None
        raise


def _free_folder(name: str, files: Sequence[str]) -> Path:
    """Returns a folder of `runs/` that is not there: a call without a name of its own is a new run."""
    return free_name(Path("runs") / (Path(files[0]).stem if files else name))


def _algorithm(algorithm: Any) -> Any:
    """Returns the `algorithm` section that is meant."""
    if not isinstance(algorithm, str):
        return algorithm
    named = algorithm in offered("recipes")
    text = offered("recipes")[algorithm].read_text(encoding="utf-8") if named else "{}"
    section = yaml.safe_load(text).get("algorithm")
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


# ---- answers of a model ----


@short_errors
@checked
def generate(model: str | Path, prompts: str | Iterable[str], **options: Any) -> list[dict[str, Any]]:
    """Returns completions of one prompt or several: mappings with prompt, text, token_ids, log_probs,
    finish_reason.

    model: a folder or a hub id. options: n, max_tokens, temperature, top_p, seed, system,
    chat_template_options, engine, images (files that each prompt shows).
    """
    from rondo.trainers.commands.evaluate import generate as command

    check_options(command, options, "generate", given=2)
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    for number, prompt in enumerate(given):
        if not isinstance(prompt, str):
            raise ConfigError(f"prompts[{number}] must be a str, got {type(prompt).__name__} {prompt!r:.80}")
    return command(str(model), given, **options)


@short_errors
@checked
def evaluate(
    model: str | Path,
    data: Any = None,
    reward: Any = None,
    *,
    tools: Any = None,
    environment: Any = None,
    recipe: Recipes = (),
    config: Mapping[str, Any] = {},
    **settings: Any,
) -> EvaluationResult:
    """Returns scored answers of a model to prompts: `metrics`, and `samples` with text and reward.

    data, reward, tools, environment: as of `train`; default those of the recipe. Settings of
    `trainer.evaluation` say how often each prompt is answered.
    """
    from rondo.trainers.commands.evaluate import evaluate_model

    files = files_of(recipe)
    ours: dict[str, Any] = {"model.path": str(model), "model.config": None, "model.tokenizer": None}
    ours |= {"trainer.warm_start": None, **acted_in(tools, environment, config, settings)}
    given = merged({"trainer.total_steps": 1}, config, ours, settings)
    with tempfile.TemporaryDirectory(prefix="rondo-evaluate-") as folder:
        inputs = Inputs(Path(folder))
        if data is not None:
            given["data.eval"] = inputs.sources(data, "eval")
            if not files:  # nothing is trained, and no run begun; a configuration has both
                given = {"trainer.run_dir": folder, "data.train": given["data.eval"], **given}
        if reward is not None:
            given["reward.functions"] = functions_of(reward)
        return evaluate_model(load_recipe(files, settings=inputs.named(given)))
