"""`rondo init`: a folder with a recipe, a reward and data that trains as it is."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from rondo import recipes
from rondo.core.errors import ConfigError

HELP = "make a folder with recipe, reward, data and README that trains, to start one's own from"
ROWS = {"train": 512, "eval": 64}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser("init", help=HELP, description=HELP)
    parser.add_argument("folder", metavar="NAME", help="folder to make; must not exist or be empty")


def run(args: argparse.Namespace) -> int:
    """Makes the folder, and says how to go on."""
    from rondo.recipes.quickstart import eval_rows, train_rows

    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".rondo-init-") as made:  # whole, or not there
        new = Path(made) / "new"
        project = Path(recipes.__path__[0]) / "project"
        shutil.copytree(project, new, ignore=shutil.ignore_patterns("__pycache__"))
        (new / "data").mkdir()
        for name, rows in (("train", train_rows(size=ROWS["train"])), ("eval", eval_rows(size=ROWS["eval"]))):
            lines = (json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) for row in rows)
            (new / "data" / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        new.replace(folder)
    print(f"made {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next:  cd {folder} && rondo train recipe.yaml")
    return 0
