"""The files of deploy/: nothing here runs Docker, Slurm or Kubernetes. Linters read them, their commands are
checked by `rondo check`, and the scripts run with stand-ins for srun, scontrol, ray and rondo on the PATH.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rondo.cli.main import main
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = ("ray_job_submit.sh", "slurm.sh")
HEAD = "node1"


def linted(program: str, *arguments: str | Path) -> str:
    """What a linter says; empty: nothing is wrong. It is one of the dev extra's."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(program, path=beside)
    if found is None:
        pytest.skip(f"{program} is not installed (the extra `dev` brings it)")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_dockerfiles(name: str, tmp_path: Path) -> None:
    assert linted("hadolint", "--no-color", DEPLOY / name) == ""
    broken = tmp_path / "Dockerfile"
    broken.write_text((DEPLOY / name).read_text().replace("rm -rf /var/lib/apt/lists/*", "true"))
    assert "DL3009" in linted("hadolint", "--no-color", broken)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts(name: str, tmp_path: Path) -> None:
    # SC2154: variables of Slurm's. SC2329: shellcheck does not see that a trap calls it.
    options = ("--exclude=SC2154,SC2329", "--enable=all", "--exclude=SC2250,SC2292,SC2310,SC2312")
    assert linted("shellcheck", *options, DEPLOY / name) == ""
    broken = tmp_path / name
    broken.write_text((DEPLOY / name).read_text().replace('"$@"', "$@"))
    assert "SC2068" in linted("shellcheck", *options, broken)
    assert os.access(DEPLOY / name, os.X_OK)


def test_the_compose_file(tmp_path: Path) -> None:
    """Against the Compose specification's schema, which check-jsonschema brings (Apache-2.0)."""
    check = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert linted(*check, DEPLOY / "compose.yaml") == ""
    broken = tmp_path / "compose.yaml"
    broken.write_text((DEPLOY / "compose.yaml").read_text().replace("shm_size:", "shm-size:"))
    assert "shm-size" in linted(*check, broken)
    [(name, service)] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items()
    assert (name, service["build"]["dockerfile"]) == ("visual", "deploy/Dockerfile.cpu")
    main_checks(service["command"])


def rayjob() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    return job


def test_the_rayjob() -> None:
    """Against a schema of the fields that it uses: rayjob.schema.json says what it is."""
    schema = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(rayjob(), schema)
    wrong = rayjob()
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_the_rayjob_asks_for_the_devices_that_its_pods_have() -> None:
    cluster = rayjob()["spec"]["rayClusterSpec"]
    [group] = cluster["workerGroupSpecs"]
    gpus = 0
    for one in (cluster["headGroupSpec"], group):
        pod = one["template"]["spec"]
        [container] = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        replicas = one.get("replicas", 1)
        gpus += replicas * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
    words = shlex.split(rayjob()["spec"]["entrypoint"])
    assert f"cluster.devices={gpus}" in words
    main_checks(words[1:])


def test_versions_agree() -> None:
    """Ray's, in the image, the manifest and the constraints; Python's and torch's are the image's own."""
    pinned = re.findall(r"^ray==(.*)", (ROOT / "constraints/cpu.txt").read_text(), re.MULTILINE)
    cuda = re.findall(r"ray\[default\]==([\d.]+)", (DEPLOY / "Dockerfile.cuda").read_text())
    assert [rayjob()["spec"]["rayClusterSpec"]["rayVersion"]] == cuda == pinned


def test_what_an_image_needs_is_in_its_context() -> None:
    """All that the Dockerfiles copy is let in by .dockerignore, and nothing else is."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied: set[str] = set()
    for file in DEPLOY.glob("Dockerfile.*"):
        for sources in re.findall(r"^COPY (.*) \S+$", file.read_text(), re.MULTILINE):
            copied |= set(sources.split())
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    assert {"README.md", "LICENSE"} == {*re.findall(r'^readme = "(.*)"', project, re.MULTILINE), "LICENSE"}


def main_checks(words: list[str]) -> None:
    """Has `rondo check` take the recipe and settings of a `rondo train` command, on a CPU."""
    assert words[0] == "train"
    assert main(["check", *words[1:], "cluster.device=cpu"]) == 0


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda", "slurm.sh", "ray_job_submit.sh"])
def test_commands_in_the_heads_of_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader is told to type ends in a recipe and settings that are right. The scripts
    add the backend.
    """
    text = re.sub(r" \\\n#\s+", " ", (DEPLOY / name).read_text())
    found = re.findall(r"^#   .*(?:rondo:\w+ train|deploy/\w+\.sh) (.*)$", text, re.MULTILINE)
    assert len(found) == 1
    monkeypatch.chdir(tmp_path)
    assert main(["init", "project"]) == 0  # what `recipe.yaml` stands for
    monkeypatch.chdir(tmp_path / "project")
    backend = ["cluster.backend=ray"] if name.endswith(".sh") else []
    main_checks(["train", *shlex.split(found[0]), *backend])


# ---- scripts, with stand-ins ----

