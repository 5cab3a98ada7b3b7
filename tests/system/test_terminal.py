"""What others wrote, on its way to a terminal or a log: every door × every kind of control."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.cli import main as cli
from rondo.core.errors import DataError
from rondo.core.types import Prompt
from rondo.system.process import ChildProcess
from rondo.system.streams import CleanStream, LogFormatter, clean_text, command_streams, drawing, drawn_on
from rondo.tracking import Console, Header, logged_to
from rondo.tracking.console import CleanConsole
from rondo.trainers.commands import evaluate
from tests.tracking.test_trajectories import rows_from_trajectories, trajectory

# What a terminal would make of it, and how it is spelled out.
CONTROLS = {
    "title": ("\x1b]0;PWN\x07", r"\x1b]0;PWN\x07"),
    "clipboard": ("\x1b]52;c;cm0gLXJm\x1b\\", r"\x1b]52;c;cm0gLXJm\x1b" + "\\"),
    "clear": ("\x1b[2J", r"\x1b[2J"),
    "C1": ("\x9b2J\x9d0;PWN\x9c", r"\x9b2J\x9d0;PWN\x9c"),
    "overwriting": ("no\ryes\x08\x7f", r"no\ryes\x08\x7f"),
    "direction": ("a\u202ecba\u2066", r"a\u202ecba\u2066"),
    "separators": ("a\x0b\x0c\x85\u2028\u2029", r"a\x0b\x0c\x85\u2028\u2029"),
}
EVIL = " ".join(control for control, _ in CONTROLS.values())
SPELLED = " ".join(spelled for _, spelled in CONTROLS.values())


@pytest.mark.parametrize("kind", CONTROLS)
def test_each_kind_of_control_is_spelled_out(kind: str) -> None:
    control, spelled = CONTROLS[kind]
    assert clean_text(f"a{control}b") == f"a{spelled}b"


@pytest.mark.parametrize(
    "text", ["a\tb\n", "π → ∞ 日本\u3000語", "10\xa0000", "می\u200cخواهم", "👩\u200d🚀", "é"]
)
def test_text_stays_as_it_is(text: str) -> None:
    assert clean_text(text) == text


def test_what_an_encoding_lacks_is_spelled_out() -> None:
    assert clean_text("é \udc80", "ascii") == r"\xe9 \udc80"


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard output and error are a pseudo-terminal; gives what returns the text that came there."""
    ours, theirs = os.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 4096):
                pieces.append(piece)
        except OSError:  # EIO: nobody has it open for writing any more
            return

    reader = threading.Thread(target=read)
    reader.start()
    stream = open(theirs, "w", encoding="utf-8", buffering=1)

    def text() -> str:
        stream.close()
        reader.join()
        return b"".join(pieces).decode().replace("\r\n", "\n")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        try:
            yield text
        finally:
            stream.close()
            reader.join()
            os.close(ours)


def in_one_word(text: str) -> str:
    """Returns it without white space, of which wrapping and indenting make some."""
    return "".join(text.split())


def answers(*args: Any, **options: Any) -> list[dict[str, Any]]:
    return [{"prompt": "p", "text": EVIL}]


def fails(*args: Any, **options: Any) -> None:
    raise DataError(f"the scorer raised ValueError: {EVIL}")


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[str]]:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "contents": f"apples\n{EVIL}"}) + "\n")
    (tmp_path / "rollouts").mkdir()
    asked = Prompt(0, f"{EVIL}\nforged", "train", np.array([1], np.int32), {"prompt": EVIL})
    made = dataclasses.replace(trajectory(0, EVIL, reward=1.0), prompt=asked)
    rows_from_trajectories([made], {}).write_parquet(tmp_path / "rollouts" / "step-000001.parquet")
    return {
        "generate": ["generate", str(tmp_path), "p"],
        "search": ["search", "query", str(corpus), "apples"],
        "show": ["show", str(tmp_path)],
    }


