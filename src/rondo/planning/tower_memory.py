"""How many bytes a model's tower, which reads images, has in a pass, for each patch of them. Pure;
`planning.memory` puts it beside what the language model has.

Qwen's towers: attention keeps images apart by computing each by itself, and joins what comes of it.
"""

from __future__ import annotations

from collections.abc import Collection

from rondo.config.schema import ModelPart
from rondo.planning.model_run import ModelRun
from rondo.planning.shapes import TowerShape


def images(run: ModelRun, tokens: int) -> tuple[int, int]:
    """Returns what a pass's images take: until it ends, and beside that while the tower reads them. Each rank
    that has the rows reads all of them. tokens: of the pass.
    """
    tower, patches = run.shape.tower, run.patches * tokens
    if tower is None:
        return 0, 0
    parts = run.parts if run.trains else ()
    return int(patches * _kept(run, tower, parts)), int(patches * _at_once(run, tower, parts))


def offloaded_images(run: ModelRun, tokens: int) -> float:
    """Returns what a tower's blocks keep in host memory, where blocks' inputs wait there."""
    tower = run.shape.tower if "tower" in run.parts else None
    return 0.0 if tower is None else run.patches * tokens * tower.depth * tower.hidden * run.compute


def _kept(run: ModelRun, tower: TowerShape, parts: Collection[ModelPart]) -> float:
    """Returns what stays of a patch until the backward pass, or without one as long as the language model
    computes: its colours in float32, and the features; of what learns what autograd keeps. parts: that do.
    """
    size = run.compute
    own = 4 * tower.patch + tower.places * tower.outputs * size / tower.merged
    if "tower" in parts:
        own += _cast(run, tower)
        if run.recompute:
            own += (2 if run.recompute == "offload" else tower.depth) * size * tower.hidden
        else:
            own += tower.depth * _block(run, tower)
    return own + tower.places * _merger(run, tower, parts)


def _at_once(run: ModelRun, tower: TowerShape, parts: Collection[ModelPart]) -> float:
    """Returns what the block that computes has beside that. The last merger has nothing then: in the forward
    pass it comes later, and in the backward pass it was first.
    """
    size, hidden = run.compute, tower.hidden
    merger = _merger(run, tower, parts)
    if "tower" in parts:
        backward = (2 if tower.gated else 1) * size * tower.intermediate + 2 * size * hidden
        return backward - merger + (_block(run, tower) - size * hidden if run.recompute else 0)
    # Queries and keys are turned in float32, which makes copies of them. Beside the blocks are patches in
    # their other order (windows), or where they are in their image.
    turning = (5 * size + (24 if size < 4 else 16)) * hidden
    inside = (3 if tower.gated else 2) * size * tower.intermediate + 3 * size * hidden
    beside = (size if tower.gated else 4) * hidden
    return _cast(run, tower) + max(turning, inside) + beside - merger


def _merger(run: ModelRun, tower: TowerShape, parts: Collection[ModelPart]) -> float:
    """Returns what autograd keeps of a merger: its norm's output, what comes between its two products, and
    where no block has it its input; nothing where neither it learns nor what is before it.
    """
    if not {"tower", "projector"} & {*parts}:
        return 0.0
    return (_norm(run, tower) + (2 if "tower" in parts else 3) * run.compute) * tower.hidden


def _cast(run: ModelRun, tower: TowerShape) -> int:
    """Colours in the dtype of products."""
    return tower.patch * run.compute if run.compute < 4 else 0


def _block(run: ModelRun, tower: TowerShape) -> float:
    """Returns what autograd keeps of a block: norms, their outputs, queries, keys, values (which lie in the
    product of all three), what attention makes of each image and that joined, and the MLP.
    """
    size = run.compute
    attention = (2 * _norm(run, tower) + 9 * size) * tower.hidden
    lean = _own_kernels(run) and not run.recompute
    inner = 4 if tower.gated and not lean else 2
    return attention + inner * size * tower.intermediate


def _norm(run: ModelRun, tower: TowerShape) -> int:
    """An RMS norm keeps a float32 of its input, and what comes of it; others their input."""
    size = run.compute
    return size + max(4, size) if tower.gated and not _own_kernels(run) else size


def _own_kernels(run: ModelRun) -> bool:
    """Says whether norms and MLPs are rondo's for a CPU; Liger's are the language model's alone."""
    return run.fused and run.on_host
