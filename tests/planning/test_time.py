"""The planner's seconds: by hand, and as sums that have to hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rondo.planning.devices import KEPT_BLOCK, DeviceRow, Reached, find_device
from rondo.planning.engine_memory import EngineRun
from rondo.planning.memory import residency
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.shapes import ModelShape
from rondo.planning.time import (
    ENGINE_STEP,
    StepRows,
    decode_step,
    generation_parts,
    model_flops,
    optimizer_parts,
    pass_parts,
    sync_parts,
)

# 2 layers; per layer 4·8·8 of attention and 3·8·16 of an MLP; 10 tokens.
SHAPE = ModelShape(
    "small",
    layers=2,
    hidden=8,
    vocabulary=10,
    heads=2,
    kv_heads=2,
    key_dim=4,
    value_dim=4,
    intermediate=16,
    dense_layers=2,
    attention=256,
    norms=16,
    attention_ends=64,
    attention_inputs=32,
)
# Ten operations, three bytes of memory, two of links a second.
DEVICE = DeviceRow("slow", 1 << 30, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5, 2, "here", 0.25, reached=Reached())


def rows(count: int = 4, prompt: int = 3, *responses: int) -> StepRows:
    return StepRows(count, prompt, responses or (5,))


def test_rows_are_counted() -> None:
    """Of two lengths each row is one of both as often as the other."""
    mixed = rows(4, 3, 1, 5)
    assert (mixed.tokens, mixed.mean) == (4 * 6, 3)
    assert mixed.pairs == 4 * (16 + 64) / 2 / 2


def test_operations_of_training_are_three_forward_passes() -> None:
    blocks, head, attention = 2 * 2 * (256 + 384), 2 * 80, 2 * 2 * 2 * 8
    assert model_flops(SHAPE, 32, 128) == 3 * ((blocks + head) * 32 + attention * 128)
    assert model_flops(SHAPE, 32, 128, head=False) == 3 * (blocks * 32 + attention * 128)


def test_a_mixture_counts_the_experts_of_a_token() -> None:
    mixture = replace(SHAPE, dense_layers=0, experts=8, active_experts=2, expert_width=4)
    assert model_flops(mixture, 1, 0, head=False) == 3 * 2 * (2 * 256 + 2 * 2 * 3 * 8 * 4)


def test_a_forward_pass() -> None:
    """Products at 10 a second, attention with them, memory at 3 bytes a second, each of two ranks a half."""
    run = ModelRun(SHAPE, Spread(2), itemsize=2, compute=2)
    parts = pass_parts(run, rows(), replace(DEVICE, launch=0.0), 1, learns=False)
    assert parts["products"] == pytest.approx((2 * 1280 / 2 * 2 + 160) * 32 / 2 / 10)
    assert parts["attention"] == pytest.approx(64 * 128 / 2 / 10)
    logits = 16 * 10 * 4 * 4
    kept = (2 * 6 + 2 * 2) * 8 + 2 * 32 + 6 * 4 * 4 + 4 * 2 * 16  # of a token in a block
    assert parts["memory"] == pytest.approx((6 * 2 * 16 * kept + logits) / 3)
    # Weights come from the other rank meanwhile: half of all, two bytes each, two bytes a second.
    assert parts["links"] == 0
    quick = replace(DEVICE, launch=0.0, flops=1e9, bandwidth=1e9)
    weights = 2 * (256 + 384) + 2 * 16 + 8 + 2 * 80
    found = pass_parts(run, rows(), quick, 1, learns=False)
    busy = sum(seconds for name, seconds in found.items() if name != "links")
    assert found["links"] == pytest.approx(weights / 2 * 2 / 2 - busy)


def test_backward_and_recomputing() -> None:
    """Two forward passes more, and one again; frozen weights have one; no head is computed again."""
    run = ModelRun(SHAPE, Spread(1), itemsize=2, trains=True, recompute=False)
    blocks, head = 2 * 1280 * 32, 160 * 32

    def products(one: ModelRun) -> float:
        return pass_parts(one, rows(), DEVICE, 1, learns=True)["products"]

    assert products(run) == pytest.approx((3 * blocks + 3 * head) / 10)
    assert products(replace(run, recompute=True)) == pytest.approx((4 * blocks + 3 * head) / 10)
    assert products(replace(run, lora=1)) == pytest.approx((2 * blocks + 2 * head) / 10)
    # Logits that are not kept are computed once more.
    assert products(replace(run, logits_bytes=1)) == pytest.approx((3 * blocks + 4 * head) / 10)


def test_a_prompt_that_rows_share_is_computed_once() -> None:
    """Of four rows in two groups two prompts: 2·3 + 4·5 tokens. A response looks at its prompt all the
    same.
    """
    apart, shared = StepRows(4, 3, (5,), 2), StepRows(4, 3, (5,), 2, shared=True)
    assert apart.passed == (apart.tokens, apart.pairs) == (32, 4 * 64 / 2)
    assert shared.passed == (26, 2 * 9 / 2 + 4 * (64 - 9) / 2)
    assert (shared.tokens, shared.pairs) == (apart.tokens, apart.pairs)  # what a step learns from
    run, device = ModelRun(SHAPE, Spread(1), itemsize=2, compute=2), replace(DEVICE, launch=0.0)
    whole, once = (pass_parts(run, rows, device, 1, learns=True) for rows in (apart, shared))
    assert once["products"] == pytest.approx(whole["products"] * 26 / 32)
    assert once["memory"] == pytest.approx(whole["memory"] * 26 / 32)
    assert once["attention"] == pytest.approx(whole["attention"] * 119 / 128)


def test_large_results_are_new_memory_on_a_host() -> None:
    """glibc keeps blocks of up to 32 MiB."""
    host = replace(DEVICE, is_host=True, fresh=1.0)
    assert (host.passing(KEPT_BLOCK), host.passing(KEPT_BLOCK + 1), DEVICE.passing(1 << 40)) == (3, 1, 3)
    run, few = ModelRun(SHAPE, Spread(1), itemsize=2, compute=2), KEPT_BLOCK // (8 * 2)

    def seconds(tokens: int, passes: int) -> float:
        return pass_parts(run, StepRows(1, 0, (tokens,)), host, passes, learns=False)["memory"] / tokens

    assert seconds(2 * few, 1) == pytest.approx(3 * seconds(few, 1))
    assert seconds(2 * few, 2) == pytest.approx(seconds(few, 1))
    sent = sync_parts(KEPT_BLOCK + 1, run, host, "gathered", hop=False, apart=1)
    assert sent["memory"] == pytest.approx(6 * (KEPT_BLOCK + 1))


def test_a_host_sends_weights_and_computes_in_turn() -> None:
    run, host = ModelRun(SHAPE, Spread(2), itemsize=2, compute=2), replace(DEVICE, launch=0.0, is_host=True)
    weights = 2 * (256 + 384) + 2 * 16 + 8 + 2 * 80
    assert pass_parts(run, rows(), host, 1, learns=False)["links"] == pytest.approx(weights / 2 * 2 / 2)
    assert pass_parts(run, rows(), replace(host, is_host=False), 1, learns=False)["links"] == 0


def test_launches_hide_on_a_card_and_not_on_the_host() -> None:
    run = ModelRun(SHAPE, Spread(1), itemsize=2, trains=True, recompute=True)
    quick = replace(DEVICE, flops=1e12, bandwidth=1e12)
    launches = 2 * 40 * 4 * 0.25
    parts = pass_parts(run, rows(), quick, 1, learns=True)
    assert sum(parts.values()) == pytest.approx(launches)
    assert pass_parts(run, rows(), DEVICE, 1, learns=True)["launches"] == 0
    host = pass_parts(run, rows(), replace(DEVICE, is_host=True), 3, learns=True)
    assert host["launches"] == pytest.approx(3 * launches)


def test_axes_send_what_they_cut() -> None:
    """A tensor axis: four times half of the hidden states a layer; more ranks than a machine has go by the
    network.
    """
    fast = replace(DEVICE, flops=1e9, bandwidth=1e9, launch=0.0, network=0.5)
    two = ModelRun(SHAPE, Spread(2, tensor=2), itemsize=2)
    sent = 2 * 4 * (32 * 8 * 2) * 0.5
    assert pass_parts(two, rows(), fast, 1, learns=False)["links"] == pytest.approx(sent / 2)
    four = ModelRun(SHAPE, Spread(4, tensor=4), itemsize=2)
    sent = 2 * 4 * (32 * 8 * 2) * 0.75
    assert pass_parts(four, rows(), fast, 1, learns=False)["links"] == pytest.approx(sent / 0.5)


def test_an_optimizer_step_moves_what_is_there() -> None:
    run = ModelRun(SHAPE, Spread(1), itemsize=4, trains=True)
    parameters = SHAPE.parameters()
    # The gradient twice, weights and both moments read and written: 2 + 2 + 4 times four bytes.
    assert optimizer_parts(run, DEVICE, 3) == {"optimizer": pytest.approx(3 * 8 * 4 * parameters / 3)}
    rests = optimizer_parts(replace(run, offload_optimizer=True), DEVICE, 1)
    assert rests["offloading"] == pytest.approx(2 * 8 * parameters / 0.5)


def between(itemsize: int) -> int:
    """Bytes that a host moves for a row beside products: six times what two blocks with lean parts keep."""
    norms, attention, mlp = (2 + 2) * 8, 2 * (8 + 8) + 4 * 4, 2 * 16
    return 6 * 2 * itemsize * (norms + attention + mlp)


def test_a_step_of_decoding_reads_weights_and_cache_once() -> None:
    engine = EngineRun(SHAPE)
    device = replace(DEVICE, flops=1e9)
    weights, token = (2 * (256 + 384) + 80) * 2, 2 * 2 * 8 * 2
    found = decode_step(engine, device, 4, 40)
    assert found == pytest.approx((weights + 40 * token) / 3 + ENGINE_STEP["native"])
    many = decode_step(engine, replace(device, flops=1.0), 4, 40)
    flops = (2 * 1280 + 160) * 4 + 64 * 40
    assert many == pytest.approx(flops + ENGINE_STEP["native"])
    on_host = decode_step(engine, replace(device, is_host=True), 4, 40)
    assert on_host == pytest.approx(found + 4 * between(2) / 3 + 2 * 20 * 0.25)


def test_a_step_by_the_native_engines_own_kernels() -> None:
    """A host reads weights by them, or computes, then the rest; nothing is launched. Others have torch's."""
    engine = EngineRun(SHAPE, itemsize=4)
    host = replace(DEVICE, is_host=True, flops=1e9, flops32=1e9, decode=1e9, reads=7.0)
    weights, token = (2 * (256 + 384) + 80) * 4, 2 * 2 * 8 * 4
    found = decode_step(engine, host, 4, 40)
    assert found == pytest.approx(weights / 7 + (40 * token + 4 * between(4)) / 3 + ENGINE_STEP["native"])
    flops = (2 * 1280 + 160) * 4 + 64 * 40
    slow = decode_step(engine, replace(host, decode=0.5), 4, 40)
    assert slow == pytest.approx(flops / 0.5 + (40 * token + 4 * between(4)) / 3 + ENGINE_STEP["native"])
    # Of few rows it does both: from one, which only waits, to 64, which only compute.
    both = decode_step(engine, replace(host, decode=50.0), 4, 40)
    further = 3 / 63 * (flops / 50 * 16 - weights / 7)
    rest = (40 * token + 4 * between(4)) / 3 + ENGINE_STEP["native"]
    assert both == pytest.approx(weights / 7 + further + rest)
    # What no cache holds is read more slowly: 1 GiB and more as such, 2^28.5 bytes half as much so.
    two = replace(host, far=3.5)
    assert [two.reading(2.0**power) for power in (20, 27, 28.5, 30, 40)] == pytest.approx(
        [7, 7, 2 / (1 / 7 + 1 / 3.5), 3.5, 3.5]
    )
    assert decode_step(engine, two, 4, 40) == found
    prompts = generation_parts(engine, StepRows(1, 4, (1,)), replace(host, decode=0.5), 1, 8)["prompts"]
    assert prompts == pytest.approx((2 * 1280 * 4 + 64 * 8) / 0.5)
    torchs = (weights + 40 * token + 4 * between(4)) / 3 + 2 * 20 * 0.25
    for other in (replace(engine, name="transformers"), replace(engine, itemsize=2)):
        bytes_moved = (weights + 40 * token + 4 * between(4)) * other.itemsize / 4
        by_torch = decode_step(other, host, 4, 40) - ENGINE_STEP[other.name]
        assert by_torch == pytest.approx(bytes_moved / 3 + 2 * 20 * 0.25)
    assert decode_step(engine, replace(host, decode=None, reads=None), 4, 40) == pytest.approx(
        torchs + ENGINE_STEP["native"]
    )


