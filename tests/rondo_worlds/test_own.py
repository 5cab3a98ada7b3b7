"""The environments that ship: their rules, in numbers."""

from __future__ import annotations

import itertools
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rondo.config import load
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments import Observation, episodes
from rondo.environments.protocol import HELD_OUT
from rondo.environments.registry import check_protocol, environment_class
from rondo.trainers.commands.check import check_rl
from rondo_worlds import levels
from rondo_worlds.bandit import Bandit
from rondo_worlds.frozen_lake import FrozenLake, way_to_goal
from rondo_worlds.gymnasium_adapter import Gymnasium
from rondo_worlds.recipes.frozen_lake import demonstrations, move, prompt
from rondo_worlds.search_qa import SearchQA
from rondo_worlds.shop import Shop
from rondo_worlds.sokoban import MOVES, Level, Sokoban, shortest_solution
from tests.environments.worlds import Honest
from tests.rondo_worlds.shipped import LAKE


def walk(world: Any, *actions: str) -> list[tuple[float, bool, bool]]:
    """(reward, done, success) of each step."""
    made = [world.step(action) for action in actions]
    return [(one.reward, one.done, one.success) for one in made]


class TestFrozenLake:
    def test_every_lake_has_a_way_and_it_leads_there(self) -> None:
        for seed in range(40):
            world = FrozenLake(size=5, holes=0.3)
            seen = world.reset(seed)
            assert seen.text.replace("\n", "")[0] == "P"
            way = way_to_goal(tuple(world.state()["level"]), (0, 0))
            assert way is not None
            assert walk(world, *way) == [(0.0, False, False)] * (len(way) - 1) + [(1.0, True, True)]

    def test_a_hole_ends_it_without_reward_and_edges_hold(self) -> None:
        world = FrozenLake(size=3)
        world.reset(0)
        world._level = ("_O_", "___", "__G")
        assert walk(world, "up", "left") == [(0.0, False, False)] * 2
        assert world.state()["at"] == [0, 0]
        result = world.step("right")
        assert (result.reward, result.done, result.success) == (0.0, True, False)
        assert result.observation.text == "_X_\n___\n__G"

    def test_no_way_round_holes(self) -> None:
        assert way_to_goal(("_O_", "_OG", "_O_"), (0, 0)) is None
        assert way_to_goal(("_O_", "___", "_OG"), (0, 0)) == ["down", "right", "right", "down"]

    def test_a_third_of_the_steps_goes_to_each_side(self) -> None:
        went = {"right": 0, "up": 0, "down": 0}
        for seed in range(600):
            world = FrozenLake(size=3, slippery=True)
            world.reset(2 * seed)
            world._level = ("___", "___", "__G")
            world._at = (1, 0)
            world.step("right")
            went[{(1, 1): "right", (0, 0): "up", (2, 0): "down"}[world._at]] += 1
        assert all(150 < count < 250 for count in went.values()), went

    @pytest.mark.parametrize("name", ["4x4", "8x8"])
    def test_maps_and_rewards_are_gymnasiums(self, name: str) -> None:
        """Its own environment of that map, move by move: where one is, the reward, and the end."""
        world = FrozenLake(map=name)
        theirs: Any = gymnasium.make("FrozenLake-v1", map_name=name, is_slippery=False).unwrapped
        signs = {"S": "_", "F": "_", "H": "O", "G": "G"}
        level = ["".join(signs[sign.decode()] for sign in row) for row in theirs.desc]
        world.reset(0)
        assert world.state()["level"] == level
        assert world.reset(0).text == world.reset(7).text
        names, rng = ("left", "down", "right", "up"), random.Random(0)
        ends = {"goal": 0, "hole": 0}
        for episode in range(200):
            theirs.reset(seed=0)
            world.reset(episode)
            way = way_to_goal(tuple(level), (0, 0)) or []
            for move_number in range(60):
                follows = episode % 2 and move_number < len(way)
                action = way[move_number] if follows else rng.choice(names)
                at, reward, done, _, _ = theirs.step(names.index(action))
                result = world.step(action)
                row, column = world.state()["at"]
                assert (row * len(level) + column, result.reward, result.done) == (at, reward, done)
                if done:
                    ends["goal" if result.success else "hole"] += 1
                    break
        assert ends["goal"] >= 100
        assert ends["hole"] > 20

    def test_what_a_map_does_not_take(self) -> None:
        for options, said in (
            ({"map": "5x5"}, "map is one of 4x4, 8x8, not '5x5'"),
            ({"map": "4x4", "size": 4}, "has its own size and holes"),
            ({"map": "4x4", "holes": 0.2}, "has its own size and holes"),
        ):
            with pytest.raises(ConfigError, match=said):
                FrozenLake(**options)  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFailedError, match="takes no task"):
            FrozenLake(map="8x8").reset(0, {"size": 6})

    def test_a_task_has_its_own_size_for_one_episode(self) -> None:
        world = FrozenLake(size=4)
        assert len(world.reset(0, {"size": 6}).text.split("\n")) == 6
        assert len(world.reset(0).text.split("\n")) == 4


