"""The door for launch scripts and configs of verl: what is loaded, what is refused, and where it stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rondo.cli.main import main
from rondo.config import LoadedConfig, leaves_of
from rondo.config import load as load_ours
from rondo.core.errors import ConfigError
from rondo_verl import launch
from rondo_verl.resolved import every_default, interpolated
from tests.rondo_verl.launched import SCRIPTS, refused, script
from tests.rondo_verl.translated import A, R
from tests.sandboxes import need_sandbox

LAUNCHES = {
    "grpo.sh": {},
    "arrays.sh": {},
    "ray_submit.sh": {},
    "several.sh": {"number": 4},
    "branches.sh": {"arguments": ["large"], "env": ["ONE_NODE=1"]},
    "examples/grpo/run.sh": {"env": ["MODEL_ROOT=/models"]},
    "slurm.sh": {"env": ["SLURM_NNODES=2"]},
}
HEAD = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=tiny "


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts where nothing lies around them: the sandbox of each would get all files of this repository,
    as that of test_script.py's does.
    """
    return Path(shutil.copytree(SCRIPTS, tmp_path_factory.mktemp("launches") / "scripts"))


@pytest.fixture(autouse=True)
def _held(monkeypatch: pytest.MonkeyPatch) -> None:
    need_sandbox()
    monkeypatch.setenv("HOME", "/home/somebody")


def where(loaded: LoadedConfig, key: str) -> str:
    return loaded.origins[key].where


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_recipe_loads_equal_to_its_launch(
    name: str, tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scripts)
    options = LAUNCHES[name]
    typed = launch.read(name, **options)  # type: ignore[arg-type]
    loaded = load_ours([typed.module], list(typed.places))
    recipe = launch.translate(name, **options).recipe
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    again = load_ours([str(tmp_path / "recipe.yaml")])
    assert leaves_of(again.config) == leaves_of(loaded.config)
    assert again.config == loaded.config
    values = [line for line in recipe.splitlines() if ": " in line and not line.startswith("#")]
    assert all(f"# {name}:" in line or "  # verl's default of " in line for line in values)


def test_what_became_of_a_script(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scripts)
    loaded = launch.load(
        "grpo.sh", ["trainer.total_epochs=2"], env=["MODEL_PATH=/models/mine"], arguments=["data.seed=3"]
    )
    c = loaded.config
    assert [(source.path, source.weight) for source in c.data.train] == [
        ("/home/somebody/data/gsm8k/train.parquet", None),
        ("/home/somebody/data/math/train.parquet", None),
    ]
    assert (c.model.path, c.actor.optimizer.lr, c.rollout.n, c.trainer.epochs) == (
        "/models/mine",
        1e-6,
        5,
        2.0,
    )
    assert c.trainer.run_dir == "checkpoints/gsm8k"
    assert c.algorithm.policy_loss.options["dual_clip"] == 3.0
    assert where(loaded, "model.path") == "grpo.sh:20 'actor_rollout_ref.model.path=/models/mine'"
    assert where(loaded, "trainer.epochs") == "argument 'trainer.total_epochs=2'"
    nothing = [note.partition(":")[0:3:2] for note in loaded.notes if "no meaning" in note]
    assert [note[1].split(" ")[0] for note in nothing] == ["11", "22", "24"]  # the first is an argument


def test_of_several_launches_one_is_chosen(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scripts)
    assert refused("several.sh").splitlines() == [
        "several.sh: it launches verl 5 times; choose one (--launch 1):",
        f"  1  several.sh:5  verl.trainer.main_ppo  {A}.optim.lr=1e-6 {R}.n=4",
        f"  2  several.sh:5  verl.trainer.main_ppo  {A}.optim.lr=1e-6 {R}.n=8",
        f"  3  several.sh:5  verl.trainer.main_ppo  {A}.optim.lr=5e-6 {R}.n=4",
        f"  4  several.sh:5  verl.trainer.main_ppo  {A}.optim.lr=5e-6 {R}.n=8",
        "  5  several.sh:12  verl.trainer.fsdp_sft_trainer",
    ]
    c = launch.load("several.sh", number=3).config
    assert (c.actor.optimizer.lr, c.rollout.n) == (5e-6, 4)
    assert "set model.path" in refused("several.sh", number=5)
    assert "--launch is 0" in refused("several.sh", number=0)


def test_a_machine_and_arguments_decide(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scripts)
    c = launch.load("branches.sh").config
    assert (c.model.path, c.rollout.max_tokens, c.cluster.devices) == ("Qwen/Qwen3-0.6B", 1024, 16)
    c = launch.load("branches.sh", arguments=["large"], env=["ONE_NODE=1"]).config
    assert (c.model.path, c.rollout.max_tokens, c.cluster.devices) == ("Qwen/Qwen3-8B", 8192, 8)