def test_generation_is_its_steps() -> None:
    """Two places for four answers of 1, 2, 3 and 4 tokens: the third begins when the first has ended."""
    engine, device = EngineRun(SHAPE), replace(DEVICE, flops=1e9)
    one = generation_parts(engine, StepRows(1, 3, (4,)), device, 1, 2)
    steps = 4 * decode_step(engine, device, 1, 3 + 2)
    assert one["decoding"] == pytest.approx(steps)
    same = generation_parts(engine, StepRows(4, 3, (4,)), device, 1, 2)
    assert same["decoding"] == pytest.approx(2 * 4 * decode_step(engine, device, 2, 2 * 5))
    spread = generation_parts(engine, StepRows(4, 3, (4,)), device, 4, 2)
    assert spread["decoding"] == pytest.approx(steps)
    # In the order 1, 4, 3, 2: the 3 begins behind the 1, and ends with the 4; then the 2 is alone.
    mixed = generation_parts(engine, StepRows(4, 3, (1, 2, 3, 4)), device, 1, 2)
    by_hand = ((1, 2, 7), (3, 2, 2 * 5.5 - 1), (2, 1, 4))
    assert mixed["decoding"] == pytest.approx(
        sum(n * decode_step(engine, device, b, t) for n, b, t in by_hand)
    )


