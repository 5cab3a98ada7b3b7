"""What a launch script would run: in the real sandbox, with stand-ins for its programs."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import pytest

from rondo.core.errors import ConfigError, SandboxError
from rondo_sandbox import open_sandbox, runs
from rondo_verl import script as script_module
from rondo_verl.script import Report, run_script
from tests.rondo_verl.launched import SCRIPTS, script
from tests.sandboxes import need_sandbox


@pytest.fixture(autouse=True)
def _held() -> None:
    need_sandbox()


@pytest.fixture(params=["bubblewrap", "landlock"])
def _each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    need_sandbox(request.param)
    monkeypatch.setattr(script_module, "open_sandbox", functools.partial(open_sandbox, request.param))


def ran(path: str, *arguments: str, **env: str) -> Report:
    return run_script(path, arguments, env)


def programs(report: Report) -> list[tuple[int, tuple[str, ...]]]:
    return [(one.line, one.argv) for one in report.ran]


@pytest.mark.usefixtures("_each_backend")
def test_arguments_are_recorded_as_the_program_would_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    path = script(
        tmp_path,
        """\
set -euxo pipefail
WORDS=(one 'two words' $'three\\nlines' '')
mkdir -p $HOME/logs
python3 -u -m module "${WORDS[@]}" \\
    path=$PWD/data home=$HOME "$@" >$HOME/logs/out.txt 2>&1 | tee here.log
(cd /usr && python "$HERE" é)
unknown-program --flag
exec torchrun $(basename /a/b)
""",
    )
    words = ("one", "two words", "three\nlines", "")
    assert programs(ran(path, "a b", "$x", HERE="t;h'e re")) == [
        (
            4,
            (
                "python3",
                "-u",
                "-m",
                "module",
                *words,
                f"path={tmp_path}/data",
                "home=/home/somebody",
                "a b",
                "$x",
            ),
        ),
        (6, ("python", "t;h'e re", "é")),
        (7, ("unknown-program", "--flag")),
        (8, ("torchrun", "b")),
    ]


@pytest.mark.usefixtures("_each_backend")
def test_nothing_leaves_and_no_real_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path.parent / f"written-{os.getpid()}"
    monkeypatch.setenv("SECRET_TOKEN", "of the user's")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        path = script(
            tmp_path,
            f"""\
echo x > {outside}
echo x > {tmp_path}/beside.txt
exec 3<>/dev/tcp/127.0.0.1/{port} && python connected
/usr/bin/python3 -c 'print(1)' > printed
/usr/bin/perl -e 1 2>/dev/null
python "${{SECRET_TOKEN-none}}" "$(cat printed)"
""",
        )
        report = ran(path)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not outside.exists()
    assert os.listdir(tmp_path) == ["run.sh"]
    assert report.ran[0].argv == ("python3", "-c", "print(1)")
    assert report.ran[-1].argv[:2] == ("python", "none")
    assert report.behind(report.ran[-1].argv[2]) is report.ran[0]


def test_what_a_script_reads_lies_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started from elsewhere, goes to the root of its folder, sources a file and reads another."""
    monkeypatch.chdir(SCRIPTS)
    report = ran("examples/grpo/run.sh", MODEL_ROOT="/models")
    assert [(one.file, one.line, one.argv[0]) for one in report.ran] == [
        ("common/env.sh", 6, "pip"),
        ("examples/grpo/run.sh", 8, "python3"),
    ]
    assert report.ran[1].argv[3:] == (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=/models/tiny",
        f"data.train_files={SCRIPTS}/train.parquet",
        "data.train_batch_size=512",
    )
    assert report.downloads() == [report.ran[0]]


def test_large_hidden_and_unrelated_files_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "beyond.txt").write_text("x")
    (work / ".env").write_text("x")
    (work / "large.txt").write_bytes(b"x" * (script_module.LARGEST + 1))
    (work / "small.txt").write_bytes(b"x" * script_module.LARGEST)
    (work / "cut-off").symlink_to("nowhere")
    (work / "two\nlines").write_text("x")
    (work / "no text \udcff").write_text("x")
    monkeypatch.chdir(work)
    path = script(work, "python *; python .e*; python ../*\n")
    assert [one.argv[1:] for one in ran(path).ran] == [("run.sh", "small.txt"), (".e*",), ("../work",)]
    monkeypatch.setattr(script_module, "MOST_FILES", 1)
    (work / "a.txt").write_text("x")
    assert ran(path).ran[0].argv == ("python", "a.txt", "run.sh")


@pytest.mark.parametrize(
    ("loop", "line"), [("while true; do sleep 60; done", 3), ("cat <(yes) >/dev/null", 3)]
)
def test_a_script_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, line: int
) -> None:
    monkeypatch.setattr(script_module, "SECONDS", 1)
    path = script(tmp_path, f"python3 -m verl.trainer.main_ppo a=b\nx=1\n{loop}\n")
    with pytest.raises(ConfigError, match=rf"run.sh:{line}: the script did not end within 1 s"):
        ran(path)


def test_a_script_that_ignores_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "SECONDS", 1)
    path = script(tmp_path, "trap '' TERM\nwhile true; do :; done\n")
    with pytest.raises(ConfigError, match=r"run.sh:2: the script did not end"):
        ran(path)


def test_without_a_sandbox_no_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, *_: object) -> None:
        raise SandboxError(f"install {name}")

    monkeypatch.setattr(runs, "backend", none)
    path = script(tmp_path, "python3 -m verl.trainer.main_ppo a=b\n")
    with pytest.raises(SandboxError, match=r"sandbox only.*install bubblewrap"):
        ran(path)
