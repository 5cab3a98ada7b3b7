"""Combinations of rollout engines, their processes, pools and placement that cannot work."""

from __future__ import annotations

from rondo.config.checker import Check
from rondo.roles import ROLES

# A bucket is shared memory, in whole pages: less than one saves nothing, and costs a round per few elements.
SMALLEST_BUCKET = 4096


def engines_of_rollout(check: Check) -> None:
    """Where engines run and how weights reach them; `trainers/commands/check.py` asks the engine itself."""
    rollout, native = check.config.rollout, check.config.rollout.engine == "native"
    for key in ("replicas", "tensor_parallel"):
        check.at_least(f"rollout.{key}", 1)
    check.at_least("rollout.bucket_bytes", SMALLEST_BUCKET)
    if native and rollout.engine_options:
        check.fail(
            "rollout.engine_options",
            "rollout.engine_options are for other engines; the native one is governed by the keys of rollout "
            "itself. Remove them",
        )
    if native and rollout.tensor_parallel > 1:
        check.fail(
            "rollout.tensor_parallel",
            f"{check.named('rollout.tensor_parallel')}, but the native engine runs on one device; use "
            "rollout.engine=vllm or sglang, or tensor_parallel=1",
        )
    if not native and rollout.process == "host":
        check.fail(
            "rollout.process",
            f"{check.named('rollout.process')}, but {check.named('rollout.engine')} runs in a process of its "
            "own; use rollout.process=own, or leave it out",
        )
    if not native and rollout.decode != "auto":
        check.fail(
            "rollout.decode",
            f"{check.named('rollout.decode')} is a path of the native engine, and "
            f"{check.named('rollout.engine')}; remove it",
        )
    if rollout.replicas > 1 and native and rollout.process != "own":
        check.fail(
            "rollout.replicas",
            f"{check.named('rollout.replicas')} needs a process for each: set rollout.process=own",
        )
    if rollout.sleep and check.config.trainer.max_staleness > 0:
        check.fail(
            "rollout.sleep",
            f"{check.named('rollout.sleep')} empties the engines while the trainer updates, but with "
            f"{check.named('trainer.max_staleness')} they go on then; use max_staleness=0, or sleep=false",
        )


def placement(check: Check) -> None:
    """Pools and the roles in them."""
    cluster = check.config.cluster
    for name, size in cluster.pools.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            check.fail(f"cluster.pools.{name}", f"cluster.pools.{name} is a number of devices, got {size!r}")
    total = sum(cluster.pools.values())
    if cluster.pools and total != cluster.devices:
        check.fail(
            "cluster.pools",
            f"cluster.pools have {total} devices together, and {check.named('cluster.devices')}; make "
            "them equal",
        )
    roles = (*ROLES, *(model.name for model in check.config.reward.models))
    for role, pool in cluster.placement.items():
        key = f"cluster.placement.{role}"
        if role not in roles:
            check.fail(key, f"{key}: there is no role {role!r}; the roles are {', '.join(roles)}")
        if pool not in cluster.pools:
            known = ", ".join(cluster.pools) or "none is named in cluster.pools"
            check.fail(key, f"{key}={pool}: there is no such pool ({known})")
