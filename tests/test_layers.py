"""The house rules of docs and design, held by reading the source: who imports whom, and what does not occur.

Lazy imports (inside functions) and imports for annotations count like all others. Circles and sizes are
tests/test_house.py's.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house import ROOT, SRC, read

PACKAGE = SRC / "rondo"
WINGS = sorted(path.name for path in SRC.glob("rondo_*") if (path / "__init__.py").is_file())
SOURCES = [path for package in ("rondo", *WINGS) for path in sorted((SRC / package).rglob("*.py"))]

# Who may import whom: a room, or one file of it. Every part above them may import these.
BASE = {"core", "system", "config"}
ALLOWED: dict[str, set[str]] = {
    "__init__": {"api"},  # when something of it is asked for
    "core": {"core"},
    "core/masking": set(),
    "core/errors": {"core/masking"},
    "core/roles": set(),
    "core/moved": {"core/errors"},
    "system": {"core/errors", "core/masking", "core/moved", "system"},
    "config": {"core/errors", "core/masking", "core/moved", "core/roles", "system/border", "system/names"},
    "platform": BASE | {"planning"},
    "algorithms": BASE | {"platform"},
    "planning": BASE,
    "models": BASE | {"platform", "weights"},
    "chat": BASE,
    "checkpoint": BASE,
    "tracking": BASE | {"checkpoint"},
    "tracking/trajectories": {"core/errors", "core/images", "system/streams", "tracking/pictures"},
    "tracking/pictures": {"core/errors", "core/images", "system/streams"},  # reads files only, as they do
    "weights": BASE | {"platform"},
    "rewards": BASE,
    "serving": BASE | {"chat"},
    "agents": BASE | {"chat", "environments", "platform", "serving"},
    "controller": BASE | {"planning", "platform"},
    "recipes": BASE | {"data"},
    "data": BASE | {"chat"},
    "training": BASE | {"checkpoint", "models", "planning", "platform", "weights"},
    "rollout": BASE | {"chat", "models", "planning", "platform", "weights"},
    "workers": BASE
    | {
        "agents",
        "algorithms",
        "chat",
        "checkpoint",
        "controller",
        "data",
        "environments",
        "models",
        "planning",
        "platform",
        "rewards",
        "rollout",
        "training",
    }
    | {"weights"},
}
# Rooms to come (docs/architecture.md has the map): what they may import is fixed before their first file.
ALLOWED |= {
    "environments": BASE,
}
ALLOWED["trainers"] = {*ALLOWED, "trainers"} - {"__init__"}
ALLOWED["cli"] = {*ALLOWED, "cli"}
ALLOWED["api"] = {"config", "core", "data", "system", "tracking", "trainers"}
ALLOWED["__main__"] = {"cli"}
# Packages beside rondo. None of rondo's files may name one: they are found by entry points.
ALLOWED["rondo_sandbox"] = {"core/errors", "core/masking", "system/access", "system/streams", "system/urls"}
ALLOWED["rondo_sandbox"] |= {"system/guard", "system/usage"}  # whether a head is stopped
ALLOWED["rondo_sandbox/cases"] = {"core/errors", "core/types"}
ALLOWED["rondo_sandbox/code_rewards"] = {"core/errors", "core/types", "rewards/marks", "rondo_sandbox"}
ALLOWED["rondo_sandbox/visual_tool"] = {"core/errors", "core/images", "core/types", "rondo_sandbox"}
ALLOWED["rondo_search"] = BASE
ALLOWED["rondo_view"] = BASE | {"tracking"}
ALLOWED["rondo_worlds"] = BASE | {"environments", "recipes", "rondo_search"}
ALLOWED["rondo_verl"] = {"config", "core/errors", "rondo_sandbox"}
ALLOWED["rondo_verl/scoring"] = {"core/errors", "core/types", "rewards/answers", "rewards/marks"}
ALLOWED["rondo_verl/scoring"] |= {"rewards/verl"}
ALLOWED["rondo_verl/shipped"] = {"rondo_verl"}
ALLOWED["rondo_verl/multi_turn"] = {"config", "core/errors", "core/types", "rewards/verl", "rondo_verl"}

# The rooms of `trainers`, each on its floor; who is on the same floor does not know the others.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("program",),
    ("loop",),
    ("replay", "supervised"),
    ("commands",),
    ("sessions",),  # a program of the user's opens its run as the commands do
)

# Third-party packages that a part must not touch.
ENGINES = {"vllm", "sglang", "megatron"}
HEAVY = {"torch", "numpy", "pyarrow", "ray", "transformers", *ENGINES}
FORBIDDEN: dict[str, set[str]] = {
    "core": {"ray", "transformers", "torch.distributed", *ENGINES},
    "core/errors": HEAVY,
    "core/masking": HEAVY,
    "core/roles": HEAVY,
    "core/moved": HEAVY,
    "core/readonly": HEAVY - {"numpy"},
    "core/columns": HEAVY - {"pyarrow"},
    "system": HEAVY,
    "config": HEAVY,
    "algorithms": {"ray", "torch.distributed", "transformers", *ENGINES},
    "planning": {"ray", "torch", "transformers", *ENGINES},
    "platform": {"ray", "transformers", *ENGINES},
    "controller": {"transformers", *ENGINES},
    "models": {"ray", *ENGINES},
    "training": {"ray", "vllm", "sglang"},
    "rollout": {"megatron"},
    "weights": {"ray", *ENGINES},
    "agents": {"ray", *ENGINES},
    "rewards": {"ray", *ENGINES},
    "rondo_sandbox": HEAVY,
    "rondo_search": {"ray", *ENGINES},
    "rondo_verl": HEAVY,
    "rondo_view": {"ray", "torch", "transformers", *ENGINES},
    "rondo_verl/standins": HEAVY - {"transformers"},  # the schema of a function, as verl makes it
    "rondo_worlds": {"ray", *ENGINES},
    "serving": {"ray", "torch", *ENGINES},
    "data": {"ray", *ENGINES},
    "tracking": {"ray", "torch", "transformers", *ENGINES},
}
# Third-party systems that one or two modules hide from everybody else.
HIDDEN = (
    "ray",
    "vllm",
    "sglang",
    "megatron",
    "aiohttp",
    "mcp",
    "peft",
    "bitsandbytes",
    "modelscope",
    "gymnasium",
    "tantivy",
    "faiss",
    "fsspec",
)

# Boundaries between threads, tasks and processes, and around the user's code: what is raised is carried on
# to whoever waits for the answer. Everywhere else `except Exception` must end in `raise`.
BOUNDARIES = {
    "rondo/system/border.py": "an exception without a text is described; a user's agent fails its trajectory",
    "rondo/agents/mcp_servers.py": "why a server did not start travels to whoever waits for it",
    "rondo/agents/places.py": "why a call of an episode worker failed travels to all who wait for it",
    "rondo/agents/tools.py": "what a tool raises ends its episode, typed and told",
    "rondo/controller/host.py": "a worker's exception travels to the controller as a Failure",
    "rondo/models/fused.py": "a module that raises when it is tried keeps its own code",
    "rondo_verl/multi_turn.py": "what a tool of verl's raises is told to the policy, as verl does",
    "rondo_sandbox/inside/caller.py": "what a program on trial raises is its answer",
    "rondo_sandbox/inside/tester.py": "what tests raise is their verdict",
    "rondo/rewards/execution.py": "a scorer's exception travels from its thread to the future",
    "rondo/rewards/scorer.py": "a scorer's exception is judged by reward.on_error",
    "rondo/rollout/vllm/engine.py": "vLLM's exceptions travel from the step thread to all who wait",
    "rondo/rollout/requests.py": "what a caller's on_tokens raises travels to that caller",
    "rondo/rollout/in_process.py": "a decoder's exception travels from its thread to all who wait",
    "rondo/rollout/sglang/worker.py": "what loading weights raises travels to the engine as text",
    "rondo/system/actor.py": "what an operation raises travels to the host as a Failure",
    "rondo/system/process.py": "why a process did not start travels to whoever wants it",
    "rondo/system/forkserver.py": "what a forked program raises is printed, and is its exit status",
    "rondo_sandbox/inside/programs.py": "what a guest's program raises is what it prints, as in any Python",
    "rondo/serving/http.py": "whatever a request's handler raises is answered as a 500, and logged",
    "rondo/trainers/commands/event_loop.py": "what a run raises travels from its thread to the caller",
    "rondo/trainers/loop/feeder.py": "an episode's exception travels to the trainer, which waits in take()",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree(path))]


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """The syntax of all files is a million objects, and no garbage: a collection looks through it in vain."""
    gc.disable()
    yield
    tree.cache_clear()
    nodes.cache_clear()
    gc.enable()


def part(path: Path) -> str:
    """rondo/data/stream.py -> data; rondo/__main__.py -> __main__; rondo_search/x.py -> rondo_search."""
    package, *inner = path.relative_to(SRC).parts
    if package != "rondo":
        return package
    return inner[0] if len(inner) > 1 else path.stem


def rule_of(path: Path, rules: dict[str, set[str]]) -> set[str]:
    """The rule of the file itself, else that of its room."""
    own = path.relative_to(SRC).with_suffix("").as_posix().removeprefix("rondo/")
    return rules.get(own, rules.get(part(path), set()))


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC))


def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted module or module.name, line) of every import in the file, relative ones resolved."""
    found = read(SRC).files[path.relative_to(SRC).as_posix()].imports
    return [(f"{module}.{name}" if name else module, line) for module, name, line in found]


