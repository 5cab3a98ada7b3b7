"""From logits to tokens and log-probs, in PyTorch (the compiled path has the same in C), and the noise of it.

One uniform number per token, a function of the request's seed and the token's index alone, and the inverse of
the cumulative distribution in token order: cheaper than one noise value per vocabulary entry.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from rondo.core.arrays import GOLDEN, MIX_1, MIX_2, mixed

_RUN = 256  # tokens of a vocabulary that are summed together, before one of them is drawn


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    never: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens int64 [R], drawn from logits [R, V], and their log-probs float32 [R].

    The settings are [R], on the host, so that it need not wait for a device to know what is asked:
    uniforms float64 in [0, 1), temperature (0: greedy, log-probs then at temperature 1), top_k (0: off),
    top_p (1: off), min_p (0: off). never: int64 [n] on the logits' device, tokens that
    are cut off as top_p cuts others. Log-probs are those after temperature and before truncation.
    """
    greedy, device = temperature == 0, logits.device
    scores = logits.float() / torch.where(greedy, 1.0, temperature).to(device)[:, None]
    log_probs = torch.log_softmax(scores, dim=-1)
    weights = log_probs.exp()
    if never is not None:
        weights, scores = weights.index_fill(1, never, 0), scores.index_fill(1, never, float("-inf"))
    if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        weights = truncate(weights, *(cut.to(device) for cut in (top_k, top_p, min_p)))
    tokens = draw(weights, uniforms.to(device))
    if bool(greedy.any()):
        tokens = torch.where(greedy.to(device), scores.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns tokens int64 [R]: the inverse of the cumulative distribution at uniforms float64 [R] in [0, 1).
    weights [R, V] need not add up to 1.
    """
    R, V = weights.shape
    # By runs of tokens, then within one: a running sum over all of a vocabulary is slow on devices.
    runs = F.pad(weights, (0, -V % _RUN)).view(R, -1, _RUN)
    of_runs = runs.sum(-1, dtype=torch.float64)  # float32 would round small weights away
    run, rest = _find(of_runs.cumsum(-1), uniforms * of_runs.sum(-1))
    within = runs.gather(1, run[:, None, None].expand(-1, 1, _RUN))[:, 0].double().cumsum(-1)
    token, _ = _find(within, rest)
    # A NaN finds no id: the clamp keeps the index valid, and the log-prob, NaN too, tells of it.
    return (run * _RUN + token).clamp_(max=V - 1)


def _find(cumulative: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where cumulative [R, n] first exceeds target [R], int64 [R], and what of it is left there."""
    total = cumulative[:, -1]
    # Below the total even where a sum rounds up to it: a search for the total itself finds nothing.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(found > 0, cumulative.gather(1, (found - 1).clamp_(min=0)), 0.0)
    return found[:, 0], target - before[:, 0]


def truncate(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns weights [R, V] with 0 outside the support: top-k, then the smallest top-p set of what is left,
    then min-p.

    min-p keeps what is at least min_p times the largest probability. Ties go to the lower token id.
    """
    ordered, ids = torch.sort(weights, dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)[None]
    keep = (top_k[:, None] <= 0) | (rank < top_k[:, None])
    kept = ordered.double() * keep
    before = kept.cumsum(-1) - kept
    keep &= (before < top_p.double()[:, None] * kept.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True  # whatever the settings, one token is left to draw
    return torch.zeros_like(weights).scatter_(1, ids, ordered * keep)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns float64 [N] in [0, 1): splitmix64 of int64 seeds [N] at token indices [N], as in kernels.c."""
    with np.errstate(over="ignore"):
        z = mixed(seeds.astype(np.uint64) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    # The upper 53 bits: as many as a float64 holds exactly.
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms_on_device(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of `uniforms`, float64 [N], for int64 tensors [N], on the device of these."""
    z = seeds + (indices.to(torch.int64) + 1) * _signed(GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(MIX_2)
    return _shifted(z ^ _shifted(z, 31), 11).to(torch.float64) * 2.0**-53


def seed_ahead(seed: int, count: int) -> int:
    """Returns the seed, int64, that gives at index i what `seed` gives at i + count."""
    return _signed((seed + count * GOLDEN) % (1 << 64))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(word: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts to the right, with zeros from the left: torch's own shift copies the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)
