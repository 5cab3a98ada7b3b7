"""Noise and sampling: distribution, exact support of truncation, seeds, stop tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rondo.rollout.native.sampling import draw, sample, seed_ahead, truncate, uniforms, uniforms_on_device
from tests.rollout.conftest import build, make_engine, prompt, request, run

_MASK = (1 << 64) - 1


def splitmix(seed: int, index: int) -> float:
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def test_uniforms_are_splitmix64() -> None:
    seeds = np.array([0, 1, 7, 2**62 + 12345, -3], np.int64)
    indices = np.array([0, 1, 500, 3, 9], np.int64)
    expected = [splitmix(int(s) & _MASK, int(i)) for s, i in zip(seeds, indices, strict=True)]
    np.testing.assert_array_equal(uniforms(seeds, indices), expected)
    many = uniforms(np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300))
    counts = np.histogram(many, bins=64, range=(0, 1))[0]
    assert ((counts - len(many) / 64) ** 2).sum() / (len(many) / 64) < 110  # chi-square, 63 degrees: p ≈ 2e-4


def test_noise_on_a_device_is_the_same_from_wherever_it_is_counted() -> None:
    random = np.random.default_rng(0)
    seeds, indices = random.integers(-(1 << 63), 1 << 63, 400), random.integers(0, 5000, 400)
    expected = uniforms(seeds, indices)
    on_device = uniforms_on_device(torch.from_numpy(seeds), torch.from_numpy(indices))
    np.testing.assert_array_equal(on_device.numpy(), expected)
    counts = random.integers(-4000, 4000, 400)
    ahead = [seed_ahead(int(seed), int(count)) for seed, count in zip(seeds, counts, strict=True)]
    np.testing.assert_array_equal(
        uniforms_on_device(torch.tensor(ahead), torch.from_numpy(indices - counts)).numpy(), expected
    )


def row(value: float, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def test_sample_inverts_the_cumulative_distribution() -> None:
    p = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125])
    u = torch.tensor([0.0, 0.1249, 0.1251, 0.6249, 0.6251, 0.8749, 0.8751, 1 - 2**-53], dtype=torch.float64)
    n = len(u)
    logits = p.log()[None].expand(n, -1)
    ids, log_probs = sample(logits, u, row(1, n), row(0, n, torch.int64), row(1, n), row(0, n))
    assert ids.tolist() == [0, 0, 1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(log_probs, p.log()[ids])
    ids, log_probs = sample(logits, u, row(0, n), row(0, n, torch.int64), row(1, n), row(0, n))
    assert ids.tolist() == [1] * n
    ids, log_probs = sample(logits, u, row(1, n), row(2, n, torch.int64), row(1, n), row(0, n))
    assert ids.tolist() == [1, 1, 1, 1, 1, 3, 3, 3]  # 2/3 and 1/3 of the mass that is left
    torch.testing.assert_close(log_probs, p.log()[ids])  # before truncation


@pytest.mark.parametrize("vocabulary", [37, 256, 257, 3000])
def test_draw_by_runs_finds_what_one_search_over_all_tokens_finds(vocabulary: int) -> None:
    """Also at both ends of the noise, and never a token without weight: a third of them, and whole runs."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.softmax(torch.randn(64, vocabulary, generator=generator) * 4, -1)
    weights[:, ::3] = 0
    weights[32:, : vocabulary // 2] = 0
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    uniform[[0, 40]], uniform[[1, 41]] = 0.0, 1 - 2.0**-53
    tokens = draw(weights, uniform)
    cumulative = weights.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    inside = uniform < 1 - 2.0**-53  # the very last number may round up to the total
    assert torch.equal(tokens[inside], expected[inside])
    assert (weights.gather(1, tokens[:, None]) > 0).all()
    assert draw(torch.full((1, vocabulary), float("nan")), uniform[:1]).item() < vocabulary


def test_truncate_supports() -> None:
    w = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])

    def support(k: int, p: float, m: float) -> list[int]:
        kept = truncate(w, torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))
        assert torch.equal(kept[kept > 0], w[kept > 0])
        return kept[0].nonzero()[:, 0].tolist()

    assert support(0, 1.0, 0.0) == [0, 1, 2, 3, 4]
    assert support(3, 1.0, 0.0) == [1, 3, 4]
    assert support(0, 0.5, 0.0) == [1, 3]
    assert support(0, 0.01, 0.0) == [1]
    assert support(0, 0.71, 0.0) == [1, 3, 4]
    assert support(3, 0.8, 0.0) == [1, 3]  # 0.8 of the 0.85 that top-k left
    assert support(0, 1.0, 0.3) == [1, 3, 4]
    assert support(2, 1.0, 0.9) == [1]
    assert support(9, 1.0, 1.0) == [1]