def test_all_that_is_refused_is_told_at_once(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """\
SIZES=(
    trainer.val_only=True
    actor_rollout_ref.actor.qat.enable=True
)
NAME=$(python3 name.py)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    --config-name=mine \\
    actor_rollout_ref.model.path=$MODEL \\
    trainer.project_name=$NAME \\
    data.train_files=$1 \\
    trainer.default_local_dir='${hydra:runtime.cwd}' \\
    data.seed=1 oops "${SIZES[@]}"
""",
    )
    with pytest.raises(ConfigError) as caught:
        launch.load(path)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(path + ":").partition(" ")[0].rstrip(":") for line in lines[:-1]] == [
        "8",
        "9",
        "10",
        "11",
        "6",
        "6",
        "3",
        "2",
    ]
    for line, words in zip(
        lines,
        (
            "it needs the variable MODEL, which is not set; give it: --env MODEL=…",
            "takes what run.sh:5 `python3 name.py` prints, which is not run here",
            "it needs its argument 1, which is missing",
            "is resolved by Hydra, and not here",
            "--config-name=mine: of the configs rondo knows ppo_trainer only",
            "'oops' is no key=value",
            "actor_rollout_ref.actor.qat.enable' is verl's spelling",
            "use `rondo eval`",
            "set model.path",
        ),
        strict=True,
    ):
        assert words in line
    assert [line.split()[-1] for line in caught.value.__notes__[0].splitlines()] == ["8", "1", "1", "9", "50"]


def test_what_a_script_lacks_may_be_given(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + "data.train_files=$1 trainer.project_name=$(git branch)\n")
    c = launch.load(path, ["data.train_files=t.parquet", "trainer.project_name=p"]).config
    assert (c.data.train[0].path, c.tracking.project) == ("t.parquet", "p")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "set -u\necho $1\n" + HEAD,
            "run.sh:2: the script needs its argument 1, which is missing; give it behind",
        ),
        (
            "set -u\nx=$DATA_DIR/a\n" + HEAD,
            "run.sh:2: the script needs the variable DATA_DIR, which is not set",
        ),
        ("x=${DATA_DIR:?}\n" + HEAD, "run.sh:1: the script needs the variable DATA_DIR"),
        (
            HEAD + "\nif true; then\n",
            "run.sh:3: bash cannot read the script: syntax error: unexpected end of file",
        ),
        ("echo 'x\n" + HEAD, "bash cannot read the script: unexpected EOF while looking for matching"),
        (
            "echo nothing\n",
            "no launch of verl (python -m verl.trainer.main_ppo …) in it; it ended with code 0",
        ),
        (
            "python3 -m verl.model_merger merge\n",
            "It would have run: run.sh:1 `python3 -m verl.model_merger merge`",
        ),
        (
            "set -e\nwget -q http://x/env.sh\nsource env.sh\n" + HEAD,
            "it ended with code 1 at run.sh:3; run.sh: line 3: env.sh: No such file or directory. Nothing is "
            "downloaded here: run.sh:2 `wget -q http://x/env.sh`",
        ),
        (HEAD + ">/data/logs/x.log\n", "run.sh: line 1: /data/logs/x.log: No such file or directory"),
        (
            "N=$(($(python3 -c 'print(2)') * 2))\nset -e\nfalse\n" + HEAD,
            "(run.sh:1 `python3 -c 'print(2)'` is not run here)",
        ),
        ("python3 -m recipe.sppo.main_sppo a=1\n", "recipe.sppo.main_sppo is not translated"),
    ],
)
def test_a_script_without_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(script(tmp_path, text).rpartition("/")[2])