# Writes what it was called with into a line of `calls`; what else it does is asked of files beside it.
STAND_IN = r"""#!/usr/bin/env bash
printf '%s\n' "$(basename "$0") $*" >> "$CALLS"
"""
# srun runs a command here, as one of the nodes would.
SRUN = r"""while [[ "$1" == --* ]]; do shift; done
[ "$1" = hostname ] && { echo "10.0.0.1 172.17.0.1"; exit; }
exec "$@"
"""
SCONTROL = r"""[ "$1 $2" = "show hostnames" ] && printf 'node%s\n' $NODES
exit 0
"""
# ray start --block stays until it is ended; ray status has a node for each that has started.
RAY = r"""case "$1" in
start)
  for word; do
    [ "$word" = --block ] && { echo up >> "$CALLS.up"; echo $$ >> "$CALLS.pids"; exec sleep 600; }
  done ;;
status) cat "$CALLS.up" 2> /dev/null | sed 's/up/ 1 node_abc/' ;;
esac
"""
RONDO = r"""trap 'echo stopped >> "$CALLS"; exit 143' TERM
cat "$RAY_AUTH_TOKEN_PATH" > "$CALLS.token"; stat --format=%a "$RAY_AUTH_TOKEN_PATH" > "$CALLS.mode"
echo training > "$CALLS.training"
[ "$STAYS" = 1 ] && while :; do sleep 0.05; done
exit "$STATUS"
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """stand_ins(**variables) -> the environment of a script that finds them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {"srun": SRUN, "scontrol": SCONTROL, "ray": RAY, "rondo": RONDO}.items():
        (folder / name).write_text(STAND_IN + body)
        (folder / name).chmod(0o755)

    def variables(**others: str) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "STAYS": "0",
            "STATUS": "0",
            **others,
        }

    return variables


def slurm(**others: str) -> dict[str, str]:
    return {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "12345",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_ON_NODE": "8",
        "NODES": "1 2",
        "POLL_SECONDS": "0.05",
        **others,
    }


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


TRAIN = (
    "rondo train quickstart trainer.run_dir=runs/a b cluster.backend=ray "
    "cluster.backend.address=10.0.0.1:22345 cluster.device=cuda cluster.devices={} cluster.threads=8"
)


@pytest.mark.parametrize(("nodes", "devices"), [("1 2", 16), ("1", 8)])
@pytest.mark.parametrize("status", ["0", "2"])
def test_slurm(nodes: str, devices: int, status: str, stand_ins: Any, tmp_path: Path) -> None:
    """Ray on every node before the run, at the address of the first; the run's exit code; nothing is left."""
    environment = stand_ins(**slurm(NODES=nodes, STATUS=status))
    command = [str(DEPLOY / "slurm.sh"), "quickstart", "trainer.run_dir=runs/a b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (int(status), "")
    ran = calls(tmp_path)
    where = "srun --overlap --nodes=1 --ntasks=1"
    start = "ray start --block --disable-usage-stats --num-cpus=64 --num-gpus=8"
    head = f"{where} --nodelist={HEAD} {start} --head --node-ip-address=10.0.0.1 --port=22345"
    expected = [
        "scontrol show hostnames node[1-2]",
        f"{where} --nodelist={HEAD} hostname --all-ip-addresses",
        f"{head} --include-dashboard=false",
        f"{where} --exclude={HEAD} {start} --address=10.0.0.1:22345",
        TRAIN.format(devices),
    ]
    if nodes == "1":
        del expected[3]
    assert [call for call in ran if not call.startswith(("ray start", "ray status"))] == expected
    main_checks(shlex.split(expected[-1].replace("runs/a b", "'runs/a b'"))[1:])
    assert (tmp_path / "calls.up").read_text().count("up") == len(nodes.split())
    pids = (tmp_path / "calls.pids").read_text().split()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # the script has waited for them
    assert re.fullmatch(r"[0-9a-f]{64}", (tmp_path / "calls.token").read_text())
    assert (tmp_path / "calls.mode").read_text() == "600\n"
    assert not list(tmp_path.glob(".ray-token-*"))


def test_slurms_signal_ends_the_run_and_queues_the_job_again(stand_ins: Any, tmp_path: Path) -> None:
    """As `--signal=B:TERM@300` sends it: to the script alone."""
    script = subprocess.Popen(
        [str(DEPLOY / "slurm.sh"), "quickstart"], cwd=tmp_path, env=stand_ins(**slurm(STAYS="1"))
    )
    wait_for("the run", (tmp_path / "calls.training").exists)
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 143
    assert calls(tmp_path)[-2:] == ["stopped", "scontrol requeue 12345"]


def test_a_job_of_ray(stand_ins: Any, tmp_path: Path) -> None:
    command = [str(DEPLOY / "ray_job_submit.sh"), "quickstart", "cluster.devices=2"]
    assert subprocess.run(command, env=stand_ins(), capture_output=True).returncode == 1  # where is it?
    subprocess.run(command, env=stand_ins(RAY_ADDRESS="http://head:8265"), check=True)
    [call] = calls(tmp_path)
    submit, train = call.split(" -- ")
    assert submit.startswith("ray job submit --working-dir . --runtime-env-json ")
    assert json.loads(submit.partition("json ")[2]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}
    assert train == (
        "rondo train quickstart cluster.devices=2 cluster.backend=ray cluster.backend.address=auto"
    )
    main_checks(shlex.split(train)[1:])