def first_tokens(engine: object, n: int, **sampling: float) -> np.ndarray:
    ids = prompt(6)
    out = run(engine, [request(str(i), ids, 1, seed=i, affinity="x", **sampling) for i in range(n)])  # type: ignore[arg-type]
    return np.array([completion.token_ids[0] for completion in out])


def next_probs(model: torch.nn.Module, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.from_numpy(prompt(6).astype(np.int64))[None]).logits[0, -1]
    return torch.softmax(logits / temperature, -1).numpy()


def test_distribution(decode: str) -> None:
    """Pearson's statistic of first tokens against the model's probabilities, cells of at least 8 expected."""
    model = build("qwen3")
    n = 2000 if decode == "compiled" else 600
    engine = make_engine(model, decode=decode, max_concurrent=128)
    for temperature in (1.0, 0.6):
        counts = np.bincount(first_tokens(engine, n, temperature=temperature), minlength=101)
        expected = next_probs(model, temperature) * n
        big = expected >= 8
        observed = np.append(counts[big], counts[~big].sum())
        wanted = np.append(expected[big], expected[~big].sum())
        degrees = len(observed) - 1
        assert ((observed - wanted) ** 2 / wanted).sum() < degrees + 4 * (2 * degrees) ** 0.5
    engine.close()


@pytest.mark.parametrize(
    "sampling", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 8, "top_p": 0.6}]
)
def test_support_is_exact(decode: str, sampling: dict[str, float]) -> None:
    model = build("qwen3")
    p = next_probs(model)
    order = np.argsort(-p)
    k = int(sampling.get("top_k", len(p)))
    kept = p[order[:k]] / p[order[:k]].sum()
    k = min(k, int((kept.cumsum() - kept < sampling.get("top_p", 1.0)).sum()))
    k = min(k, int((p[order] >= sampling.get("min_p", 0.0) * p.max()).sum()))
    engine = make_engine(model, decode=decode, max_concurrent=128)
    drawn = first_tokens(engine, 400, **sampling)
    assert set(drawn) == set(order[:k])
    engine.close()


def test_stop_tokens_and_lengths(decode: str) -> None:
    model = build("qwen3")
    engine = make_engine(model, decode=decode)
    free = run(engine, [request("free", prompt(5), 30, seed=3)])[0]
    stop = int(free.token_ids[11])
    first = int(np.flatnonzero(free.token_ids == stop)[0])
    outs = run(engine, [
        request("stop", prompt(5), 30, seed=3, stop_token_ids=(stop, 100_000)),
        request("short", prompt(5), first, seed=3, stop_token_ids=(1_000_000, stop)),
        request("one", prompt(5), 1, seed=3),
        request("exact", prompt(5), first + 1, seed=3, stop_token_ids=(stop,)),
    ])  # fmt: skip
    assert [o.finish_reason for o in outs] == ["stop", "length", "length", "stop"]
    assert [len(o.token_ids) for o in outs] == [first + 1, first, 1, first + 1]
    for out in outs:
        np.testing.assert_array_equal(out.token_ids, free.token_ids[: len(out.token_ids)])
        assert out.token_ids.dtype == np.int32
        assert out.log_probs.dtype == np.float32
    engine.close()


def test_seeds(decode: str) -> None:
    engine = make_engine(build("qwen3"), decode=decode)
    outs = run(
        engine,
        [request(str(i), prompt(5), 16, seed=s) for i, s in enumerate([1, 2, 1, 2**63 - 1, 2**64 - 5])],
    )
    np.testing.assert_array_equal(outs[0].token_ids, outs[2].token_ids)
    assert len({tuple(o.token_ids) for o in outs}) == 4
    engine.close()
