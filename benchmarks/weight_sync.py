"""Weight syncs from FSDP2 on 1, 2 and 4 ranks to a rollout engine, route by route: bytes moved and needed,
peak extra memory, time.

    python benchmarks/weight_sync.py [--ranks 1 2 4] [--engines native] [--json weight_sync.json]
    python benchmarks/weight_sync.py --engines native vllm sglang --tp 1 2      (in the engines' environment)
    python benchmarks/weight_sync.py --layouts                  (two ranks along each parallel axis)

Routes: `gathered` (an engine in each rank's process), `process` (one engine in a process of its own beside
rank 0, through shared memory; the other ranks take part in the gathering), `collective` (one engine on a host
of its own, point to point along a transfer plan), `disk` (the same engine reads what the trainer wrote).

bytes moved: between processes (for disk: written and read). bytes needed: what the engine's process does not
hold beforehand. peak: most resident memory during the sync over what was resident before it (free memory is
given back to the system first, in this process), of the trainer's rank 0 and of the engine's processes
together; where both are one process it is said once. planned: of whoever plans, the largest. Times are
medians of --repeat syncs after one that does not count; compare them within one run only. With --layouts
bytes are not worked out but counted, of each rank, in the calls of torch.distributed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

MiB = 1 << 20
ROUTES = ("gathered", "process", "collective", "disk")  # into the native engine; others have `process` only
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers"]
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
}
LAYOUTS = ("shard", "tensor", "context", "expert", "replicate")


@dataclass(frozen=True)
class Row:
    """One route from one number of ranks to one engine. Bytes; seconds."""

    route: str
    ranks: int
    engine: str
    tensor_parallel: int
    model_bytes: int
    bytes_moved: int
    bytes_needed: int
    peak_planned: int
    peak_trainer: int
    peak_engine: int | None
    seconds: float


class Memory:
    """Resident bytes of processes, and the most since `reset` (Linux)."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def reset(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self.before = sum(self._read(pid, "VmRSS") for pid in self.pids)
        for pid in self.pids:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def extra(self) -> int:
        return max(0, sum(self._read(pid, "VmHWM") for pid in self.pids) - self.before)

    @staticmethod
    def _read(pid: int, field: str) -> int:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
        return 0


def children(pid: int) -> list[int]:
    """The process and all below it."""
    found, parents = [pid], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def rank_main(rank: int, world: int, store: str, case: dict[str, Any], pipe: Any) -> None:
    """A process of one case; answers (seconds, peak, planned) of every sync, or the error."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own deprecations
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    try:
        with contextlib.ExitStack() as stack:
            sync, memory, planned = side(rank, case, stack)
            measured = []
            for version in range(case["repeat"] + 1):
                dist.barrier()
                memory.reset()
                started = time.perf_counter()
                sync(version)
                mine = memory.extra()
                dist.barrier()
                measured.append((time.perf_counter() - started, mine, list(planned())))
            if "layout" in case:  # beside the timed ones: it looks at every call
                from parallel import Received

                with Received() as received:
                    sync(case["repeat"] + 1)
                measured.append(sum(received.bytes.values()))
        pipe.send(measured[1:])
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def side(
    rank: int, case: dict[str, Any], stack: contextlib.ExitStack
) -> tuple[Callable[[int], Any], Memory, Callable[[], list[int]]]:
    """What this rank does in every sync, the memory to watch, and the bytes that were planned at most and
    needed.
    """
    import torch.distributed as dist

    from rondo.weights.disk import read_weights, write_weights
    from rondo.weights.exchange import Transfer, piece_of, receive, send
    from rondo.weights.sync import gather_along, gather_into

    ranks, bucket, route = case["ranks"], case["bucket"], case["route"]
    engine = trainer(rank, case)
    memory, plan = Memory([os.getpid()]), [0, 0]

    def counted(report: Any) -> None:
        plan[:] = report.peak_bytes, report.bytes_needed

    if route == "gathered":
        sink = native_sink(case)
        return lambda v: counted(gather_into(engine.parameters(), sink, v, bucket)), memory, lambda: plan
    if route == "process":
        if rank > 0:
            return lambda v: gather_along(engine.parameters(), bucket, None), memory, lambda: [0, 0]
        child = start_child(case, stack)
        pair = _Pair(memory, Memory(children(child.pid)))
        gather = lambda v: counted(gather_into(engine.parameters(), child, v, bucket, processes=1))  # noqa: E731
        return gather, pair, lambda: plan
    layout = [engine.parameters().layout()] if engine is not None else [None]
    dist.broadcast_object_list(layout, 0)
    if route == "collective":
        transfer = Transfer(layout[0], (ranks,), bucket)
        if engine is None:
            sink = native_sink(case)
            return lambda v: counted(receive(transfer, v, sink, "cpu")), memory, lambda: plan

        def sending(version: int) -> None:
            with engine.parameters().local() as shards:
                assert not send(transfer, version, piece_of(layout[0], shards), "cpu").lost

        return sending, memory, lambda: [0, 0]
    folder = Path(case["folder"])
    if engine is None:
        sink = native_sink(case)

        def reading(version: int) -> None:
            dist.barrier()
            counted(read_weights(folder, version, sink))

        return reading, memory, lambda: plan

    def writing(version: int) -> None:
        counted(write_weights(engine.parameters(), folder, version, bucket, leader=rank == 0))
        dist.barrier()

    return writing, memory, lambda: plan


class _Pair(Memory):
    """This process's memory; the engine's beside it."""

    def __init__(self, mine: Memory, engine: Memory) -> None:
        super().__init__(mine.pids)
        self.engine = engine

    def reset(self) -> None:
        super().reset()
        self.engine.reset()

    def extra(self) -> Any:
        return super().extra(), self.engine.extra()


def trainer(rank: int, case: dict[str, Any]) -> Any:
    """The model under FSDP2 on this rank, random weights; None on a rank of the engine. Collective."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from rondo.config.schema import FrozenEngineConfig
    from rondo.training import ModelSpec, make_engine

    ranks, axes = case["ranks"], axes_of(case)
    if axes:
        from tests.training.layouts import context_of, layout

        context_of(ranks, tuple(axes.items()))
        mesh = layout(ranks, **axes)[0] if rank < ranks else None
    else:
        group = dist.new_group(list(range(ranks)))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)) if rank < ranks else None
    spec = ModelSpec(model_source(case), FrozenEngineConfig())
    return None if mesh is None else make_engine(spec, mesh=mesh)


