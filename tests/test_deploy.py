"""deploy/: each file by a linter, the script for Slurm with stand-ins for Slurm and Ray, and every command of
rondo in them. Docker, Kubernetes and Slurm are not here: nothing of it was run there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rondo.config import load

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(DEPLOY.glob("*.sh"))

# Subsets of ours of the Compose specification and of KubeRay's RayJob: what these files use and nothing else,
# so that a mistyped key is found.
TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}


def mapping(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    shape = {"type": "object", "properties": properties, "additionalProperties": False}
    return shape | {"required": list(required)}


SERVICE = mapping(
    ["build", "command"],
    build=mapping(["context", "dockerfile"], context={"type": "string"}, dockerfile={"type": "string"}),
    image={"type": "string"},
    command=TEXTS,
    volumes=TEXTS,
    shm_size={"type": "string", "pattern": "^[0-9]+gb$"},
)
COMPOSE = mapping(["services"], services={"type": "object", "additionalProperties": SERVICE})
CONTAINER = mapping(
    ["name", "image"],
    name={"type": "string"},
    image={"type": "string"},
    command=TEXTS,
    resources=mapping(["limits"], limits={"type": "object", "additionalProperties": {"type": "string"}}),
    volumeMounts={
        "type": "array",
        "items": mapping(["name", "mountPath"], name={"type": "string"}, mountPath={"type": "string"}),
    },
)
VOLUME = mapping(
    ["name"],
    name={"type": "string"},
    persistentVolumeClaim=mapping(["claimName"], claimName={"type": "string"}),
    emptyDir=mapping([], medium={"enum": ["Memory"]}, sizeLimit={"type": "string"}),
)
POD = mapping(
    ["spec"],
    spec=mapping(
        ["containers"],
        containers={"type": "array", "items": CONTAINER, "minItems": 1},
        volumes={"type": "array", "items": VOLUME},
    ),
)
PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 1}
WORKERS = mapping(
    ["groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=PARAMS,
    template=POD,
)
RAY_JOB = mapping(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=mapping(["name"], name={"type": "string"}),
    spec=mapping(
        ["entrypoint", "rayClusterSpec"],
        entrypoint={"type": "string"},
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=mapping(
            ["headGroupSpec", "workerGroupSpecs"],
            headGroupSpec=mapping(["rayStartParams", "template"], rayStartParams=PARAMS, template=POD),
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)


def linter(name: str) -> str:
    """Returns the program, which a package of Python's index brings beside this interpreter."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f'{name} is not there: pip install "rondo-rl[dev]"')
    return found


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_by_shellcheck(file: Path) -> None:
    done = subprocess.run([linter("shellcheck"), str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_dockerfiles_by_hadolint(name: str) -> None:
    command = [linter("hadolint"), "--no-color", str(DEPLOY / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_dockerfiles_copy_is_sent() -> None:
    """.dockerignore sends what setuptools reads, and the constraints."""
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == {"src", "constraints", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.parametrize(("name", "schema"), [("compose.yaml", COMPOSE), ("kuberay.yaml", RAY_JOB)])
def test_manifests_have_no_other_keys(name: str, schema: dict[str, Any]) -> None:
    made = yaml.safe_load((DEPLOY / name).read_text())
    jsonschema.Draft202012Validator(schema).validate(made)
    if name == "kuberay.yaml":
        spec = made["spec"]["rayClusterSpec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            named = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]} == named
        (workers,) = spec["workerGroupSpecs"]
        limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert (
            f"cluster.devices={workers['replicas'] * int(limits['nvidia.com/gpu'])}"
            in made["spec"]["entrypoint"]
        )


def commands() -> list[str]:
    """Returns the arguments of `rondo train` in these files and on their page, with variables' values."""
    job = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]["entrypoint"]
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["visual"]["command"]
    found = [job.removeprefix("rondo train "), shlex.join(service[1:])]
    for file in (*SCRIPTS, ROOT / "docs" / "cluster.md"):
        text = file.read_text().replace("\\\n", " ")
        text = re.sub(r'"\$\(\[.*?\)"', "cuda", text)
        text = text.replace('"$address:$port"', "first:6379").replace('"$devices"', "16")
        found += re.findall(r"^[^`#|\n]*\brondo train (.*)$", text, re.MULTILINE)
    return [one.replace('"$@"', "quickstart") for one in found]


@pytest.mark.parametrize("command", commands())
def test_settings_of_the_commands(command: str) -> None:
    recipe, *settings = shlex.split(command)
    known = {"visual": "visual"}.get(recipe, "quickstart")  # the others' recipe is the user's
    config = load([known], [one.replace("FIRST", "first") for one in settings]).config
    assert config.cluster.backend.name == ("local" if known == "visual" else "ray")
    assert config.cluster.devices == (16 if "cluster.devices=" in command else 1)


def test_there_is_a_command_of_each_file() -> None:
    assert len(commands()) == 5  # two manifests, two scripts, a line on the page


STAND_INS = {
    "scontrol": 'printf "node1\\nnode2\\n"',
    "hostname": "echo 10.0.0.1 10.0.0.9",
    "ray": 'echo "$$" >> rays; trap "echo stopped >> log; exit" TERM; while :; do sleep 0.05; done',
    "python": 'case "$1" in -c) echo token;; *) cat > /dev/null;; esac',
    "rondo": 'cp "$RAY_AUTH_TOKEN_PATH" token-seen; exit "${FAIL:-0}"',
    # --option … COMMAND: what would run on that machine runs here.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
}


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_script_starts_ray_everywhere_and_stops_it(tmp_path: Path, status: int) -> None:
    """With stand-ins for Slurm, Ray and rondo: which commands on which machine, and that no Ray stays."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name, body in STAND_INS.items():
        said = f'echo "{name} $*" >> {log}\n' if name != "hostname" else ""
        (programs / name).write_text(f"#!/usr/bin/env bash\n{said}{body}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "FAIL": str(status), **slurm}
    done = subprocess.run(
        [str(DEPLOY / "slurm.sh"), "mine.yaml", "trainer.seed=1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    lines = log.read_text().splitlines()
    started = sorted(line for line in lines if line.startswith("srun") and "ray start" in line)
    on = "srun --overlap --nodes=1 --ntasks=1"
    same = "ray start --block --num-gpus=4 --disable-usage-stats"
    assert started == [
        f"{on} --nodelist=node1 {same} --head --node-ip-address=10.0.0.1 --port=6379",
        f"{on} --nodelist=node2 {same} --address=10.0.0.1:6379",
    ]
    assert [line for line in lines if line.startswith("rondo")] == [
        "rondo train mine.yaml trainer.seed=1 cluster.backend=ray cluster.backend.address=10.0.0.1:6379 "
        "cluster.devices=8 cluster.device=cuda"
    ]
    assert lines.count("stopped") == 2
    for process in (tmp_path / "rays").read_text().split():
        assert not Path(f"/proc/{process}").exists()
    assert (tmp_path / "token-seen").read_text() == "token\n"
    assert not list(tmp_path.glob(".ray-token-*"))
