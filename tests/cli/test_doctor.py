"""`rondo doctor`: what is there, what is not and why, for people and for programs."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from rondo.cli import doctor
from rondo.cli.main import main


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