def axes_of(case: dict[str, Any]) -> dict[str, int]:
    """The axes of a case of --layouts: all ranks along one."""
    return {case["layout"]: case["ranks"]} if case.get("layout", "shard") != "shard" else {}


def model_source(case: dict[str, Any]) -> Any:
    from rondo.models import ModelSource

    return ModelSource(config=MODEL | (EXPERTS if case.get("layout") == "expert" else {}), seed=1)


def native_sink(case: dict[str, Any]) -> Any:
    """The native engine's storage, in this process."""
    import torch

    from rondo.models import load_model_config
    from rondo.rollout.weights import WeightStore, build_module

    cpu, config = torch.device("cpu"), load_model_config(model_source(case))
    module = build_module(config, "eager", torch.float32, cpu, trust_remote_code=False)
    store = WeightStore(module, None, torch.float32, cpu)
    for tensor in store.tensors.values():
        tensor.zero_()  # resident before the first sync
    return store


def start_child(case: dict[str, Any], stack: contextlib.ExitStack) -> Any:
    """An engine in a process of its own."""
    from rondo.rollout import EngineSpec, start_engine

    spec = EngineSpec(
        engine=case["engine"],
        source=model_source(case),
        dtype="float32",
        device="cpu",
        max_context=256,
        max_concurrent=8,
        threads=1,
        tensor_parallel=case["tp"],
    )
    child = start_engine(spec, bucket_bytes=case["bucket"])
    stack.callback(child.close)
    return child


