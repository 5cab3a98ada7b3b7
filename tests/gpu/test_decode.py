"""The native engine's log-probs on a CUDA device, by the generic path and by the lean one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rondo.rollout.native.sampling import uniforms, uniforms_on_device
from tests.rollout.conftest import build, make_engine, prompt, request, run, true_log_probs
from tests.rollout.test_images import BOTH, REFUSED, Pictures

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["generic", "lean"])
def test_log_probs_on_cuda(path: str, dtype: str) -> None:
    model = build("qwen3").to(device="cuda", dtype=getattr(torch, dtype))
    engine = make_engine(model, decode=path, dtype=dtype, device="cuda", max_concurrent=24)
    out = run(engine, [request(str(i), prompt(3 + i), 30, seed=i, affinity=str(i // 2)) for i in range(20)])
    engine.close()
    model = model.cpu().float()
    for completion in out:
        gap = np.abs(completion.log_probs - true_log_probs(model, completion))
        assert gap.max() < (1e-4 if dtype == "float32" else 0.3)
        assert gap.mean() < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize(("family", "kind"), [pair for pair in BOTH if pair not in REFUSED])
def test_prompts_with_images_on_cuda(family: str, kind: str, tmp_path: Path) -> None:
    """Rows without, with one and with two images, some with the tokens of another: those of the host."""
    of = Pictures(family, tmp_path)
    names: tuple[tuple[str, ...], ...] = ((), ("wide",), ("tall", "small"), ("tall", "other"))
    requests = [of.request(f"{i}", of.prompt(min(i, 2), *names[i]), seed=i) for i in range(4)]
    host = of.engine(kind)
    card = of.engine(kind, device="cuda")
    for ours, theirs in zip(run(card, requests), run(host, requests), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4, rtol=0)
    card.close()
    host.close()


def test_noise_of_the_device_is_the_hosts() -> None:
    """Integers that wrap are exact everywhere, so a sampler on the device draws the same tokens."""
    random = np.random.default_rng(0)
    seeds, indices = random.integers(-(1 << 63), 1 << 63, 4000), random.integers(0, 100_000, 4000)
    on_device = uniforms_on_device(torch.tensor(seeds, device="cuda"), torch.tensor(indices, device="cuda"))
    np.testing.assert_array_equal(on_device.cpu().numpy(), uniforms(seeds, indices))
