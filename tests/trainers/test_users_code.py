"""Code of the user's that would end, cancel or alter a run: an error that names the function, what chose it,
and the line.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.trainers.conftest import inline

CODE = """
import asyncio, sys
from pathlib import Path
from rondo.recipes.quickstart import tokenizer, train_rows

def leave(prompt, trajectory):
    sys.exit(0)

async def leave_later(prompt, trajectory):
    await asyncio.sleep(0)
    sys.exit(0)

async def cancel(prompt, trajectory):
    raise asyncio.CancelledError

def write(prompt, trajectory):
    trajectory.response_ids[:] = 7

def write_field(prompt, trajectory):
    prompt.fields["answer"] = 7

async def stray(prompt, trajectory):
    async def leaves():
        sys.exit(0)
    asyncio.create_task(leaves())
    await asyncio.sleep(3600)

def rows():
    yield from train_rows(size=8)
    raise KeyError("solution")

def rows_that_leave():
    sys.exit(0)

def half_a_character():
    return [{"prompt": "fine"}, {"prompt": "\\ud83d"}]

def make_tokenizer():
    raise GeneratorExit

def broken_tokenizer():
    made = tokenizer()
    class Broken(type(made)):
        def __call__(self, *args, **options):
            raise LookupError("no merge")
    made.__class__ = Broken
    return made

def estimator(reward, group_id):
    sys.exit(0)

def estimator_that_writes(reward, response_mask):
    response_mask[:] = 1.0
    return reward

def loss(log_probs, advantages):
    raise BaseException("no")

def unsure(reward):
    raise ZeroDivisionError("one reward")

class Tracker:
    def __init__(self, context):
        if "log" not in vars(type(self)):
            sys.exit(0)
    def finish(self, status):
        pass

class LogsWrong(Tracker):
    def log(self, step, metrics):
        raise OSError("full")
"""

REWARD = "reward.functions=['{file}:{name}']"
TOKENIZER = "model.tokenizer={file}:{name}"
ADVANTAGE = "algorithm.advantage='{file}:{name}'"
LOSS = "algorithm.policy_loss='{file}:{name}'"
FILTER = "algorithm.filter='{file}:{name}'"
TRACKER = "tracking.trackers=['{file}:{name}']"
SOURCE = "data.train=[{{type: function, name: mine, task: '{file}:{name}'}}]"
# Name: override, what is said, and the line in the file that is named.
CASES = {
    "leave": (REWARD, r"RewardError.*reward function leave: .*SystemExit\(0\) would end.*in leave", 7),
    "leave_later": (REWARD, r"RewardError.*SystemExit\(0\) would end.*in leave_later", 11),
    "cancel": (REWARD, r"RewardError.*CancelledError\(\) would end.*in cancel", 14),
    "write": (REWARD, r"RewardError.*ValueError: .*read-only.*in write", 17),
    "write_field": (REWARD, r"RewardError.*ValueError: .*read-only.*in write_field", 20),
    "stray": (REWARD, r"TrainError\n.*a task that code of yours started raised .*SystemExit\(0\)", 24),
    "rows": (SOURCE, r"DataError\n.*source 'mine': .*mine\.py:rows raised KeyError: 'solution'", 30),
    "rows_that_leave": (SOURCE, r"DataError\n.*source 'mine': .*SystemExit\(0\)", 33),
    "half_a_character": (SOURCE, r"DataError\n.*source 'mine' .*row 1\): character \d+ .* '\\ud83d'", None),
    "make_tokenizer": (
        TOKENIZER,
        r"ConfigError.*model\.tokenizer: .*make_tokenizer raised .*Generator",
        39,
    ),
    "broken_tokenizer": (TOKENIZER, r"DataError.*the tokenizer raised LookupError: no merge", 45),
    "estimator": (ADVANTAGE, r"TrainError\n.*the advantage function .*:estimator raised .*SystemExit", 50),
    "estimator_that_writes": (
        ADVANTAGE,
        r"TrainError\n.*_that_writes wrote into response_mask",
        None,
    ),
    "loss": (LOSS, r"TrainError in actor\[0\]\n.*the policy_loss function .*:loss raised .*'no'", 57),
    "unsure": (FILTER, r"TrainError\n.*the filter function .*:unsure raised ZeroDivisionError: one", 60),
    "Tracker": (TRACKER, r"ConfigError\n.*tracking\.trackers\.0: .*:Tracker raised .*SystemExit\(0\)", 65),
    "LogsWrong": (
        TRACKER,
        r"TrainError\n.*tracking\.trackers\.0: .*:LogsWrong\.log raised OSError",
        71,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_users_code_does_wrong_is_told(name: str, recipe: Path, tmp_path: Path) -> None:
    override, said, line = CASES[name]
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    done = inline(
        "train",
        str(recipe),
        override.format(file=file, name=name),
        f"trainer.run_dir={tmp_path / 'run'}",
        "trainer.evaluation.every=null",
        "data.eval=[]",
        check=False,
    )
    assert done.returncode == 2
    assert re.search("(?s)^rondo train: " + said, done.stderr), done.stderr
    assert line is None or re.search(rf'mine\.py"?, line {line}\b', done.stderr), done.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Ctrl-C is as it was


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise GeneratorExit", "raise asyncio.CancelledError"])
def test_a_file_that_leaves_when_it_is_imported(statement: str, recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import asyncio, sys\n\n{statement}\n")
    for override in ("reward.functions=['{}:f']", "rollout.agent='{}:f'", "algorithm.advantage='{}:f'"):
        done = inline("train", str(recipe), override.format(file), check=False)
        assert done.returncode == 2
        key = override.partition("=")[0]
        said = rf"(?s)^rondo train: ConfigError\n.*{key}.*could not be imported: .*\(mine\.py, line 3\)"
        assert re.search(said, done.stderr), done.stderr


def test_the_command_itself_is_the_last_border(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    """Code that a library runs for the user (a model's own, say) may leave anywhere."""

    def leaves(arguments: object) -> int:
        raise SystemExit(0)

    monkeypatch.setattr("rondo.cli.training.run", leaves)
    done = inline("train", str(recipe), check=False)
    assert done.returncode == 2
    assert re.search(
        r"TrainError\n.*code of yours raised EscapeError: SystemExit\(0\) .*, line \d+\)$",
        done.stderr.strip(),
    )
