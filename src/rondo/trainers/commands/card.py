"""The model card of an export: README.md, as hubs show it, made from the run. What is not known is left out,
and paths of this machine are.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rondo.config import Config
from rondo.config.printing import plain
from rondo.config.schema.data import HuggingfaceSourceConfig
from rondo.core.masking import masked_urls
from rondo.data import source_name
from rondo.models.carried import BASE_README, README
from rondo.models.files import json_object
from rondo.models.value_head import FILE as VALUE_HEAD_FILE
from rondo.system.hub import is_from_hub
from rondo.system.storage import write_atomic
from rondo.tracking.metrics import each_metrics, versions
from rondo.trainers.loop import read_summary
from rondo.trainers.loop.evaluation import numbers_of, table_of

CURVES = "curves.png"
_FRONT = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
_PYTHON = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "."  # this folder, or its name on the hub
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
PROMPT
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```"""
_CHAT = """\
messages = [{"role": "user", "content": "How many?"}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"OPTIONS
)"""
_TEXT = 'prompt = tokenizer("How many?", return_tensors="pt")'
_OF_BASE = (
    "license",
    "license_name",
    "license_link",
    "language",
)  # what holds of a model that was made of it


def write_card(run: Path, config: Config, export: Path, step: int) -> None:
    """Writes README.md, and the run's curves beside it, into an export of the run's `step`. config: as the
    run's config.yaml has it. Raises StorageError.
    """
    curves = run / CURVES
    if curves.is_file():
        shutil.copyfile(curves, export / CURVES)
    write_atomic(export / README, model_card(run, config, export, step))


def model_card(run: Path, config: Config, export: Path, step: int) -> str:
    """Returns the card of an export folder, in Markdown with YAML front matter; the same run and export have
    the same one.
    """
    summary = read_summary(run / "summary.json") if (run / "summary.json").is_file() else {}
    algorithm = summary.get("algorithm")
    front = _front(config, export, algorithm)
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    parts = [f"---\n{head}---\n\n# {run.resolve().name}", _origin(config, front, export)]
    parts.append("## Training\n\n" + "\n".join(_training(config, summary, algorithm, step)))
    table = _evaluation(run, step)
    if table:
        parts.append(f"## Evaluation\n\n{table}")
    if (export / CURVES).is_file():
        parts.append(f"![Metrics of the run, by step]({CURVES})")
    parts.append(f"## Use\n\n{_use(config, export)}")
    return "\n\n".join(parts) + "\n"


def _front(config: Config, export: Path, algorithm: str | None) -> dict[str, Any]:
    """Returns what hubs read of a card. base_model: where the model came from that hub; of a base that was a
    run's export, that one's.
    """
    base, path = front_matter(export / BASE_README), config.model.path
    front: dict[str, Any] = {"library_name": "transformers"}
    if path is not None and config.model.hub == "huggingface" and is_from_hub(path):
        front["base_model"] = path
    elif "rondo" in (base.get("tags") or ()) and "base_model" in base:
        front["base_model"] = base["base_model"]
    if not (export / VALUE_HEAD_FILE).is_file():
        front["pipeline_tag"] = "image-text-to-text" if _sees(export) else "text-generation"
    front |= {key: base[key] for key in _OF_BASE if key in base}
    names = (s.path for s in config.data.train if isinstance(s, HuggingfaceSourceConfig))
    datasets = [name for name in dict.fromkeys(names) if not Path(name).expanduser().exists()]
    if datasets:
        front["datasets"] = datasets
    slug = re.sub(r"\W+", "-", algorithm or "").strip("-")
    return front | {"tags": ["rondo", *([slug] if slug else [])]}


def front_matter(readme: Path) -> dict[str, Any]:
    """Returns the YAML at the head of a card; nothing where there is none that can be read."""
    found = _FRONT.match(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
    try:
        said = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:  # somebody else's file
        return {}
    return said if isinstance(said, dict) else {}


def _sees(export: Path) -> bool:
    return "vision_config" in json_object(export / "config.json")


def _origin(config: Config, front: Mapping[str, Any], export: Path) -> str:
    """Returns the sentences on what the model was made of."""
    if "base_model" in front:
        made = f"`{front['base_model']}`, trained with rondo."
    elif config.model.path is not None:
        made = f"`{Path(masked_urls(config.model.path)).name}`, trained with rondo."
    else:
        made = "A model with new weights, trained with rondo."
    if (export / BASE_README).is_file():
        made += f" The card of what it was trained from is [{BASE_README}]({BASE_README})."
    return made


def _training(config: Config, summary: Mapping[str, Any], algorithm: str | None, step: int) -> Iterator[str]:
    """Yields the rows of a table: what the model was trained with."""
    actor, data = config.actor, config.data
    found = summary.get("versions") or versions()
    rows = {
        "algorithm": algorithm,
        "steps": step,
        "data": ", ".join(_data_name(source) for source in data.train),
        "warm start": config.trainer.warm_start and Path(config.trainer.warm_start).stem,
        "batch size": data.batch_size,
        "learning rate": f"{actor.optimizer.lr:g}",
        "LoRA": actor.lora and f"rank {actor.lora.rank}",
        "seed": config.trainer.seed,
        "versions": ", ".join(
            f"{name} {found[name]}" for name in ("rondo", "torch", "transformers") if name in found
        ),
    }
    yield "| | |\n|---|---|"
    for name, value in rows.items():
        if value not in (None, ""):
            yield f"| {name} | {_cell(value)} |"


def _data_name(source: Any) -> str:
    """Returns what a source is called: by a hub, or by the recipe."""
    on_hub = isinstance(source, HuggingfaceSourceConfig) and not Path(source.path).expanduser().exists()
    return str(source.path) if on_hub else source_name(source)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _evaluation(run: Path, step: int) -> str:
    """Returns a table of the evaluations before training and at `step`; empty: there was none then."""
    found: dict[int, dict[str, float]] = {}
    if (run / "metrics.jsonl").is_file():
        for line in each_metrics(run):
            if line["step"] in (0, step):
                found.setdefault(line["step"], {}).update(numbers_of(line))
    before, after = ({**table_of(at), **_losses(at)} for at in (found.get(0, {}), found.get(step, {})))
    if not after:
        return ""
    rows = [f"| {name} | {_number(before.get(name))} | {_number(value)} |" for name, value in after.items()]
    return "\n".join(["| on held-out data | before | after |", "|---|---|---|", *rows])


def _losses(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the losses and accuracies of supervised runs, in words."""
    return {
        name.replace("/", " "): value for name, value in metrics.items() if name.startswith(("sft/", "pair/"))
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _use(config: Config, export: Path) -> str:
    if (export / VALUE_HEAD_FILE).is_file():
        return (
            "A reward model: its trunk in the files of transformers, its head in "
            f"`{VALUE_HEAD_FILE}`. In a recipe of rondo:\n\n"
            "```yaml\nreward:\n  models: [{path: PATH}]   # of this folder\n```"
        )
    if _sees(export):
        return "```bash\nrondo serve PATH   # of this folder, or its name on the hub\n```"
    if not (export / "chat_template.jinja").is_file():
        return _PYTHON.replace("PROMPT", _TEXT)
    options = plain(config.model.chat_template_options)
    said = "".join(f",\n    {name}={value!r}" for name, value in options.items())
    return _PYTHON.replace("PROMPT", _CHAT.replace("OPTIONS", said))
