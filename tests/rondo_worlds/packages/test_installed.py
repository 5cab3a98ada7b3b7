"""What the other tests of this folder rest on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.installed import needs, needs_programs
from tests.messages import full_text

PACKAGES = ("alfworld", "minigrid", "miniwob", "openenv", "textarena", "textworld", "verifiers")


def test_no_package_is_imported_before_an_environment_needs_it() -> None:
    """Not even by the modules of all environments."""
    code = f"""
import sys
from rondo.system.names import offered
assert len(list(offered("environments").values())) > 15
print(sorted(set({PACKAGES}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_missing_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDO_REQUIRED_PACKAGES", raising=False)
    monkeypatch.setenv("RONDO_REQUIRED_PROGRAMS", "rondo-no-such-browser")
    needs("json")
    needs_programs("sh")
    with pytest.raises(pytest.skip.Exception, match=full_text("needs rondo_nowhere: make")):
        needs("json", "rondo_nowhere")
    with pytest.raises(pytest.skip.Exception, match="rondo-no-such-driver"):
        needs_programs("sh", "rondo-no-such-driver")
    with pytest.raises(RuntimeError, match="rondo-no-such-browser must be installed"):
        needs_programs("rondo-no-such-browser")
    monkeypatch.setenv("RONDO_REQUIRED_PACKAGES", "1")
    with pytest.raises(RuntimeError, match="rondo_nowhere must be installed"):
        needs("rondo_nowhere")
