"""The planner beside what others measured: benchmarks/plan.py, and the tables of docs/plan.md."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import plan as measured
from benchmarks import plan_time as times
from benchmarks import what_fits
from rondo.config import Config, load
from rondo.core.errors import ConfigError, DataError
from rondo.models.attention import SHORT
from rondo.planning.devices import find_device
from rondo.planning.memory import GIB, NOTHING, snapshot_bytes
from rondo.planning.plan import Held, MemoryPlan, plan_memory, remedies
from rondo.planning.roles import ON_CARD, ON_HOST, config_for, roles_of
from rondo.planning.runs import SHORT_ROW, Lengths, lengths_like, lengths_of, runs_of, shapes_of
from rondo.planning.step_time import plan_time
from rondo.platform.cpu import Cpu
from rondo.platform.cuda import Cuda
from rondo.tracking.trajectories import lengths_of as recorded_lengths
from tests.house import ROOT
from tests.trainers.conftest import inline

SETTINGS = [
    "model.path=Qwen/Qwen3-8B",
    "trainer.total_steps=1",
    "cluster={backend: process, devices: 8}",
    "rollout={engine: vllm, sleep: true, max_tokens: 4096}",
    "algorithm.advantage=gae",
    "algorithm.kl={name: k3, where: loss, coef: 0.001}",
]


def test_peaks_of_prime_rl() -> None:
    """Two of three within a fifth; the others are adapters of a mixture, which docs/plan.md explains."""
    errors = {row[:5]: row[6] / row[5] - 1 for row in measured.prime_rl()}
    far = {row for row, error in errors.items() if abs(error) > 0.2}
    assert len(far) <= len(errors) // 3
    assert {(name, lora) for name, _, _, lora, _ in far} == {("Qwen3-30B-A3B", 16)}


def test_what_ran_is_not_refused_and_what_ran_out_is_warned_of() -> None:
    for name, prompts, ran, least, expected in measured.verl():
        assert not ran or least < 80 * GIB, (name, prompts)
        assert ran or expected > 80 * GIB, (name, prompts)


def test_full_fine_tuning_that_ran_is_not_refused() -> None:
    rows = [*measured.verl_full()]
    assert {layout.split()[0] for _, _, _, layout, _, _ in rows} == {"FSDP", "Megatron:"}
    for name, cards, gib, _, least, expected in rows:
        assert least < gib * GIB, (name, cards)
        assert least < expected
    # 66 GB were measured on a card.
    (mean,) = [expected for name, cards, _, _, _, expected in rows if (name, cards) == ("DeepSeek-V3", 96)]
    assert mean == pytest.approx(66e9, rel=0.1)


ROWS = (*measured.LAYOUTS, *measured.LARGE)
QUICK = [row for row in measured.LAYOUTS if row.ranks < 16 and row.tokens < 32_768]


def equal_bytes(row: measured.Ranked) -> None:
    found = {owner: (torchs, planned) for owner, torchs, planned in measured.fake(row)}
    torchs, planned = found.pop("pass")
    assert planned == pytest.approx(torchs, rel=0.25)
    for owner, (torchs, planned) in found.items():
        assert planned == pytest.approx(torchs, rel=0.03), owner


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in QUICK else pytest.mark.slow) for row in ROWS], ids=str
)
def test_bytes_of_a_rank_as_the_backend_makes_them(row: measured.Ranked) -> None:
    """Of its first layers."""
    equal_bytes(row._replace(layers=4))


@pytest.mark.parametrize("row", [row for row in ROWS if row not in QUICK], ids=str)
def test_bytes_of_a_rank_of_the_whole_model(row: measured.Ranked) -> None:
    equal_bytes(row)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(measured.STAGES)), ids=[str(row) for row, _ in measured.STAGES])
def test_bytes_of_a_stage_as_megatron_makes_them(number: int) -> None:
    pytest.importorskip("megatron.core")
    for owner, megatrons, planned in measured.staged(number):
        assert planned == pytest.approx(megatrons, rel=0.01), owner


def printed_by(main: Callable[[], None], against: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["program", against])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main()
    return printed.getvalue()


def test_the_page_has_the_tables_that_the_program_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for against in ("prime-rl", "verl", "verl-full"):
        assert printed_by(measured.main, against, monkeypatch) in page


@pytest.mark.slow
def test_the_page_of_megatron_has_the_table_that_the_program_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    page = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    assert printed_by(measured.main, "megatron", monkeypatch) in page


def test_what_auto_is_without_torch() -> None:
    assert (ON_CARD.half, ON_CARD.recomputes) == (Cuda.half, Cuda.recomputes)
    assert (ON_HOST.half, ON_HOST.recomputes) == (Cpu.half, Cpu.recomputes)


def test_the_plans_of_large_mixtures_with_megatron() -> None:
    """Of docs/megatron.md: its commands make its table, and no key is tried that Megatron does not have."""
    page = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    commands = [line for line in page.splitlines() if line.startswith("rondo plan grpo ")]
    told = [json.loads(inline(*shlex.split(command)[1:], "--json").stdout) for command in commands]
    for phase in ("generate", "score", "update", "sync"):
        held = [plan["pools"]["all"]["phases"][phase].values() for plan in told]
        gib = [sum(one["expected"] for one in owners) / GIB for owners in held]
        assert f"| {phase}, GiB | {gib[0]:.1f} | {gib[1]:.1f} |" in page
    seconds = [sum(plan["time"]["phases"]["update"].values()) for plan in told]
    assert f"| update, seconds | {seconds[0]:.0f} | {seconds[1]:.0f} |" in page
    only_torch = ("offload", "8bit", "bfloat16")
    assert not [help for plan in told for help in plan["helps"] if help["value"] in only_torch]


def test_a_plan_has_each_phase_and_what_helps() -> None:
    config = config_for(load([], SETTINGS).config, ON_CARD)
    shape, lengths = shapes_of(config), lengths_of(config, None)
    roles = roles_of(config)
    assert Counter(roles) == Counter(("actor", "critic", "reference", "rollout"))

    def plan(one: Config) -> MemoryPlan:
        return plan_memory(runs_of(one, roles, ("actor", "critic"), shape, lengths), card=80 * GIB)

    (pool,) = plan(config).pools
    assert [*pool.phases] == ["generate", "score", "update", "sync"]
    assert "rollout cache" in pool.phases["generate"]
    assert "rollout cache" not in {*pool.phases["update"], *pool.phases["sync"]}
    assert "rollout weights" in pool.phases["sync"]
    h100 = find_device("h100")

    def cost(one: Config) -> tuple[int, float]:
        return plan(one).peak, plan_time(runs_of(one, roles, ("actor", "critic"), shape, lengths), h100).step

    helps = remedies(config, cost)
    assert [one.saves for one in helps] == sorted((one.saves for one in helps), reverse=True)
    best = helps[0]
    changed = config_for(load([], [*SETTINGS, f"{best.key}={json.dumps(best.value)}"]).config, ON_CARD)
    (after,) = plan(changed).pools
    now = pool.total(pool.highest).expected
    assert now - after.total(after.highest).expected == best.saves
    assert cost(changed)[1] - cost(config)[1] == best.seconds
    # Split, no device has what is of the other pool.
    pools = "{backend: process, devices: 8, pools: {a: 6, b: 2}, placement: {rollout: b}}"
    apart = [*SETTINGS[:2], f"cluster={pools}"]
    split = config_for(load([], [*apart, "rollout.engine=vllm"]).config, ON_CARD)
    runs = runs_of(split, ("actor", "rollout"), ("actor",), shape, lengths)
    first, second = plan_memory(runs, card=80 * GIB).pools
    assert [*first.phases] == ["score", "update"]
    assert {owner.split()[0] for owner in second.phases["generate"]} == {"rollout", "host"}


def test_the_machine_has_rows_their_routes_and_what_a_checkpoint_copies() -> None:
    model = {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
    }
    model |= {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 100}
    tokenizer = "model.tokenizer=rondo.recipes.quickstart.tokenizer"
    base = [
        f"model.config={json.dumps(model)}",
        tokenizer,
        *SETTINGS[1:3],
        "data.batch_size=2",
        "rollout.n=3",
    ]

    def machine(*settings: str) -> Held:
        config = config_for(load([], [*base, *settings]).config, ON_CARD)
        runs = runs_of(
            config, ("actor", "rollout"), ("actor",), shapes_of(config), lengths_of(config, "10,5")
        )
        plan = plan_memory(runs)
        learns = 8 * snapshot_bytes(runs.models["actor"])  # all eight devices are in one machine
        held = plan.of_machine(lambda pool: pool.highest)
        assert held.get("actor checkpoint", NOTHING).expected == (
            learns if "checkpoint.every=2" in settings else 0
        )
        assert "actor checkpoint" not in plan.of_machine(lambda pool: pool.highest, copies=False)
        # All of it is written once, at 2 GB a second.
        assert plan_time(runs, find_device("h100")).checkpoint == pytest.approx(learns / 2e9)
        return held

    rows = 2 * 3 * (128 + 4 * 10 + 21 * 5)
    assert machine()["the rows of a batch"] == (2 * 3 * 128, rows)
    adapted = machine("actor.lora={rank: 1}", "checkpoint.every=2")["actor checkpoint"].expected
    # Four products of three layers, of 8 inputs and outputs each, and their moments; the one row of A is
    # planned as if each rank had it.
    assert adapted == 12 * 3 * 4 * (8 * 8 + 8)
    # A byte for each of two experts of three layers, of all tokens.
    replayed = machine("actor.router.replay=trainer", "checkpoint.every=2")
    assert replayed["the rows of a batch"] == (2 * 3 * 128, rows + 2 * 3 * 6 * 15)


def test_lengths_that_nobody_said_and_lengths_that_are_wrong() -> None:
    config = load([], SETTINGS).config
    assert "nobody said how long rows are" in lengths_of(config, None).said
    assert lengths_of(config, "100,28").row == 128
    for wrong in ("100", "a,b", "0,5"):
        with pytest.raises(ConfigError, match="give two numbers of tokens"):
            lengths_of(config, wrong)


def test_lengths_of_a_run(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    for wrong in ("has no rollouts", "has no rows"):
        with pytest.raises(DataError, match=wrong):
            recorded_lengths(tmp_path)
        rollouts.mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"prompt_length": [], "response_length": []}), rollouts / "step-000001.parquet"
        )
    for step, responses in ((1, [30, 10]), (2, [20, 40] * 1000)):
        table = pa.table({"prompt_length": [step] * len(responses), "response_length": responses})
        pq.write_table(table, rollouts / f"step-00000{step}.parquet")
    lengths = lengths_like(*recorded_lengths(tmp_path), "runs/a")
    assert (lengths.prompt, lengths.response, lengths.row) == (2, 40, 42)
    assert lengths.said == (
        "as 2002 rows of runs/a: prompts of at most 2 tokens, responses of 30 in the mean, 95 % of them of "
        "at most 40, the longest of 40"
    )
    assert len(lengths.responses) == 1000
    assert lengths.responses[-1] == 40
    assert sum(lengths.responses) == pytest.approx(30_000, rel=0.01)
    assert lengths_like([1, 1, 1], [3, 1, 2], "runs/a").responses == (1, 2, 3)
    told = inline("plan", *SETTINGS, "--lengths", str(tmp_path), "--json").stdout
    assert json.loads(told)["lengths"]["response"] == 40
    (rollouts / "step-000002.parquet").write_bytes(b"no file")
    with pytest.raises(DataError, match=r"step-000002\.parquet: cannot be read"):
        recorded_lengths(tmp_path)


def test_the_command_imports_no_torch() -> None:
    program = (
        "import sys; from rondo.cli.main import main; "
        f"code = main(['plan', *{SETTINGS!r}, '--card', 'h100', '--json']); "
        "print('torch' in sys.modules, 'transformers' in sys.modules, code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-3:] == ["False", "False", "0"]
    told = json.loads(done.stdout)
    assert told["pools"]["all"]["highest"] in ("generate", "update")
    assert told["helps"]


def test_the_command_says_what_fits() -> None:
    told = inline("plan", *SETTINGS, "--card", "h200").stdout
    assert "It fits the 141 GiB of a h200" in told
    assert "What would help" in told
    assert "does not fit the 24 GiB of a rtx4090" in inline("plan", *SETTINGS, "--card", "rtx4090").stdout
    wrong = (*SETTINGS, "actor.parallel.tensor=3", "--card", "h100")
    failed = inline("plan", *wrong, check=False)
    assert "actor.parallel: tensor × context = 3 does not divide the 8 devices" in failed.stderr
    failed = inline("plan", *SETTINGS, "--card", "h1000", check=False)
    assert failed.returncode == 2
    assert "There are: h100" in failed.stderr


def test_the_pages_have_the_tables_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for against in ("prime-rl", "nemo-rl", "hybridflow"):
        for table in printed_by(times.main, against, monkeypatch).split("\n\n"):
            assert table.strip() in page


@pytest.mark.slow
def test_the_page_of_hardware_has_what_fits() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    assert "\n".join(what_fits.rows(what_fits.CARDS)) in page


def test_placements_are_in_the_order_that_hybridflow_found() -> None:
    """But for two of nine, which docs/plan.md names."""
    others = {
        (name, cards)
        for name, cards, best, planned in times.hybridflow()
        if min(planned, key=lambda one: planned[one]) != best
    }
    assert others == {("Llama-2-13B", 128), ("CodeLlama-34b", 64)}


def test_weights_are_handed_on_as_table_2_of_hybridflow_says() -> None:
    """Eight parts of two copies to engines of two: a quarter of a half is there; nothing is held twice."""
    found = times.transitions(4_000, 8, 1, 2, 2)
    assert found["DeepSpeed-Chat"] == (8_000 * 15 / 16, 8_000)
    assert found["HybridFlow-V"] == (8_000 * 7 / 8, 8_000)
    assert found["HybridFlow"] == (8_000 * (1 / 2 - 1 / 8), 4_000)


def test_rows_share_prompts_where_attention_does() -> None:
    """On a host, up to as many tokens as its kernel for short rows takes."""
    assert SHORT_ROW == SHORT
    config = config_for(load([], [*SETTINGS[:2], "rollout.n=4"]).config, ON_HOST)

    def shared(tokens: int, *, on_host: bool) -> bool:
        lengths = Lengths(100, tokens - 100, "here")
        one = runs_of(config, ("actor", "rollout"), ("actor",), shapes_of(config), lengths, on_host=on_host)
        return one.rows.shared

    # The last token of a row has no pass.
    assert shared(129, on_host=True)
    assert not shared(130, on_host=True)
    assert not shared(129, on_host=False)