class TestSokoban:
    @pytest.mark.slow
    def test_every_level_is_solved_by_search_and_by_play(self) -> None:
        for seed in range(25):
            for options in ({}, {"size": 5, "boxes": 2, "walls": 0.15}):
                world = Sokoban(**options)
                world.reset(seed)
                assert not set(world.level.boxes) & set(world.level.targets)
                moves = shortest_solution(world.level)
                assert moves
                assert walk(world, *moves) == [(0.0, False, False)] * (len(moves) - 1) + [(1.0, True, True)]

    def test_the_rules(self) -> None:
        start = Level(3, walls=(), targets=((2, 3),), boxes=((2, 2),), player=(2, 1))
        assert start.text() == "#####\n#___#\n#@$.#\n#___#\n#####"
        pushed = start.after("right")
        assert pushed.text() == "#####\n#___#\n#_@*#\n#___#\n#####"
        assert pushed.solved
        assert pushed.after("right") == pushed  # a box at the wall
        assert start.after("left") == start  # a wall
        assert shortest_solution(start) == ["right"]
        two = Level(3, (), ((1, 1), (1, 3)), ((2, 2), (2, 3)), (2, 1))
        assert two.after("right") == two  # two boxes in a row
        stuck = Level(3, (), ((2, 2),), ((1, 1),), (3, 3))
        assert shortest_solution(stuck) is None
        assert Level(3, (), ((2, 2),), (), (2, 2)).text().split("\n")[2] == "#_+_#"

    def test_shaping_is_given_and_taken_back(self) -> None:
        world = Sokoban(size=4, boxes=2, shaping=0.25)
        world.reset(0)
        world._level = Level(4, (), ((2, 3), (4, 4)), ((2, 2), (3, 3)), (2, 1))
        assert walk(world, "right", "right") == [(0.25, False, False), (-0.25, False, False)]

    def test_the_scale_of_gym_sokoban(self) -> None:
        """By hand: -0.1 a move, one against a wall too; 1 where a box arrives, -1 where it leaves, 10 at the
        end: 0.9, -1.1, -0.1, 10.9. A return is thus 10 + boxes - 0.1 · moves.
        """
        world = Sokoban(size=4, boxes=2, rewards="gym_sokoban")
        world.reset(0)
        world._level = Level(4, (), ((2, 3), (4, 4)), ((2, 2), (3, 3)), (2, 1))
        rewards = [reward for reward, _, _ in walk(world, "right", "right", "right")]
        assert rewards == pytest.approx([0.9, -1.1, -0.1])
        world._level = Level(3, walls=(), targets=((2, 3),), boxes=((2, 2),), player=(2, 1))
        assert walk(world, "left", "right") == [(-0.1, False, False), (pytest.approx(10.9), True, True)]
        world = Sokoban(boxes=2, size=5, rewards="gym_sokoban")
        world.reset(3)
        moves = shortest_solution(world.level)
        assert moves is not None
        assert sum(reward for reward, _, _ in walk(world, *moves)) == pytest.approx(12 - 0.1 * len(moves))

    def test_a_search_agrees_with_random_play(self) -> None:
        """Nobody who plays at random is faster."""
        rng = random.Random(0)
        world = Sokoban(size=3, walls=0.0)
        for seed in range(10):
            world.reset(seed)
            best = shortest_solution(world.level)
            assert best is not None
            for _ in range(50):
                position = world.level
                for _ in range(len(best) - 1):
                    position = position.after(rng.choice(list(MOVES)))
                    assert not position.solved