def test_rows_of_one_prompt_read_it_once() -> None:
    engine = EngineRun(SHAPE)
    alone = generation_parts(engine, StepRows(8, 4, (1,)), DEVICE, 1, 8)["prompts"]
    assert alone == pytest.approx((2 * 1280 * 32 + 64 * 8 * 8) / 10)
    assert generation_parts(engine, StepRows(8, 4, (1,), 4), DEVICE, 1, 8)["prompts"] == pytest.approx(
        alone / 4
    )


def test_weights_on_their_way() -> None:
    run = ModelRun(SHAPE, Spread(2), itemsize=2)
    assert sync_parts(100, run, DEVICE, "shared", hop=False, apart=2) == {}
    near = sync_parts(100, run, DEVICE, "gathered", hop=False, apart=2)
    assert near == {"links": pytest.approx(100 / 2 / 2), "memory": pytest.approx(200)}
    # To another machine, and on through its memory.
    far = sync_parts(100, run, DEVICE, "collective", hop=True, apart=4)
    assert (far["links"], far["offloading"]) == (pytest.approx(100), pytest.approx(400))


def test_a_data_sheet_is_not_reached() -> None:
    h100 = find_device("h100")
    assert h100.link_over(8) == 0.7 * 450e9
    assert h100.link_over(9) == 0.7 * 50e9
    assert find_device("gb200").link_over(72) == 0.7 * 900e9
    assert (h100.flops_of(2), h100.flops_of(4)) == (989e12, 67e12)


