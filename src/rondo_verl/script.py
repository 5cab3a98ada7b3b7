"""What a launch script of verl would run, found by running it where nothing else can: bash in the sandbox, with
stand-ins for all programs but coreutils. They write down their arguments and do nothing.

The script sees a copy of the files around it, of its working directory and an empty home, each at its own
path below a folder of the sandbox; that folder's name is taken out of what it says. So it may read, `cd`,
write and redirect as it does at home.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rondo.core.errors import ConfigError, SandboxError
from rondo_sandbox import Limits, Result, open_sandbox

SECONDS = 20
MOST_FILES, MOST_BYTES, LARGEST = 2000, 32 << 20, 256 << 10
# What a script may really run. Those in QUIET fail in silence: what they would change is not here.
TOOLS = (
    "basename cat cut date dirname echo env expr false find grep egrep head join ls mktemp nl nohup nproc paste "
    "printf pwd readlink realpath rev sed seq sh bash sort split stat tac tail tee test timeout tr true uname "
    "uniq wc xargs awk mawk gawk sha256sum md5sum base64 id tty yes"
)
QUIET = "mkdir rm cp mv touch ln chmod rmdir truncate"
PROGRAMS = (
    "python python3 torchrun ray accelerate deepspeed pip pip3 uv conda wget curl huggingface-cli hf git srun sbatch "
    "nvidia-smi npu-smi rocm-smi sleep ps pkill kill killall hostname sudo apt apt-get docker ssh scp rsync jq module"
)
_DOWNLOADS = re.compile(
    r"(wget|curl|scp|rsync)\b|\S+ (download|clone|install|pull|sync)\b|python3? .*(download|snapshot)"
)
_ABSOLUTE = re.compile(rf"/(?:[\w.-]+/)+(?:{'|'.join(PROGRAMS.split()[:6])})\b")

_BOOT = """\
root=$PWD/{token}
bin=$root/.bin
mkdir -p "$bin" "$root/.ran" "$root"{cwd} "$root"{home}
for name in {tools}; do [ -x /usr/bin/$name ] && ln -s /usr/bin/$name "$bin/$name"; done
chmod +x "$root/.stub" "$root/.quiet"
for name in {programs}; do ln -s ../.stub "$bin/$name"; done
for name in {quiet}; do ln -s ../.quiet "$bin/$name"; done
cd "$root"{cwd}
env -i PATH="$bin" HOME="$root"{home} LANG=C.UTF-8 USER=user BASH_ENV="$root/.before" RONDO_ROOT="$root" {env} \\
    "$bin/timeout" -k 1 {seconds} bash "$root"{script} {arguments} </dev/null >/dev/null 2>"$root/.said"
code=$?
printf '%s\\0' "$root" "$code" "$(cat "$root/.at" 2>/dev/null)" "$(tail -c 20000 "$root/.said")"
for ((n = 1; ; n++)); do [ -e "$root/.ran/$n" ] && cat "$root/.ran/$n" || break; done
"""
# Before each command of the script: where it stands, for the stand-ins and for a script that never ends.
_BEFORE = """\
if [[ $0 != "$RONDO_ROOT"/.bin/* && $0 != "$RONDO_ROOT"/.stub ]]; then
    command_not_found_handle() { "$RONDO_ROOT/.stub" "$@"; }
    {functions}
    exec {BASH_XTRACEFD}>/dev/null
    set -T
    trap '[[ -z ${BASH_SOURCE-} || $BASH_SOURCE == */.before ]] || { RONDO_AT=$BASH_SOURCE:$LINENO; {at}; }' DEBUG
fi
""".replace("{at}", 'export RONDO_AT; printf %s "$RONDO_AT" >| "$RONDO_ROOT/.at"')
_STUB = """\
#!/bin/bash
name=${0##*/}
if [ "$name" = .stub ]; then name=$1; shift; fi
[ "$name" = sleep ] && exit 0
set -C
n=1
until { : > "$RONDO_ROOT/.ran/$n"; } 2>/dev/null; do n=$((n + 1)); [ $n -lt 1000 ] || exit 1; done
printf '%s\\0' "$RONDO_AT" "$(($# + 1))" "$name" "$@" >> "$RONDO_ROOT/.ran/$n"
case "$name $*" in
nvidia-smi*name*) for i in {0..7}; do echo "NVIDIA H100 80GB HBM3"; done ;;
nvidia-smi*count*) for i in {0..7}; do echo 8; done ;;
nvidia-smi*memory*) for i in {0..7}; do echo 81559; done ;;
nvidia-smi*) for i in {0..7}; do echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-$i)"; done ;;
srun*|ray\\ job*|sudo*)
    while [ $# -gt 0 ]; do case "${1##*/}" in bash|sh) exec "$@" ;; esac; shift; done ;;
*) echo "{marker}$n@" ;;
esac
"""
_QUIET = '#!/bin/bash\n/usr/bin/"${0##*/}" "$@" 2>/dev/null\nexit 0\n'


@dataclass(frozen=True)
class Ran:
    """A program that a script would have run."""

    file: str
    """Which script names it: the one that was given, or one that this one sources or runs."""
    line: int
    """Where its command begins."""
    argv: tuple[str, ...]
    """Its name, and its arguments."""

    def __str__(self) -> str:
        text = shlex.join(self.argv)
        return f"{os.path.basename(self.file)}:{self.line} `{text if len(text) < 60 else text[:57] + '…'}`"


@dataclass(frozen=True)
class Report:
    """What a script did."""

    ran: tuple[Ran, ...]
    """The programs, in the order in which they would have begun."""
    code: int
    """How it ended."""
    at: str
    """file:line of the last command."""
    said: tuple[str, ...]
    """Lines of standard error, with the script's paths as they are here."""
    marker: str
    """What stands for the output of a program that was not run, with its number and `@` behind it."""

    def behind(self, text: str) -> Ran | None:
        """Returns the program whose output is in `text`."""
        found = re.search(re.escape(self.marker) + r"(\d+)@", text)
        return self.ran[int(found[1]) - 1] if found else None

    def downloads(self) -> list[Ran]:
        """Returns what was to bring something from elsewhere."""
        return [one for one in self.ran if _DOWNLOADS.match(" ".join(one.argv))]


