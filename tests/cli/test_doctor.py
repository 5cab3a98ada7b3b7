"""`rondo doctor`: what is there, what is not and why, for people and for programs."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from rondo import __version__
from rondo.checkpoint import CheckpointStore
from rondo.cli import doctor
from rondo.cli.main import main
from rondo.config.schema import FrozenEngineConfig
from rondo.models import ModelSource
from rondo.system import names
from rondo.training import ModelSpec, make_engine
from tests.training.conftest import mesh  # noqa: F401 (a fixture)
from tests.training.helpers import ARCHITECTURES


def findings() -> dict[tuple[str, str], doctor.Finding]:
    return {(finding.section, finding.what): finding for finding in doctor.examine()}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Distributions in this set are not installed."""
    missing: set[str] = set()
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    return missing


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        "torch",
        "native",
        "vllm",
        "sglang",
        "local",
        "ray",
        "tensorboard",
        "sdpa",
        "flash-attn",
        "C compiler",
    ):
        assert word in text
    assert '"rondo-rl[swanlab]"' in text or "swanlab           │ yes" in text  # brackets are no markup


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found[0]) == {"section", "what", "state", "detail", "remedy"}
    torch = next(finding for finding in found if finding["what"] == "torch")
    assert torch["detail"] == importlib.metadata.version("torch")
    sections = list(dict.fromkeys(finding["section"] for finding in found))
    assert sections == ["core", "machine", "engines", "backends", "attention", "trackers", "extras"]


def test_what_is_missing_has_a_remedy(without: set[str]) -> None:
    without |= {"ray", "wandb", "math-verify"}
    found = findings()
    assert found["backends", "ray"] == doctor.Finding(
        "backends", "ray", "no", "not installed", 'pip install "rondo-rl[ray]"'
    )
    assert found["trackers", "wandb"].remedy == 'pip install "rondo-rl[wandb]"'
    assert found["extras", "math-verify"].remedy == 'pip install "rondo-rl[math]"'
    assert found["engines", "vllm"].state == "no"