def rondo_imports(path: Path) -> Iterator[tuple[str, str, int]]:
    """(part of rondo, the file in it that is named, or the part again, line) of every import of ours."""
    for module, line in imports(path):
        pieces = module.split(".")
        if pieces[0] in WINGS:
            yield pieces[0], "/".join(pieces[:2]), line
        elif pieces[0] == "rondo":
            target = pieces[1] if len(pieces) > 1 and (PACKAGE / pieces[1]).is_dir() else "__init__"
            file = "/".join(pieces[1:3])
            yield target, (file if (PACKAGE / f"{file}.py").is_file() else target), line


def test_every_part_has_a_layer() -> None:
    assert {part(path) for path in SOURCES} <= set(ALLOWED)


def allowed(path: Path) -> set[str]:
    """What a file may import: its room, too, unless it has a rule of its own."""
    rule = rule_of(path, ALLOWED)
    return rule if rule is not ALLOWED[part(path)] else {part(path), *rule}


def test_who_may_import_whom() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {file}"
        for path in SOURCES
        for target, file, line in rondo_imports(path)
        if target != "__init__" and not {target, file} & allowed(path)
    ]
    assert not wrong, "\n".join(wrong)


FRAMEWORKS = (
    "rondo.training.torch_backend",
    "rondo.training.megatron",
    "torch.distributed.fsdp",
    "peft",
    "megatron",
)


