"""No way out of any back end of this machine; and the list can tell, where nothing holds programs."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from rondo.cli import main as cli
from rondo.core.errors import SandboxError
from rondo_sandbox import open_sandbox
from rondo_sandbox.escapes import HARMLESS, LIMITS, Attempt, Attempts, Host, _host, check
from rondo_sandbox.records import Limits, Result
from rondo_sandbox.ways_out import PRELUDE

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3"
NOBODY = 65534
ATTEMPTS = 31


async def attempts(backend: str, names: tuple[str, ...] | None = None) -> list[Attempt]:
    async with await open_sandbox(backend) as sandbox:
        return await check(sandbox, names)


@pytest.mark.slow
def test_nothing_escapes(backend: str) -> None:
    found = asyncio.run(attempts(backend))
    assert len(found) == ATTEMPTS
    assert [attempt for attempt in found if attempt.escaped] == []


AS_USER = """
import asyncio, sys
from rondo_sandbox import open_sandbox
from rondo_sandbox.escapes import check
async def main():
    async with await open_sandbox(sys.argv[1]) as sandbox:
        assert not sandbox.backend.as_root
        for attempt in await check(sandbox):
            print("escaped" if attempt.escaped else "held", attempt.name, attempt.said)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nothing_escapes_from_a_user_who_is_not_root(backend: str) -> None:
    if not all(folder.stat().st_mode & 1 for folder in (ROOT, *ROOT.parents)):
        pytest.skip(f"{ROOT} lies where other users may not go")
    new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not Path(PYTHON).exists() or subprocess.run([PYTHON, "-c", new_enough]).returncode:
        pytest.skip(f"{PYTHON} is older than 3.11")
    done = subprocess.run(
        [PYTHON, "-c", AS_USER, backend],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]},
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
    if "no sandbox can hold" in done.stderr:  # this one needs more of a user than it does of root
        pytest.skip(done.stderr.splitlines()[-1])
    lines = done.stdout.splitlines()
    assert len(lines) == ATTEMPTS, done.stderr
    assert [line for line in lines if not line.startswith("held ")] == []


class _Written(Attempts):
    """Keeps the programs, and runs none of them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.programs: list[str] = []

    async def run(self, program: str, limits: Limits = LIMITS, **more: object) -> Result:
        self.programs.append(self.text(program, **more))
        return Result("finished", "held\n", "", 0, 0.0)


def test_every_program_is_one_and_knows_the_host() -> None:
    """All that are not run one behind the other in one sandbox."""

    async def written() -> tuple[Host, dict[str, list[str]]]:
        found = {}
        async with _host() as host:
            attempts = _Written(host)
            for name, attempt in attempts.all.items():
                if name not in ("daemons", "forged answers", "another trajectory"):
                    attempts.programs = []
                    await attempt()
                    found[name] = attempts.programs
        return host, found

    host, found = asyncio.run(written())
    assert len(found) == ATTEMPTS - 3
    assert {name: len(programs) for name, programs in found.items()} == dict.fromkeys(found, 1)
    for (program,) in found.values():
        facts: dict[str, object] = {}
        compile(program, "attempt", "exec")
        exec(program[: program.index(PRELUDE)], facts)
        assert (facts["CANARY"], facts["VICTIM"]) == (str(host.folder / "canary"), host.victim)


def test_the_list_can_tell() -> None:
    found = asyncio.run(attempts("none", HARMLESS))
    assert [(attempt.name, attempt.escaped) for attempt in found] == [(name, True) for name in HARMLESS]
    with pytest.raises(SandboxError, match="holds nothing"):
        asyncio.run(attempts("none"))


def test_the_command_prints_a_table_and_fails_where_one_escapes(
    backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, escaped = Attempt("read files", False, "finished"), Attempt("devices", True, "escaped: /dev/kvm")
    for found, code in (([held], 0), ([held, escaped], 1)):

        async def tried(sandbox: object, found: list[Attempt] = found) -> list[Attempt]:
            return found

        monkeypatch.setattr("rondo_sandbox.escapes.check", tried)
        assert cli.main(["sandbox", "check", "--backend", backend]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split() == ["read", "files", "held", "finished"]
    assert lines[-2].split() == ["devices", "ESCAPED", "/dev/kvm"]
    assert lines[-1] == "1 of 2 escaped"