def run_script(path: str, arguments: Sequence[str], env: Mapping[str, str]) -> Report:
    """Runs a script with stand-ins. Raises ConfigError for one that cannot be run to its end, SandboxError
    where this machine can hold no program.
    """
    script, token = os.path.abspath(path), f"rondo-{secrets.token_hex(8)}"
    marker = f"@not-run-{secrets.token_hex(4)}-"
    text = Path(script).read_text(encoding="utf-8")
    cwd, home = os.getcwd(), os.path.expanduser("~")
    functions = "\n    ".join(
        f'{place}() {{ {place.rpartition("/")[2]} "$@"; }}' for place in sorted(_absolute(text))
    )
    boot = _BOOT.format(
        token=token,
        cwd=shlex.quote(cwd),
        home=shlex.quote(home),
        script=shlex.quote(script),
        tools=TOOLS,
        quiet=QUIET,
        programs=PROGRAMS,
        seconds=SECONDS,
        env=" ".join(shlex.quote(f"{name}={value}") for name, value in env.items()),
        arguments=shlex.join(arguments),
    )
    files: dict[str, str | bytes] = {f"{token}{name}": content for name, content in _around(script, cwd)}
    files |= {
        "boot.sh": boot,
        f"{token}{script}": text,
        f"{token}/.before": _BEFORE.replace("{functions}", functions),
        f"{token}/.stub": _STUB.replace("{marker}", marker),
        f"{token}/.quiet": _QUIET,
    }
    result = _in_sandbox(files, path)
    if not result.ok or "\0" not in result.stdout:
        limit = f"it exceeded a limit ({result.status})" if "limit" in result.status else result.stderr[-300:]
        raise ConfigError(f"{path}: the script could not be run: {limit}")
    root, code, at, said, *rest = result.stdout.split("\0")
    at, said = (each.replace(root + script, path).replace(root, "") for each in (at, said))
    ran = tuple(_records([each.replace(root + script, path).replace(root, "") for each in rest]))
    return Report(ran, int(code), at, tuple(said.splitlines()), marker)


def _absolute(text: str) -> Iterable[str]:
    """Returns the places at which a script may name a program by its whole path."""
    usual = (f"/{place}/{name}" for place in ("usr/bin", "bin", "usr/local/bin") for name in PROGRAMS.split())
    return {*usual, *_ABSOLUTE.findall(text)}


def _around(script: str, cwd: str) -> Iterator[tuple[str, bytes]]:
    """Yields the files that a script may read, the nearest first: below its folder, below the repository that
    it lies in, and below the working directory where that holds it. None that is hidden or large.
    """
    folder = Path(script).parent
    roots = [folder, *(above for above in folder.parents if (above / ".git").exists() or str(above) == cwd)]
    waiting, seen, size = deque(map(str, roots)), set[str](), 0
    while waiting:
        try:
            entries = sorted(os.scandir(waiting.popleft()), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.path in seen:
                continue
            seen.add(entry.path)
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file() and entry.stat().st_size <= LARGEST:
                    size += entry.stat().st_size + 4096
                    if size > MOST_BYTES or len(seen) > MOST_FILES:
                        return
                    yield entry.path, Path(entry.path).read_bytes()
            except OSError:
                continue


def _in_sandbox(files: Mapping[str, str | bytes], path: str) -> Result:
    limits = Limits(seconds=SECONDS + 10.0, disk_mb=2 * MOST_BYTES >> 20, output_bytes=4 << 20, processes=128)

    async def opened() -> Result:
        async with await open_sandbox(limits=limits) as sandbox:
            return await sandbox.run(["/bin/bash", "boot.sh"], files=files)

    try:
        with ThreadPoolExecutor(1) as elsewhere:  # a loop may run here
            return elsewhere.submit(asyncio.run, opened()).result()
    except SandboxError as error:
        raise SandboxError(
            f"{path}: a script runs in a sandbox only, and there is none here: {error}. Or give the launch "
            "itself: rondo train verl.trainer.main_ppo key=value …"
        ) from error


def _records(fields: list[str]) -> Iterator[Ran]:
    at = 0
    while at + 2 < len(fields):
        place, count = fields[at], int(fields[at + 1])
        file, _, line = place.rpartition(":")
        yield Ran(file, int(line or 0), tuple(fields[at + 2 : at + 2 + count]))
        at += 2 + count
