"""The composed losses: terms, weights, masks, and gradients that no split changes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from rondo.algorithms import ActorLoss, CriticLoss, SftLoss, bind, lookup, names
from rondo.algorithms.aggregation import loss_weights
from rondo.algorithms.objective import rollout_gap
from rondo.config.schema import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    BypassConfig,
    DivergenceRejectionConfig,
    FunctionConfig,
    KlConfig,
    RatioRejectionConfig,
    TermConfig,
)
from rondo.core.errors import ConfigError, TrainError

T = torch.tensor
LENGTHS = [3, 1, 4, 2, 5, 3]
MODES = [
    FunctionConfig(
        name, {"rows": 2} if "chunk" in name else {"divisor": 8.0} if name.endswith("norm") else {}
    )
    for name in names("aggregation")
]
TRAJECTORIES = np.array([5, 5, 2, 3, 5, 3])  # of the six rows


class Rows:
    """Six packed responses: row 1 has no trained token, rows 0 and 4 have holes; float64."""

    def __init__(
        self, aggregation: FunctionConfig = FunctionConfig("token-mean"), dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(11)
        size = sum(LENGTHS)
        self.cu_seqlens = T([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
        self.row = torch.repeat_interleave(torch.arange(6), T(LENGTHS))
        mask = torch.ones(size, dtype=torch.uint8)
        mask[[1, 3, 12]] = 0

        def draw() -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=dtype)

        old = -draw().abs()
        self.outputs = {"log_probs": old + 0.3 * draw(), "entropy": draw().abs(), "values": draw()}
        tokens = torch.zeros(6).index_add(0, self.row, mask.float()).numpy()
        weight = torch.from_numpy(
            loss_weights(bind("aggregation", aggregation), tokens, np.zeros(6), TRAJECTORIES)
        )
        self.columns = {
            "response_mask": mask,
            "loss_weight": weight[self.row],
            "critic_loss_weight": weight[self.row],
            "old_log_probs": old,
            "rollout_log_probs": old + 0.01 * draw(),
            "ref_log_probs": old + 0.2 * draw(),
            "advantages": torch.randn(6, generator=generator, dtype=dtype)[self.row],
            "values": draw(),
            "returns": draw(),
        }
        wide = torch.log_softmax(torch.randn(2, size, 3, generator=generator, dtype=dtype), -1)
        self.outputs["topk_log_probs"], self.columns["teacher_topk_log_probs"] = wide
        self.columns["teacher_topk_ids"] = torch.zeros(size, 3, dtype=torch.int32)
        self.columns["group_log_ratio"], self.columns["group_size"] = torch.full((2, size), 3.0, dtype=dtype)
        self.columns["entropy_weight"] = torch.tensor([0.0, 5.0])[torch.arange(size) % 2]
        answers = torch.randn(2, 6, generator=generator, dtype=dtype)[:, self.row]
        self.columns["pacs_gradient"], self.columns["pacs_loss"] = answers
        self.columns["covariance_selected"] = (torch.arange(size) % 4 == 0).to(torch.float32)
        self.columns["given"] = (self.row % 2).to(torch.uint8)
        self.columns["given_log_probs"] = old + 0.5 * draw()
        self.columns["replaying"] = torch.ones(size, dtype=dtype)
        self.mask = mask.bool()

    def part(self, rows: list[int], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        where = (
            torch.cat([torch.nonzero(self.row == row).squeeze(1) for row in rows])
            if rows
            else T([], dtype=torch.long)
        )
        return {name: tensor[where] for name, tensor in tensors.items()}

    def gradient(self, loss: object, parts: list[list[int]], output: str) -> tuple[float, torch.Tensor, dict]:
        """(Σ loss, gradient of `output`, metrics reduced over parts), with the rows processed in `parts`."""
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in self.outputs.items()}
        total, sums = 0.0, {}
        for rows in parts:
            cu_seqlens = T([0, *np.cumsum([LENGTHS[row] for row in rows])], dtype=torch.int32)
            columns = self.part(rows, {name: self.columns[name] for name in loss.columns})
            outputs = self.part(rows, {name: leaves[name] for name in loss.outputs})
            value, metrics = loss(outputs, columns, cu_seqlens)
            value.backward()
            total += value.item()
            for name, metric in metrics.items():
                assert not isinstance(metric, torch.Tensor) or metric.ndim == 0
                new = (torch.stack(metric) if isinstance(metric, tuple) else metric).detach()
                old = sums.get(name, torch.zeros_like(new))
                sums[name] = old + new if isinstance(metric, tuple) else torch.maximum(old, new)
        return total, leaves[output].grad, sums


def algorithm(policy_loss: str = "ppo_clip", **changes: object) -> AlgorithmConfig:
    return AlgorithmConfig(policy_loss=FunctionConfig(policy_loss), **changes)  # type: ignore[arg-type]


FULL = {"kl": KlConfig("k3", "loss", 0.3), "entropy_coef": 0.05}
SPLITS = [[[0], [1], [2], [3], [4], [5]], [[5, 1], [], [3, 0, 4], [2]], [[4, 3, 2], [5, 1, 0]]]


@pytest.mark.parametrize("policy_loss", names("policy_loss"))
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_no_split_changes_loss_gradient_or_metrics(policy_loss: str, mode: FunctionConfig) -> None:
    rows, loss = Rows(mode), ActorLoss(algorithm(policy_loss, **FULL))
    whole, gradient, metrics = rows.gradient(loss, [[0, 1, 2, 3, 4, 5]], "log_probs")
    for parts in SPLITS:
        total, part_gradient, part_metrics = rows.gradient(loss, parts, "log_probs")
        assert total == pytest.approx(whole, rel=1e-12)
        assert (part_gradient - gradient).norm() <= 1e-12 * gradient.norm()
        assert part_metrics.keys() == metrics.keys()
        for name, value in metrics.items():
            torch.testing.assert_close(part_metrics[name], value, rtol=1e-12, atol=1e-15)


def aggregate(mode: str, x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The modes written down directly, from ALGORITHMS §2.1; of trajectories, with all of their rows."""
    per_row = [x[(rows.row == i) & rows.mask] for i in range(6)]
    whole = [torch.cat([per_row[i] for i in np.flatnonzero(TRAJECTORIES == name)]) for name in (2, 3, 5)]
    per_row, whole = ([r for r in each if len(r)] for each in (per_row, whole))
    return {
        "token-mean": lambda: torch.cat(per_row).mean(),
        "token-sum": lambda: torch.cat(per_row).sum(),
        "seq-mean-token-sum": lambda: torch.stack([r.sum() for r in per_row]).mean(),
        "seq-mean-token-mean": lambda: torch.stack([r.mean() for r in per_row]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([r.sum() for r in per_row]).mean() / 8.0,
        "trajectory-mean-token-sum": lambda: torch.stack([r.sum() for r in whole]).mean(),
        "trajectory-mean-token-mean": lambda: torch.stack([r.mean() for r in whole]).mean(),
        "chunk-mean-token-mean": lambda: (
            sum(
                (x * (rows.mask & (rows.row // 2 == chunk))).sum()
                / (rows.mask & (rows.row // 2 == chunk)).sum()
                for chunk in range(3)
            )
            / 3
        ),
        "trajectory-mean-token-sum-norm": lambda: torch.stack([r.sum() for r in whole]).mean() / 8.0,
    }[mode]()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_term_is_aggregated_as_configured(mode: FunctionConfig) -> None:
    """Policy loss - c·entropy + β·k3, each aggregated directly, against the weighted sum."""
    rows = Rows(mode)
    c, o = rows.columns, rows.outputs
    ppo, _ = lookup("policy_loss", "ppo_clip")(
        o["log_probs"], c["old_log_probs"], c["advantages"], c["response_mask"].double()
    )
    terms = [
        (1.0, ppo),
        (-0.05, o["entropy"]),
        (0.3, lookup("kl", "k3")(o["log_probs"], c["ref_log_probs"])),
    ]
    expected = sum(factor * aggregate(mode.name, x, rows) for factor, x in terms)
    total, _, metrics = rows.gradient(ActorLoss(algorithm(**FULL)), [list(range(6))], "log_probs")
    assert total == pytest.approx(expected.item(), rel=1e-12)
    if mode.name.endswith("mean") and mode.name != "seq-mean-token-sum":
        reported = metrics["actor/policy_loss"]
        assert (reported[0] / reported[1]).item() == pytest.approx(aggregate(mode.name, ppo, rows).item())


def test_gmpo_with_the_papers_aggregation_is_the_mean_over_responses() -> None:
    rows = Rows(FunctionConfig("seq-mean-token-mean"))
    c, log_probs = rows.columns, rows.outputs["log_probs"]
    per_row = []
    for i in (0, 2, 3, 4, 5):
        where = (rows.row == i) & rows.mask
        advantage = c["advantages"][where][0]
        delta = log_probs[where] - c["old_log_probs"][where]
        bounded = delta.clamp(-0.4, 0.4)
        chosen = torch.minimum(delta, bounded) if advantage > 0 else torch.maximum(delta, bounded)
        per_row.append(-advantage * chosen.mean().exp())
    total, _, _ = rows.gradient(ActorLoss(algorithm("gmpo")), [list(range(6))], "log_probs")
    assert total == pytest.approx(torch.stack(per_row).mean().item())


@pytest.mark.parametrize("policy_loss", names("policy_loss"))
def test_what_the_mask_hides_reaches_nothing(policy_loss: str) -> None:
    rows, loss = Rows(), ActorLoss(algorithm(policy_loss, **FULL))
    whole, gradient, metrics = rows.gradient(loss, [list(range(6))], "log_probs")
    for tensors in (rows.outputs, rows.columns):
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor[~rows.mask] = float("nan")
    hidden, hidden_gradient, hidden_metrics = rows.gradient(loss, [list(range(6))], "log_probs")
    assert hidden == whole
    assert torch.equal(hidden_gradient, gradient)
    assert (gradient[~rows.mask] == 0).all()
    assert (gradient[rows.mask] != 0).any()
    assert all(torch.equal(hidden_metrics[name], metrics[name]) for name in metrics)


def test_entropy_gradient_is_its_weight_times_the_coefficient() -> None:
    rows = Rows()
    _, gradient, _ = rows.gradient(ActorLoss(algorithm(entropy_coef=0.05)), [list(range(6))], "entropy")
    torch.testing.assert_close(gradient, -0.05 * rows.columns["loss_weight"] * rows.mask)


def test_on_policy_uses_the_current_log_probs_as_old_ones() -> None:
    """Ratio 1 everywhere: the gradient is the plain policy gradient, and no old log-probs are asked for."""
    rows, loss = Rows(), ActorLoss(algorithm(), on_policy=True)
    assert "old_log_probs" not in loss.columns
    _, gradient, metrics = rows.gradient(loss, [list(range(6))], "log_probs")
    _, plain, _ = rows.gradient(ActorLoss(algorithm("reinforce")), [list(range(6))], "log_probs")
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=0)
    assert metrics["actor/ratio"][0] == metrics["actor/ratio"][1] == rows.mask.sum()
    assert metrics["actor/clip_fraction"][0] == 0


def own_ratio(log_probs, old_log_probs, advantages, response_mask, *, clip_high=0.3):  # type: ignore[no-untyped-def]
    """A user's CISPO, which reports one number of its own."""
    ratio = (log_probs - old_log_probs).exp().detach()
    return -ratio.clamp(max=1 + clip_high) * advantages * log_probs, {
        "actor/mine": (ratio.sum(), ratio.sum())
    }


def test_a_loss_of_the_users_has_the_metrics_of_a_ratio() -> None:
    """Those that `cispo` reports, with the same bounds, whatever the cut."""
    rows = Rows()
    _, _, mine = rows.gradient(ActorLoss(algorithm(own_ratio)), [[0, 1], [2, 3, 4, 5]], "log_probs")
    of_cispo = FunctionConfig("cispo", {"clip_high": 0.3})
    _, _, theirs = rows.gradient(
        ActorLoss(AlgorithmConfig(policy_loss=of_cispo)), [list(range(6))], "log_probs"
    )
    names = {"actor/ppo_kl", "actor/ratio", "actor/ratio_max"}
    names |= {"actor/clip_fraction", "actor/clip_fraction_low", "actor/clip_fraction_high"}
    assert {name for name in mine if name in theirs} >= names
    assert theirs["actor/clip_fraction_high"][0] > 0
    for name in names:
        assert mine[name] == pytest.approx(theirs[name])
    assert "actor/mine" in mine


def test_the_gap_between_sampler_and_trainer_is_reported() -> None:
    rows = Rows()
    difference = (rows.columns["old_log_probs"] - rows.columns["rollout_log_probs"])[rows.mask]
    _, _, metrics = rows.gradient(ActorLoss(algorithm()), SPLITS[1], "log_probs")
    mean, maximum, k3 = (metrics[f"rollout/{n}"] for n in ("log_prob_gap", "log_prob_gap_max", "kl_k3"))
    assert (mean[0] / mean[1]).item() == pytest.approx(difference.abs().mean().item())
    assert maximum.item() == pytest.approx(difference.abs().max().item())
    assert (k3[0] / k3[1]).item() == pytest.approx((difference.exp() - 1 - difference).mean().item())
    entropy = metrics["actor/entropy_sampled"]
    assert (entropy[0] / entropy[1]).item() == pytest.approx(
        -rows.outputs["log_probs"][rows.mask].mean().item()
    )
    _, _, on_policy = rows.gradient(ActorLoss(algorithm(), on_policy=True), SPLITS[1], "log_probs")
    current = (rows.outputs["log_probs"] - rows.columns["rollout_log_probs"])[rows.mask]
    assert on_policy["rollout/log_prob_gap_max"].item() == pytest.approx(current.abs().max().item())


def test_bypass_leaves_out_what_the_current_policy_rejects() -> None:
    """Ratios to the sampler 2 and 1 in row 0, 1 and 1 in row 1: a token, or a row, is 0 in loss and gradient,
    the weights are as planned.
    """
    rollout = T([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    columns = {
        "response_mask": torch.ones(4),
        "rollout_log_probs": rollout,
        "old_log_probs": rollout,
        "advantages": torch.ones(4, dtype=torch.float64),
        "loss_weight": torch.full((4,), 0.25, dtype=torch.float64),
    }
    token, row = RatioRejectionConfig("k1", 1.5), DivergenceRejectionConfig("k2", 0.1, "mean")
    for rules, left, tokens, rows in (
        ((), [2.0, 1.0, 1.0, 1.0], None, None),
        ((token,), [0.0, 1.0, 1.0, 1.0], 1, 0),
        ((row,), [0.0, 0.0, 1.0, 1.0], 2, 1),
        ((token, row), [0.0, 0.0, 1.0, 1.0], 2, 1),
    ):
        current = (rollout + T([2.0, 1.0, 1.0, 1.0]).log()).requires_grad_()
        config = algorithm("reinforce_is", rollout_correction=BypassConfig(reject=rules))
        total, metrics = ActorLoss(config)({"log_probs": current}, columns, T([0, 2, 4], dtype=torch.int32))
        (gradient,) = torch.autograd.grad(total, current)
        torch.testing.assert_close(gradient, -0.25 * T(left, dtype=torch.float64))
        assert float(metrics["actor/loss"][1]) == 1
        if tokens is not None:
            assert metrics["rollout_correction/rejected_token_share"] == (tokens, 4)
            assert metrics["rollout_correction/rejected_row_share"] == (rows, 2)


def test_k3_of_policies_that_agree_has_digits_in_float32() -> None:
    """δ = 2⁻¹³ exactly, about 1e-4: k3 = δ²/2 + δ³/6, of which float32's e^δ - 1 - δ keeps three digits."""
    delta = 2.0**-13
    old = torch.full((5,), -0.5)
    numerator, _ = rollout_gap(old, old - delta, torch.ones(5))["rollout/kl_k3"]
    assert numerator.item() == pytest.approx(5 * (delta**2 / 2 + delta**3 / 6), rel=1e-6)


def test_outputs_and_columns_follow_from_the_configuration() -> None:
    plain = ActorLoss(algorithm())
    assert plain.outputs == ("log_probs",)
    assert set(plain.columns) == {
        "response_mask",
        "loss_weight",
        "rollout_log_probs",
        "old_log_probs",
        "advantages",
    }
    assert plain.zero_where_advantage_is_zero
    assert (
        "old_log_probs" not in ActorLoss(algorithm("reinforce")).columns
    )  # nobody computes them for a metric
    full = ActorLoss(algorithm(**FULL))
    assert full.outputs == ("log_probs", "entropy")
    assert "ref_log_probs" in full.columns
    assert not full.zero_where_advantage_is_zero
    in_reward = ActorLoss(algorithm(kl=KlConfig("k1", "reward", 0.1)))
    assert "ref_log_probs" not in in_reward.columns
    assert in_reward.zero_where_advantage_is_zero


def test_an_adaptive_coefficient_in_the_loss_is_a_column() -> None:
    rows = Rows()
    loss = ActorLoss(algorithm(kl=KlConfig("k3", "loss", 0.3, controller=AdaptiveKlConfig())))
    assert "kl_coef" in loss.columns
    rows.columns["kl_coef"] = torch.full_like(rows.columns["loss_weight"], 0.7)
    adaptive = rows.gradient(loss, [list(range(6))], "log_probs")
    fixed = rows.gradient(ActorLoss(algorithm(kl=KlConfig("k3", "loss", 0.7))), [list(range(6))], "log_probs")
    assert adaptive[0] == pytest.approx(fixed[0], rel=1e-12)
    torch.testing.assert_close(adaptive[1], fixed[1])


def test_k1_in_the_loss_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="k2"):
        ActorLoss(algorithm(kl=KlConfig("k1", "loss", 0.1)))


def test_critic_loss_uses_the_values_of_the_advantages_for_clipping() -> None:
    rows = Rows()
    loss = CriticLoss(FunctionConfig("clipped_value", {"clip": 0.2}))
    assert loss.outputs == ("values",)
    assert set(loss.columns) == {"response_mask", "critic_loss_weight", "values", "returns"}
    new, old, returns = rows.outputs["values"], rows.columns["values"], rows.columns["returns"]
    near = new.clamp(old - 0.2, old + 0.2)
    expected = torch.maximum((new - returns) ** 2, (near - returns) ** 2)[rows.mask].mean() / 2
    whole, gradient, _ = rows.gradient(loss, [list(range(6))], "values")
    assert whole == pytest.approx(expected.item())
    for parts in SPLITS:
        total, part, _ = rows.gradient(loss, parts, "values")
        assert total == pytest.approx(whole, rel=1e-12)
        assert (part - gradient).norm() <= 1e-12 * gradient.norm()
    for tensor in (new, old, returns):
        tensor[~rows.mask] = float("nan")
    hidden, hidden_gradient, _ = rows.gradient(loss, [list(range(6))], "values")
    assert hidden == whole
    assert torch.equal(hidden_gradient, gradient)


def test_rows_without_a_weight_are_in_no_metric_of_the_critic() -> None:
    """As of what `mask_truncated` leaves out: row 4 of the rows, whatever stands there."""
    rows, loss = Rows(), CriticLoss(FunctionConfig("clipped_value"))
    rows.columns["critic_loss_weight"] = rows.columns["critic_loss_weight"] * (rows.row != 4)
    counted = rows.mask & (rows.row != 4)
    _, metrics = loss(rows.outputs, rows.columns, rows.cu_seqlens)
    returns, number = metrics["critic/return"]
    assert number == counted.sum()
    assert returns == pytest.approx(rows.columns["returns"][counted].sum().item())
    rows.columns["returns"][rows.row == 4] = float("nan")
    assert loss(rows.outputs, rows.columns, rows.cu_seqlens)[1]["critic/return"] == (returns, number)


def test_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    rows, loss = Rows(), SftLoss()
    expected = -rows.outputs["log_probs"][rows.mask].mean()
    rows.outputs["log_probs"][~rows.mask] = float("nan")
    for parts in SPLITS:
        total, gradient, metrics = rows.gradient(loss, parts, "log_probs")
        assert total == pytest.approx(expected.item())
        torch.testing.assert_close(gradient, -rows.columns["loss_weight"] * rows.mask)
        assert (metrics["sft/loss"][0] / metrics["sft/loss"][1]).item() == pytest.approx(expected.item())


def test_losses_survive_pickling() -> None:
    for loss in (
        ActorLoss(algorithm(**FULL), on_policy=True),
        CriticLoss(AlgorithmConfig().value_loss),
        SftLoss(),
    ):
        copy = pickle.loads(pickle.dumps(loss))
        assert (copy.outputs, copy.columns) == (loss.outputs, loss.columns)


def test_float32_is_kept() -> None:
    """Weights are planned in float64; the loss stays in the precision of the log-probs."""
    rows = Rows(dtype=torch.float32)
    assert rows.columns["loss_weight"].dtype == torch.float64
    loss = ActorLoss(algorithm(**FULL))
    value, _ = loss(rows.outputs, rows.columns, rows.cu_seqlens)
    assert value.dtype == torch.float32


def broken(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return (log_probs * advantages).sum()


def test_a_loss_that_returns_something_else_is_named() -> None:
    rows, loss = Rows(), ActorLoss(algorithm(f"{__name__}:broken"))
    assert not loss.zero_where_advantage_is_zero  # it does not say so
    with pytest.raises(TrainError, match="broken"):
        rows.gradient(loss, [list(range(6))], "log_probs")


def tells(log_probs, advantages, *, name: str):  # type: ignore[no-untyped-def]
    return -advantages * log_probs, {name: log_probs.detach().amax()}


@pytest.mark.parametrize(
    "name",
    [
        *("actor/loss", "actor/grad_norm", "actor/lr", "actor/coefficient/alpha", "actor/term/entropy"),
        *("reward/mean", "buffer/filtered", "timing/step_s", "rollout/kl_k3", "step"),
    ],
)
def test_a_loss_of_the_users_names_its_metrics_otherwise_than_rondo_does(name: str) -> None:
    """They were merged with rondo's, or dropped."""
    rows, chosen = Rows(), FunctionConfig(f"{__name__}:tells", {"name": name})
    for loss in (
        ActorLoss(AlgorithmConfig(policy_loss=chosen)),
        ActorLoss(AlgorithmConfig(terms=(TermConfig(chosen.name, chosen.options),))),
    ):
        with pytest.raises(TrainError, match=f":tells tells '{name}'"):
            loss(rows.outputs, rows.columns, rows.cu_seqlens)


@pytest.mark.parametrize("name", ["actor/ppo_kl", "actor/ratio", "actor/clip_fraction", "actor/mine", "mine"])
def test_names_of_its_own_and_those_of_a_ratio_are_free(name: str) -> None:
    rows, chosen = Rows(), FunctionConfig(f"{__name__}:tells", {"name": name})
    _, metrics = ActorLoss(AlgorithmConfig(policy_loss=chosen))(rows.outputs, rows.columns, rows.cu_seqlens)
    assert metrics[name] == rows.outputs["log_probs"][rows.columns["response_mask"] > 0].clamp(min=0).amax()


def told(log_probs, advantages, *, what: str):  # type: ignore[no-untyped-def]
    loss, one = -advantages * log_probs, torch.ones(())
    said = {
        "floats": {"actor/mine": (3.0, 1.0)},
        "float": {"actor/mine": 0.5},
        "vector": {"actor/mine": log_probs},
        "three": {"actor/mine": (one, one, one)},
        "nothing": None,
        "pair": {"actor/mine": (one, one)},
    }
    return (loss.detach(), {}) if what == "detached" else (loss, said[what])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        *((what, "tells 'actor/mine', which is neither") for what in ("floats", "float", "vector", "three")),
        ("nothing", "told' must .* metrics a mapping"),
        ("detached", "policy_loss: .*told' has no gradient"),
    ],
)
def test_what_a_loss_of_the_users_returns_is_checked(what: str, said: str) -> None:
    right, wrong = (
        ActorLoss(AlgorithmConfig(policy_loss=FunctionConfig(f"{__name__}:told", {"what": one})))
        for one in ("pair", what)
    )
    Rows().gradient(right, [list(range(6))], "log_probs")
    with pytest.raises(TrainError, match=said):
        Rows().gradient(wrong, [list(range(6))], "log_probs")


# ---- losses of the user's, compared with themselves on halves ----


def undefined_where_masked(
    log_probs: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, dict[str, object]]:
    largest = log_probs[response_mask > 0].abs().amax()  # raises where there is no token
    assert largest >= 0
    return -advantages * log_probs / response_mask, {}


def of_its_micro_batch(
    log_probs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, dict[str, object]]:
    return -log_probs * (advantages - advantages.mean()), {}


DIFFERENCE = "split_difference/algorithm.policy_loss"


def test_a_loss_of_each_row_is_itself_on_halves() -> None:
    rows = Rows()
    loss = ActorLoss(algorithm(f"{__name__}:undefined_where_masked"))
    _, metrics = loss(rows.outputs, rows.columns, rows.cu_seqlens)
    assert metrics[DIFFERENCE] == 0.0


def test_a_loss_of_its_micro_batch_is_another_on_halves() -> None:
    rows = Rows()
    loss = ActorLoss(algorithm(f"{__name__}:of_its_micro_batch"))
    _, metrics = loss(rows.outputs, rows.columns, rows.cu_seqlens)
    assert metrics[DIFFERENCE] > 0.01


def test_a_half_without_a_trained_token_is_not_asked_for() -> None:
    rows = Rows()
    rows.columns["response_mask"][: sum(LENGTHS[:3])] = 0
    loss = ActorLoss(algorithm(f"{__name__}:undefined_where_masked"))
    _, metrics = loss(rows.outputs, rows.columns, rows.cu_seqlens)
    assert DIFFERENCE not in metrics
