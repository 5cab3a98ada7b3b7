"""Loading: merging, overrides, types, origins and the exact messages of what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.config import Origin, load, show, to_yaml
from rondo.config.keys import schema_keys
from rondo.config.printing import _Dumper, plain
from rondo.config.schema import Config, FileSourceConfig, FunctionConfig, KlConfig, RewardFunctionConfig
from rondo.config.tree import parse_scalar
from rondo.core.errors import ConfigError
from rondo.system.names import offered

ROOT = Path(__file__).resolve().parents[2]
BASE = ("model.path=model", "trainer.total_steps=10")  # what every configuration needs


def recipe(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def message(files: list[str], *overrides: str, base: tuple[str, ...] = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        load(files, [*base, *overrides])
    return str(caught.value)


def config(*overrides: str) -> Config:
    return load([], [*BASE, *overrides]).config


class TestMerging:
    def test_files_merge_in_order_and_arguments_win(self, in_tmp_path: Path) -> None:
        first = recipe(in_tmp_path, "rollout: {n: 4, top_p: 0.9}\ndata: {batch_size: 8}\n", "a.yaml")
        second = recipe(in_tmp_path, "rollout:\n  n: 6\n", "b.yaml")
        loaded = load([first, second], [*BASE, "data.batch_size=32"])
        assert (loaded.config.rollout.n, loaded.config.rollout.top_p, loaded.config.data.batch_size) == (
            6,
            0.9,
            32,
        )
        assert loaded.files == ("a.yaml", "b.yaml")
        assert loaded.origins["rollout.n"] == Origin("b.yaml:2")
        assert loaded.origins["rollout.top_p"] == Origin("a.yaml:1")
        assert loaded.origins["data.batch_size"] == Origin("argument 'data.batch_size=32'")
        assert "rollout.top_k" not in loaded.origins

    def test_lists_replace(self, in_tmp_path: Path) -> None:
        first = recipe(in_tmp_path, "rollout: {stop: [a, b, c]}\n", "a.yaml")
        second = recipe(in_tmp_path, "rollout: {stop: [d]}\n", "b.yaml")
        assert load([first, second], BASE).config.rollout.stop == ("d",)

    def test_open_mappings_merge_deeply(self, in_tmp_path: Path) -> None:
        first = recipe(
            in_tmp_path, "model: {config: {model_type: qwen3, rope: {theta: 1, x: 2}}}\n", "a.yaml"
        )
        found = load([first], ["model.config.rope.theta=1e4", "trainer.epochs=1", "model.tokenizer=t"]).config
        assert found.model.config == {"model_type": "qwen3", "rope": {"theta": 10000.0, "x": 2}}

    def test_options_belong_to_the_name(self, in_tmp_path: Path) -> None:
        first = recipe(in_tmp_path, "algorithm: {advantage: {name: grpo, normalize_std: false}}\n", "a.yaml")
        same = load([first], [*BASE, "algorithm.advantage.eps=1e-3"]).config.algorithm.advantage
        assert same == FunctionConfig("grpo", {"normalize_std": False, "eps": 1e-3})
        for other in (
            "algorithm.advantage=gae",
            "algorithm.advantage.name=gae",
            "algorithm.advantage={name: gae}",
        ):
            assert load([first], [*BASE, other]).config.algorithm.advantage == FunctionConfig("gae")

    def test_sections_start_from_their_own_defaults(self) -> None:
        found = config("critic.optimizer.betas=[0.9, 0.95]", "algorithm.advantage.normalize_std=false")
        assert (found.critic.optimizer.lr, found.actor.optimizer.lr) == (1e-5, 1e-6)
        assert found.algorithm.advantage == FunctionConfig("grpo", {"normalize_std": False})

    def test_null_and_mapping_over_null(self, in_tmp_path: Path) -> None:
        first = recipe(in_tmp_path, "algorithm: {kl: {name: k3, where: loss, coef: 1e-3}}\n", "a.yaml")
        assert load([first], BASE).config.algorithm.kl == KlConfig("k3", "loss", 0.001)
        assert load([first], [*BASE, "algorithm.kl=null"]).config.algorithm.kl is None

    def test_one_element_of_a_list(self, in_tmp_path: Path) -> None:
        text = "reward:\n  functions:\n    - gsm8k\n    - {name: length, target: 5}\n"
        path = recipe(in_tmp_path, text)
        loaded = load([path], [*BASE, "reward.functions.0.weight=2", "reward.functions.1.target=7"])
        assert loaded.config.reward.functions == (
            RewardFunctionConfig("gsm8k", weight=2.0),
            RewardFunctionConfig("length", options={"target": 7}),
        )
        assert loaded.origins["reward.functions.0.name"] == Origin("recipe.yaml:3")
        assert loaded.origins["reward.functions.0.weight"] == Origin("argument 'reward.functions.0.weight=2'")

    def test_a_function_in_flow_style(self) -> None:
        found = config(
            "reward.functions=[{name: my_reward.py:short_and_right, max_tokens: 24, sources: [a]}]"
        )
        expected = RewardFunctionConfig(
            "my_reward.py:short_and_right", sources=("a",), options={"max_tokens": 24}
        )
        assert found.reward.functions == (expected,)

    def test_it_travels_to_workers(self) -> None:
        found = config("rollout.engine={name: vllm, a: 1}", "algorithm.kl={name: k3, where: loss, coef: 1}")
        assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found

    def test_a_program_makes_sections_under_the_same_bounds(self) -> None:
        assert dataclasses.replace(Config().rollout, n=4).n == 4
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            dataclasses.replace(Config().rollout, n=0)
        with pytest.raises(ValueError, match="valid integer"):
            dataclasses.replace(Config().rollout, n="4")

    def test_defaults_equal_the_schema(self) -> None:
        found = config()
        assert found.actor == Config().actor
        assert found.rollout == Config().rollout


class TestValues:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1e-4", 1e-4),
            ("1e4", 1e4),
            ("-2.5E+3", -2500.0),
            (".5", 0.5),
            ("3.", 3.0),
            ("12", 12),
            ("-7", -7),
            ("1_000", "1_000"),
            ("1_2", "1_2"),
            ("0_2.5", "0_2.5"),
            ("0x10", 16),
            ("0o10", 8),
            ("010", 10),
            (".inf", float("inf")),
            ("-.inf", float("-inf")),
            ("true", True),
            ("False", False),
            ("yes", "yes"),
            ("on", "on"),
            ("1:30", "1:30"),
            ("2026-11-21", "2026-11-21"),
            ("null", None),
            ("~", None),
            ("", None),
            ("e5", "e5"),
            ("1e", "1e"),
        ],
    )
    def test_scalars(self, text: str, value: object) -> None:
        found = parse_scalar(text)
        assert found == value
        assert type(found) is type(value)

    def test_numbers(self) -> None:
        assert config("actor.optimizer.lr=1e-4").actor.optimizer.lr == 1e-4
        assert config("data.max_prompt_tokens=1e3").data.max_prompt_tokens == 1000
        lr = config("actor.optimizer.lr=1").actor.optimizer.lr
        assert (lr, type(lr)) == (1.0, float)
        assert config("actor.optimizer.betas=[0.8, 0]").actor.optimizer.betas == (0.8, 0.0)

    def test_quoted_number_is_a_string(self) -> None:
        assert config("tracking.project='2024'").tracking.project == "2024"


class TestUnknownKeys:
    def test_names_file_and_line(self, in_tmp_path: Path) -> None:
        path = recipe(in_tmp_path, "# comment\nactor:\n  optimizer:\n    lr: 1e-4\n    betass: [1, 2]\n")
        assert message([path]) == (
            "recipe.yaml:5: unknown key 'actor.optimizer.betass'; did you mean 'actor.optimizer.betas'?"
        )

    def test_every_schema_key_is_reachable(self) -> None:
        assert "actor.optimizer.schedule.warmup_steps" in schema_keys()
        assert "data.train.0.prompt_key" in schema_keys()
        keys = schema_keys()
        leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
        assert len(set(keys)) == len(keys)
        # 210, hub, template options, override of five models, balance, isolation, hangs, best,
        # tools, environments, full, python of engines, env, timeout, episode workers, states, restarts,
        # an adapter's five of two models, and how engines get it, two optimizers' moments, mlp_chunk,
        # four axes of five models, and a mixture's balance (two), biases and replay; open
        # environments, what is left out of the rows of three kinds of sources (two), and whether
        # four models' tokenizers are compared, an export's dtype, how many rollouts are kept, terms of a
        # loss (three), numbers that adapt, a sampler, which answers of a step are trained on, and values of
        # steps by branches (three), a mix, and what of a model with
        # images is frozen (three), how fast its parts learn (two), how images are read, what is watched in
        # metrics (17), what is warned of before a run (nine), and of which steps columns of tokens are
        # written and kept (two), what other rows at a resume mean, and in which parts of a model with images
        # adapters are (two), columns of answers and conversations (two of three kinds of sources), a share of
        # steps as warm-up (two optimizers'), how long a conversation is, how it is written, an epoch's last
        # batch, whether its end is evaluated, and
        # what trackers call the run and its metrics, how what is offloaded comes and goes, which steps are
        # profiled (two), what comes of a plan of memory, what plans take a device for, and Megatron:
        # its five settings, and the axis pipeline of five models
        assert len(leaves) <= 387


class TestBadFiles:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                "rollout:\n  n: 4\n  n: 5\n",
                "recipe.yaml:3: key 'n' is set twice in one mapping (first at recipe.yaml:2)",
            ),
            (
                "rollout:\n  n: [1, 2\ndata: {}\n",
                "recipe.yaml:3: not valid YAML: expected ',' or ']', but got ':' (while parsing a flow "
                "sequence)",
            ),
            (
                "rollout:\n\tn: 4\n",
                "recipe.yaml:2: not valid YAML: found character '\\t' that cannot start any token "
                "(while scanning for the next token)",
            ),
            (
                "- a\n- b\n",
                "recipe.yaml:1: a recipe is a mapping of sections (model: …, data: …), this is a list",
            ),
            (
                "hello\n",
                "recipe.yaml:1: a recipe is a mapping of sections (model: …, data: …), this is a string "
                "'hello'",
            ),
            ("? [a, b]\n: 1\n", "recipe.yaml:1: a key must be a plain word, not a list or mapping"),
            (
                "rollout:\n",
                "recipe.yaml:1: rollout must be a mapping, got null (How the policy is sampled, and by what)",
            ),
        ],
    )
    def test_message_names_the_line(self, in_tmp_path: Path, text: str, expected: str) -> None:
        assert message([recipe(in_tmp_path, text)]) == expected

    def test_missing_file_lists_what_is_there(self, in_tmp_path: Path) -> None:
        assert message(["nope.yaml"]) == (
            "configuration file nope.yaml does not exist (paths are relative to the working directory)"
        )
        (in_tmp_path / "recipes").mkdir()
        recipe(in_tmp_path / "recipes", "", "quickstart.yaml")
        expected = (
            "configuration file recipes/quick.yaml does not exist; did you mean recipes/quickstart.yaml?"
        )
        assert message(["recipes/quick.yaml"]) == expected
        assert message(["recipes"]) == "configuration file recipes is a folder; recipes/ has: quickstart.yaml"
        assert message(["rollout.n"]) == (
            "configuration file rollout.n does not exist; there is no recipe of that name. A setting is "
            "written key.sub=value"
        )
        assert message(["quikstart"]) == (
            "configuration file quikstart does not exist; did you mean the recipe quickstart? A setting is "
            "written key.sub=value"
        )

    @pytest.mark.parametrize("name", sorted(offered("recipes")))
    def test_a_recipe_printed_into_a_file_is_that_recipe(self, in_tmp_path: Path, name: str) -> None:
        (in_tmp_path / "quickstart").mkdir()  # a folder of its name is in nobody's way
        own = recipe(in_tmp_path, offered("recipes")[name].read_text())
        assert load([own]).config == load([str(offered("recipes")[name])]).config

    def test_recipes_that_rondo_ships_have_names(self, in_tmp_path: Path) -> None:
        assert load(["quickstart"]).files == (str(offered("recipes")["quickstart"]),)
        own = recipe(in_tmp_path, "include: quickstart\ntrainer: {total_steps: 7}\n")
        assert load([own]).config.data == load(["quickstart"]).config.data
        recipe(in_tmp_path, "rollout: {n: 3}\n", "quickstart")  # a file here goes before
        assert load(["quickstart"], BASE).config.rollout.n == 3

    def test_binary_file(self, in_tmp_path: Path) -> None:
        (in_tmp_path / "x.yaml").write_bytes(b"ab\xff\x00")
        assert message(["x.yaml"]) == "x.yaml: not UTF-8 text (byte 2); is this a YAML file?"

    def test_empty_file_is_an_empty_recipe(self, in_tmp_path: Path) -> None:
        assert load([recipe(in_tmp_path, "# nothing\n")], BASE).config == config()

    def test_argument_with_broken_yaml(self) -> None:
        assert message([], "rollout.stop=[a").startswith(
            "argument 'rollout.stop=[a': the value is not valid YAML (expected ',' or ']'"
        )


class TestPrinting:
    RECIPE = """
    model: {config: {model_type: qwen3, note: "1e-4", empty: {}, list: [1, {a: null}]}, tokenizer: "007"}
    data: {train: [{type: function, task: "m:f", options: {ratio: 1e-7}}, {type: jsonl, path: a.jsonl}]}
    reward: {functions: [gsm8k, {name: "x.py:f", weight: 0.5, flag: true, text: "yes"}]}
    algorithm: {kl: {name: k3+, where: loss, coef: 1e-3}, advantage: {name: gae, lam: 0.95}}
    trainer: {epochs: 1.5, run_dir: "2026-11-21"}
    tracking: {trackers: [tensorboard, {name: wandb, mode: "on"}], project: "1:30"}
    """

    def test_to_yaml_loads_back_equal(self, in_tmp_path: Path) -> None:
        loaded = load([recipe(in_tmp_path, self.RECIPE)])
        again = load([recipe(in_tmp_path, to_yaml(loaded.config), "again.yaml")])
        assert again.config == loaded.config
        assert loaded.config.model.tokenizer == "007"
        assert loaded.config.model.config is not None
        assert loaded.config.model.config["note"] == "1e-4"

    @pytest.mark.parametrize("note", ["1e-4", "a\\b", "é", "😀", "x: [y]", "yes", "a\nb\n", "word " * 40])
    def test_libyaml_writes_what_yaml_in_python_does(self, in_tmp_path: Path, note: str) -> None:
        config = load(["dapo"]).config
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, config={"note": note}))
        options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 110}
        assert to_yaml(config) == yaml.dump(plain(config), Dumper=_Dumper, **options)

    def test_other_readers_of_yaml_agree(self, in_tmp_path: Path) -> None:
        import yaml

        loaded = load([recipe(in_tmp_path, self.RECIPE)])
        plain = yaml.safe_load(to_yaml(loaded.config))
        assert plain["trainer"]["run_dir"] == "2026-11-21"
        assert plain["reward"]["functions"][1]["text"] == "yes"
        assert plain["tracking"]["project"] == "1:30"
        assert plain["data"]["train"][0]["options"]["ratio"] == 1e-7

    def test_show_has_every_leaf_with_its_origin(self, in_tmp_path: Path) -> None:
        loaded = load([recipe(in_tmp_path, self.RECIPE)], ["rollout.n=3"])
        lines = {line.split(":")[0]: line for line in show(loaded.config, loaded.origins).splitlines()}
        assert lines["rollout.n"].split() == ["rollout.n:", "3", "#", "argument", "'rollout.n=3'"]
        assert lines["rollout.top_p"].split() == ["rollout.top_p:", "1.0", "#", "default"]
        assert lines["algorithm.advantage.lam"].endswith("# recipe.yaml:5")
        assert lines["data.train.1.path"].split() == ["data.train.1.path:", "a.jsonl", "#", "recipe.yaml:3"]
        simple = {
            key for key in schema_keys() if key.startswith(("actor.", "rollout.", "trainer.evaluation."))
        }
        sections = {"actor.backend", "actor.optimizer", "actor.optimizer.schedule", "rollout.engine"}
        sections.add("actor.router")
        # Of a function that is null, and of choices that were not made.
        nothing = {"rollout.agent.name", "rollout.engine.tensor_parallel", "rollout.engine.python"}
        nothing |= {f"rollout.tools.0.{key}" for key in ("name", "timeout_seconds", "max_tokens")}
        of_environments = ("name", "timeout_seconds", "max_open", "keep_state")
        nothing |= {f"rollout.environments.0.{key}" for key in of_environments}
        nothing |= {f"actor.optimizer.schedule.{key}" for key in ("min_ratio", "decay_steps")}
        nothing |= {
            f"actor.parallel.{key}" for key in ("replicate", "tensor", "context", "expert", "pipeline")
        }
        of_megatron = ("virtual", "first_stage_layers", "last_stage_layers", "recompute", "options")
        nothing |= {f"actor.backend.{key}" for key in of_megatron}
        nothing |= {f"actor.router.balance.{key}" for key in ("weight", "over")}
        nothing |= {
            f"actor.lora.{key}"
            for key in ("rank", "alpha", "targets", "parts", "init", "path", "base_dtype", "send")
        }
        assert simple - sections - nothing <= set(lines)


class TestRecipes:
    @pytest.mark.parametrize("name", sorted(offered("recipes")))
    def test_every_recipe_loads(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        text = offered("recipes")[name].read_text(encoding="utf-8")
        files = [str(offered("recipes")[name])]
        if "rondo train quickstart " in text:  # says that it goes over the quickstart
            files.insert(0, "quickstart")
        assert load(files).config.data.train


def test_sources_are_typed() -> None:
    found = config("data.train=[{type: parquet, path: p.parquet, weight: 2}]").data.train
    assert found == (FileSourceConfig(type="parquet", path="p.parquet", weight=2.0),)


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    """A recipe loads and prints without torch, ray, transformers or numpy, and without foreign keys."""
    path = recipe(tmp_path, TestPrinting.RECIPE)
    code = (
        "import sys; from rondo.cli.arguments import load_arguments; from rondo.config import show, to_yaml; "
        f"loaded = load_arguments([{str(tmp_path / path)!r}]); "
        "show(loaded.config, loaded.origins); to_yaml(loaded.config); "
        "heavy = ('torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'rich', 'rondo.compat'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


class TestWarmStart:
    """The recipe of a warm start is named so that a run's config.yaml can be trained from, wherever it is."""

    def test_shipped(self, tmp_path: Path) -> None:
        loaded = load(["quickstart"])
        assert loaded.config.trainer.warm_start == "quickstart_sft"
        (tmp_path / "config.yaml").write_text(to_yaml(loaded.config))
        assert load([str(tmp_path / "config.yaml")]).config == loaded.config

    def test_beside_the_recipe(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes" / "sft.yaml").write_text("")
        recipe = tmp_path / "recipes" / "rl.yaml"
        recipe.write_text("trainer: {warm_start: sft.yaml, total_steps: 1}")
        assert load([str(recipe)]).config.trainer.warm_start == str(tmp_path / "recipes" / "sft.yaml")
        monkeypatch.chdir(tmp_path)
        assert load(["recipes/rl.yaml"]).config.trainer.warm_start == "recipes/sft.yaml"
        (tmp_path / "sft.yaml").write_text("")  # the working directory comes first
        assert load(["recipes/rl.yaml"]).config.trainer.warm_start == "sft.yaml"

    def test_one_that_is_not_there_stays_as_it_is_written(self) -> None:
        arguments = ["trainer.warm_start=nowhere.yaml", "trainer.total_steps=1"]
        assert load([], arguments).config.trainer.warm_start == "nowhere.yaml"


class TestPaths:
    """Where a path begins with the home folder is decided once, for all that open it."""

    def test_every_path_begins_at_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/somebody")
        paths = {
            "model.path": "~/model",
            "model.tokenizer": "~/tokens.py:load",
            "model.chat_template": "~/chat.jinja",
            "reference.path": "~/reference",
            "rollout.recorded": "~/runs/before",
            "trainer.run_dir": "~",
            "trainer.replay": "~/runs/other",
            "checkpoint.path": "~/checkpoints",
        }
        sources = [{"type": "jsonl", "path": ["~/a.jsonl", "b~.jsonl"], "image_dir": "~/images"}]
        loaded = load([], [*BASE, "data.batch_size=1"], settings={**paths, "data.train": sources}).config
        for key, path in paths.items():
            assert loaded.at(key) == path.replace("~", "/home/somebody")
        (source,) = loaded.data.train
        assert isinstance(source, FileSourceConfig)
        assert source.path == ("/home/somebody/a.jsonl", "b~.jsonl")
        assert source.image_dir == "/home/somebody/images"
