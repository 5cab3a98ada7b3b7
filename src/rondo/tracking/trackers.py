"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, SwanLab, trackio, Prometheus.

A tracker is a class whose constructor takes a TrackerContext and, keyword only, its options. Each
third-party library is imported by the class that speaks to it, when it is made. Another tracker is
`path.py:ClassName` in the config.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import io
import json
import math
import numbers
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from rondo.config.functions import called_with, check_options, resolve_function
from rondo.config.schema import FunctionConfig, TrackingConfig
from rondo.core.errors import ConfigError, TrainError, about
from rondo.core.masking import masked_urls
from rondo.system.border import users_code
from rondo.system.names import offered
from rondo.system.prometheus import family
from rondo.system.storage import storing, write_atomic
from rondo.tracking.pictures import Picture, pixels
from rondo.tracking.run_folder import RunFolder
from rondo.tracking.shown import Sample

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class TrackerContext:
    """The facts about a run that every tracker gets."""

    folder: RunFolder
    """The folder of the run."""
    project: str
    """The project that the run belongs to."""
    run_name: str
    """The name of the run."""
    config: Mapping[str, Any]
    """The resolved configuration, nested, spelt as in a recipe; secrets are masked."""
    warn: Callable[[str], None]
    """Called with a message when a remote service fails; the run goes on, metrics.jsonl has everything."""
    algorithm: str = ""
    """What the run trains by."""


class Tracker(Protocol):
    """A place that metrics go to. `where` is a URL or folder to show to the user."""

    where: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes finite numbers of one step. Steps ascend; a step may be logged in several calls."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Takes a few trajectories as text, and their images as PNG (`Sample.images`)."""

    def finish(self, status: Status) -> None:
        """Flushes and closes."""


class TensorBoard:
    """Event files in trackers/tensorboard, or in log_dir.

    On resume, what was logged beyond the checkpoint is hidden.
    """

    def __init__(
        self, context: TrackerContext, *, log_dir: str | None = None, flush_seconds: int = 30
    ) -> None:
        _require("tensorboard", "tensorboard")
        writer = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.where = log_dir or str(context.folder.trackers_dir("tensorboard"))
        resumed = context.folder.resume_step
        purge = None if resumed is None else resumed + 1
        self._writer: Any = writer(self.where, purge_step=purge, flush_secs=flush_seconds)
        self._writer.add_text("config", _as_code(context.config), resumed or 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples):
            self._writer.add_text(f"samples/{number}", _as_code(_as_text(sample)), step)
            for which, picture in _drawable(sample):
                name = f"samples/{number}/image {which}"
                self._writer.add_image(name, pixels(picture), step, dataformats="HWC")

    def finish(self, status: Status) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Local files lie in trackers/wandb; a resumed run goes on under its old id."""

    def __init__(
        self,
        context: TrackerContext,
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
    ) -> None:
        self._wandb = _require("wandb", "wandb")
        folder = context.folder.trackers_dir("wandb")
        run_id = _remembered_id(context, "wandb", _short_id)
        try:
            self._run: Any = self._wandb.init(
                project=context.project,
                name=context.run_name,
                config=dict(context.config),
                dir=str(folder),
                id=run_id,
                resume="allow",
                mode=mode,
                entity=entity,
                group=group,
                tags=list(tags),
                notes=notes,
                reinit="create_new",
                settings=self._wandb.Settings(silent=True, console="off"),
            )
        except self._wandb.errors.Error as error:
            remedy = "Log in (`wandb login`), or set the tracker's option mode: offline"
            raise ConfigError(f"tracking.trackers: wandb did not start: {error}. {remedy}") from error
        self.where = str(folder if self._run.offline else self._run.url or folder)
        # wandb refuses steps that go back, which a resume does; so the step is an ordinary column and the x
        # axis
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = _table(step, samples, self._wandb.Image)
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=rows)})

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Mlflow:
    """MLflow. tracking_uri: default $MLFLOW_TRACKING_URI, else an SQLite file in trackers/mlflow."""

    def __init__(
        self,
        context: TrackerContext,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        mlflow = _require("mlflow", "mlflow")
        self._entities = mlflow.entities
        self._image = mlflow.Image
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        self._warn = lambda said: context.warn(masked_urls(said))  # an error may name the server with its key
        folder = context.folder.trackers_dir("mlflow").resolve()
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        artifacts = (folder / "artifacts").as_uri() if uri.startswith("sqlite") else None
        self.where = masked_urls(uri)
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
            self._run_id = self._start(context, experiment or context.project, artifacts, dict(tags or {}))
        except (self._error, ImportError) as error:  # mlflow-skinny has no database and needs a server
            remedy = (
                "Check the tracker's option tracking_uri, or install the whole package (pip install mlflow)"
            )
            raise ConfigError(
                f"tracking.trackers: mlflow did not start at {uri}: {error}. {remedy}"
            ) from error

    def _start(
        self, context: TrackerContext, experiment: str, artifacts: str | None, tags: dict[str, str]
    ) -> str:
        known = self._client.get_experiment_by_name(experiment)
        parent = (
            known.experiment_id
            if known
            else self._client.create_experiment(experiment, artifact_location=artifacts)
        )

        def create() -> str:
            return str(self._client.create_run(parent, run_name=context.run_name, tags=tags).info.run_id)

        run_id = _remembered_id(context, "mlflow", create)
        self._client.update_run(run_id, status="RUNNING")
        self._client.log_dict(run_id, dict(context.config), "config.json")
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._entities.Metric(_mlflow_name(n), v, now, step) for n, v in metrics.items()]
        with self._warning(f"the metrics of step {step} were not stored"):
            for start in range(0, len(rows), 1000):  # the most that MLflow takes in one request
                self._client.log_batch(self._run_id, metrics=rows[start : start + 1000])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = _table(step, samples, self._image)
        table = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        for name in columns:
            if name.startswith("image "):  # MLflow takes nothing else in such a column: a white point, then
                table[name] = [self._image([[[255, 255, 255]]]) if x is None else x for x in table[name]]
        with self._warning(f"the samples of step {step} were not stored"):
            self._client.log_table(self._run_id, table, f"samples/step-{step:06d}.json")

    def finish(self, status: Status) -> None:
        words = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
        with self._warning("the run was not closed"):
            self._client.set_terminated(self._run_id, words[status])

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Makes a fault of the server inside a warning."""
        try:
            yield
        except self._error as error:
            self._warn(f"mlflow: {what}: {error}")


