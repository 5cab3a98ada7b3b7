"""Which of verl's own launch scripts mean something here, and what the others lack.

    python benchmarks/verl_launches.py verl_launches.jsonl [--write tests/rondo_verl/launches.tsv]

Each line of the file is one launch of a script: repo, script, launch (its number in the script), module,
flags (Hydra's), overrides. It is loaded as `rondo train MODULE OVERRIDES…` would be. Prints what the launches
that are refused lack, by capability: each counts for what it lacks that is furthest, and where that is all.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rondo.config.load import load
from rondo.core.errors import ConfigError
from rondo_verl.programs import program

ACCEPTED = "accepted"
# What a launch lacks, and the keys, values or programs that show it; the first that fits.
CAPABILITIES: Mapping[str, str] = {
    "self-play fine-tuning": r"\S*main_spin",
    "generation": r"\S*main_(generation|eval)\S*|trainer\.val_only",
    "program": r"program .*|scripts/.*|no program",
    "experts with megatron": r"\S*megatron\S*\.(expert_|moe_|num_moe_|router_replay)\S*",
    "megatron": r"\S*megatron\S*|\S*(pipeline|virtual)_\S*|--config-name=\S*(megatron|mcore)\S*|\S*\.mtp\.\S*"
    r"|\S*(strategy|engine|optim)=megatron|optim\.(min_lr|lr_decay|lr_warmup_init)\S*|engine\.(tensor|pipeline|virtual|context|expert|\S*mbridge)\S*|\S*optim\.lr_(decay|warmup_init)\S*|\S*optim\.override_optimizer\S*",
    "another engine of training": r"\S*(veomni|torchtitan|turbo|qat|actor\.engine)\S*|model_engine\S*"
    r"|\S*strategy=\S*|(engine|optim)@\S*|(engine|optim)\.\S*|\S*_mlite\S*|actor@\S*|hydra\S*",
    "rewards": r"(reward|reward_model|custom_reward_function|sandbox_fusion)(\.\S*)?(=.*)?",
    "multi-turn": r"\S*(multi_turn|\.agent\.|custom_cls)\S*.*",
    "distillation": r"(distillation|teacher)\S*.*",
    "another accelerator": r"cluster\.device=npu|trainer\.device=npu",
    "config file": r"--config-name=.*",
    "asynchrony": r"(async_training|async_resources|transfer_queue|trainer\.v1|trainer\.use_v1)\S*.*"
    r"|rollout\.(n_gpus|nnodes|sleep|test_freq|total)\S*.*",
    "rollout engine": r"actor_rollout_ref\.rollout\.\S*.*|rollout\.engine\S*.*",
    "data": r"data\.\S*.*|trainer\.evaluation\S*.*|model(\.path)?(=.*)?",
    "algorithm": r"(algorithm|critic)\.\S*.*|\S*\.actor\.(policy_loss|clip|loss|tau|use_kl)\S*.*",
    "training": r"(actor|actor_rollout_ref)\.\S*.*|actor\.\S*.*",
    "run": r".*",
}
# Those of verl's own trainers, of either framework.
OWN_CONFIGS = r"=(ppo|fully_async_ppo)_trainer|=(ppo|fully_async_ppo|one_step_off_ppo|dapo)_megatron_trainer"
COLUMNS = ("repo", "script", "launch", "module", "result", "shown by", "all that it lacks")


def launches(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the launches of a file; other lines of it are verl's defaults."""
    for line in path.read_text(encoding="utf-8").splitlines():
        launch = json.loads(line)
        if "overrides" in launch:
            yield launch


def refusals(launch: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is refused, as program, flag, key or key=value."""
    module, programs = launch["module"] or "", []
    if not module:
        yield "no program"
    else:
        try:
            programs = [module] if program(module) is not None else []
        except ConfigError:
            known = re.fullmatch(
                f"{CAPABILITIES['self-play fine-tuning']}|{CAPABILITIES['generation']}", module
            )
            yield module if known else f"program {module}"
    for flag in launch["flags"]:
        # What a file of verl's says is not in the launch; those of its own trainers have its defaults.
        if flag.startswith("--config-name=") and not re.search(OWN_CONFIGS, flag):
            yield flag
    by_megatron = any("megatron_trainer" in flag for flag in launch["flags"])  # whose default it is
    strategy = ["actor_rollout_ref.actor.strategy=megatron"] if by_megatron else []
    try:
        load(programs, [*strategy, *launch["overrides"]])
    except ConfigError as error:
        for problem in error.problems:
            key, text = problem.key or "", str(problem)
            written = re.search(r"cannot be (\S+) here", text)
            shown = f"{key}={written[1]}" if written else key
            if key.endswith("device") and "npu" in text:
                shown = f"{key}=npu"
            yield shown or text.partition(": ")[2][:60]


def capability(shown: str) -> str:
    """Returns the capability that something refused shows to be missing."""
    return next(name for name, pattern in CAPABILITIES.items() if re.fullmatch(pattern, shown))


def row(launch: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a launch's row of the table."""
    shown = list(dict.fromkeys(refusals(launch)))
    lacking = {one: capability(one) for one in shown}
    # Of several, the one that is hardest to mend.
    first = min(shown, key=lambda one: list(CAPABILITIES).index(lacking[one]), default="")
    needed = [name for name in CAPABILITIES if name in lacking.values()]
    where = (launch["repo"], launch["script"], str(launch["launch"]), launch["module"] or "")
    return (*where, lacking[first] if first else ACCEPTED, first[:100], ", ".join(needed))


def main() -> None:
    """Loads every launch, prints the counts, and writes the table where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    table = [row(launch) for launch in launches(arguments.data)]
    first, alone = Counter(one[4] for one in table), Counter(one[6] for one in table)
    print(f"{'launches':>8}  {'only that':>9}  lacks")
    for name in (ACCEPTED, *CAPABILITIES):
        print(f"{first[name]:8}  {alone[name] if name in CAPABILITIES else '':>9}  {name}")
    print(f"{len(table):8}  {'':>9}  all")
    if arguments.write:
        lines = ["\t".join(one) for one in (COLUMNS, *table)]
        arguments.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
