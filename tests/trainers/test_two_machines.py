"""Two machines, as far as one can be two: a network namespace for each, joined by a virtual cable, with a
node of Ray in each. A run has a rank on either, and outlives the loss of one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import yaml

from tests.trainers.conftest import PYTHONPATH, RECIPE, REPOSITORY, inline, metrics, weights
from tests.waiting import is_gone, wait_for, wait_until_gone

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip (iproute2)"),
]

PORT = 6379
STEPS = 10
SETTINGS = (
    f"trainer.total_steps={STEPS}",
    "trainer.evaluation={before: false, every: null}",
    "checkpoint.every=2",
    "cluster.devices=2",
    "cluster.device=cpu",
    "tracking.console=plain",
)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:  # root of a container may not
        pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass
class Machine:
    """A network namespace with one end of a cable."""

    name: str
    """Of the namespace and of the interface in it."""
    address: str
    folder: Path
    """Of Ray, whose sockets want a short path."""

    def begin(self, *command: str, output: IO[str]) -> subprocess.Popen[str]:
        """Starts `python COMMAND…` there: `ip` becomes that process."""
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, *command],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_ray(self, *joins: str) -> None:
        """One node with one CPU."""
        ray = ("-m", "ray.scripts.scripts", "start", *joins, f"--node-ip-address={self.address}")
        options = ("--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats")
        with tempfile.TemporaryFile("w+") as said:
            process = self.begin(*ray, *options, f"--temp-dir={self.folder}", output=said)
            code = process.wait(180)
            said.seek(0)
            assert code == 0, said.read()

    def pids(self) -> list[int]:
        """Of all processes there."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(line) for line in listed.stdout.split()]

    def make(self) -> None:
        """Where its name stands for a loopback address, as in many a file of hosts."""
        ip("netns", "add", self.name)
        etc = Path("/etc/netns", self.name)  # `ip netns exec` lays its files over those of /etc
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")

    def plug(self, state: str) -> None:
        """Puts its end of the cable up, or down: then nothing arrives any more, and nothing says so."""
        ip("-n", self.name, "link", "set", self.name, state)

    def remove(self) -> None:
        """With all that runs there."""
        if Path("/run/netns", self.name).exists():
            self.lose()
            subprocess.run(["ip", "netns", "del", self.name], check=True)
            shutil.rmtree(Path("/etc/netns", self.name))
        shutil.rmtree(self.folder)

    def lose(self) -> None:
        """Ends all its processes at once, as when its power fails; returns when they are gone."""

        def ended() -> bool:
            left = [pid for pid in self.pids() if not is_gone(pid)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_for(f"the end of what runs on {self.name}", ended)


def object_stores() -> set[str]:
    """Files of Ray's. What else is in shared memory, other tests may be using."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("plasma")}


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    """The first has Ray's head. Their addresses exist nowhere but on their cable."""
    before = object_stores()
    folders = [Path(tempfile.mkdtemp(prefix="ray")) for _ in "ab"]
    names = [f"rondo{os.getpid()}{letter}" for letter in "ab"]
    both = [Machine(names[i], f"10.77.0.{i + 1}", folders[i]) for i in (0, 1)]
    with contextlib.ExitStack() as stack:
        for one in both:
            stack.callback(one.remove)
        for one in both:
            one.make()
        first, second = ((one.name, "netns", one.name) for one in both)
        ip("link", "add", *first, "type", "veth", "peer", "name", *second)
        for one in both:
            ip("-n", one.name, "addr", "add", f"{one.address}/24", "dev", one.name)
            one.plug("up")
            ip("-n", one.name, "link", "set", "lo", "up")
        both[0].start_ray("--head", f"--port={PORT}", "--include-dashboard=false")
        both[1].start_ray(f"--address={both[0].address}:{PORT}")
        yield both
    assert not [name for name in os.listdir("/run/netns") if name in names]
    assert object_stores() <= before


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machines") / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def on_one_machine(recipe: Path) -> Path:
    """The same run, of two processes here."""
    run = recipe.parent / "one"
    inline("train", str(recipe), *SETTINGS, "cluster.backend=process", f"trainer.run_dir={run}")
    return run


@dataclass
class Command:
    """`rondo train` over both machines, from the first of them."""

    process: subprocess.Popen[str]
    run: Path
    output: Path

    def says(self, text: str) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        return text in self.output.read_text()

    def ends(self) -> None:
        assert self.process.wait(240) == 0, self.output.read_text()

    def hosts(self) -> list[list[tuple[int, str]]]:
        """Process id and address of each host process, by rank and attempt, as its log says."""
        logs = sorted((self.run / "logs").glob("host-*.log"))
        headers = [
            re.findall(r"^=== .*\(pid (\d+) on (\S+)\), started", log.read_text(), re.M) for log in logs
        ]
        return [[(int(pid), address) for pid, address in found] for found in headers]


def train(machines: list[Machine], recipe: Path, name: str, *settings: str) -> Command:
    folder = recipe.parent
    backend = f"cluster.backend={{name: ray, address: '{machines[0].address}:{PORT}'}}"
    command = ("-m", "rondo.cli.main", "train", str(recipe), *SETTINGS, backend, *settings)
    with (folder / f"{name}.txt").open("w") as output:
        process = machines[0].begin(*command, f"trainer.run_dir={folder / name}", output=output)
    return Command(process, folder / name, folder / f"{name}.txt")


def test_two_machines_equal_one(machines: list[Machine], recipe: Path, on_one_machine: Path) -> None:
    command = train(machines, recipe, "two")
    command.ends()
    hosts = command.hosts()
    assert [len(attempts) for attempts in hosts] == [1, 1]
    assert {address for ((_, address),) in hosts} == {one.address for one in machines}
    assert weights(command.run) == weights(on_one_machine)
    assert metrics(command.run) == metrics(on_one_machine)
    wait_until_gone(pid for ((pid, _),) in hosts)


def test_an_interface_that_leads_to_nobody_is_told(machines: list[Machine], recipe: Path) -> None:
    """Loopback: where gloo would listen by itself."""
    command = train(machines, recipe, "loopback", "cluster.env.GLOO_SOCKET_IFNAME=lo")
    assert command.process.wait(240) == 2
    assert "did not join one torch.distributed world at 10.77.0." in command.output.read_text()
    assert "do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in command.output.read_text()


@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_a_machine_that_is_lost_and_comes_back(
    machines: list[Machine], recipe: Path, on_one_machine: Path, how: str
) -> None:
    """All its processes at once in the middle of the run, without which no step can be done; or its cable:
    nobody hears of that, and the watch ends the calls. It is back when the run has said that it waits.
    """
    head, lost = machines
    command = train(machines, recipe, how, "cluster.hang_seconds=10")
    lines = command.run / "metrics.jsonl"
    wait_for("step 3", lambda: command.says("") and lines.exists() and '"step": 3' in lines.read_text())
    if how == "unplugged":
        lost.plug("down")
        wait_for("the watch", lambda: command.says("its machine may be gone, or out of reach"))
    lost.lose()
    wait_for("patience", lambda: command.says(f"Ray has lost {lost.address}"))
    lost.plug("up")
    lost.start_ray(f"--address={head.address}:{PORT}")
    command.ends()
    hosts = command.hosts()
    assert [len(attempts) for attempts in hosts] == [2, 2]
    for attempt in zip(*hosts, strict=True):
        assert {address for _, address in attempt} == {head.address, lost.address}
    why = {
        "killed": f"on {lost.address}) died or cannot be reached",
        "unplugged": "nothing has moved for 10 s (cluster.hang_seconds)",
    }
    assert why[how] in command.output.read_text()
    assert "Task exception was never retrieved" not in command.output.read_text()
    assert "restart 1 of 3 (trainer.max_restarts): goes on behind step" in command.output.read_text()
    assert weights(command.run) == weights(on_one_machine)
    assert metrics(command.run) == metrics(on_one_machine)
    wait_until_gone(pid for attempts in hosts for pid, _ in attempts)