def test_a_pipeline_computes_as_much_and_waits_between() -> None:
    """Two stages of Megatron's on two ranks share out what one computes; of four passes in one batch a stage
    waits for one, in two batches for two. Weights come back once a step, in each stage to those that have it.
    """
    one = ModelRun(SHAPE, trains=True, recompute=False, megatron=True)
    two = replace(one, layout=Spread(2, pipeline=2))
    quick = replace(DEVICE, launch=0.0)
    whole, half = (pass_parts(run, rows(), quick, 4, learns=True) for run in (one, two))
    assert half["products"] == whole["products"] / 2
    assert "bubble" not in whole
    busy = sum(half.values()) - half["bubble"]
    assert half["bubble"] == pytest.approx(busy / 4)
    chunks = pass_parts(replace(two, layout=Spread(2, pipeline=2, virtual=2)), rows(), quick, 4, learns=True)
    assert chunks["bubble"] == pytest.approx(busy / 8)
    emptied = pass_parts(two, rows(), quick, 4, 2, learns=True)
    assert emptied["bubble"] == pytest.approx(busy / 2)
    assert optimizer_parts(two, quick, 1)["links"] == 0
    four = replace(two, layout=Spread(4, pipeline=2))
    held = residency(four)
    moved = (held.gradients + held.weights) / 2
    assert optimizer_parts(four, quick, 3)["links"] == pytest.approx(3 * moved / quick.link_over(2))


def test_a_frozen_model_of_megatrons_has_weights_alone() -> None:
    """And one that computes in float32 has no second copy of its weights."""
    frozen = ModelRun(SHAPE, Spread(2, pipeline=2), megatron=True)
    learns = replace(frozen, trains=True, compute=4)
    held = residency(frozen)
    assert (held.weights, held.gradients, held.moments) == (held.weights, 0, 0)
    whole = residency(learns)
    assert (whole.weights, whole.gradients) == (2 * held.weights, 2 * held.weights)
    assert whole.moments == 2 * whole.weights
