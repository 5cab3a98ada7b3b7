"""Every family on a CUDA device, in float32: what it computes there is what it computes on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from rondo.core.errors import ConfigError
from rondo.training import Engine
from tests.gpu.test_training import cuda_mesh
from tests.models.families import FAMILIES, WITH_IMAGES, source_of
from tests.rollout.conftest import run, true_log_probs
from tests.rollout.test_families import REFUSED, engine_of, requests, tiny
from tests.training.helpers import PolicyLoss, full_gradients, relative_difference, tiny_engine
from tests.training.test_families import CHANGES, documents

__all__ = ("cuda_mesh",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = sorted({*FAMILIES} - {*WITH_IMAGES})  # those were not run on a card yet


@pytest.mark.parametrize("family", NAMES)
def test_training_is_that_of_the_cpu(cuda_mesh: DeviceMesh, family: str) -> None:
    """Log-probs of documents of many lengths, and the gradient of every parameter."""

    def engine(device: str) -> Engine:
        source = source_of(family, **CHANGES.get(family, {}))
        return tiny_engine(cuda_mesh, source, config={"compute_dtype": "float32"}, device=device)

    engines = {device: engine(device) for device in ("cpu", "cuda:0")}
    for shard in engines["cpu"].backend.shards.values():
        if not shard.to_local().any():  # a router that begins at 0 (ERNIE's): every choice would be a tie
            torch.nn.init.normal_(shard.to_local(), std=0.2)
    engines["cuda:0"].copy_parameters_from(engines["cpu"])
    batch = documents()
    log_probs, gradients = {}, {}
    for device, one in engines.items():
        log_probs[device] = one.forward(batch, {"log_probs": "x"}).ragged("x")[0].cpu()
        one.forward_backward(batch, PolicyLoss())
        gradients[device] = {
            name: grad.cpu() for name, grad in full_gradients(one).items() if grad is not None
        }
    torch.testing.assert_close(log_probs["cuda:0"], log_probs["cpu"], atol=2e-4, rtol=0)
    assert gradients["cuda:0"].keys() == gradients["cpu"].keys()
    whole = {device: torch.cat([grad.flatten() for grad in of.values()]) for device, of in gradients.items()}
    assert relative_difference(whole["cuda:0"], whole["cpu"]) < 1e-3


@pytest.mark.parametrize("family", [name for name in NAMES if name not in REFUSED])
def test_decoding_is_that_of_the_cpu(family: str) -> None:
    """Prompts around the window, greedy and sampled: log-probs are those of transformers on the CPU, and a
    greedy token is the likeliest one there (within rounding).
    """
    model = tiny(family)
    try:
        on_cpu = engine_of(model)
    except ConfigError as error:
        pytest.skip(f"the native engine refuses it: {error}")
    on_cpu.close()
    engine = engine_of(model.to("cuda"), device="cuda")
    completions = run(engine, requests())
    engine.close()
    model = model.cpu()
    for one, completion in zip(requests(), completions, strict=True):
        temperature = one.sampling.temperature
        expected = true_log_probs(model, completion, temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs, expected, atol=2e-4, rtol=0)
        if temperature == 0.0:
            ids = torch.tensor(np.concatenate([one.token_ids, completion.token_ids]))[None].long()
            with torch.no_grad():
                logits = model(ids).logits[0, len(one.token_ids) - 1 : -1].float()
            chosen = logits.gather(1, ids[0, len(one.token_ids) :, None])[:, 0]
            assert float((logits.amax(-1) - chosen).max()) < 1e-3
