"""`rondo config show`, which runs nothing, and `rondo check`, which says what it runs."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path

import pytest

from rondo.cli.main import main
from rondo.config import load
from rondo.system.names import offered

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["model.path=m", "trainer.total_steps=1", "rollout.n=4"]


def test_yaml_can_be_trained_from(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--yaml", *ARGUMENTS]) == 0
    (in_tmp_path / "all.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load(["all.yaml"]).config == load([], ARGUMENTS).config


def test_keys_with_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", *ARGUMENTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("rollout.n:")] == [
        ["rollout.n:", "4", "#", "argument", "'rollout.n=4'"]
    ]


def test_a_path_is_said_once(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of one name are told apart; those of the working directory have no path to be said."""
    quickstart = offered("recipes")["quickstart"]
    for folder in ("a", "b"):
        (in_tmp_path / folder).mkdir()
        (in_tmp_path / folder / "x.yaml").write_text("include: quickstart\nrollout: {n: 3}\n")
    (in_tmp_path / "mine.yaml").write_text("rollout:\n  top_p: 0.5\n")
    (in_tmp_path / "b" / "x.yaml").write_text("rollout: {temperature: 0.5}\n")
    assert main(["config", "show", "a/x.yaml", "b/x.yaml", "mine.yaml", "trainer.seed=3"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[:3] == [
        f"# quickstart.yaml: {quickstart}",
        "# x.yaml: a/x.yaml",
        "# x.yaml (2): b/x.yaml",
    ]
    assert all(text.count(file) == 1 for file in (str(quickstart), "a/x.yaml", "b/x.yaml"))
    origins = dict(
        re.findall(r"^(rollout.n|rollout.temperature|rollout.top_p|trainer.seed): .*# (.*)", text, re.M)
    )
    assert origins == {
        "rollout.n": "x.yaml:2",
        "rollout.temperature": "x.yaml (2):1",
        "rollout.top_p": "mine.yaml:2",
        "trainer.seed": "argument 'trainer.seed=3'",
    }


def test_stages_follow_from_the_functions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = str(offered("recipes")["quickstart"])
    assert main(["check", recipe, "algorithm.kl={name: k3, where: loss, coef: 0.1}"]) == 0
    stages = capsys.readouterr().out.split("One step:\n")[1]
    assert (
        "ref_log_probs <- reference.compute_ref_log_prob" in stages or "ref_log_probs <- reference." in stages
    )


TASKS = {"dpo": "preference", "reward_model": "reward-model"}


@pytest.mark.slow
def test_every_recipe_that_rondo_ships_passes_the_second_check(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, with the model that a warm start has yet to make; only a teacher is for the user to name.
    A recipe whose package is not here says so (where the package is, `make test-environments` checks it).
    """
    missing = [name for name in ("alfworld", "miniwob") if importlib.util.find_spec(name) is None]
    for path in sorted(offered("recipes").values()):
        teacher = ["teacher.path=."] if path.stem.startswith("distill") else []
        command = "sft" if path.stem.endswith("_sft") else TASKS.get(path.stem, "train")
        code = main(["check", path.stem, "--for", command, *teacher])
        said = capsys.readouterr().err
        package = path.stem.removesuffix("_sft")  # whose tokenizer is the package's, too
        if package in missing:
            assert code == 2
            assert f"needs a package: pip install 'rondo-rl[{package}]'" in said
        else:
            assert code == 0 or (teacher and "teacher.path" in said), (path.stem, said)


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def mine(*arguments, **options):
    return 1.0
class World:
    pass
"""
KEYS = {  # what a recipe may name, each with a value that runs when it is looked at closely
    "a reward": "reward.functions=[{name: evil.py:mine}]",
    "a tokenizer": "model.tokenizer=evil.py:mine",
    "rows": "data.train=[{type: function, name: a, task: evil.py:mine}]",
    "an agent": "rollout.agent=evil.py:mine",
    "a tool": "rollout.tools=[evil.py:mine]",
    "a server of tools": "rollout.tools=[{name: mcp, command: touch ran}]",
    "an environment": "rollout.environments=[evil.py:World]",
    "a loss": "algorithm.policy_loss=evil.py:mine",
    "an estimator": "algorithm.advantage=evil.py:mine",
    "a tracker": "tracking.trackers=[evil.py:mine]",
}


@pytest.mark.parametrize("what", list(KEYS))
def test_showing_runs_nothing_and_checking_says_what_it_runs(
    what: str, in_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_tmp_path / "evil.py").write_text(CODE)
    assert main(["config", "show", "quickstart", KEYS[what]]) == 0, capsys.readouterr().err
    assert main(["config", "show", "--yaml", "quickstart", KEYS[what]]) == 0
    assert not (in_tmp_path / "ran").exists()
    capsys.readouterr()
    main(["check", "quickstart", KEYS[what]])  # which may refuse it
    head = capsys.readouterr().out.partition("One step")[0]
    assert head.startswith("The recipe names, and this runs, starts or asks:\n")
    assert "evil.py:" in head or "touch ran" in head


def test_showing_asks_nobody(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that plays the user, and data at a URL: a socket that listens is never called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        user = f"rollout.environments=[{{name: user, base_url: {url}/v1, model: m}}]"
        model = ("trainer.warm_start=null", f"model.path={url}/m")
        data = f"data.train=[{{type: jsonl, path: {url}/a.jsonl}}]"
        assert main(["config", "show", "quickstart", user, data, *model]) == 0
        with pytest.raises(BlockingIOError):
            server.accept()
    assert url in capsys.readouterr().out
