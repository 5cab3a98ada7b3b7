"""From logits to tokens and log-probs, in PyTorch (the compiled path has the same in C).

One uniform number per token and the inverse of the cumulative distribution in token order: cheaper than one
noise value per vocabulary entry, and a function of the request alone.
"""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens int64 [R], drawn from logits [R, V], and their log-probs float32 [R].

    All other arguments are [R]: uniforms float64 in [0, 1), temperature (0: greedy, log-probs then at
    temperature 1), top_k (0: off), top_p (1: off), min_p (0: off). Log-probs are those after temperature and
    before truncation.
    """
    greedy = temperature == 0
    scores = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    log_probs = torch.log_softmax(scores, dim=-1)
    weights = log_probs.exp()
    if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        weights = truncate(weights, top_k, top_p, min_p)
    tokens = torch.where(greedy, scores.argmax(-1), draw(weights, uniforms))
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns tokens int64 [R]: the inverse of the cumulative distribution at uniforms float64 [R] in [0, 1).
    weights [R, V] need not add up to 1.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1]
    # Below the total even where the product rounds up to it: a search for the total itself finds no token.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


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
