"""A trained model as a Hugging Face folder: of a run that ends, or of a checkpoint (`rondo export`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast, get_args

from rondo.checkpoint import Checkpoint, CheckpointStore, load_named
from rondo.config import Config, LocalBackendConfig
from rondo.config.schema.types import Dtype
from rondo.controller import WorkerGroup, start_cluster
from rondo.core.errors import CheckpointError, ConfigError, OtherRunError, did_you_mean
from rondo.models import is_function
from rondo.system.hub import Repository
from rondo.system.storage import cache_folder, replacing_folder, storing
from rondo.system.urls import Far, Place, place_of, spelled
from rondo.tracking import RunFolder
from rondo.trainers.commands.card import README, model_card, write_card
from rondo.trainers.commands.event_loop import run_loop
from rondo.trainers.loop import (
    changed_files,
    config_of,
    found_again,
    named_files,
    read_summary,
    refuse_changed,
)
from rondo.trainers.program import as_policy, complete_model, create_model, on_one_pool, open_tokenizer
from rondo.workers import ActorWorker

_log = logging.getLogger(__name__)


def with_model(config: Config, export: Path) -> Config:
    """Returns the configuration with the model and the tokenizer of an export folder."""
    model = dataclasses.replace(config.model, path=str(export), tokenizer=str(export))
    return dataclasses.replace(config, model=model)


async def export_model(actor: WorkerGroup, config: Config, folder: Path) -> str | None:
    """Writes the actor's model, and the tokenizer that the configuration names. Returns a line that says how
    the exported weights differ from the trained ones; None: not at all.
    """
    wanted, trained = config.checkpoint.export_dtype, config.actor.param_dtype
    with storing(folder):
        dtype = await actor.call(ActorWorker.export, str(folder), wanted)
        open_tokenizer(config).save_pretrained(folder)
    if dtype == trained:
        return None
    why = "checkpoint.export_dtype" if wanted else "as those of model.path"
    return (
        f"the exported weights are {dtype} ({why}), rounded from the {trained} that was trained; "
        f"checkpoint.export_dtype={trained} keeps them whole"
    )


def write_cards(run: RunFolder, config: Config, step: int, others: Sequence[str]) -> None:
    """Writes the cards of what a run has exported at its end. config: as its config.yaml has it. step: which
    the models are of. others: roles of `models` that have an export, too.
    """
    write_card(run.path, config, run.export_dir, step)
    for name in others:
        write_card(run.path, as_policy(name, config), run.exports_dir / name, step)


def export_checkpoint(
    run: str,
    output: str,
    step: int | None = None,
    dtype: str | None = None,
    *,
    model: str | None = None,
    trust_code: bool = False,
    note: Callable[[str], object] = _log.info,
) -> int:
    """Writes the actor of a checkpoint of `run` to `output` (a folder, or a URL) with its tokenizer; returns
    the step. dtype: of the weights, in place of the run's checkpoint.export_dtype. model: one of `models`
    that learnt, in place of the actor. trust_code: whether code that the run's configuration names may be
    run. note: is told where the weights are rounded.

    Raises CheckpointError when the run has no such checkpoint, ConfigError when `output` is in use, and for
    code that is not trusted, StorageError, before anything is loaded, when it cannot be made.
    """
    if output.startswith("hf://"):
        raise ConfigError(f"{output}: a hub takes a model whole: rondo push {run} {output[5:]}")
    folder, target = Path(run), place_of(output)
    if isinstance(target, Far):
        in_use = bool(target.files())
    else:
        in_use = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if in_use:
        raise ConfigError(f"{output}: exists and is not an empty folder; choose another place to export to")
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{run}: not a run folder (no config.yaml)")
    asked = config_of(folder)
    learners = [name for name, one in asked.models.items() if one.like == "actor"]
    if model is not None and model not in learners:
        raise ConfigError(
            f"{run}: no policy of `models` in its config.yaml is called {model}"
            f"{did_you_mean(model, learners)} There are: {', '.join(learners) or 'none'}"
        )
    code = _code_in(asked)
    if code and not trust_code:
        raise ConfigError(
            f"{run}: its config.yaml has code run for an export: {', '.join(code)}. If the run is yours, or "
            "you have read that code, say so: rondo export --trust-code, or trust_code=True in Python"
        )
    if dtype not in (None, *get_args(Dtype)):
        raise ConfigError(f"dtype {dtype!r}: choose {', '.join(get_args(Dtype))}")
    store = CheckpointStore(asked.checkpoint.path or folder / "checkpoints", keep=asked.checkpoint.keep)
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise CheckpointError(
            f"{run}: has no checkpoint; set checkpoint.every in the recipe, or use its export/ folder"
        )
    asked = _as_it_was(folder, store, checkpoint, model)
    config = on_one_pool(asked)
    if dtype is not None:
        kept = dataclasses.replace(config.checkpoint, export_dtype=cast(Dtype, dtype))
        config = dataclasses.replace(config, checkpoint=kept)
    if config.trainer.warm_start is not None:
        config = with_model(config, folder / "warm_start" / "export")
    cluster = dataclasses.replace(config.cluster, backend=LocalBackendConfig(), devices=1)
    config = complete_model(dataclasses.replace(config, cluster=cluster))
    if model is not None:
        config = as_policy(model, config)
    with _exporting_to(target) as part, store.way_out_named(checkpoint.step):
        rounded = run_loop(_export(config, checkpoint, part, model or "actor"), config.cluster.hang_seconds)
        with storing(part):
            write_card(folder, asked if model is None else as_policy(model, asked), part, checkpoint.step)
    if rounded is not None:
        note(rounded)
    return checkpoint.step


def _as_it_was(run: Path, store: CheckpointStore, checkpoint: Checkpoint, model: str | None) -> Config:
    """Returns the configuration of a run, with names of models that mean from here what they meant where it
    began. Raises OtherRunError where settings or tokenizer of the model are others by now.
    """
    with store.way_out_named(checkpoint.step):
        named = load_named(checkpoint)
    config = config_of(run, found_again(named))
    ours = {
        key: one for key, one in named.items() if key.startswith("model.") or key == f"models.{model}.path"
    }
    fixed, free = changed_files(ours, named_files(config), weights=False)  # they come from the checkpoint
    remedy = "or use the run's export/ folder: this would be another model"
    refuse_changed(fixed if model is None else [*fixed, *free], remedy)
    return config


def push(
    run: str,
    name: str,
    step: int | None = None,
    dtype: str | None = None,
    *,
    private: bool = True,
    replace: bool = False,
    model: str | None = None,
    trust_code: bool = False,
    note: Callable[[str], object] = _log.info,
) -> tuple[str, int | None]:
    """Sends the model of a run to the repository `name` (OWNER/NAME) of Hugging Face. Returns its URL, and
    the step where it was of a checkpoint.

    It is what the run has exported at its end; before that, or with a step or dtype, what
    `export_checkpoint` writes, whose arguments these are. private, replace: see `Repository`, which says
    what it raises; the hub is asked before anything is loaded.
    """
    repository = Repository(name, private=private, replace=replace)
    ready = Path(run) / ("export" if model is None else f"exports/{model}")
    message = f"Model of {Path(run).resolve().name}, trained with rondo"
    finished = (ready / "config.json").is_file() and (Path(run) / "summary.json").is_file()
    if step is None and dtype is None and finished:
        besides = {} if (ready / README).is_file() else {README: _late_card(Path(run), ready, model).encode()}
        return repository.take(ready, message, besides), None
    with TemporaryDirectory(prefix="export-", dir=cache_folder()) as part:
        target = Path(part) / "model"
        step = export_checkpoint(run, str(target), step, dtype, model=model, trust_code=trust_code, note=note)
        return repository.take(target, message), step


def _late_card(run: Path, export: Path, model: str | None) -> str:
    """Returns the card of what an older rondo has exported without one."""
    config, summary = config_of(run), read_summary(run / "summary.json")
    step = (summary["best"] or summary)["step" if summary["best"] else "steps"]
    return model_card(run, config if model is None else as_policy(model, config), export, step)


def _code_in(config: Config) -> list[str]:
    """Returns the settings of a run by which an export would run code that is not rondo's."""
    tokenizer = config.model.tokenizer or ""
    found = ["model.trust_remote_code=true"] if config.model.trust_remote_code else []
    if is_function(tokenizer) and not tokenizer.startswith("rondo."):
        found.append(f"model.tokenizer={tokenizer}")
    return found


@contextmanager
def _exporting_to(target: Place) -> Iterator[Path]:
    """Gives a new folder on this machine, and has `target` be it at the end. At a URL config.json, without
    which it is no model, comes last.
    """
    if isinstance(target, Path):
        with replacing_folder(target) as part:
            yield part
        return
    target.check_writable()
    with TemporaryDirectory(prefix="export-", dir=cache_folder()) as part:
        yield Path(part)
        target.upload(Path(part), last="config.json")


async def _export(config: Config, checkpoint: Checkpoint, target: Path, role: str) -> str | None:
    """role: whose folder of the checkpoint it is."""
    files = checkpoint.files_in(role)
    if not files:
        raise OtherRunError(f"{checkpoint.path}: has nothing of {role}, which the program had not made")
    async with await start_cluster(config.cluster) as cluster:
        policy = await create_model(cluster, "actor", config)
        await policy.call(ActorWorker.load, spelled(checkpoint.path / role), files)
        return await export_model(policy, config, target)