def test_who_names_a_framework_that_trains() -> None:
    """What computes is behind `training.backend.Backend`: what makes an engine knows who that is."""
    named = {
        name_of(path)
        for path in SOURCES
        for module, _ in imports(path)
        if module.startswith(FRAMEWORKS)
        if not {"torch_backend", "megatron"} & set(path.parts) and part(path) != "models"
    }
    assert named == {"rondo/training/make.py"}


def test_rooms_import_downward() -> None:
    """At most 5 floors, no arrow upward, and none between rooms of one floor."""
    trainers = PACKAGE / "trainers"
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert {path.name for path in trainers.iterdir() if (path / "__init__.py").is_file()} == set(floor)
    assert not [path.name for path in trainers.glob("*.py") if path.name != "__init__.py"]
    assert len(FLOORS) <= 5
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for room in floor
        for path in (trainers / room).glob("*.py")
        for module, line in imports(path)
        if module.startswith("rondo.trainers.") and (target := module.split(".")[2]) != room
        if floor[target] >= floor[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_third_party_packages_stay_where_they_belong() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in SOURCES
        for module, line in imports(path)
        for forbidden in rule_of(path, FORBIDDEN)
        if module == forbidden or module.startswith(forbidden + ".")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("system", HIDDEN)
def test_one_or_two_modules_know_an_engine(system: str) -> None:
    users = {
        name_of(path) for path in SOURCES for module, _ in imports(path) if module.split(".")[0] == system
    }
    assert len(users) <= 2, f"{system} is imported by {sorted(users)}"


def test_pure_parts_read_no_environment() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in SOURCES
        if part(path) in ("algorithms", "planning")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        if ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert not wrong, "\n".join(wrong)


# Where else a kind of device is named, and why.
NAMES_A_DEVICE = {
    ("rondo/cli/plan_command.py", "cpu"): "a plan asks no platform, which imports torch",
    ("rondo/config/schema/types.py", "cuda"): "what cluster.device may be",
    ("rondo/config/rules.py", "CUDA_VISIBLE_DEVICES"): "cluster.env may not set it; config imports no torch",
    ("rondo/controller/distributed.py", "gloo"): "how a transport's error is known",
    ("rondo/controller/distributed.py", "nccl"): "how a transport's error is known",
    ("rondo/rollout/sglang/worker.py", "cpu"): "SGLang's own table",
}
_OF_A_DEVICE = re.compile(r"(cuda|hip|npu|xpu|mps)(:\d+)?|[nhr]ccl|gloo|GPU|(CUDA|HIP|ROCR)_VISIBLE_DEVICES")


def test_only_platforms_name_a_kind_of_device() -> None:
    """Nothing else compares with one, or says torch.cuda, a back end of collectives, or what Ray calls it.
    The host as a place (`.to("cpu")`, `device="cpu"`) is no comparison.
    """
    found = {
        (name_of(path), word): f"{name_of(path)}:{line} {word}"
        for path in SOURCES
        if path.parent.name != "platform" and part(path) in ALLOWED
        for word, line in _named_devices(nodes(path))
    }
    wrong = [where for key, where in found.items() if key not in NAMES_A_DEVICE]
    assert not wrong, "\n".join(wrong)
    assert set(NAMES_A_DEVICE) <= set(found), "not there any more"


def _named_devices(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or _OF_A_DEVICE.fullmatch(node.attr)):
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            if isinstance(node.value, str) and _OF_A_DEVICE.fullmatch(node.value):
                yield node.value, node.lineno
        elif isinstance(node, ast.Compare | ast.Dict):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.keys
            for side in sides:
                of = [*side.elts] if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
                if any(isinstance(one, ast.Constant) and one.value == "cpu" for one in of):
                    yield "cpu", node.lineno


def test_one_place_gives_memory_back() -> None:
    """What torch's and C's allocators keep: `platform/residency.py` knows when, platforms how."""
    found = {
        name_of(path): ast.unparse(node.func)
        for path in SOURCES
        if path.parent.name != "platform"
        if _MAY_GIVE_BACK.search(path.read_text(encoding="utf-8"))
        for node in nodes(path)
        if isinstance(node, ast.Call) and _GIVES_BACK.search(ast.unparse(node.func))
    }
    assert not found


_MAY_GIVE_BACK = re.compile(r"release|empty_cache|give_back_(free|large)")
_GIVES_BACK = re.compile(r"platform\w*(\(.*\))?\.release$|empty_cache$|give_back_(free|large)")


def test_controller_knows_no_models() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if part(path) == "controller"
        for node in nodes(path)
        if (isinstance(node, ast.Name) and node.id.lower() == "critic")  # an actor is also a word of Ray's
        or (isinstance(node, ast.Constant) and node.value in ("actor", "critic"))
    ]
    assert not wrong, "the words actor and critic in\n" + "\n".join(wrong)


