"""A teacher, reference, critic or reward model that reads other words than the policy is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AddedToken, AutoTokenizer

from tests.trainers.conftest import RECIPE, inline

ONE_STEP = (
    "trainer.total_steps=1",
    "data.eval=[]",
    "trainer.evaluation.every=null",
    "checkpoint.export=false",
)
USES = {
    "teacher": ("algorithm.policy_loss=reinforce", "algorithm.advantage=teacher_gap"),
    "reference": ("algorithm.kl={name: k3, where: loss, coef: 0.01}",),
    "critic": ("algorithm.advantage=gae",),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    few = [one for one in ONE_STEP if "export" not in one]
    inline("train", str(folder / "tiny.yaml"), f"trainer.run_dir={folder / 'run'}", *few)
    return folder


def other(policy: Path, folder: Path) -> Path:
    """The policy's model with a tokenizer in which two tokens have changed places."""
    shutil.copytree(policy / "run" / "export", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {number: token for token, number in vocabulary.items()}
    vocabulary[names[40]], vocabulary[names[41]] = 41, 40
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("section", USES)
def test_other_words_are_refused(section: str, policy: Path, tmp_path: Path) -> None:
    model = other(policy, tmp_path / "other")
    run = (
        "train",
        str(policy / "tiny.yaml"),
        f"trainer.run_dir={tmp_path / 'run'}",
        *USES[section],
        *ONE_STEP,
    )
    refused = inline(*run, f"{section}.path={model}", check=False)
    assert refused.returncode == 2
    words = f"{section}.path: the tokenizer of {model} is not the policy's: of"
    told = " ".join(refused.stderr.split())
    assert words in told
    assert "2 are others there (40 is " in told
    assert f"set {section}.tokenizer=trust" in told
    inline(*run, f"{section}.path={model}", f"{section}.tokenizer=trust")


@pytest.mark.slow
def test_the_same_words_are_taken_and_a_folder_without_a_tokenizer(policy: Path, tmp_path: Path) -> None:
    model = tmp_path / "same"
    shutil.copytree(policy / "run" / "export", model)
    run = ("train", str(policy / "tiny.yaml"), *USES["teacher"], *ONE_STEP, f"teacher.path={model}")
    inline(*run, f"trainer.run_dir={tmp_path / 'first'}")
    for file in model.glob("tokenizer*"):
        file.unlink()
    inline(*run, f"trainer.run_dir={tmp_path / 'second'}")


def test_more_words_and_other_special_ones_are_said(policy: Path, tmp_path: Path) -> None:
    model = tmp_path / "more"
    shutil.copytree(policy / "run" / "export", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([AddedToken("<image>", special=True), AddedToken("<seen>", special=True)])
    tokenizer.pad_token = "<seen>"
    tokenizer.save_pretrained(model)
    ours = AutoTokenizer.from_pretrained(policy / "run" / "export").pad_token
    said = (
        "its tokenizer has 2 tokens that the policy never says (<image>, <seen>), "
        f"pad_token '<seen>' (the policy's: {ours!r})"
    )
    plain = ("tracking.console=plain", f"trainer.run_dir={tmp_path / 'run'}")
    run = ("train", str(policy / "tiny.yaml"), *USES["teacher"], *ONE_STEP, *plain)
    assert f"teacher.path: {said}" in inline(*run, f"teacher.path={model}").stdout
