"""A run that was made: what it measured, what it wrote, and its model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rondo.api.serving import Server

RECIPE = "recipe.yaml"  # what `rondo.train` was given, in the run folder


class Run:
    """A run folder, read when it is asked. path: the folder."""

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

    def samples(self, step: int | None = None) -> Any:
        """Returns the trajectories of a step (default: the last) as a pandas DataFrame, a row each."""
        import pyarrow.parquet as pq

        folder = self.path / "rollouts"
        files = sorted(folder.glob("step-*.parquet"))
        file = folder / f"step-{step:06d}.parquet" if step is not None else next(reversed(files), folder)
        if file not in files:
            which = "any step" if step is None else f"step {step}"
            raise DataError(f"{self.path}: has no rollouts of {which} (tracking.save_rollouts writes them)")
        _pandas()
        return pq.read_table(file).to_pandas()

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

    def export(
        self,
        path: str | Path,
        step: int | None = None,
        dtype: str | None = None,
        *,
        trust_code: bool = False,
    ) -> int:
        """Writes the model of a checkpoint (default: the newest) to a folder; returns its step. dtype: of the
        weights; default: as checkpoint.export_dtype says. trust_code: may run code that the run's config.yaml
        names (a tokenizer's).
        """
        from rondo.trainers.commands.export import export_checkpoint

        return export_checkpoint(str(self.path), str(path), step, dtype, trust_code=trust_code)

    def generate(self, prompts: str | Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """As `rondo.generate`, with the trained model."""
        from rondo.api.models import generate

        return generate(self.model, prompts, **options)

    def serve(self, **options: Any) -> Server:
        """As `rondo.serve`, with the trained model."""
        from rondo.api.serving import serve

        return serve(self.model, **options)

    def evaluate(self, data: Any = None, **settings: Any) -> Any:
        """As `rondo.evaluate`, with the trained model and the run's own settings; data: default data.eval."""
        from rondo.api.models import evaluate

        return evaluate(self.model, data, recipe=self.path / "config.yaml", **settings)

    def resume(self, steps: int | None = None, *, on_step: Any = None, **settings: Any) -> Run:
        """Goes on from the newest checkpoint, with more steps perhaps. Needs a run that Python has made."""
        from rondo.api.training import resumed

        return resumed(self, steps, on_step, settings)


def load(path: str | Path) -> Run:
    """Returns a run from its folder, whoever made it. Raises DataError."""
    return Run(path)


def has_begun(folder: Path) -> bool:
    """Says whether a folder is that of a run, were it only in its warm start."""
    return any((part / "config.yaml").is_file() for part in (folder, folder / "warm_start"))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("metrics as a table need pandas: pip install pandas") from error
    return pandas
