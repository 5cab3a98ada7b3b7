"""The command `rondo`: dispatch, errors as one block, exit codes, and how light it is."""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rondo import __version__
from rondo.cli import main as cli
from rondo.cli.arguments import KEYS, command_of, load_arguments
from rondo.config import load
from rondo.core.errors import ConfigError, WorkerError
from rondo.system.names import offered

ROOT = Path(__file__).resolve().parents[2]


def fake_command(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Make `rondo train` call `action(args)`."""
    module: Any = ModuleType("fake")
    module.add_parser = lambda subparsers: subparsers.add_parser("train").add_argument("config", nargs="*")
    module.run = action
    monkeypatch.setattr(cli, "offered", lambda kind: {"train": module})


def raising(error: BaseException) -> Any:
    def run(args: object) -> int:
        raise error

    return run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for command in offered("commands"):
        assert f"\n    {command}" in text


SHIPPED = {
    "sft": {name for name in offered("recipes") if name.endswith("_sft")},
    "preference": {"dpo"},
    "reward-model": {"reward_model"},
    "serve": set(),  # the model of one that is shipped exists after training
    "check": set(offered("recipes")),
}
SHIPPED["train"] = set(offered("recipes")) - set().union(*(SHIPPED[name] for name in list(SHIPPED)[:3]))
SHIPPED["eval"] = SHIPPED["train"]


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "-h"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", list(SHIPPED))
def test_help_of_a_command_says_what_it_does_and_names_its_recipes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(help_of(command, capsys=capsys).split())
    assert text.startswith(f"usage: rondo {command} [-h]")
    assert "a YAML file, or the name of a recipe; several" in text
    assert set(filter(None, text.partition("says what they are): ")[2].split(", "))) == SHIPPED[command]


def arguments_of(command: str) -> list[str]:
    return [re.split(r"\s{2,}", line)[0] for line in KEYS[command].splitlines()]


@pytest.mark.parametrize("command", list(KEYS))
def test_the_keys_that_help_names_are_keys_with_such_values(command: str) -> None:
    arguments = arguments_of(command)
    rest = [] if any("total_steps" in one for one in arguments) else ["trainer.total_steps=1"]
    loaded = load([], [*arguments, *rest])
    written = [key for key, origin in loaded.origins.items() if origin.written]
    for argument in arguments:
        key = argument.partition("=")[0]
        assert any(f"{one}.".startswith(f"{key}.") for one in written), key


@pytest.mark.parametrize("command", ["train", "sft", "preference", "reward-model"])
def test_a_command_reads_the_keys_that_its_help_names(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one does not read is an error (of a server: test_serve.py)."""
    assert main_of_check(command, arguments_of(command), capsys) == set()
    if command != "train":
        told = main_of_check(command, arguments_of("train"), capsys)
        assert {"reward.functions", "actor.mini_batch_size"} <= told


def main_of_check(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The keys of which a command says that nothing reads them. The files that they name are not there."""
    assert cli.main(["check", "--for", command, *arguments]) == 2
    said = capsys.readouterr().err
    assert "a.jsonl" in said
    return {key.partition(".0.")[0] for key in re.findall(r"([\w.]+) has no meaning for", said)}


@pytest.mark.parametrize("command", [["check"], ["config", "show"]])
def test_help_of_a_command_for_any_recipe_says_where_its_keys_are(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(*command, capsys=capsys)
    assert "those of the command that the recipe is for: `rondo train -h`" in text
    assert "model.path=" not in text


def test_every_recipe_is_for_the_command_that_takes_it() -> None:
    for name in offered("recipes"):
        assert name in SHIPPED[command_of(name)]


def test_a_recipe_called_recipe_is_no_program_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("rollout: {n: 3}")
    with contextlib.chdir(tmp_path):
        assert load_arguments(["recipe.yaml", "model.path=m", "trainer.total_steps=1"]).config.rollout.n == 3


def test_help_of_generate_shows_what_it_takes_where_nothing_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["generate", "-h"])
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "-n N completions per prompt (default: 1)",
        "--max-tokens MAX_TOKENS of a completion (default: 256)",
        "--temperature TEMPERATURE 0 is greedy (default: 1.0)",
        "--top-p TOP_P default: 1.0",
        "--seed SEED default: 0",
        "--engine ENGINE native, transformers, vllm or sglang (default: native)",
    ):
        assert said in text


def test_every_training_command_runs_its_own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for program in ("train", "sft", "preference", "reward_model"):
        record = functools.partial(called.append, program)
        module = "train" if program == "train" else "supervised"
        place = f"rondo.trainers.commands.{module}.{program}"
        monkeypatch.setattr(place, lambda loaded, record=record: record())
    for command in ("train", "sft", "preference", "reward-model"):
        assert cli.main([command, "quickstart"]) == 0
    assert called == ["train", "sft", "preference", "reward_model"]


def test_what_has_no_name_and_is_no_write_is_not_told_of_standard_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A socket or a pipe that cannot be opened, say."""
    error = OSError(errno.EMFILE, "Too many open files")
    fake_command(monkeypatch, raising(error))
    with pytest.raises(OSError) as caught:
        cli.main(["train"])
    assert caught.value is error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rondo {__version__}\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in {
        ("trian",): "argument COMMAND: there is no 'trian'; did you mean 'train'? There are: train, sft, ",
        ("tran", "a.yaml"): "there is no 'tran'; did you mean 'train'?",
        ("zzzzz",): "there is no 'zzzzz'. There are: train, ",
        (
            "config",
            "shwo",
        ): "argument ACTION: there is no 'shwo'; did you mean 'show'? There are: schema, show",
        ("check", "--for", "stf", "a.yaml"): "argument --for: there is no 'stf'; did you mean 'sft'?",
        ("eval", "a.yaml", "--modle", "m"): "unrecognized arguments: --modle m; did you mean '--model'?",
        ("search", "query", "--indxe=a", "c", "w"): "arguments: --indxe=a; did you mean '--index'?",
        ("eval", "a.yaml", "--zzzz"): "arguments: --zzzz; a setting is written key.sub=value",
        ("quickstart",): "quickstart is a recipe; a command comes first: rondo train quickstart",
        ("dpo", "--x"): "dpo is a recipe; a command comes first: rondo preference dpo",
        ("mine.yml",): "mine.yml is a recipe; a command comes first: rondo train mine.yml",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
        assert said in capsys.readouterr().err


def test_config_error_is_one_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "quickstart", "lr=1", "rollout.n=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "rondo config: ConfigError\n"
        "  argument 'rollout.n=x': rollout.n must be an integer, got string 'x' (Trajectories per prompt)\n"
        "  argument 'lr=1': unknown key 'lr'; did you mean 'actor.optimizer.lr' (or 'critic.optimizer.lr', "
        "'prm.lr')?\n"
    )


def test_worker_error_keeps_the_workers_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(
        monkeypatch, raising(WorkerError("actor", 1, "update_actor", "boom", "Traceback …\n  line 3"))
    )
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "rondo train: WorkerError\n"
        "  actor[1].update_actor failed: boom\n"
        "  --- traceback in actor[1] ---\n"
        "  Traceback …\n"
        "    line 3\n"
    )


def test_hidden_cause_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("outer")
    error.__cause__ = ValueError("inner")
    fake_command(monkeypatch, raising(error))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err.endswith("  outer\n  (--traceback shows where in the code)\n")


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, raising(ConfigError("x")))
    with pytest.raises(ConfigError):
        cli.main(["train", "--traceback", "a.yaml"])
    monkeypatch.setenv("RONDO_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        cli.main(["train"])
    monkeypatch.setenv("RONDO_TRACEBACK", "0")
    assert cli.main(["train"]) == 2


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_command(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "rondo train: interrupted\n"


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_exit_code_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, lambda args: 7)
    assert cli.main(["train"]) == 7


def test_overrides_may_stand_after_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("rondo.cli.model_command.run", lambda args: seen.append(args) or 0)
    assert cli.main(["eval", "a.yaml", "--model", "m", "rollout.n=4"]) == 0
    assert seen[0].config == ["a.yaml", "rollout.n=4"]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["eval", "a.yaml", "--modle", "m"])