def test_what_a_script_does_besides_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script(
        tmp_path,
        "hf download Qwen/x\ncd nowhere\npip install -e .\nray start --head\n"
        + HEAD
        + "data.train_files=a.jsonl\n",
    )
    notes = launch.load("run.sh").notes
    brought = "run.sh:1 `hf download Qwen/x`; run.sh:3 `pip install -e .`"
    assert notes[:3] == (
        f"not run, of the script: {brought}; run.sh:4 `ray start --head`",
        f"nothing was downloaded, what these bring has to be here already: {brought}",
        "bash said of the script: run.sh: line 2: cd: nowhere: No such file or directory",
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.txt", b"bash run.sh", "neither a script (.sh, or #!/bin/bash"),
        ("run.sh", b"\xff\xfe\x00", "it cannot be read as a script"),
        (
            "a.yaml",
            b"model: {path: x}",
            "it has neither actor_rollout_ref nor optim; a recipe in rondo's spelling goes without",
        ),
        ("a.yaml", b"- 1", "a recipe is a mapping of sections"),
        (
            "a.yaml",
            b"defaults: [ppo_trainer, _self_]\ndata: {}",
            "a.yaml:1: defaults: ['ppo_trainer', '_self_']: Hydra",
        ),
        ("a.yaml", b"a: [", "not valid YAML"),
    ],
)
def test_a_file_that_is_neither(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in refused(tmp_path / name)
    assert "there is no such file" in refused(tmp_path / "none.sh")


def test_options_of_scripts_and_versions(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("actor_rollout_ref: {}")
    assert "--env: for scripts only" in refused(tmp_path / "a.yaml", env=["A=1"])
    assert "--launch: for scripts only" in refused(tmp_path / "a.yaml", number=1)
    assert "--env A: it is written" in refused(script(tmp_path, HEAD), env=["A"])
    assert "rondo does not know its defaults" in refused(tmp_path / "a.yaml", version="0.4.0")
    (tmp_path / "a.yaml").write_text(yaml.dump({"actor_rollout_ref": {f"new_{n}": n for n in range(11)}}))
    assert "11 of its keys are none of verl main (actor_rollout_ref.new_0, " in refused(tmp_path / "a.yaml")


def test_a_version_is_the_translators(tmp_path: Path) -> None:
    """What 0.6.1 had by default, and main has not: 1024 sequences at once."""
    path = script(tmp_path, HEAD + "data.train_files=a.parquet trainer.total_training_steps=1\n")
    found = {version: launch.load(path, version=version) for version in ("main", "0.6.1", None)}
    assert [one.config.rollout.max_concurrent for one in found.values()] == [256, 1024, 256]
    translated = launch.translate(path, version="0.6.1").recipe
    assert "max_concurrent: 1024  # verl's default of actor_rollout_ref.rollout.max_num_seqs" in translated


def test_a_program_sets_what_it_does_beneath_the_keys(tmp_path: Path) -> None:
    """The trainer that is one step ahead, typed and in a script; two files of one name keep apart."""
    ahead = "recipe.one_step_off_policy.main_ppo"
    keys = ["data.train_files=[gsm8k/train.parquet,math/train.parquet]", "trainer.total_training_steps=1"]
    text = HEAD.replace("verl.trainer.main_ppo", ahead) + " ".join(keys) + "\n"
    config = launch.load(script(tmp_path, text)).config
    typed = load_ours([ahead], [*HEAD.split()[3:], *keys]).config
    assert leaves_of(config) == leaves_of(typed)
    assert config.trainer.max_staleness == 1
    assert [source.name for source in config.data.train] == ["gsm8k-train", "math-train"]


def resolved(path: Path, changes: dict[str, object], *, keep: bool = False) -> str:
    """Writes verl's whole config with these changes, as Hydra does (keep: without resolving)."""
    values = {**every_default("main"), **changes}
    tree: dict[str, object] = {"hydra": {"run": {"dir": "x"}}}
    for key, value in values.items():
        *sections, name = key.split(".")
        node: dict = tree  # type: ignore[type-arg]
        for section in sections:
            node = node.setdefault(section, {"_target_": "verl.workers.config.X"})
        node[name] = value if keep else interpolated(value, key, values)
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(path)


@pytest.mark.parametrize("keep", [False, True])
def test_a_whole_config_is_its_launch(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.chdir(scripts)
    typed = launch.read("grpo.sh")
    changes = {
        each.partition("=")[0]: json.loads(value)
        if value[0] in '[{"0123456789' and "'" not in value
        else value
        for each in typed.places
        for value in [each.partition("=")[2].replace("'", '"') if "[" in each else each.partition("=")[2]]
    }
    changes = {
        key: {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    changes["actor_rollout_ref.actor.optim.lr"] = 1e-6
    path = resolved(tmp_path / "config.yaml", changes, keep=keep)
    one, other = leaves_of(launch.load(path).config), leaves_of(launch.load("grpo.sh").config)
    differ = {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}
    assert not differ
    assert "trainer.val_only (verl's spelling) cannot be boolean true" in refused(
        resolved(tmp_path / "config.yaml", {**changes, "trainer.val_only": True})
    )


def test_the_commands(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scripts)
    assert main(["config", "translate", "branches.sh", "trainer.nnodes=1", "--", "large"]) == 0
    out, err = capsys.readouterr()
    assert "path: Qwen/Qwen3-8B  # branches.sh:20 'actor_rollout_ref.model.path=Qwen/Qwen3-8B'" in out
    assert "keys of branches.sh:16      5" in err
    assert "carried                     5" in err
    assert main(["config", "show", "--verl", "grpo.sh", "--env", "MODEL_PATH=/m"]) == 0
    assert "model.path: /m " in capsys.readouterr().out
    assert main(["train", "--verl", "grpo.sh", "trainer.val_only=True", "model.hub=local"]) == 2
    assert "use `rondo eval`\n  keys of grpo.sh:11         26\n" in capsys.readouterr().err
    assert main(["check", "--verl", "several.sh", "--verl-version", "0.6"]) == 2
    assert "there are: " in capsys.readouterr().err
    assert main(["train", "quickstart", "--launch", "2"]) == 2
    assert "--launch and --verl-version: of a launch, and none is named" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "name a recipe: a YAML file, or one of" in capsys.readouterr().err
