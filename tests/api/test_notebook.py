"""Training in a notebook: a real kernel, in whose thread an event loop runs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.tracking import read_metrics
from tests import begun
from tests.api.test_training import ROWS, SETTINGS
from tests.messages import full_text
from tests.trainers.conftest import PYTHONPATH, SFT_RECIPE
from tests.waiting import wait_for

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
launcher = pytest.importorskip("jupyter_client.launcher", reason="needs nbclient and ipykernel")

pytestmark = pytest.mark.slow

GOES_ON = full_text("resume() goes on with it")

GIVEN = f"""
import json, rondo
rows, settings = json.loads({json.dumps(json.dumps(ROWS))}), json.loads({json.dumps(json.dumps(SETTINGS))})
settings["tracking"]["console"] = "auto"
seen = []

def reward(prompt, trajectory):
    seen.append(prompt.prompt_id)
    return float((trajectory.response_ids % 2 == 0).mean())
"""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel begins with its imports; without this it is started as a user's is."""
    monkeypatch.setattr(launcher, "Popen", lambda command, **options: begun.Program(command[1:], **options))


FORKED = pytest.mark.usefixtures("forked")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():
        yield client


def run(client: Any, source: str) -> list[Any]:
    """The outputs of a cell; what it raises is raised."""
    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1)
    return list(cell.outputs)


def test_a_run_shows_in_one_output_that_changes(client: Any) -> None:
    run(client, GIVEN)
    outputs = run(client, "run = rondo.train(data=rows, reward=reward, config=settings, steps=2)")
    (shown,) = [output for output in outputs if output.output_type == "display_data"]
    assert "step 2/2" in shown.data["text/plain"]
    assert "trainer and sampler use the same storage" in shown.data["text/html"]
    (result,) = run(client, "run, len(seen), run.metrics.index.tolist()[-1]")
    assert result.data["text/plain"] == f"(Run('runs/train', 2 steps), {2 * 16 + 2 * 4 * 3}, 2)"
    (picture,) = run(client, "run.plot()")
    assert "image/png" in picture.data
    (again,) = run(client, "rondo.train(data=rows, reward=reward, config=settings, steps=1).path.name")[-1:]
    assert again.data["text/plain"] == "'train-2'"


@FORKED
def test_a_server_answers_the_cells_that_follow(client: Any) -> None:
    pytest.importorskip("openai")
    run(client, GIVEN)
    run(client, "run = rondo.train(data=rows, reward=reward, config=settings, steps=1); server = run.serve()")
    run(client, "import openai; ask = {'messages': [{'role': 'user', 'content': rows[0]['prompt']}]}")
    run(client, "client = openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key)")
    answer = (
        "client.chat.completions.create(model='export', temperature=0, max_tokens=4, "
        "extra_body={'return_token_ids': True}, **ask)"
    )
    (ids,) = run(client, f"(await {answer}).choices[0].token_ids")
    (row,) = run(client, "run.generate(rows[0]['prompt'], max_tokens=4, temperature=0.0)[0]['token_ids']")
    assert ids.data["text/plain"] == row.data["text/plain"]
    (closed,) = run(client, "await client.close(); server.close(); server")
    assert closed.data["text/plain"].endswith(", ended)")


def stop_once_there_are_steps(client: Any, metrics: Path) -> threading.Thread:
    """Interrupts the kernel, as the stop button does, when a run has logged two steps."""

    def stop() -> None:
        wait_for("two steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    return stopper


@FORKED
def test_the_stop_button_stops_and_saves(client: Any, tmp_path: Path) -> None:
    """An interrupt of the kernel between the steps of a run that would go on for long."""
    run(client, GIVEN)
    stopper = stop_once_there_are_steps(client, tmp_path / "runs" / "train" / "metrics.jsonl")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=GOES_ON):
        run(client, "rondo.train(data=rows, reward=reward, config=settings, steps=10_000)")
    stopper.join()
    (step,) = run(client, "int(rondo.load('runs/train').metrics.index[-1])")
    (resumed,) = run(client, f"rondo.load('runs/train').resume(steps={step.data['text/plain']} + 1)")[-1:]
    assert resumed.data["text/plain"].startswith("Run('runs/train', ")


@FORKED
def test_a_run_stopped_in_its_warm_start_goes_on_there(client: Any, tmp_path: Path) -> None:
    """Its recipe, rows and reward stay, and so do the steps of the warm start that were done."""
    long = {**SFT_RECIPE, "trainer": {**SFT_RECIPE["trainer"], "total_steps": 300}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(long))
    run(client, GIVEN)
    run(client, f"settings['trainer']['warm_start'] = {str(tmp_path / 'sft.yaml')!r}")
    run(client, "del settings['model']['config']")
    warm_start = tmp_path / "runs" / "train" / "warm_start"
    stopper = stop_once_there_are_steps(client, warm_start / "metrics.jsonl")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=GOES_ON):
        run(client, "rondo.train(data=rows, reward=reward, config=settings, steps=1)")
    stopper.join()
    done = read_metrics(warm_start)
    (resumed,) = run(client, "run = rondo.load('runs/train').resume(); run, len(seen) > 0")[-1:]
    assert resumed.data["text/plain"] == "(Run('runs/train', 1 steps), True)"
    assert read_metrics(warm_start)[: len(done)] == done
    assert read_metrics(warm_start)[-1]["step"] == 300 > len(done)


BROKEN = """
import asyncio, tqdm.auto  # which warns where ipywidgets are missing

def broken(prompt, trajectory):
    return prompt['answer']

async def unclean(prompt, trajectory):
    try:
        await asyncio.sleep(3600 * (trajectory.sample_index > 0))
        return prompt['answer']
    finally:
        if trajectory.sample_index > 0:
            raise OSError("cannot be closed")

def callback(metrics):
    raise KeyError('answer')
"""


@FORKED
@pytest.mark.parametrize(
    ("given", "line", "said"),
    [
        ("reward=broken", "return prompt['answer']", "Fix broken, or set reward.on_error"),
        ("reward=unclean", "return prompt['answer']", "Fix unclean, or set reward.on_error"),
        ("reward=lambda p, t: 1/0", "reward=lambda p, t: 1/0", "Fix lambda, or set reward.on_error"),
        ("reward=reward, on_step=callback", "raise KeyError('answer')", "KeyError: 'answer'"),
    ],
)
def test_an_error_shows_the_cell_and_the_message_alone(client: Any, given: str, line: str, said: str) -> None:
    run(client, GIVEN + BROKEN + 'settings["tracking"]["console"] = "off"')
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(client, f"rondo.train(data=rows, {given}, config=settings, steps=1)")
    run(client, "import gc; gc.collect()")  # whatever nobody has heard of would be said now
    outputs = [output for cell in client.nb.cells[-2:] for output in cell.outputs]
    (error,) = [output for output in outputs if output.output_type == "error"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert f"rondo.train(data=rows, {given}" in shown
    assert line in shown
    assert said in shown
    assert "asyncio" not in shown.replace("await asyncio.sleep", "")
    assert ".pkl" not in shown
    streams = [output.text for output in outputs if output.output_type == "stream"]
    assert streams == []
    assert len(shown.splitlines()) <= 30, shown