@pytest.mark.parametrize("command", ["generate", "search", "show"])
def test_commands_print_no_controls_on_a_terminal(
    commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(evaluate, "generate", answers)
    with terminal(monkeypatch) as text:
        assert cli.main(commands[command]) == 0
        shown = text()
    assert shown == clean_text(shown)
    assert in_one_word(shown).count(in_one_word(SPELLED)) == (2 if command == "show" else 1)


@pytest.mark.parametrize("command", ["search", "show"])
def test_they_print_none_into_a_pipe_that_may_lead_to_a_terminal(
    commands: dict[str, list[str]], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main(commands[command]) == 0
    shown = capsys.readouterr().out
    assert shown == clean_text(shown)
    assert in_one_word(SPELLED) in in_one_word(shown)


def test_answers_in_a_file_are_as_they_were_said(
    commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "generate", answers)
    cli.main(commands["generate"])
    assert capsys.readouterr().out == f">>> p\n{EVIL}\n\n"


def test_an_error_at_the_end_is_spelled_out_wherever_it_goes(
    commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "generate", fails)
    assert cli.main(commands["generate"]) == 2
    said = in_one_word(f"rondo generate: DataError\n  the scorer raised ValueError: {SPELLED}\n")
    assert in_one_word(capsys.readouterr().err) == said
    with terminal(monkeypatch) as text:
        cli.main(commands["generate"])
        assert in_one_word(text()) == said


@pytest.mark.slow
def test_a_traceback_of_a_bug_is_spelled_out() -> None:
    program = (
        "import sys, rondo.tracking.trajectories; from rondo.cli.main import main\n"
        f"def read(*args, **options): raise ValueError({EVIL!r})\n"
        "rondo.tracking.trajectories.read_trajectories = read\n"
        "sys.argv = ['rondo', 'show', 'runs/x']\nsys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.endswith(f"ValueError: {SPELLED}\n")


def test_what_no_terminal_is_told_and_what_draws() -> None:
    """Libraries colour their lines on a terminal only; progress bars are drawn on what is below."""
    with open(os.devnull, "w", encoding="utf-8") as raw:
        clean = CleanStream(raw)
        assert not clean.isatty()
        assert (clean.encoding, clean.fileno()) == ("utf-8", raw.fileno())
        assert clean.write(EVIL) == len(EVIL)
        before = sys.stderr
        sys.stderr = clean  # type: ignore[assignment]
        try:
            with drawing():
                assert sys.stderr is raw
            assert sys.stderr is clean
        finally:
            sys.stderr = before
        assert drawn_on(raw) is raw


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("utf-8", "é→\\x1b".encode()), ("latin-1", b"\xe9\\u2192\\x1b"), ("ascii", b"\\xe9\\u2192\\x1b")],
)
def test_what_the_streams_own_encoding_lacks_is_spelled_out(encoding: str, written: bytes) -> None:
    below = io.BytesIO()
    clean = CleanStream(io.TextIOWrapper(below, encoding=encoding, write_through=True))
    clean.writelines(["é→", "\x1b"])
    assert below.getvalue() == written


def test_a_stream_without_an_encoding_is_written_as_utf_8() -> None:
    below = io.StringIO()  # has none
    assert CleanStream(below).write("é\x1b") == 2
    assert below.getvalue() == "é\\x1b"


def logger_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[1:]


def test_no_text_forges_a_line_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, log = tmp_path / "controller.log", logging.getLogger("rondo.anything")
    forged = "2026-01-01 00:00:00,000 INFO rondo: all is well"
    with logged_to(path, 1):
        log.warning("a scorer raised %s", f"{EVIL}\n{forged}")
        try:
            raise ValueError(f"{EVIL}\n{forged}")
        except ValueError:
            log.exception("once more")
    first, second, *rest, end = logger_lines(path)
    assert first.endswith(f"WARNING rondo.anything: a scorer raised {SPELLED}")
    assert second == f"    {forged}"
    assert rest[0].endswith("ERROR rondo.anything: once more")
    assert rest[-2:] == [f"    ValueError: {SPELLED}", f"    {forged}"]
    assert all(line.startswith("    ") for line in rest[1:])
    assert end == ""


@pytest.mark.slow
def test_warnings_that_nobody_else_shows_are_spelled_out(tmp_path: Path) -> None:
    program = (
        "import logging, sys; from pathlib import Path; from rondo.tracking import logged_to\n"
        "layout = logging.lastResort.formatter\n"
        f"with logged_to(Path(sys.argv[1]), 1): logging.getLogger('rondo').warning({EVIL!r})\n"
        "assert logging.lastResort.formatter is layout"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "controller.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == f"{SPELLED}\n"


def test_what_a_process_of_ours_prints_is_spelled_out(tmp_path: Path) -> None:
    """In its log, in the tail that errors quote, and where it is logged."""
    (tmp_path / "printing.py").write_text(f"import sys\nsys.stderr.write({EVIL!r} + '.\\n')\n")
    log = tmp_path / "host-0.log"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        process = ChildProcess("it", ["printing"], theirs.fileno(), environment, log=log)
        assert process.wait(20)
    assert process.tail() == SPELLED.replace(r"\r", "\n") + "."  # the end of a line, in a pipe
    assert log.read_text().endswith(f"{process.tail()}\n")


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_the_console_of_a_run_draws_its_own_controls_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """Also of what others print meanwhile, which rich catches, and of warnings in the panel."""
    header = Header(EVIL, "cpu", "grpo", EVIL)
    with terminal(monkeypatch) as text:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "400")
        with command_streams(output=True), Console(mode) as console:  # type: ignore[arg-type]
            assert console.mode == ("live" if mode == "auto" else "plain")
            assert isinstance(console.out, CleanConsole)
            console.start(header, 3)
            console.warn(EVIL)
            console.note(EVIL)
            print(EVIL)
            print(EVIL, file=sys.stderr)
        shown = text()
    for control, _ in CONTROLS.values():
        assert control.replace("a", "") not in shown
    for control in ("\x9b", "\x9d", "\u202e", "\x07", "\x08", "\x7f", "\x1b]"):
        assert control not in shown
    assert r"\x9b2J\x9d0;PWN\x9c" in shown
    assert "\x1b[" in shown  # its own: colours, and in live mode the way up


def test_a_formatter_keeps_records_apart() -> None:
    record = logging.LogRecord("rondo", logging.INFO, "", 0, "a\nb\x1b", None, None)
    assert LogFormatter("%(message)s").format(record) == "a\n    b\\x1b"