def test_a_bandit_pays_by_its_odds() -> None:
    world = Bandit(arms=3, pulls=3)
    assert world.reset(4, [0.0, 1.0, 0.5]).text == "3 pulls left"
    assert walk(world, "arm 1", "arm 2") == [(0.0, False, False), (1.0, False, False)]
    last = world.step("arm 2")
    assert (last.reward, last.done, last.success) == (1.0, True, True)
    assert last.observation.text == "arm 1 paid 0\narm 2 paid 1\narm 2 paid 1\n0 pulls left"
    with pytest.raises(EnvironmentFailedError, match="2 of 3 arms"):
        world.reset(4, [0.0, 1.0])


def test_gymnasiums_lake_by_names() -> None:
    world = Gymnasium(**LAKE, is_slippery=False)
    seen = world.reset(0)
    assert (seen.text, seen.actions) == ("row 0, column 0", ("left", "down", "right", "up"))
    way = ("down", "down", "right", "right", "down", "right")  # of the library's own 4 × 4 map
    assert walk(world, *way) == [(0.0, False, False)] * 5 + [(1.0, True, True)]
    assert world.state() == {"observation": 15}
    world.reset(0)
    assert walk(world, "down", "right")[-1] == (0.0, True, False)
    world.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**LAKE, "id": "FrozenLake-v99"}, "knows no environment"),
        ({**LAKE, "actions": ["left", "right"]}, "Discrete\\(4\\), and there are 2 names"),
        ({**LAKE, "actions": ["left", "left"]}, "different names"),
        ({**LAKE, "text": "nowhere.py:text"}, "no file"),
    ],
)
def test_what_gymnasium_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Gymnasium(**options)


def test_gymnasium_without_a_text_says_what_to_do() -> None:
    with pytest.raises(EnvironmentFailedError, match="set the option text"):
        Gymnasium(id="FrozenLake-v1", actions=LAKE["actions"]).reset(0)


def test_gymnasium_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rondo-rl\[gymnasium\]"):
        Gymnasium.check(id="FrozenLake-v1", actions=["a"])


