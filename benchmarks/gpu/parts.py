"""What the parts of a step take on one GPU, each by itself: decode steps at several numbers of rows and
lengths, a forward and backward pass, an optimizer step, a sync's checksums.

    python benchmarks/gpu/parts.py [decode] [update] [--kernels 20] [--json FILE]

A model of Qwen3-0.6B's shape with random weights (qwen3_0.6b.yaml), bfloat16, the native engine's lean path.
Wall time, with the device's work done; of the update the best of three. With --kernels N also which N kernels
took the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
import yaml
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.train import RECIPE, kernels
from rondo.config.schema import OptimizerConfig
from rondo.config.schema.models import TorchBackendConfig
from rondo.core.batch import Batch
from rondo.core.types import GenerateRequest, SamplingParams
from rondo.models import ModelSource
from rondo.rollout import EngineSpec, NativeEngine
from rondo.training import Engine
from tests.training.helpers import PolicyLoss, make_batch, tiny_engine

GROUP = 8
LENGTHS = ((20, 16), (20, 100), (20, 500), (500, 16), (500, 100))  # prompt and new tokens
ROWS = ((20, 512),) * 30  # prompt and response tokens of a micro-batch: 15,960 in all
_turns = itertools.count()


def seconds_of(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


@contextlib.contextmanager
def _named(what: str, most: int | None) -> Iterator[None]:
    sys.stdout.write(f"== {what}\n")
    with kernels(most):
        yield


def decode(mapping: dict[str, Any], most: int | None) -> dict[str, float]:
    """Milliseconds per token step of all rows, the prompts' prefill (once per group of 8) included."""
    config = AutoConfig.for_model(**mapping)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    found = {}
    for rows in (64, 256):
        spec = EngineSpec("native", ModelSource(config=mapping), "bfloat16", "cuda", 1024, rows, threads=1)
        engine = NativeEngine(spec, config, parameters, decode="lean")  # type: ignore[arg-type]

        async def turn(prompt: int, new: int, engine: NativeEngine = engine, rows: int = rows) -> None:
            number = next(_turns)  # no earlier turn had its prompts
            ids = np.random.default_rng(number).integers(0, 466, (rows // GROUP, prompt)).astype(np.int32)
            sampling = SamplingParams(max_tokens=new)
            requests = (
                GenerateRequest(str(i), ids[i // GROUP], sampling, seed=i, affinity=f"{number}/{i // GROUP}")
                for i in range(rows)
            )
            await asyncio.gather(*map(engine.generate, requests))

        for prompt, new in LENGTHS:  # kernels are compiled, and graphs captured
            asyncio.run(turn(prompt, new))
        for prompt, new in LENGTHS:
            seconds = seconds_of(lambda: asyncio.run(turn(prompt, new)))  # noqa: B023
            found[f"{rows} rows, {prompt} + {new} tokens, ms per step"] = seconds / new * 1e3
        if most:
            with _named(f"{rows} rows, 400 + 40 tokens", most):
                asyncio.run(turn(400, 40))
        engine.close()
    return found


def milliseconds_of(engine: Engine, batch: Batch, loss: PolicyLoss) -> dict[str, float]:
    parameters = engine.parameters()
    work: dict[str, Callable[[], object]] = {
        "forward and backward": lambda: engine.forward_backward(batch, loss),
        "optimizer step": engine.optimizer_step,
        "log-probs": lambda: engine.forward(batch, {"log_probs": "x"}),
        "checksums": lambda: parameters.checksums("bfloat16"),
        "full tensors": lambda: list(parameters.gathered(256 << 20, "bfloat16")),
    }
    found = {}
    for what, one in work.items():
        one()  # warms up
        found[what] = min(seconds_of(one) for _ in range(3)) * 1e3
    return found


def update(mapping: dict[str, Any], most: int | None) -> dict[str, float]:
    """Milliseconds, by `actor.backend.kernels` and with and without checkpointed activations."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    batch, loss, found = make_batch(ROWS), PolicyLoss(), {}
    names = ("auto", "liger") if importlib.util.find_spec("liger_kernel") else ("auto",)
    for name, checkpointing in itertools.product(names, (True, False)):
        engine = tiny_engine(
            mesh,
            ModelSource(config=mapping),
            OptimizerConfig(lr=1e-6),
            {"token_budget": 16384, "gradient_checkpointing": checkpointing},
            device="cuda:0",
            backend=TorchBackendConfig(kernels=name),
        )
        way = f"{name}, {'checkpointed' if checkpointing else 'all activations kept'}"
        found |= {f"{way}: {what}, ms": value for what, value in milliseconds_of(engine, batch, loss).items()}
        found[f"{way}: peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        if most:
            with _named(f"forward and backward, {way}", most):
                engine.forward_backward(batch, loss)
                torch.cuda.synchronize()
        del engine
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", choices=("decode", "update", []), metavar="decode or update")
    parser.add_argument("--kernels", type=int, metavar="N", help="list the N that took the most time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mapping = yaml.safe_load(RECIPE.read_text())["model"]["config"]
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(),
    }
    for part in (decode, update):
        if not arguments.parts or part.__name__ in arguments.parts:
            result[part.__name__] = part(mapping, arguments.kernels)
            if arguments.json:  # after each: a part that does not end loses none of the others
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