def test_no_folder_of_helpers() -> None:
    assert not [
        name_of(p)
        for package in ("rondo", *WINGS)
        for p in (SRC / package).rglob("*")
        if p.stem in ("utils", "util", "helpers", "misc", "common")
    ]


# Modules that others import for the effect, and why.
IMPORTED_FOR_IT = {
    "rondo/rollout/vllm/worker.py": "all that vLLM's workers are told of rondo before they make the model",
}


def test_importing_has_no_effects() -> None:
    """Module level holds definitions only: no calls for their effect, no writes into other objects."""
    found = [(name_of(path), line) for path in SOURCES for line in _effects(tree(path))]
    wrong = [f"{name}:{line}" for name, line in found if name not in IMPORTED_FOR_IT]
    assert {name for name, _ in found} >= IMPORTED_FOR_IT.keys()
    assert not wrong, "\n".join(wrong)


def _effects(module: ast.Module) -> Iterator[int]:
    own = {
        name.id
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)  # not `other` of `other.field`
    }
    own |= {
        n.name for n in module.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    harmless = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in module.body:
        if isinstance(node, harmless):
            continue
        if isinstance(node, ast.Expr):
            call = node.value
            if isinstance(call, ast.Constant):
                continue
            if isinstance(call, ast.Call) and _root(call.func) in own:
                continue  # completes an object of this module
            yield node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute | ast.Subscript) and _root(target) not in own:
                    yield node.lineno
        elif isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        ):
            continue
        elif isinstance(node, ast.Try) and all(isinstance(n, ast.Import | ast.ImportFrom) for n in node.body):
            continue  # imports of an optional package
        else:
            yield node.lineno


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def printing(src: Path) -> list[str]:
    """Where a file prints that is neither of `rondo/cli` nor the command of a package beside rondo."""
    return [
        f"{path.relative_to(src)}:{node.lineno}"
        for path in sorted(src.glob("rondo*/**/*.py"))
        if path.parent != src / "rondo" / "cli"
        if not (path.name == "command.py" and path.parent.parent == src)
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def test_only_commands_print() -> None:
    assert printing(SRC) == []


def test_a_print_in_a_package_beside_rondo_is_found(tmp_path: Path) -> None:
    for name in (
        "rondo/cli/show.py",
        "rondo_games/command.py",
        "rondo_games/maze.py",
        "rondo/core/command.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def f():\n    print(1)\n")
    assert printing(tmp_path) == ["rondo/core/command.py:2", "rondo_games/maze.py:2"]


def test_every_check_reads_the_packages_beside_rondo() -> None:
    assert {part(path) for path in SOURCES} >= set(WINGS)
    assert {file.split("/")[0] for file in read(SRC).files} == {"rondo", *WINGS}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert settings["mypy"]["files"] == ["src"]
    ours = next(each for each in settings["mypy"]["overrides"] if each.get("ignore_missing_imports") is False)
    assert set(ours["module"]) == {f"{package}.*" for package in ("rondo", *WINGS)}


@pytest.mark.parametrize("wing", WINGS)
def test_a_package_beside_rondo_says_its_contract_on_one_screen(wing: str) -> None:
    lines = (SRC / wing / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# {wing}"
    assert len(lines) <= 50


def test_no_swallowed_exceptions() -> None:
    """`except Exception`, `except BaseException` and bare `except` end in `raise`, or carry the error on."""
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler)
        and _is_broad(node)
        and not isinstance(node.body[-1], ast.Raise)
        if name_of(path) not in BOUNDARIES or not _uses_error(node)
    ]
    assert not wrong, "\n".join(wrong)


def _uses_error(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(ast.Module(handler.body, [])) if isinstance(node, ast.Name)}
    return handler.name in names or "traceback" in names


def _is_broad(handler: ast.ExceptHandler) -> bool:
    names = (
        {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type else {"Exception"}
    )
    return bool(names & {"Exception", "BaseException"})


def test_public_functions_are_annotated() -> None:
    wrong = [
        f"{name_of(path)}:{function.lineno} {function.name}"
        for path in SOURCES
        for function in _functions(tree(path))
        if not function.name.startswith("_") and not _is_annotated(function)
    ]
    assert not wrong, "\n".join(wrong)


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, but not functions inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try):
            yield from _functions(child)


def _is_annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return function.returns is not None and all(a.annotation or a.arg in ("self", "cls") for a in named)


def test_importing_rondo_is_light() -> None:
    """`import rondo` and the command's own modules load no third-party package but yaml."""
    code = (
        "import sys, rondo, rondo.config, rondo.cli.main; "
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