class Swanlab:
    """SwanLab. Local files lie in trackers/swanlab. mode `local` also needs its dashboard: pip install
    swanlab[dashboard]."""

    def __init__(
        self,
        context: TrackerContext,
        *,
        mode: Literal["online", "offline", "local", "disabled"] = "online",
        workspace: str | None = None,
        description: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._swanlab = _require("swanlab", "swanlab")
        if mode == "local":
            _require("swanboard", "swanlab")
        folder = context.folder.trackers_dir("swanlab")
        self._run: Any = self._swanlab.init(
            project=context.project,
            name=context.run_name,
            config=dict(context.config),
            log_dir=str(folder),
            mode=mode,
            workspace=workspace,
            description=description,
            tags=list(tags) or None,
            id=_remembered_id(context, "swanlab", _short_id),
            resume="allow" if mode == "online" else None,
        )
        self.where = str((mode == "online" and self._run.url) or folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = _table(step, samples)
        table = self._swanlab.echarts.Table().add(columns, rows)
        images = {
            f"samples/{number}/image {which}": self._swanlab.Image(pixels(picture))
            for number, sample in enumerate(samples)
            for which, picture in _drawable(sample)
        }
        self._run.log({"samples": table, **images}, step=step)

    def finish(self, status: Status) -> None:
        words = {"finished": "success", "failed": "crashed", "stopped": "aborted"}
        self._swanlab.finish(state=words[status], error=None if status == "finished" else status)


class Trackio:
    """trackio. Its files lie where its dashboard looks for them: in $TRACKIO_DIR, else in Hugging Face's
    cache. Nothing leaves this machine but to a Space that space_id or $TRACKIO_SPACE_ID names.
    """

    def __init__(
        self,
        context: TrackerContext,
        *,
        space_id: str | None = None,
        private: bool = True,
        group: str | None = None,
    ) -> None:
        self._trackio = _require("trackio", "trackio")
        far = space_id or os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        # trackio ends the run that it finds in its context, the user's own perhaps, and once more at exit.
        with redirect_stdout(io.StringIO()), nullcontext() if far else _without_hub():
            self._run: Any = contextvars.copy_context().run(
                self._trackio.init,
                project=context.project,
                name=context.run_name,
                config=dict(context.config),
                resume="allow" if context.folder.resuming else "never",
                space_id=space_id,
                private=private,
                group=group,
                embed=False,  # no dashboard is started, in a notebook either
            )
        self.where = masked_urls(far or str(self._trackio.utils.TRACKIO_DIR))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = _table(step, samples, self._trackio.Image)
        self._run.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, status: Status) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


class Prometheus:
    """A file that node_exporter's textfile collector reads, with the newest number of each metric. A run
    opens no port for it: on a cluster, nobody has to know where the run is.

    directory: the collector's; default: trackers/prometheus.
    """

    def __init__(self, context: TrackerContext, *, directory: str | None = None) -> None:
        folder = context.folder.trackers_dir("prometheus") if directory is None else Path(directory)
        if not folder.is_dir():  # made here, it would be one that nobody reads
            remedy = "Name the one that node_exporter has as --collector.textfile.directory"
            raise ConfigError(f"tracking.trackers: prometheus: there is no folder {directory}. {remedy}")
        self._path = folder / f"rondo-{re.sub(r'[^-.0-9A-Za-z]', '_', context.run_name)}.prom"
        self.where = str(self._path)
        self._labels = {"run": context.run_name, "algorithm": context.algorithm}
        self._warn = context.warn
        # By its name there, a metric's name here, which is said of it, and the newest number.
        self._newest: dict[str, tuple[str, float]] = {"run_status": ("the state", 0)}
        self._left_out: set[str] = set()
        self._write("running")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._newest["step"] = "the step", step
        self._newest["step_timestamp_seconds"] = "the clock, in Unix time", time.time()
        for name, value in metrics.items():
            there = _prometheus_name(name)
            known, _ = self._newest.get(there, (name, value))
            if known == name:
                self._newest[there] = name, value
            elif name not in self._left_out:
                self._left_out.add(name)
                self._warn(f"prometheus: {name} is left out: it would be rondo_{there}, as {known} is")
        self._write("running")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Does nothing: Prometheus has numbers only."""

    def finish(self, status: Status) -> None:
        self._write(status)

    def _write(self, status: str) -> None:
        states = [
            (self._labels | {"status": state}, int(state == status))
            for state in ("running", *get_args(Status))
        ]
        lines = family("run_status", "gauge", "1: the run is in this state.", states)
        for there, (name, value) in sorted(self._newest.items()):
            if there == "run_status":
                continue
            lines += family(there, "gauge", f"The newest value of {name}.", [(self._labels, value)])
        write_atomic(self._path, "\n".join([*lines, ""]))


class _UsersTracker:
    """A tracker that a recipe names by file or module; what it raises says so. who: that key and name."""

    def __init__(self, who: str, tracker: Tracker) -> None:
        self._who = who
        self._tracker = tracker
        self.where = getattr(tracker, "where", "")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with users_code(f"{self._who}.log", TrainError):
            self._tracker.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        with users_code(f"{self._who}.log_samples", TrainError):
            self._tracker.log_samples(step, samples)

    def finish(self, status: Status) -> None:
        with users_code(f"{self._who}.finish", TrainError):
            self._tracker.finish(status)


BUILT_IN: Mapping[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "swanlab": Swanlab,
    "trackio": Trackio,
    "prometheus": Prometheus,
}


def metric_names(config: FunctionConfig | None) -> Callable[[Mapping[str, float]], dict[str, float]]:
    """Returns the function that `tracking.metric_names` names, as trackers use it: from a step's numbers to
    theirs. What it raises, or returns that are no numbers by name, is a TrainError.
    """
    if config is None:
        return dict
    who, function = f"tracking.metric_names: {config.name}", _naming(config)

    def named(metrics: Mapping[str, float]) -> dict[str, float]:
        with users_code(who, TrainError):
            found = dict(function(metrics))
        for name, value in found.items():
            if not isinstance(name, str) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise TrainError(
                    f"{who} returned {name!r}: {value!r}; it is to return a finite number for each name"
                )
        return {name: float(value) for name, value in found.items()}

    return named


def _naming(config: FunctionConfig) -> Callable[[Mapping[str, float]], Mapping[str, float]]:
    where = "tracking.metric_names"
    with about(where):
        function = resolve_function(config.name, offered("metric_names"))
        check_options(function, config.options, where, given=1)
    return functools.partial(function, **called_with(config.options, where))


def make_trackers(configs: Sequence[FunctionConfig], context: TrackerContext) -> list[Tracker]:
    """Starts the trackers that `tracking.trackers` names.

    Raises ConfigError for an unknown tracker or option (with the nearest name), or a missing package (with
    the pip line).
    """
    _check_trackers(configs)
    made: list[Tracker] = []
    try:
        for number, entry in enumerate(configs):
            make, where = resolve_function(entry.name, BUILT_IN), f"tracking.trackers.{number}"
            options = called_with(entry.options, where)
            if entry.name in BUILT_IN:
                made.append(make(context, **options))
                continue
            who = f"{where}: {entry.name}"
            with users_code(who, ConfigError):
                theirs = make(context, **options)
            made.append(_UsersTracker(who, theirs))
    except BaseException:
        for tracker in reversed(made):
            tracker.finish("failed")
        raise
    return made


def check_trackers(config: TrackingConfig) -> None:
    """Raises ConfigError for what does not exist of trackers and metric_names; starts nothing."""
    if config.metric_names is not None:
        _naming(config.metric_names)
    _check_trackers(config.trackers)


def _check_trackers(configs: Sequence[FunctionConfig]) -> None:
    """Raises ConfigError for a name or an option that does not exist, or a package that is not installed;
    starts nothing and imports no tracker's library.
    """
    for number, entry in enumerate(configs):
        where = f"tracking.trackers.{number}"
        with about(where):
            check_options(resolve_function(entry.name, BUILT_IN), entry.options, where, given=1)
            is_theirs = entry.name in BUILT_IN and entry.name != "prometheus"  # of a package of that name
            if is_theirs and entry.name not in sys.modules and find_spec(entry.name) is None:
                raise ConfigError(_not_installed(entry.name, f"No module named '{entry.name}'"))


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(_not_installed(extra, str(error))) from error


def _not_installed(extra: str, error: str) -> str:
    message = f"tracking.trackers: {extra!r} needs a package that is not installed ({error})"
    return f'{message}. Install it: pip install "rondo-rl[{extra}]", or leave it out of tracking.trackers'


def _remembered_id(context: TrackerContext, name: str, create: Callable[[], str]) -> str:
    """Returns the service's id of this run: kept in trackers/<name>/run_id, used again only when the run is
    resumed.
    """
    path = context.folder.trackers_dir(name) / "run_id"
    if context.folder.resuming and path.exists():
        with storing(path, "read"):
            known = path.read_text(encoding="utf-8", errors="replace").strip()
        if known:
            return known
    run_id = create()
    write_atomic(path, run_id + "\n")
    return run_id


def _short_id() -> str:
    return os.urandom(6).hex()


def _mlflow_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)


def _prometheus_name(name: str) -> str:
    """Returns a name of Prometheus, with the unit in full."""
    plain = re.sub(r"[^0-9A-Za-z]+", "_", name)
    return re.sub(r"_per_s$", "_per_second", re.sub(r"(?<!_per)_s$", "_seconds", plain))


def _as_text(sample: Sample) -> dict[str, Any]:
    """Returns what a sample is in text: of its images a line each."""
    said = {name: value for name, value in vars(sample).items() if name != "images"}
    lines = [picture.line(number) for number, picture in enumerate(sample.images, 1)]
    return {**said, "images": lines} if lines else said


def _table(
    step: int, samples: Sequence[Sample], image: Callable[[Any], Any] | None = None
) -> tuple[list[str], list[list[Any]]]:
    """Returns samples as columns and rows.

    image: makes of an image's pixels what a cell holds: there is a column for the first of each prompt, and
    so on. None: cells hold no images.
    """
    cells = []
    for sample in samples:
        row = {"step": step, **_as_text(sample)}
        if "images" in row:
            row["images"] = "\n".join(row["images"])
        if image is not None:
            row |= {f"image {which}": image(pixels(picture)) for which, picture in _drawable(sample)}
        cells.append(row)
    columns = list(dict.fromkeys(name for row in cells for name in row))  # not all have images
    return columns, [[row.get(name) for name in columns] for row in cells]


@contextmanager
def _without_hub() -> Iterator[None]:
    """Keeps trackio, as it starts, from asking Hugging Face whose token this machine has."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    was, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was


def _drawable(sample: Sample) -> Iterator[tuple[int, Picture]]:
    """Yields the images that were looked at, each with its number, from 1."""
    return ((number, picture) for number, picture in enumerate(sample.images, 1) if picture.png)


def _as_code(value: Mapping[str, Any]) -> str:
    """Puts a text into a Markdown code block, so that a model's text cannot be taken for markup."""
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return "\n".join("    " + line for line in text.splitlines())