def test_not_usable_without_the_core(without: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    without.add("transformers")
    assert findings()["engines", "native"].detail == "needs transformers"
    assert main(["doctor"]) == 1


def test_old_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST", {"torch": (99, 1)})
    finding = findings()["core", "torch"]
    assert finding.state == "no"
    assert finding.detail.endswith("is older than 99.1")
    assert finding.remedy == 'pip install "torch>=99.1"'


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    finding = findings()["machine", "C compiler"]
    assert (finding.state, finding.detail) == ("no", "no cc, gcc or clang on the path")
    assert "twice as fast" in finding.remedy


def test_other_packages_and_their_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each what it offers, and in one row all that is wrong for one reason; nothing is imported."""

    def install(name: str, entry_points: str, requires: str = "rondo-rl") -> None:
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n")
        (info / "entry_points.txt").write_text(entry_points)

    world = "[rondo.environments]\ncoins = nowhere:Coins\n"
    install("rondo-coins", f"{world}dice = nowhere:Dice\n[rondo.tools]\nflip = nowhere:flip\n")
    install("rondo-mint", f"{world}bandit = nowhere:Bandit\n[rondo.commands]\ntrain = nowhere\n")
    install(
        "rondo-new", "[rondo.rewards]\nnew = nowhere:new\n[rondo.tools]\nold = nowhere:old", "rondo-rl>=99"
    )
    install("rondo-torn", "[rondo.tools]\nflip")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for read in (names.offered, names._others):
        read.cache_clear()
    try:
        found = [finding for finding in doctor.examine() if finding.section == "packages"]
        assert main(["doctor"]) == 0
    finally:
        for read in (names.offered, names._others):
            read.cache_clear()
    assert [(one.what, one.state, one.detail, one.remedy) for one in found] == [
        ("rondo-coins 1.0", "ok", "environment dice, tool flip", ""),
        (
            "rondo-coins 1.0 and rondo-mint 1.0",
            "no",
            "environment coins: both offer this name",
            "write nowhere:Coins or nowhere:Coins instead",
        ),
        (
            "rondo-mint 1.0",
            "no",
            "command train: rondo has this name, and its own is meant",
            "rename it there",
        ),
        (
            "rondo-mint 1.0",
            "no",
            "environment bandit: rondo has this name, and its own is meant",
            "write nowhere:Bandit for this one",
        ),
        (
            "rondo-new 1.0",
            "no",
            f"reward function new, tool old: it was made for rondo-rl>=99, and this is {__version__}",
            "update one of them",
        ),
        (
            "rondo-torn 1.0",
            "no",
            "its entry_points.txt cannot be read: "
            "Source contains parsing errors: '<string>' [line 2]: 'flip'",
            "install another version of it",
        ),
    ]
    assert "environment dice, tool flip" in capsys.readouterr().out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def saved_run(
    tmp_path: Path,
    mesh: Any,  # noqa: F811
) -> Path:
    """The checkpoints of steps 1 to 3, and an export."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        with store.writing(step) as draft:
            draft.write("controller.json", b"{}")
            draft.write("actor/rank-0.bin", bytes(5_000_000))
    source = ModelSource(config={**ARCHITECTURES["qwen3"], "tie_word_embeddings": False})
    make_engine(ModelSpec(source, FrozenEngineConfig()), mesh=mesh).export(str(tmp_path / "export"))
    return tmp_path


def test_a_run_that_is_whole(saved_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(saved_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [f"{saved_run}/checkpoints/step-0000000{step}: ok, 2 files of 5.0 MB" for step in (1, 2, 3)]
    assert lines[:3] == steps
    assert lines[3].startswith(f"{saved_run}/export: ok, 1 files of 0.")
    assert len(lines) == 4


def test_each_damaged_file_of_a_run_is_named(saved_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, export = saved_run / "checkpoints", saved_run / "export" / "model.safetensors"
    flip(checkpoints / "step-00000001" / "manifest.json")
    flip(checkpoints / "step-00000003" / "actor" / "rank-0.bin")
    (checkpoints / "step-00000003" / "controller.json").unlink()
    with safe_open(export, "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").numpy().tobytes()
    content = bytearray(export.read_bytes())
    at = content.index(embedding)
    content[at] ^= 1
    export.write_bytes(content)
    assert main(["doctor", str(saved_run), "--json"]) == 1
    first, second, third, exported = json.loads(capsys.readouterr().out)["saved"]
    assert first["faults"][0].startswith(f"{checkpoints}/step-00000001/manifest.json: damaged")
    assert (second["faults"], second["remedy"]) == ([], "")
    assert third["faults"] == [
        f"{checkpoints}/step-00000003/actor/rank-0.bin: damaged: bytes 0 to 5000000 do not have the "
        "checksum that the manifest lists",
        f"{checkpoints}/step-00000003/controller.json: missing",
    ]
    assert third["remedy"].startswith("The checkpoint of step 2 is valid. To go on from it: `mv ")
    end = at + len(embedding)
    assert exported["faults"] == [
        f"{export}: damaged: bytes {at} to {end} (tensor model.embed_tokens.weight) do not have the checksum "
        "that the manifest lists"
    ]
    assert "rondo export" in exported["remedy"]


def test_a_folder_without_anything_saved_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no checkpoint, no export and no metrics" in capsys.readouterr().err


TABLE = """
from rondo.cli.doctor import Finding, _print_tables
_print_tables([Finding("core", "python", "ok", "word " * 60)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "width"), [(80, 80), (None, 120)])
def test_a_piped_table_is_as_wide_as_the_terminal_that_it_ends_on(columns: int | None, width: int) -> None:
    """`rondo doctor | head` on a terminal of 80 columns; 120 where there is no terminal at all."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    keyboard, terminal = os.openpty()
    if columns is not None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    shown = subprocess.run(
        [sys.executable, "-c", TABLE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal if columns is not None else subprocess.DEVNULL,
        env=environment,
        text=True,
        timeout=120,
        check=True,
    )
    os.close(keyboard)
    os.close(terminal)
    assert max(map(len, shown.stdout.splitlines())) == width