def test_notes_on_foreign_keys_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model.path=m", "trainer.total_steps=1", "trainer.balance_batch=True"]
    assert cli.main(["config", "show", "--yaml", *arguments, "algorithm.adv_estimator=grpo"]) == 0
    defaults, note = capsys.readouterr().err.splitlines(keepends=True)
    assert defaults.startswith("note: with keys in verl's spelling verl's defaults hold")
    assert note == (
        "note: argument 'trainer.balance_batch=True': trainer.balance_batch has no meaning in rondo: "
        "batches are always "
        "balanced over ranks, by tokens\n"
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rondo.cli.main import main; main([]); "
        "heavy = ('torch', 'ray', 'transformers', 'numpy', 'rich', 'pydantic'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_mistyped_folder_is_said_before_torch_is_imported() -> None:
    recipe = ["quickstart", "trainer.warm_start=null", "tracking.console=off", "model.path=nowhere"]
    commands = [["generate", "nowhere", "a"], ["serve", "nowhere"], ["train", *recipe], ["eval", *recipe]]
    code = (
        "import sys; from rondo.cli.main import main; "
        f"print([main(command) for command in {commands}], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "[2, 2, 2, 2] False"
    assert out.stderr.count("model.path: there is no folder nowhere in") == 4


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m rondo config show model.path=m trainer.total_steps=1 | head -n 1"
    out = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (out.stdout.split(), out.stderr) == (["model.path:", "m", "#", "argument", "'model.path=m'"], "")
