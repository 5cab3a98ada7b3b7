"""Peaks of CPU processes that train a model with random weights, beside what is planned: anonymous memory of
the process (RssAnon, read each 10 ms) in an update, above what it had before the model.

    python benchmarks/process_peaks.py [ROW …]      numbers of rows, from 0; all of them take some ten minutes
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from rondo.planning.memory import GIB, on_device, total_of  # noqa: E402
from rondo.planning.model_run import ModelRun, Spread  # noqa: E402
from rondo.planning.shapes import shape_of  # noqa: E402

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 12,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """What is trained."""

    name: str
    """Of the model."""
    config: Mapping[str, Any]
    """Its config.json."""
    tokens: int
    """Of a pass."""
    row: int
    """Of a document in it."""
    ranks: int = 1
    """Processes."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine (`actor`)."""
    moments: str = "full"
    """Of Adam."""
    mlp_chunk: int | None = None
    """Tokens in an MLP at one time."""

    def run(self) -> ModelRun:
        """Returns it as the formulas take it."""
        return ModelRun(
            shape_of(self.config, self.name),
            Spread(self.ranks),
            compute=4,
            trains=True,
            lora=self.engine.get("lora"),
            moments=self.moments,  # type: ignore[arg-type]
            recompute=self.engine.get("gradient_checkpointing", False),
            mlp_chunk=self.mlp_chunk,
            fused=self.ranks == 1,
            on_host=True,
        )

    def __str__(self) -> str:
        said = [f"{key} {value}".replace(" True", "") for key, value in self.engine.items()]
        said += [] if self.moments == "full" else [f"moments {self.moments}"]
        said += [] if self.mlp_chunk is None else [f"mlp_chunk {self.mlp_chunk}"]
        return f"{self.name} | {self.ranks} | {self.tokens:,} | {self.row:,} | {', '.join(said)}"


_AGAIN = {"gradient_checkpointing": True}
CASES = (
    Case("Qwen2.5, 12 layers", QWEN, 512, 512),
    Case("Qwen2.5, 12 layers", QWEN, 1024, 1024, engine=_AGAIN),
    Case("Qwen2.5, 12 layers", QWEN, 512, 512, ranks=2),
    Case("Llama, 16 layers", LLAMA, 1024, 1024),
    Case("Llama, 16 layers", LLAMA, 768, 128),
    Case("Llama, 16 layers", LLAMA, 512, 512, ranks=2, engine=_AGAIN),
    Case("Qwen2.5, 12 layers", QWEN, 512, 512, moments="8bit"),
    Case("Qwen2.5, 12 layers", QWEN, 1024, 512, engine={"lora": 16}),
    Case("Llama, 16 layers", LLAMA, 1024, 512, engine=_AGAIN, mlp_chunk=256),
)


class Policy:
    """Advantage × log-prob."""

    outputs = ("log_probs",)
    columns = ("advantages",)

    def __call__(self, outputs: Any, columns: Any, cu_seqlens: Any) -> tuple[Any, Any]:
        return -(columns["advantages"] * outputs["log_probs"]).sum(), {}


class Anonymous:
    """The most anonymous memory of this process since `forget`."""

    def __init__(self) -> None:
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def now() -> int:
        """Returns the bytes that it has."""
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) << 10

    def forget(self) -> None:
        """Begins again."""
        self.most = self.now()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.01)


def _train(rank: int, case: Case, store: str, answers: Any) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rondo.config.schema import EngineConfig, LoraConfig, OptimizerConfig, TorchBackendConfig
    from rondo.core.batch import Batch, ragged_rows
    from rondo.models import ModelSource
    from rondo.training import ModelSpec, make_engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks)
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("dp",))
    settings = dict(case.engine)
    lora = settings.pop("lora", None)
    config = EngineConfig(
        **settings, token_budget=case.tokens, lora=None if lora is None else LoraConfig(rank=lora)
    )
    spec = ModelSpec(
        ModelSource(config=dict(case.config)),
        config,
        OptimizerConfig(moments=case.moments),  # type: ignore[arg-type]
        TorchBackendConfig(mlp_chunk=case.mlp_chunk),
    )

    def batch(passes: int, row: int, of_pass: int) -> Batch:
        rng, rows = np.random.default_rng(0), passes * of_pass
        ids = [rng.integers(0, case.config["vocab_size"], row) for _ in range(rows)]
        columns = {"prompt_ids": [one[:2] for one in ids], "response_ids": [one[1:] for one in ids]}
        numbers = {"row_id": np.arange(rows), "advantages": rng.standard_normal(rows)}
        return Batch.of(numbers | {name: ragged_rows(one, np.int32) for name, one in columns.items()})

    # What a process has once, whatever model it has: threads, tables, modules that are imported late.
    small = dict(case.config) | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8}
    engine = make_engine(ModelSpec(ModelSource(config=small), config, spec.optimizer), mesh=mesh)
    tiny = Batch.of(
        {
            "row_id": np.arange(1),
            "advantages": np.ones(1),
            **{name: ragged_rows([np.arange(4)], np.int32) for name in ("prompt_ids", "response_ids")},
        }
    )
    engine.forward_backward(tiny, Policy())
    engine.optimizer_step()
    del engine
    anonymous, before = Anonymous(), Anonymous.now()
    engine = make_engine(spec, mesh=mesh)
    anonymous.forget()
    engine.forward_backward(batch(2, case.row, case.tokens // case.row), Policy())
    engine.optimizer_step()
    answers.put((engine.num_parameters(), anonymous.most - before))


def measured(case: Case) -> tuple[int, int, int]:
    """Returns the number of parameters, the largest peak of a rank, and the planned one."""
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as work:
        answers = start.Queue()
        ranks = [
            start.Process(target=_train, args=(rank, case, f"{work}/store", answers))
            for rank in range(case.ranks)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        assert not any(one.exitcode for one in ranks), case
        found = [answers.get() for _ in ranks]
    planned = total_of(on_device(case.run(), "update", case.tokens)).expected
    return found[0][0], max(peak for _, peak in found), planned


def table(numbers: list[int]) -> Iterator[str]:
    """Yields the lines of docs/plan.md."""
    yield "| model | ranks | tokens | of a row | | parameters | measured, GiB | planned | |"
    yield "|---" * 9 + "|"
    for number in numbers or range(len(CASES)):
        case = CASES[number]
        parameters, peak, planned = measured(case)
        error = f"{planned / peak - 1:+.0%}"
        yield f"| {case} | {parameters / 1e9:.2f}B | {peak / GIB:.2f} | {planned / GIB:.2f} | {error} |"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for line in table([int(word) for word in sys.argv[1:]]):
        print(line, flush=True)