@pytest.mark.parametrize(
    ("world", "options", "said"),
    [
        (FrozenLake, {"size": 1}, "needs"),
        (Sokoban, {"boxes": 9}, "needs"),
        (Sokoban, {"rewards": "gym"}, "rewards is one of sparse, gym_sokoban"),
        (Sokoban, {"rewards": "gym_sokoban", "shaping": 0.1}, "leave shaping out"),
        (Bandit, {"arms": 1}, "needs"),
    ],
)
def test_impossible_options(world: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        world.check(**options)
    with pytest.raises(ConfigError, match=said):
        world(**options)


@pytest.mark.parametrize(
    "entry", ["{name: frozen_lake, holes: 0}", "{name: frozen_lake, size: 32, holes: 0.9}"]
)
def test_lakes_without_two_halves_are_refused_before_the_run(entry: str, tmp_path: Path) -> None:
    """Of which there is one lake, or none that can be crossed; not in every `reset`."""
    with pytest.raises(ConfigError, match="with these options there are too few"):
        check_rl(load(["frozen_lake"], [f"rollout.environments=[{entry}]", f"trainer.run_dir={tmp_path}"]))


def test_a_level_that_there_is_not_is_an_error() -> None:
    """A lake of 2 × 2 without holes is one level, and one of the two halves has none."""
    world, found = FrozenLake(size=2, holes=0.0), []
    for seed in (0, 1):
        try:
            world.reset(seed)
            found.append(seed)
        except EnvironmentFailedError as error:
            assert "too few" in str(error)  # noqa: PT017
    assert len(found) == 1


def lakes_of_three() -> tuple[set[str], set[str]]:
    """All lakes of 3 × 3 that can be crossed, with the player: those of even seeds, and of odd seeds."""
    halves: tuple[set[str], set[str]] = (set(), set())
    for ice in itertools.product("_O", repeat=7):
        signs = "".join(["_", *ice, "G"])
        level = (signs[:3], signs[3:6], signs[6:])
        if way_to_goal(level, (0, 0)) is not None:
            halves[zlib.crc32(repr(level).encode()) % 2].add("\n".join(["P" + level[0][1:], *level[1:]]))
    return halves


class TestEpisodes:
    def test_held_out_levels_are_no_training_levels_and_come_once(self) -> None:
        """Of lakes of 3 × 3, of which there are so few that all of the held-out half come, each once."""
        even, odd = lakes_of_three()
        world = FrozenLake(size=3, holes=0.4)
        train = [world.reset(row["seed"]).text for row in episodes("frozen_lake", size=200)]
        held_out = [
            world.reset(row["seed"]).text for row in episodes("frozen_lake", size=len(odd), held_out=True)
        ]
        assert set(train) <= even
        assert len(set(train)) < len(train)
        assert set(held_out) == odd
        assert len(held_out) == len(odd)
        with pytest.raises(
            EnvironmentFailedError, match=f"differs from the {len(odd)} of the held-out seeds"
        ):
            world.reset(2 * len(odd) + 1)

    def test_a_held_out_level_does_not_depend_on_what_was_asked_before(self) -> None:
        """In any order, and by many at a time: as in a process that begins with it."""
        seeds = [2 * number + 1 for number in range(40)]
        first = {seed: FrozenLake(holes=0.21).reset(seed).text for seed in seeds}
        levels._held_out.clear()
        assert FrozenLake(holes=0.21).reset(61).text == first[61]
        levels._held_out.clear()
        with ThreadPoolExecutor(8) as threads:
            again = dict(
                zip(
                    reversed(seeds),
                    threads.map(lambda seed: FrozenLake(holes=0.21).reset(seed).text, reversed(seeds)),
                    strict=True,
                )
            )
        assert again == first
        assert len(set(first.values())) == 40
        # A seed that was drawn, for a row without one, has no others before it.
        assert FrozenLake(holes=0.21).reset(2**62 + 1).text
        assert sum(len(one.digests) for one in levels._held_out.values()) == 40

    @pytest.mark.parametrize(
        ("world", "size"),
        [
            (FrozenLake(), 512),
            (FrozenLake(size=8), 128),
            (Sokoban(pulls=6), 256),
            (Sokoban(size=3, walls=0.0), 50),
            (Shop(products=30), 128),
            (SearchQA(), 504),
        ],
        ids=["lake", "large lake", "room", "small room", "shop", "questions"],
    )
    def test_no_two_held_out_levels_are_alike(self, world: Any, size: int) -> None:
        assert len({world.reset(2 * number + 1).text for number in range(size)}) == size

    def test_there_is_an_end_to_what_is_held_out(self) -> None:
        assert episodes("sokoban", size=96, seed=4000, held_out=True)[-1]["seed"] == 2 * HELD_OUT - 1
        with pytest.raises(ConfigError, match="where rows are held out, got 4097"):
            episodes("sokoban", size=97, seed=4000, held_out=True)
        assert len(episodes("sokoban", size=97, seed=4000)) == 97
        world = SearchQA()
        with pytest.raises(EnvironmentFailedError, match="is held out, and there are 504 such"):
            world.reset(2 * 504 + 1)

    def test_rows(self) -> None:
        made = episodes("sokoban", size=3, seed=5, held_out=True, task={"size": 6})
        assert [row["seed"] for row in made] == [11, 13, 15]
        assert made[0] == {
            "prompt": Sokoban.instructions,
            "environment": "sokoban",
            "seed": 11,
            "task": {"size": 6},
        }
        own = episodes("tests/environments/worlds.py:Honest", size=1, prompt="Go!")
        assert own == [{"prompt": "Go!", "environment": "Honest", "seed": 0}]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"environment": "frozen_lakes"}, "did you mean 'frozen_lake'"),
            ({"environment": "gymnasium"}, "set the option prompt"),
            ({"environment": "bandit", "size": 0}, "size >= 1"),
        ],
    )
    def test_impossible_rows(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            episodes(**options)


def test_what_is_no_environment_is_named() -> None:
    class Half(Honest):
        step = None  # type: ignore[assignment]

    class Wrong(Honest):
        def reset(self) -> Any:  # type: ignore[override]
            return None

    class Coroutine(Honest):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            return None

    check_protocol(environment_class("tests/environments/worlds.py:Honest", "here"), "here")
    for made, said in (
        (Half, "has no method step"),
        (Wrong, "cannot be called with"),
        (Coroutine, "is a coroutine"),
        (len, "is no class"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_protocol(made, "here")


def test_demonstrations_on_the_lake() -> None:
    """Their prompts are those that the recipe's loop writes; the right moves come as often as they should;
    no prompt is of a held-out lake, and none stands in a hole.
    """
    share = {}
    for right_share in (0.0, 0.5, 1.0):
        rows = demonstrations(size=1000, seed=3, right_share=right_share)
        assert len(rows) == 1000
        right = 0
        for row in rows:
            task, *lake = row["prompt"].split("\n")
            assert task == "Go"
            assert prompt("Go", (), Observation("\n".join(lake))) == row["prompt"]
            at = next((i, line.index("P")) for i, line in enumerate(lake) if "P" in line)
            level = tuple(line.replace("P", "_") for line in lake)
            assert zlib.crc32(repr(level).encode()) % 2 == 0
            way = way_to_goal(level, at)
            assert way
            right += row["response"] == way[0]
        share[right_share] = right / len(rows)
    assert share[1.0] == 1
    assert share[0.5] == pytest.approx(0.625, abs=0.05)
    assert share[0.0] == pytest.approx(0.25, abs=0.05)
    assert move(" left\n", Observation("", tuple(MOVES))) == "left"
    assert move("left!", Observation("", tuple(MOVES))) is None
    with pytest.raises(ConfigError, match="right_share"):
        demonstrations(right_share=2.0)


def test_no_position_of_a_training_level_is_the_start_of_a_held_out_one() -> None:
    """Not even one that moves lead to."""
    world = Sokoban(size=3)
    held_out = set()
    for seed in range(1, 401, 2):
        held_out.add(world.reset(seed).text)
    for seed in range(0, 60, 2):
        world.reset(seed)
        reached, ahead = {world._level}, [world._level]
        while ahead:
            level = ahead.pop()
            for action in MOVES:
                after = level.after(action)
                if after not in reached:
                    reached.add(after)
                    ahead.append(after)
        assert not held_out & {level.text() for level in reached}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("frozen_lake", "size: 1", "frozen_lake: needs size 2 to 32"),
        # One lake without holes, for two halves of seeds; and lakes without a way.
        ("frozen_lake", "holes: 0", "holes=0: frozen_lake 4 0: none of 2000"),
        ("frozen_lake", "holes: 0.9", "holes=0.9: frozen_lake 4 0.9: none of"),
        ("sokoban", "pulls: 0", "sokoban: needs size 3 to 20"),
        ("bandit", "arms: 1", "bandit: needs 2 to 100 arms"),
        ("shop", "page: 0", "shop: needs 10 to 100000 products"),
        ("search_qa", "k: 0", "search_qa: k must be"),
        ("gymnasium", "id: FrozenLake-v1, actions: [a]", "there are 1 names"),
        ("gymnasium", "id: FrozenLake-v1, actions: [a, b, c, d], sise: 1", "cannot be made with"),
        ("gymnasium", "id: Nowhere-v1, actions: [a]", "knows no environment"),
        ("observed", "of: {name: bandit, arms: 1}, by: json.dumps", "bandit: needs 2 to 100 arms"),
        ("observed", "of: bandit, by: nowhere.py:text", "no file"),
    ],
)
def test_options_are_checked_when_a_recipe_is(name: str, options: str, said: str) -> None:
    recipe = f"rollout.environments=[{{name: {name}, {options}}}]"
    rows = "data.train=[{type: function, task: rondo.recipes.quickstart.train_rows}]"
    model = ["model.config={model_type: qwen3}", "model.tokenizer=rondo.recipes.quickstart.tokenizer"]
    settings = [recipe, rows, *model, "reward.functions=[{name: environment}]", "trainer.total_steps=1"]
    with pytest.raises(ConfigError) as raised:
        check_rl(load([], [*settings, "trainer.run_dir=run", "cluster.device=cpu"]))
    # The only fault, and where it is.
    assert [error.key for error in raised.value.problems] == ["rollout.environments"]
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"argument '{recipe}': rollout.environments")
