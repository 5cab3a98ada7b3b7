"""Decode speed: rondo's native engine against `transformers` generate, and against the roofline of this
machine.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--batches 64 128 256] [--repeats 5] [--json out.json]
    python benchmarks/decode.py --device cuda [--model RECIPE.yaml] [--dtype bfloat16]
                                                         wall time; no compiled path, no roofline
    python benchmarks/decode.py --paged [--cache-bytes 268435456]        long contexts, below

The quickstart's model (0.85 M parameters, float32, random weights) or that of RECIPE's model.config; groups
of 8 samples per prompt, 16 prompt and 48 new tokens, temperature 1, one thread. Tokens per second of *process
CPU time*; all contestants take turns within one run and the median of the turns counts, so that ratios hold
on a busy machine too.

--paged: LONG_REQUESTS requests whose lengths follow an exponential distribution of mean LONG_MEAN tokens, to
an engine that takes any of LONG_CONTEXT: bytes of the cache, and tokens per CPU-second on the compiled path.

The roofline is what the arithmetic alone would take: the model's matrix products at the rate measured here
for their shapes (the better of PyTorch's and our own), plus one pass over each token's keys and values at the
measured bandwidth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from rondo.core.types import GenerateRequest, SamplingParams
from rondo.models import ModelSource
from rondo.rollout import EngineSpec, NativeEngine
from rondo.rollout.native.kernels import library

PROMPT, NEW, GROUP = 16, 48, 8
LONG_CONTEXT, LONG_REQUESTS, LONG_MEAN = 16384, 64, 1024
_turns = itertools.count()


def quickstart_config() -> Qwen3Config:
    """As in the quickstart (PLATFORM: the model that learns in minutes)."""
    return Qwen3Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        vocab_size=466,
        tie_word_embeddings=True,
        initializer_range=0.08,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def prompts(batch: int) -> torch.Tensor:
    """int64 [batch, PROMPT], every GROUP rows alike."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 466, (-(-batch // GROUP), PROMPT), generator=generator).repeat_interleave(
        GROUP, 0
    )[:batch]


def run_generate(model: torch.nn.Module, ids: torch.Tensor, cache: str) -> None:
    """transformers' own loop: sampling at temperature 1, no truncation, exactly NEW tokens."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        use_cache=True,
        cache_implementation=cache,
    )
    assert out.shape == (len(ids), PROMPT + NEW)


def run_engine(engine: NativeEngine, ids: torch.Tensor) -> None:
    """One request per row; no earlier turn had its prompt (no free prefill)."""
    turn = next(_turns)
    sampling = SamplingParams(max_tokens=NEW)
    rows = (ids.cpu().numpy().astype(np.int32) + turn) % 466

    async def all_requests() -> None:
        await asyncio.gather(
            *(
                engine.generate(
                    GenerateRequest(str(i), rows[i], sampling, seed=i, affinity=f"{turn}/{i // GROUP}")
                )
                for i in range(len(rows))
            )
        )

    asyncio.run(all_requests())


def model_config(recipe: Path | None) -> PretrainedConfig:
    """The model of a recipe's `model.config`, else the quickstart's."""
    if recipe is None:
        return quickstart_config()
    return AutoConfig.for_model(**yaml.safe_load(recipe.read_text())["model"]["config"])


def contestants(
    batch: int, device: str, config: PretrainedConfig, dtype: str
) -> dict[str, Callable[[], None]]:
    """Name → one complete turn."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval().to(device)
    model.generation_config.eos_token_id = None
    parameters = {name: p.data for name, p in model.named_parameters()}
    ids = prompts(batch).to(device)
    turns: dict[str, Callable[[], None]] = {}
    source = ModelSource(config=config.to_dict())
    spec = EngineSpec("native", source, dtype, device, PROMPT + NEW, max_concurrent=batch, threads=1)
    for decode in ("generic", "lean", "compiled") if device == "cpu" else ("generic", "lean"):
        engine = NativeEngine(spec, config, parameters, decode=decode)  # type: ignore[arg-type]
        turns[f"rondo {decode}"] = lambda engine=engine: run_engine(engine, ids)  # type: ignore[misc]
    turns["generate, dynamic cache"] = lambda: run_generate(model, ids, "dynamic")
    turns["generate, static cache"] = lambda: run_generate(model, ids, "static")
    return turns