def measure(case: dict[str, Any]) -> list[list[Any]]:
    """Start the processes of a case and return their answers. Raises RuntimeError with a rank's message."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks, route = case["ranks"], case["route"]
    world = ranks + (1 if route in ("collective", "disk") else 0)
    with tempfile.TemporaryDirectory(prefix="rondo-weight-sync-", dir=case["disk"]) as folder:
        case = {**case, "folder": f"{folder}/weights"}
        started = []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=rank_main, args=(rank, world, f"{folder}/store", case, sender))
            process.start()
            sender.close()
            started.append((process, receiver))
        answers = []
        try:
            for rank, (_, receiver) in enumerate(started):
                answer = receiver.recv() if receiver.poll(900) else f"rank {rank} did not answer in 900 s"
                if isinstance(answer, str):
                    raise RuntimeError(f"{route}, {ranks} ranks, {case['engine']}: {answer}")
                answers.append(answer)
        finally:
            for process, _ in started:
                process.join(5)
                if process.is_alive():
                    process.kill()
    return answers


def joined(case: dict[str, Any], answers: list[list[tuple[float, Any, int]]]) -> Row:
    """The row of a case from what its ranks measured."""
    ranks, route = case["ranks"], case["route"]
    size = model_bytes(case)
    around = (ranks - 1) * size  # what an all-gather moves
    moved = {"gathered": around, "process": around + size, "collective": size, "disk": 2 * size}[route]
    needed = around if route == "gathered" else size
    peaks = [sample[1] for sample in answers[0]]
    of_engine: int | None = None
    if route == "process":
        of_engine = max(peak[1] for peak in peaks)
        peaks = [peak[0] for peak in peaks]
    elif route != "gathered":
        of_engine = max(sample[1] for sample in answers[-1])
    return Row(
        route,
        ranks,
        case["engine"],
        case["tp"],
        size,
        moved,
        needed,
        max(sample[2][0] for answer in answers for sample in answer),
        max(peaks),
        of_engine,
        statistics.median(sample[0] for sample in answers[0]),
    )


def model_bytes(case: dict[str, Any]) -> int:
    import torch

    from rondo.models.loading import build_model

    return sum(p.numel() * 4 for p in build_model(model_source(case), torch.float32).parameters())


def common_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"bucket": int(arguments.bucket_mib * MiB), "repeat": arguments.repeat, "disk": arguments.disk}


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    common = common_of(arguments)
    for ranks in arguments.ranks:
        for engine in arguments.engines:
            if engine == "native":
                for route in arguments.routes:
                    yield {**common, "ranks": ranks, "engine": engine, "tp": 1, "route": route}
            else:
                for tp in arguments.tp:
                    yield {**common, "ranks": ranks, "engine": engine, "tp": tp, "route": "process"}


def table(rows: list[Row]) -> str:
    """Markdown. ratio: of the time to `gathered` into the native engine on as many ranks."""
    base = {row.ranks: row.seconds for row in rows if row.route == "gathered"}
    lines = [
        "| ranks | engine | route | moved MiB | needed MiB | peak planned | peak trainer | peak engine "
        "| seconds | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        engine = row.engine if row.engine == "native" else f"{row.engine} tp {row.tensor_parallel}"
        of_engine = "" if row.peak_engine is None else f"{row.peak_engine / MiB:.0f}"
        ratio = f"{row.seconds / base[row.ranks]:.1f}" if row.ranks in base else ""
        lines.append(
            f"| {row.ranks} | {engine} | {row.route} | {row.bytes_moved / MiB:.0f} | "
            f"{row.bytes_needed / MiB:.0f} | {row.peak_planned / MiB:.0f} | {row.peak_trainer / MiB:.0f} | "
            f"{of_engine} | {row.seconds:.2f} | {ratio} |"
        )
    return "\n".join(lines)


def by_layout(common: dict[str, Any]) -> None:
    """Prints what each of two ranks along each axis receives and holds beside the model. Native engines."""
    common = {**common, "ranks": 2, "engine": "native", "tp": 1}
    print("| layout | route | model MiB | received MiB, by rank | needed MiB | planned | peak, by rank |")
    print("|---|---|---|---|---|---|---|")
    for name in LAYOUTS:
        for route in ("gathered", "collective"):
            case = {**common, "layout": name, "route": route}
            answers = measure(case)
            received = " + ".join(f"{answer[-1] / MiB:.1f}" for answer in answers)
            peaks = ", ".join(f"{max(one[1] for one in answer[:-1]) / MiB:.0f}" for answer in answers)
            planned, needed = answers[-1][0][2]
            print(
                f"| {name} | {route} | {model_bytes(case) / MiB:.1f} | {received} | {needed / MiB:.1f} | "
                f"{planned / MiB:.0f} | {peaks} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engines", nargs="+", default=["native"], choices=["native", "vllm", "sglang"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--routes", nargs="+", default=ROUTES, choices=ROUTES)
    parser.add_argument("--bucket-mib", type=float, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--disk", help="where the disk route writes (default: the temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", action="store_true", help="two ranks along each axis, instead")
    arguments = parser.parse_args()
    if arguments.layouts:
        by_layout(common_of(arguments))
        return
    rows, failed = [], []
    for case in cases(arguments):
        try:
            rows.append(joined(case, measure(case)))
        except (RuntimeError, EOFError) as error:
            failed.append(str(error) or f"{case['route']}, {case['ranks']} ranks: a rank died")
            continue
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    size = f"{model_bytes({}) / MiB:.0f} MiB in float32, buckets of {arguments.bucket_mib:g} MiB"
    print(f"\n{machine}; model {size}\n\n{table(rows)}")
    for message in failed:
        print(f"failed: {message}")
    if arguments.json is not None:
        record = {"machine": machine, "rows": [asdict(row) for row in rows], "failed": failed}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
