"""`rondo serve`: a process that answers, and that leaves nothing behind."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.chat import encode_prompt
from rondo.cli import serve_command
from rondo.cli.arguments import KEYS
from rondo.system.access import add_keys, keys_of
from rondo.system.pool import Supervision
from rondo.trainers.commands.serve import Serving
from tests import begun
from tests.trainers.conftest import PYTHONPATH, inline, saved_model
from tests.waiting import engine_processes

ASK: Any = [{"role": "user", "content": "Tom has 3 apples, buys 4. How many?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `rondo train` exports it."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


def greedy(folder: Path, tokens: int) -> list[int]:
    """By transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(encode_prompt(AutoTokenizer.from_pretrained(folder), ASK))[None].long()
    return model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()


def ask(client: openai.OpenAI, model: str) -> list[int]:
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_tokens=6, extra_body={"return_token_ids": True}
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_it_serves_a_folder_and_ends_with_all_it_started(folder: Path) -> None:
    """An engine in its own process, which dies once; a random token; Ctrl-C."""
    command = ["-m", "rondo.cli.main", "serve", str(folder), "--port", "0", "cluster.threads=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    environment.pop("RONDO_TOKEN", None)
    with begun.Program(
        [*command, "rollout.engine.decode=lean", "rollout.engine.process=own"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(4)]
            facts = dict(line.strip().split("=", 1) for line in said[:3])
            assert "native rollout engine: lean path" in said[3]
            started = psutil.Process(process.pid).children(recursive=True)
            with openai.OpenAI(base_url=facts["base_url"], api_key=facts["api_key"], max_retries=0) as client:
                before = ask(client, facts["model"])
                with pytest.raises(openai.AuthenticationError):
                    client.with_options(api_key="guess").models.list()
                (engine,) = engine_processes(process.pid)
                engine.kill()
                after = ask(client, facts["model"])
            started += psutil.Process(process.pid).children(recursive=True)
        finally:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert not psutil.wait_procs(started, timeout=20)[1]
    assert facts["model"] == "tiny"
    assert facts["base_url"].startswith("http://127.0.0.1:")
    assert before == after == greedy(folder, 6)


@pytest.mark.slow
def test_it_ends_with_the_error_of_its_last_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies more often than engines are started again."""
    others = [engine.pid for engine in engine_processes()]

    def kill(serving: Serving, is_random: bool) -> None:
        (engine,) = engine_processes(but=others)
        engine.kill()

    monkeypatch.setattr(serve_command, "_announce", kill)
    monkeypatch.setattr("rondo.rollout.members.ENGINES", Supervision(restarts=0, deaths=2))
    settings = ("cluster.threads=1", "rollout.engine.decode=lean", "rollout.engine.process=own")
    done = inline("serve", str(folder), *settings, "--port", "0", check=False)
    assert done.returncode == 2
    assert "no replica left (0: " in " ".join(done.stderr.split())


@pytest.mark.parametrize("engine", ["rollout.engine.decode=lean", "rollout.engine=transformers"])
def test_sigterm_ends_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """In this process; the token from the environment is not printed."""
    answers: list[list[int]] = []
    lengths: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def use(serving: Serving) -> None:
        def ask_and_stop() -> None:
            try:
                with openai.OpenAI(base_url=serving.base_url, api_key="from-outside") as client:
                    answers.append(ask(client, "mine"))
                    lengths.append(client.models.list().data[0].max_model_len)  # type: ignore[attr-defined]
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask_and_stop).start()

    def ready(serving: Serving, is_random: bool) -> None:
        announce(serving, is_random=is_random)
        use(serving)

    announce = serve_command._announce
    monkeypatch.setattr(serve_command, "_announce", ready)
    monkeypatch.setenv("RONDO_TOKEN", "from-outside")
    settings = ("cluster.threads=1", engine, "--port", "0", "--name", "mine")
    done = inline("serve", str(folder), *settings)
    assert answers == [greedy(folder, 6)]
    assert lengths == [256]  # the model's positions: fewer than the defaults add up to
    assert "model=mine" in done.stdout
    assert "from-outside" not in done.stdout
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "choose an API key (--token-file, or RONDO_TOKEN)"),
        (["--token", "a", "--token-file", "b"], "are both given"),
        (["--token-file", "not/there"], "cannot be read"),
        (["--token", "two words"], "--token must be printable ASCII without spaces, and not empty"),
        (["--token", ""], "--token must be printable ASCII without spaces, and not empty"),
        (["--token", "schlüssel"], "--token must be printable ASCII"),
        (["--token", "a\nb"], "--token must be printable ASCII"),
        (["--token-file", "/dev/null"], "the token in --token-file /dev/null must be printable ASCII"),
        (["--port", "99999"], "choose another port"),
        (["cluster.devices=2", "cluster.backend=ray"], "uses one device"),
        (["rollout.engine={a: 1}"], "unknown key 'rollout.engine.a'"),
        (["--replicas", "0"], "rollout.replicas"),
        (["--max-context", "1"], "--max-context 1 leaves no room"),
        (
            ["--max-context", "257"],
            "--max-context 257 is asked for, but the model has positions for 256 tokens",
        ),
        (["rollout.max_tokens=300"], "rollout.max_tokens=300 is 1324 tokens, but model.path's model has"),
        (["rollout.sleep=true"], "rollout.sleep has no meaning for `rondo serve`: there is no trainer"),
        (["rollout.agent.name=a.py:b"], "rollout.agent.name has no meaning for `rondo serve`: clients"),
        (["trainer.max_staleness=2"], "trainer.max_staleness has no meaning for `rondo serve`; remove it"),
    ],
)
def test_what_it_refuses(folder: Path, arguments: list[str], message: str) -> None:
    done = inline(
        "serve", str(folder), "cluster.threads=1", "rollout.engine.decode=lean", *arguments, check=False
    )
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_it_reads_the_keys_that_its_help_names(folder: Path) -> None:
    """What it does not read is an error before that of its port."""
    lines = (line.split()[0] for line in KEYS["serve"].splitlines())
    keys = [key for key in lines if not key.startswith(("model.path", "data.max_prompt", "rollout.max_tok"))]
    assert len(keys) == 6
    room = ("data.max_prompt_tokens=100", "rollout.max_tokens=100")
    done = inline("serve", str(folder), *keys, *room, "--port", "99999", check=False)
    assert "choose another port" in " ".join(done.stderr.split())


@pytest.mark.parametrize("token", ["", " ", "\t"])
def test_an_empty_token_of_the_environment_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("RONDO_TOKEN", token)
    done = inline("serve", str(folder), "cluster.threads=1", check=False)
    assert done.returncode == 2
    assert "the environment variable RONDO_TOKEN must be printable ASCII" in " ".join(done.stderr.split())


def test_a_token_file_has_a_key_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n")
    file.chmod(0o600)
    parser = argparse.ArgumentParser()
    add_keys(parser, "RONDO_TOKEN")
    keys, source = keys_of(parser.parse_args(["--token-file", str(file)]), "RONDO_TOKEN")
    assert (keys, source) == (("first", "second"), f"the token in --token-file {file}")


@pytest.mark.parametrize(("mode", "noted"), [(0o644, True), (0o640, True), (0o600, False)])
def test_a_token_file_that_others_can_read_is_noted(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, noted: bool
) -> None:
    """The server ends at its port. Outside tests, what is logged as a warning goes to standard error."""
    file = tmp_path / "token"
    file.write_text("correct-horse\n")
    file.chmod(mode)
    arguments = ("--token-file", str(file), "--port", "99999", "rollout.engine.decode=lean")
    done = inline("serve", str(folder), "cluster.threads=1", *arguments, check=False)
    assert "choose another port" in " ".join(done.stderr.split())
    assert (f"other users can read --token-file {file}" in caplog.text) == noted
    assert "correct-horse" not in done.stdout + done.stderr


def test_what_a_recipe_says_to_a_trainer_is_said_once(folder: Path, tmp_path: Path) -> None:
    """The run ends at the port, before anything is loaded."""
    recipe = tmp_path / "a.yaml"
    rollout = "{max_tokens: 8, sleep: true, agent: {name: mine.py:loop, times: 3}}"
    recipe.write_text(
        f"model: {{path: {folder}}}\nrollout: {rollout}\ntrainer: {{total_steps: 9, epochs: null}}\n"
    )
    done = inline("serve", str(recipe), "--token", "two words", check=False)
    assert done.returncode == 2
    assert [line.partition(" has no meaning ")[0] for line in done.stderr.splitlines()[:2]] == [
        f"note: {recipe}:2: rollout.sleep",
        f"note: {recipe}:2: rollout.agent",
    ]
    assert done.stderr.splitlines()[2] == "rondo serve: ConfigError"


def test_a_mistyped_folder_is_an_error_at_once() -> None:
    done = inline("serve", "nowhere", check=False)
    assert done.returncode == 2
    assert "model.path: there is no folder nowhere in" in done.stderr
    assert "set model.hub=local" in done.stderr


def test_a_recipe_whose_model_does_not_exist_yet() -> None:
    done = inline("serve", "quickstart", check=False)
    assert done.returncode == 2
    assert "exists after training only" in done.stderr