def cpu_seconds(work: Callable[[], object], repeats: int = 1) -> float:
    started = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - started) / repeats


def seconds_of(work: Callable[[], object], device: str) -> float:
    """CPU seconds on a CPU; wall seconds, with the device's work done, on CUDA."""
    if device == "cpu":
        return cpu_seconds(work)
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def products(batch: int) -> list[tuple[int, int, int]]:
    """(K, N, times per step) of the matrix products of one decode step."""
    c = quickstart_config()
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = [(c.hidden_size, q + 2 * kv), (q, c.hidden_size), (c.hidden_size, 2 * c.intermediate_size)]
    layer.append((c.intermediate_size, c.hidden_size))
    return [(K, N, c.num_hidden_layers) for K, N in layer] + [(c.hidden_size, c.vocab_size, 1)]


def roofline(batch: int) -> dict[str, float]:
    """Measured product time per step, measured bandwidth, and the tokens per second that they allow."""
    kernels = library()
    panel, seconds, flops = kernels.rondo_panel(), 0.0, 0.0
    for K, N, times in products(batch):
        x, w, out = torch.randn(batch, K), torch.randn(N, K), torch.empty(batch, N)
        packed = torch.zeros(-(-N // panel), K, panel)
        kernels.rondo_pack(w.data_ptr(), N, K, packed.data_ptr(), 0)
        ours = (x.data_ptr(), packed.data_ptr(), batch, K, N, out.data_ptr())
        repeats = int(4e8 / (2 * batch * K * N)) + 1
        best = min(
            min(cpu_seconds(lambda: torch.mm(x, w.t(), out=out), repeats) for _ in range(3)),  # noqa: B023
            min(cpu_seconds(lambda: kernels.rondo_gemm(*ours), repeats) for _ in range(3)),  # noqa: B023
        )
        seconds += best * times
        flops += 2.0 * batch * K * N * times
    c = quickstart_config()
    per_token = c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * 4
    cache = torch.zeros(batch * (PROMPT + NEW) * per_token // 4)
    other = torch.empty_like(cache)
    bandwidth = 2 * cache.nbytes / min(cpu_seconds(lambda: other.copy_(cache)) for _ in range(7))
    traffic = batch * (PROMPT + NEW / 2) * per_token / bandwidth
    return {
        "gemm_gflops": flops / seconds / 1e9,
        "bandwidth_gib_s": bandwidth / 2**30,
        "tokens_per_cpu_s": batch / (seconds + traffic),
    }


def long_lengths() -> list[int]:
    """Tokens of every request: the quantiles of an exponential distribution, in an order that mixes them."""
    shares = (np.random.default_rng(0).permutation(LONG_REQUESTS) + 0.5) / LONG_REQUESTS
    lengths = -np.log(1 - shares)
    return [max(2 * PROMPT, round(n)) for n in lengths * (LONG_MEAN / lengths.mean())]


def measure_paged(cache_bytes: int | None) -> dict[str, float]:
    """One pass over the long requests after a short one to warm up."""
    config = quickstart_config()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = {name: p.data for name, p in model.named_parameters()}
    source = ModelSource(config=config.to_dict())
    spec = EngineSpec("native", source, "float32", "cpu", LONG_CONTEXT, LONG_REQUESTS, threads=1)
    engine = NativeEngine(spec, config, parameters, cache_bytes=cache_bytes)
    run_engine(engine, prompts(GROUP))
    lengths = long_lengths()
    rows = prompts(LONG_REQUESTS * GROUP)[::GROUP].numpy().astype(np.int32)  # no two alike

    async def all_requests() -> dict[str, float]:
        await engine.stats()
        calls = (
            engine.generate(GenerateRequest(str(i), row, SamplingParams(max_tokens=length - PROMPT), seed=i))
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
        )
        await asyncio.gather(*calls)
        return (await engine.stats()).values()

    started = time.process_time()
    stats = asyncio.run(all_requests())
    seconds = time.process_time() - started
    engine.close()
    return {
        "cache_mib": stats["rollout/cache_bytes"] / 2**20,
        "cached_tokens": float(sum(lengths)),
        "longest": float(max(lengths)),
        "preemptions": stats.get("rollout/preemptions", 0.0),
        "tokens_per_cpu_s": stats["perf/decoded_tokens"] / seconds,
    }


def measure(batch: int, repeats: int, device: str, config: PretrainedConfig, dtype: str) -> dict[str, object]:
    """Median tokens per CPU-second of every contestant over alternated turns, after one to warm up."""
    turns = contestants(batch, device, config, dtype)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    order = [(repeat, name) for repeat in range(repeats + 1) for name in turns]
    if device != "cpu":  # nobody else is there; and what is compiled for minutes, or is cut off, comes last
        order = [(repeat, name) for name in turns for repeat in range(repeats + 1)]
    for repeat, name in order:
        rate = batch * NEW / seconds_of(turns[name], device)
        if repeat:
            rates[name].append(rate)
            print(f"{batch} rows, {name}: {rate:.0f} tokens per second", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "batch": batch,
        "tokens_per_cpu_s": medians,
        "all": rates,
        "roofline": roofline(batch) if device == "cpu" else None,
    }


def table(results: list[dict[str, object]], device: str) -> str:
    """Rows: contestants; columns: batches; × against the better `generate` of the same column."""
    names = list(results[0]["tokens_per_cpu_s"])  # type: ignore[call-overload]
    what = "tokens per CPU-second" if device == "cpu" else "tokens per second"
    lines = [what.ljust(26) + "".join(f"B={r['batch']}".rjust(18) for r in results)]
    for name in names:
        line = name.ljust(26)
        for r in results:
            rates: dict[str, float] = r["tokens_per_cpu_s"]  # type: ignore[assignment]
            best = max(rate for other, rate in rates.items() if other.startswith("generate"))
            line += f"{rates[name]:10.0f} ({rates[name] / best:4.2f}×)"
        lines.append(line)
    roof: list[dict[str, float]] = [r["roofline"] for r in results if r["roofline"]]  # type: ignore[misc]
    if not roof:
        return "\n".join(lines)
    lines.append("roofline".ljust(26) + "".join(f"{r['tokens_per_cpu_s']:10.0f}        " for r in roof))
    lines.append("  GEMM GFLOP/s".ljust(26) + "".join(f"{r['gemm_gflops']:10.0f}        " for r in roof))
    lines.append("  copy GiB/s".ljust(26) + "".join(f"{r['bandwidth_gib_s']:10.1f}        " for r in roof))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, metavar="RECIPE.yaml", help="its model.config is measured")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--paged", action="store_true", help="long contexts instead")
    parser.add_argument("--cache-bytes", type=int, help="of the engine that --paged measures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.paged:
        sys.stdout.write(json.dumps(measure_paged(arguments.cache_bytes), indent=1) + "\n")
        return
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
    config = model_config(arguments.model)
    results: list[dict[str, object]] = []
    for batch in arguments.batches:  # written as they come: what is cut off keeps what it has
        results.append(measure(batch, arguments.repeats, arguments.device, config, arguments.dtype))
        text = json.dumps(
            {"prompt": PROMPT, "new": NEW, "group": GROUP, "versions": versions, "results": results}, indent=1
        )
        if arguments.json:
            arguments.json.write_text(text + "\n")
    sys.stdout.write(table(results, arguments.device) + "\n")
    if not arguments.json:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
