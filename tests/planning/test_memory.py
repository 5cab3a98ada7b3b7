"""The formulas of memory: by hand, against each other, and that they stand in one place."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from rondo.config.schema import LoraConfig
from rondo.core.errors import ConfigError
from rondo.planning import engine_memory, memory, tower_memory
from rondo.planning.engine_memory import EngineRun, engine_on_device, token_bytes
from rondo.planning.memory import (
    GIB,
    adapter_share,
    model_bytes,
    on_device,
    residency,
    share_of,
)
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.shapes import find_shape
from rondo.planning.telling import Need, check_fits
from rondo.training.adapters import BASE
from rondo.training.views import local_of
from tests.house import ROOT, SRC
from tests.training.helpers import one_rank_mesh, source, tiny_engine

FOUR = find_shape("Qwen3-4B")


def test_a_model_that_is_trained_is_held_four_times() -> None:
    assert model_bytes(1000, 2) == 2000
    assert model_bytes(1000, 4, "full") == 16_000
    assert model_bytes(1000, 4, "8bit") == 10_000


def test_the_largest_owner_is_named_first_and_is_what_to_lower() -> None:
    needs = [
        Need("rows", GIB, ("data.batch_size",)),
        Need("actor", 6 * GIB, ("a", "b")),
        Need("none", 0, ("c",)),
    ]
    check_fits(needs, 7 * GIB, "memory")
    with pytest.raises(ConfigError) as caught:
        check_fits(needs, 7 * GIB - 1, "memory")
    assert "at least 7.00 GiB of memory" in str(caught.value)
    assert "actor 6.00, rows 1.00; lower a or b" in str(caught.value)
    assert caught.value.key == "a"


def test_ranks_share_a_copy_and_the_axis_tensor_repeats_norms() -> None:
    whole = FOUR.parameters()
    assert share_of(ModelRun(FOUR)) == whole
    assert share_of(ModelRun(FOUR, Spread(8))) == pytest.approx(whole / 8, abs=2)
    assert share_of(ModelRun(FOUR, Spread(8, replicate=2))) == pytest.approx(whole / 4, abs=2)
    both = share_of(ModelRun(FOUR, Spread(8, tensor=4)))
    assert both == pytest.approx(whole / 8 + FOUR.whole * 3 / 8, abs=2)


def test_what_learns_and_where_it_rests() -> None:
    run = ModelRun(FOUR, trains=True)
    count = FOUR.parameters()
    full = residency(run)
    assert (full.weights, full.gradients, full.moments) == (4 * count, 4 * count, 8 * count)
    small = residency(replace(run, moments="8bit"))
    assert small.moments == 2 * count + 2 * count * 4 // 128
    rests = residency(replace(run, offload_params=True, offload_optimizer=True))
    assert rests.of("rest") == {"weights": 0, "moments": 0}
    # One tensor of embeddings is larger than a block: two buffers of its two moments.
    assert rests.moments_pass == 2 * 8 * FOUR.embeddings
    assert rests.at_rest == 12 * count
    lora = residency(replace(run, lora=16, itemsize=2))
    assert lora.gradients == 4 * 16 * FOUR.adapted
    assert lora.weights == 2 * count + lora.gradients
    four_bits = residency(replace(run, lora=16, itemsize=2, quantised=True))
    saved = (2 - memory.NF4_BYTES) * FOUR.matrices
    assert lora.weights - four_bits.weights == pytest.approx(saved, abs=1)


def test_what_leaves_holes_from_1_gib_on() -> None:
    held = memory.ResidencyPlan(weights=GIB // 2, gradients=GIB // 4, moments=GIB // 4)
    for how in ((True, False, False), (False, True, False), (False, False, True)):
        assert memory.leaves_holes(held, *how)
        assert not memory.leaves_holes(replace(held, moments=GIB // 4 - 1), *how)
    assert not memory.leaves_holes(held, False, False, False)


def test_what_a_pass_keeps() -> None:
    run, tokens = ModelRun(FOUR, Spread(8), trains=True), 16_384
    once = on_device(run, "update", tokens)
    twice = on_device(run, "update", 2 * tokens)
    assert twice["activations"].expected == pytest.approx(2 * once["activations"].expected, abs=2)
    context = on_device(replace(run, layout=Spread(8, context=2)), "update", 2 * tokens)
    assert context["activations"] == once["activations"]
    every = on_device(replace(run, recompute=False), "update", tokens)["activations"].expected
    host = on_device(replace(run, recompute="offload"), "update", tokens)["activations"].expected
    tiled = on_device(replace(run, mlp_chunk=1024), "update", tokens)["activations"].expected
    assert every > 10 * once["activations"].expected > 10 * max(host, tiled)
    inputs = FOUR.layers * FOUR.hidden * 2 * tokens
    assert memory.in_host(replace(run, recompute="offload"), tokens)["block inputs"].expected == inputs
    assert once["activations"].expected - host == pytest.approx(inputs - 2 * inputs / FOUR.layers, abs=2)
    assert set(once) == {"weights", "gradients", "moments", "gathered", "activations", "unreduced gradients"}
    assert all(size.least in (0, size.expected) for size in once.values())
    assert sum(size.least for size in once.values()) == sum(
        once[owner].expected for owner in ("weights", "gradients", "moments")
    )


def test_logits_are_kept_where_they_are_few() -> None:
    row = 4 * FOUR.vocabulary
    run = replace(ModelRun(FOUR, trains=True), logits_bytes=8 * row)
    assert memory.logits(run, 4) == (4 + 4) * row
    assert memory.logits(run, 16) == (16 + 8) * row
    assert memory.logits(run, 18) == 2 * 6 * row  # three chunks of six
    assert memory.logits(run, 18, 1.5) == 1.5 * 6 * row
    assert memory.logits(replace(run, layout=Spread(2, tensor=2)), 36) == 3 * 6 * row
    assert memory.logits(replace(run, head="value"), 17) == 0
    assert memory.logits(replace(run, logits_bytes=None), 17) == 0


def test_the_fullest_moment_of_a_pass() -> None:
    """Of a float32 model of 8 ranks in bfloat16: at the start, at the head, in a block, at the end."""
    run, size = ModelRun(FOUR, Spread(8), trains=True, logits_bytes=None), FOUR.embeddings
    own = FOUR.block
    few = memory.passing(run, 1)
    assert few["gathered"] == size * 2  # a tied root, whose gradients are in float32 and bfloat16 at the end
    assert few["unreduced gradients"] == size * (2 + 4) + size * 4 // 8
    on_host = memory.passing(replace(run, on_host=True), 1)
    assert on_host["unreduced gradients"] == few["unreduced gradients"] + 4 * size  # gloo's copy
    frozen = memory.passing(replace(run, trains=False), 1)
    assert frozen["gathered"] == 2 * 2 * (size + own - FOUR.norms)
    many = memory.passing(run, 1 << 16)
    assert many["gathered"] == 2 * (size + 2 * own)
    assert many["unreduced gradients"] == 2 * size + 6 * own + 4 * own // 8
    inputs = FOUR.layers * FOUR.hidden * 2 << 16
    behind = (6 + 3 * 2) * FOUR.hidden << 16
    assert many["activations"] == inputs + behind + memory.one_block(run, 1 << 16)
    vocabulary = FOUR.vocabulary * 4
    head = memory.passing(replace(run, logits_bytes=vocabulary << 12, lora=16), 1 << 14)
    assert head["logits"] == 2 * vocabulary << 12
    assert head["gathered"] == 2 * (size + own)
    learns = memory.passing(replace(run, logits_bytes=vocabulary << 12), 1 << 14)
    assert learns["logits"] == 1.5 * (vocabulary << 12)
    assert learns["unreduced gradients"] == 2 * 4 * size


def test_experts_that_stay_on_their_ranks_are_not_gathered() -> None:
    sparse = find_shape("Qwen3-30B-A3B")
    one = sparse.routed // 48
    own = sparse.block - one
    together, apart = (ModelRun(sparse, Spread(8, expert=size)) for size in (1, 4))
    roots = 2 * sparse.embeddings
    assert memory.gathered(together) == 2 * (roots + 2 * (own + one))
    assert memory.gathered(apart) == 2 * (roots + 2 * (own + one // 4))
    assert memory.gathered(ModelRun(sparse, Spread(8, expert=8))) == 2 * (roots + 2 * own + one // 8)
    assert memory.gathered_first(apart) == 2 * 2 * (roots + own)
    assert memory.gathered_first(together) == 2 * 2 * (roots + own + one)


def test_a_rank_of_megatrons() -> None:
    """A toy of 4 blocks on 16 ranks: tensor 2, pipeline 2, so 4 ranks have the same data's parameters."""
    sizes = {"model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 2, "tie_word_embeddings": False}
    toy = find_shape(None, sizes)
    block = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    dense = (2 * block + 100 * 8) // 2
    run = ModelRun(toy, Spread(16, tensor=2, pipeline=2), trains=True)
    assert memory.stage_of(run) == (dense, 0)
    held = memory.megatron_residency(run)
    assert (held.weights, held.gradients, held.moments) == (2 * dense, 4 * dense, 12 * dense // 4)
    assert memory.megatron_residency(run, on_host=0.5).moments == 6 * dense // 4
    inputs = 4 * 8 * 2 * 10 // 2
    assert memory.megatron_passing(run, 10) == inputs + memory.one_block(run, 10)
    # With two chunks a stage the first one has 5 chunks' inputs before it goes backward, in the place of 4.
    chunks = replace(run, layout=replace(run.layout, virtual=2))
    assert memory.megatron_passing(chunks, 10) == inputs * 5 // 4 + memory.one_block(run, 10)
    assert memory.megatron_residency(chunks) == held
    # Where the ends have fewer blocks the fullest is a stage between; where the last has more, that one.
    six = find_shape(None, {**sizes, "num_hidden_layers": 6})
    uneven = ModelRun(six, Spread(6, tensor=2, pipeline=3), ends=(1, 1))
    assert memory.stage_blocks(uneven) == (1, 4, 1)
    assert memory.stage_of(uneven) == (4 * block // 2, 0)
    assert memory.megatron_passing(uneven, 10) == 4 * 2 * 8 * 2 * 10 // 2 + memory.one_block(uneven, 10)
    last = ModelRun(toy, Spread(4, tensor=2, pipeline=2), ends=(None, 3))
    assert memory.stage_blocks(last) == (1, 1, 3)
    assert memory.stage_of(last) == ((3 * block + 100 * 8) // 2, 0)
    # Experts: two of four on each of two ranks, their optimizer over the four ranks that have the same two.
    moe = {"num_local_experts": 4, "num_experts_per_tok": 1, "model_type": "mixtral"}
    mixture = ModelRun(find_shape(None, {**sizes, **moe}), Spread(16, pipeline=2, expert=2), trains=True)
    dense, experts = memory.stage_of(mixture)
    assert dense == 2 * (4 * 8 * 8 + 2 * 8 + 4 * 8) + 800
    assert experts == 2 * 2 * 3 * 8 * 16
    assert memory.megatron_residency(mixture).moments == 12 * (dense // 8 + experts // 4)
    # Adapters of rank 3: of a block's seven A and B, tensor ranks have these of hidden states whole.
    adapted = replace(run, lora=3)
    whole, cut = 7 * 8, (8 + 16) + (3 * 8 + 2 * 16)
    learns = 3 * 2 * (whole + cut // 2)
    assert memory.stage_adapters(adapted) == learns
    held = memory.megatron_residency(adapted)
    assert (held.weights, held.gradients, held.moments) == (
        2 * (memory.stage_of(run)[0] + learns),
        4 * learns,
        12 * learns // 4,
    )
    assert memory.megatron_residency(replace(run, lora=0)).moments == 0
    # A checkpoint has weights and moments in float32, whatever computes.
    for compute in (2, 4):
        copied = memory.snapshot_bytes(replace(mixture, megatron=True, compute=compute))
        assert copied == 12 * (dense // 8 + experts // 4)


@pytest.mark.parametrize("rank", [None, 4])
def test_a_snapshot_is_what_learns_and_its_moments(rank: int | None) -> None:
    """Those of a real engine, but for its counters and the sum of what does not learn."""
    model, lora = source(), None if rank is None else LoraConfig(rank=rank, alpha=8)
    snapshot = tiny_engine(one_rank_mesh(), model, config={"lora": lora}).snapshot()
    nbytes = sum(
        local_of(one).nbytes for name, one in snapshot.items() if name not in ("optimizer.steps", BASE)
    )
    shape = find_shape(None, {**(model.config or {})})
    assert memory.snapshot_bytes(ModelRun(shape, trains=True, lora=rank)) == nbytes


def test_an_engine_awake_and_asleep() -> None:
    one = 36 * 2 * 8 * 128 * 2
    assert token_bytes(FOUR, 2) == one
    assert token_bytes(FOUR, 2, tensor=16) == one // 8  # a worker has one head at least
    deep = find_shape("DeepSeek-V3")
    assert token_bytes(deep, 2, latent=True) == 61 * (512 + 64) * 2
    assert token_bytes(deep, 2) == 61 * 128 * (192 + 128) * 2
    run = EngineRun(FOUR, "vllm", tokens=1000, longest=10, tensor=2, own_process=True)
    awake = engine_on_device(run, 80 * GIB, 0)
    assert awake["cache"] == memory.Bytes(0, 1000 * one // 2)
    assert engine_on_device(replace(run, name="native"), None, 0)["cache"].least == 10 * one // 2
    assert awake["weights"].least == 2 * -(-FOUR.parameters() // 2)
    assert {*engine_on_device(run, 80 * GIB, 0, asleep=True)} == {"process"}
    assert "weights" in engine_on_device(replace(run, name="native"), 80 * GIB, 0, asleep=True)
    many = engine_on_device(replace(run, tokens=10**9), 80 * GIB, 20 * GIB)
    assert many["cache"].expected == int(0.4 * (60 * GIB - awake["weights"].least))


# What only `planning` may write: products of the sizes that a formula of memory is about.
_OF_FORMULAS = {"kv_heads", "key_dim", "value_dim", "CACHE_SHARE", "KEPT_CHUNKS"}


def test_formulas_of_memory_stand_in_one_place() -> None:
    """Engines, residency and tiles call them: nobody else multiplies heads, or shares out what is free."""
    found = []
    for path in sorted((SRC / "rondo").rglob("*.py")):
        if path.parent.name == "planning" or "vision" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            called = {id(one) for call in ast.walk(node) if _is_formula(call) for one in ast.walk(call)}
            inner = [one for one in ast.walk(node) if id(one) not in called]
            names = {one.attr for one in inner if isinstance(one, ast.Attribute)}
            names |= {one.id for one in inner if isinstance(one, ast.Name)}
            sized = {"itemsize", "free"} & names or len(_OF_FORMULAS & names) > 1
            if sized and _OF_FORMULAS & names:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def _is_formula(node: ast.AST) -> bool:
    """Says whether it is a call of one of the planner's formulas."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    return any(hasattr(formulas, node.func.id) for formulas in (memory, engine_memory, tower_memory))


def test_no_rank_has_a_part_of_an_expert() -> None:
    """Of 8 experts three ranks have 3, 3 and 2; of sixteen ranks eight have one, and eight none."""
    shape = find_shape("Mixtral-8x7B")
    rest = shape.parameters() - shape.whole - shape.routed
    one = shape.routed // 8
    for layout, most in (
        (Spread(3), 3),
        (Spread(16), 1),
        (Spread(16, expert=8), 1),
        (Spread(8, expert=2), 1),
    ):
        others = -(-rest // layout.ranks) + -(-shape.whole // layout.ranks)
        assert share_of(ModelRun(shape, layout)) == others + most * one, layout


def test_a_row_of_an_adapter_is_on_one_rank() -> None:
    """A of rank 2 over four ranks: two of them have a row of it each. B is cut by its outputs."""
    inputs = 36 * ((3 * 2560 + 4096) + (2 * 2560 + 9728))
    outputs = 36 * ((4096 + 2 * 1024 + 2560) + (2 * 9728 + 2560))
    assert (FOUR.adapted_inputs, FOUR.adapted) == (inputs, inputs + outputs)
    found = adapter_share(ModelRun(FOUR, Spread(4), trains=True, lora=2))
    assert found == inputs + 2 * outputs // 4
    assert adapter_share(ModelRun(FOUR, Spread(1), trains=True, lora=2)) == 2 * FOUR.adapted
