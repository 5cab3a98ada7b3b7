"""How the cost of rondo's own work grows with its size: each size four times the last, and the exponent.

    python benchmarks/growth.py [NAME ...] [--sizes 4]

Of each dimension the part that holds all rows, or walks over all that was before, is run alone, with made-up
data: no model, no process. An exponent is that of the CPU seconds between the two largest sizes; above 1.1 it
is marked (1.0 grows with the work). Where a size takes less than .02 s, noise is most of it. The peak is of
what Python and NumPy hold beside the data itself. `tests/benchmarks/test_growth.py` looks at the same
dimensions by the number of Python's steps, not by time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from rondo.agents.policy import MODEL, Policy
from rondo.checkpoint import (
    CheckpointStore,
    ControllerState,
    Grown,
    load_controller_state,
    save_controller_state,
)
from rondo.cli.main import main as rondo
from rondo.config.schema import FileSourceConfig, RewardConfig, RewardFunctionConfig
from rondo.core.batch import Batch, BatchRef, ragged_rows
from rondo.core.types import Completion, GenerateRequest, Prompt, Row, SamplingParams, Trajectory
from rondo.data import PromptStream
from rondo.data.rollout_files import Recording
from rondo.recipes.quickstart import tokenizer
from rondo.rewards import Scorer
from rondo.rollout.native.sampling import sample
from rondo.rollout.native.scheduler import Scheduler
from rondo.rollout.native.scheduler import Sequence as Asked
from rondo.serving import Endpoint, EndpointSession, Key, ModelCall, SessionRules, Sessions
from rondo.tracking import RunFolder, Timeline
from rondo.tracking.curves import _smoothed
from rondo.tracking.metrics import metrics_line
from rondo.tracking.timeline import Span
from rondo.trainers.loop.buffer import Buffer, Group, Ledger
from rondo.trainers.loop.journal import JOURNAL_FILE, JOURNAL_FORMAT, RunJournal
from rondo.trainers.replay.journal import FollowedJournal, JournalFile
from rondo.training.packed import response_columns
from rows import arguments as recipe_of_rows

INDEX = ("reward", "outcome", "response_length", "step_index")


def _group(seq: int, version: int = 0) -> Group:
    """Returns a group of two rows, one of which failed."""
    rows = {
        "row_id": np.array([2 * seq, 2 * seq + 1]),
        "reward": np.array([seq % 7, np.nan], np.float32),
        "response_length": np.array([3 + seq % 5, 8], np.int32),
        "step_index": np.zeros(2, np.int32),
        "outcome": ["scored", "reward_error"],
    }
    return Group(seq, version, version, BatchRef.of(Batch.of(rows), INDEX))


def _buffer(size: int, order: str) -> Callable[[], object]:
    """Four steps' groups come in, the newest first; each lets those who wait look again."""
    groups = [_group(seq) for seq in range(size)]

    async def fill() -> None:
        bounds = {"batch_size": size // 4, "max_staleness": 3, "total_steps": 99, "total_groups": 1 << 40}
        buffer = Buffer(**bounds, order=order)  # type: ignore[arg-type]
        taking = asyncio.create_task(buffer.take())
        for seq in [await buffer.ticket() for _ in range(size)][::-1]:
            buffer.put(groups[seq])
            await asyncio.sleep(0)
        await taking

    return lambda: asyncio.run(fill())


def buffer_in_prompt_order(size: int) -> Callable[[], object]:
    return _buffer(size, "prompt")


def buffer_in_completion_order(size: int) -> Callable[[], object]:
    return _buffer(size, "completion")


def checkpoint_after_drops(size: int) -> Callable[[], object]:
    """The ledger of a run that has dropped this many groups, as one checkpoint writes it. Wanted: 0."""
    ledger = Ledger()
    for _ in range(size):
        ledger.drop(ledger.admit(0))
    return lambda: [json.dumps(record) for record in ledger.records()]


def checkpoint_of_waiting_groups(size: int) -> Callable[[], object]:
    """Groups in the buffer, written and read."""
    rows = {seq: _rows(2, 8, first=2 * seq) for seq in range(size)}

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            with CheckpointStore(Path(folder)).writing(1) as draft:
                save_controller_state(draft, ControllerState(1, 1, groups=rows), {})
            load_controller_state(CheckpointStore(Path(folder)).open(1))

    return write


class _Folder:
    """As much of a run's folder as its journal asks for."""

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory()
        self.path = Path(self._held.name)

    def discard_rest(self, name: str, end: int) -> None:
        assert end == (self.path / name).stat().st_size


def resume_of_a_journal(size: int, *, older: bool = False) -> Callable[[], object]:
    """A journal with this many groups of eight, gone on with from its end. Wanted: 0. older: by the number of
    lines, as older checkpoints have it, which reads all of them.
    """
    folder = _Folder()
    entry = {"spans": [[0, 40]], "finish": "stop", "outcome": "scored", "reward": 1.0, "digest": "0" * 16}
    line = json.dumps({"step": 1, "kind": "put", "seq": 1, "reason": None, "entries": [entry] * 8}) + "\n"
    (folder.path / JOURNAL_FILE).write_text(line * size)
    mark = size if older else (size, len(line) * size)
    return lambda: RunJournal(folder, {}).restore(mark)  # type: ignore[arg-type]


def _rows(count: int, tokens: int, first: int = 0) -> Batch:
    """Returns rows with a response of this many tokens and a column beside it."""
    return Batch.of(
        {
            "row_id": np.arange(first, first + count),
            "response_ids": ragged_rows([np.zeros(tokens, np.int32)] * count, np.int32),
            "advantages": ragged_rows([np.zeros(tokens, np.float32)] * count, np.float32),
        }
    )


def columns_of_passes(size: int) -> Callable[[], object]:
    """The columns of one row after the other: as many passes as rows, as with rows as long as the budget."""
    batch, device = _rows(size, 16), torch.device("cpu")

    def each() -> None:
        for row in range(size):
            response_columns(batch, ["advantages"], np.array([row]), torch.float32, device)

    return each


def recorded_groups(size: int) -> Callable[[], object]:
    """Finds every group of a recording of as many steps, one a step."""
    files = tuple(Path(f"step-{step:06d}.parquet") for step in range(1, size + 1))
    recording = Recording("run", None, files, tuple((step,) for step in range(size)), size, (), False)
    return lambda: [recording.place(seq) for seq in range(size)]


def curves(size: int) -> Callable[[], object]:
    """The running mean of a metric with this many steps."""
    values = np.random.default_rng(0).random(size).tolist()
    return lambda: _smoothed(values)


def urgent_requests(size: int) -> Callable[[], object]:
    """Requests of an evaluation that wait in a native engine."""

    async def made() -> list[Asked]:  # on a loop, as every request
        ids, sampling = np.array([1], np.int32), SamplingParams(1)
        return [Asked(GenerateRequest(str(i), ids, sampling, urgent=True)) for i in range(size)]

    requests = asyncio.run(made())

    def add() -> None:
        line = Scheduler(1, 16, 64, chunk=None)
        for request in requests:
            line.add(request)

    return add


def turns_by_token_ids(size: int) -> Callable[[], object]:
    """Calls of one session, each with the last one's tokens and eight more: which does it go on from?"""

    def turns() -> None:
        session, prompt = EndpointSession(), np.arange(8, dtype=np.int32)
        for _ in range(size):
            found = session.extended_ids(prompt)
            answer = np.zeros(8, np.int32)
            made = Completion("", prompt, answer, np.zeros(8, np.float32), answer, "stop")
            session.add(ModelCall(found, "environment", made, 1), Key.of("ids"), Key.of("ids"))
            prompt = np.concatenate([prompt, answer, np.arange(8, dtype=np.int32)])

    return turns


def rollouts_that_are_kept(size: int) -> Callable[[], object]:
    """A run of this many steps, each of which writes its rollouts and removes those that are too old."""

    def steps() -> list[Path]:
        with tempfile.TemporaryDirectory() as place, RunFolder(place) as folder:
            for step in range(1, size + 1):
                with folder.new_rollouts(step, 1) as (path,):
                    path.write_bytes(b"rows")
                folder.remove_rollouts(4)
            return list((folder.path / "rollouts").iterdir())

    return steps


def timeline_of_a_run(size: int) -> Callable[[], object]:
    """This many steps of eight groups, written; then the sizes of the files."""
    events = [Span("run_group", i, i + 1.0, "rollout", 0, 0) for i in range(8)]

    def steps() -> list[int]:
        with tempfile.TemporaryDirectory() as place:
            timeline = Timeline(place)
            for step in range(size):
                timeline.write(step, events)
            return [path.stat().st_size for path in sorted(Path(place).iterdir())]

    return steps


def metrics_elsewhere(size: int) -> Callable[[], object]:
    """A run of this many steps with a checkpoint after each: its metrics, as they are sent, and had again on
    a machine that has none of them. Returns the bytes sent, and those of the file.
    """

    def steps() -> tuple[int, int]:
        with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
            parts, grown, sent = Path(place) / "metrics", Grown(), 0
            for step in range(1, size + 1):
                folder.append_metrics(step, {f"metric/{name}": step / 7 for name in range(20)})
                part = folder.metrics_from(grown.num_bytes)
                grown, sent = grown.with_part(parts, step, part), sent + len(part)
            with RunFolder(Path(place) / "other") as other:
                other.take_over_metrics(grown.parts(parts))
                return sent, (other.path / "metrics.jsonl").stat().st_size

    return steps


def resume_of_metrics(size: int) -> Callable[[], object]:
    """The metrics of this many steps, of which the last four are beyond the checkpoint."""
    line = {f"metric/{name}": 1 / 7 for name in range(20)}

    def resume() -> int:
        with tempfile.TemporaryDirectory() as place, RunFolder(place) as folder:
            with (folder.path / "metrics.jsonl").open("w") as file:
                file.writelines(metrics_line(step, line) + "\n" for step in range(size))
            moved = folder.discard_beyond(size - 5)
            last = deque(folder.each_metrics(), maxlen=1).pop()
            assert last["step"] == size - 5
            return moved

    return resume


def replay_of_a_journal(size: int) -> Callable[[], object]:
    """A journal with this many groups of two, eight in flight at a time, read and followed to its end."""
    source, entry = _Folder(), {"spans": [[0, 40]], "finish": "stop", "outcome": "scored", "reward": 1.0}
    entry["digest"] = "0" * 16
    with (source.path / JOURNAL_FILE).open("w") as file:
        print(json.dumps({"kind": "journal", "format": JOURNAL_FORMAT, "settings": {}}), file=file)
        for seq in range(size + 8):
            if seq < size:
                print(json.dumps({"step": 1, "kind": "admit", "seq": seq, "version": 0}), file=file)
            if seq >= 8:
                put = {"step": 1, "kind": "put", "seq": seq - 8, "reason": None, "trajectories": [entry] * 2}
                print(json.dumps(put), file=file)
                print(json.dumps({"step": 1, "kind": "take", "seqs": [seq - 8]}), file=file)

    def follow() -> None:
        own = _Folder()
        followed = JournalFile.read(str(source.path))
        with closing(FollowedJournal(own, {}, followed)) as journal:  # type: ignore[arg-type]
            while line := dict(journal.upcoming):
                line.pop("step")
                journal.note(line.pop("kind"), **line)

    return follow


def first_prompts(size: int) -> Callable[[], object]:
    """The first batch of a Parquet file of this many rows, in one row group; nothing of it in the cache."""
    folder = tempfile.TemporaryDirectory()
    numbers = pa.array(range(size)).cast(pa.string())
    text = pc.binary_join_element_wise(
        "Tom has", numbers, "apples and gives a few of them away: how many?", " "
    )
    path = Path(folder.name) / "rows.parquet"
    pq.write_table(pa.table({"prompt": text, "answer": numbers}), path, row_group_size=size)
    words = tokenizer()

    def read() -> object:
        with folder:
            source = FileSourceConfig(type="parquet", path=str(path))
            stream = PromptStream((source,), words, max_prompt_tokens=128)
            return [stream.prompt(seq) for seq in range(64)]

    return read


def turns_of_chat(size: int) -> Callable[[], object]:
    """Calls of `policy.chat`, each with the last one's conversation, its answer and a message more; the
    engine does nothing.
    """
    said = tokenizer()
    answer = np.array(said("3 + 4", add_special_tokens=False)["input_ids"], np.int32)
    ask, zeros = [{"role": "user", "content": "1 + 2"}], np.zeros(len(answer), np.int32)
    prompt_ids, sampling = np.zeros(1, np.int32), SamplingParams(1 << 20)

    async def generate(request: GenerateRequest) -> Completion:
        made = (request.token_ids, answer, zeros.astype(np.float32), zeros, "stop")
        return Completion(request.request_id, *made)  # type: ignore[arg-type]

    sessions = Sessions()
    endpoint = Endpoint(said, model=MODEL, max_context=1 << 20, sessions=sessions)
    rules = SessionRules(generate, sampling, 1, "name", "name", prompt_ids, Key.of("none"))

    async def turns() -> None:
        policy = Policy(endpoint, sessions.open("name", rules), asyncio.get_running_loop())
        messages = ask
        for _ in range(size):
            messages = [*messages, (await policy.chat(messages)).message, *ask]
        endpoint.close()
        assert [call.parent for call in sessions.peek("name").calls] == [None, *range(size - 1)]

    return lambda: asyncio.run(turns())


def rewards_of_rows(size: int) -> Callable[[], object]:
    """Scores by one plain function, as a step asks for them: all at one time."""
    prompt = Prompt(0, "source/0/0", "source", np.zeros(1, np.int32))
    rows = (Row.empty(prompt.token_ids),)
    trajectories = [Trajectory(prompt, f"train/source/0/0/{i}", i, rows, text="x") for i in range(size)]

    async def score() -> None:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "mine.py"
            file.write_text("def one(prompt, trajectory):\n    return float(len(trajectory.text))\n")
            scorer = Scorer(RewardConfig(functions=(RewardFunctionConfig(f"{file}:one"),)))
            scored = await asyncio.gather(*map(scorer.score, trajectories))
            scorer.close()
        assert [one.reward for one in scored] == [1.0] * size

    return lambda: asyncio.run(score())


def tokens_of_a_vocabulary(size: int) -> Callable[[], object]:
    """Sixteen tokens, drawn from this many."""
    logits = torch.randn(16, size, generator=torch.Generator().manual_seed(0))
    ones, none = torch.ones(16), torch.zeros(16)
    return lambda: sample(logits, ones.double() / 2, ones, none.long(), ones, none)


def steps_of_a_run(size: int) -> Callable[[], object]:
    """A whole run of this many steps, of the smallest model there is: 16 rows of 4 tokens each, scored by a
    plain function, a checkpoint at the end. Not measured by its lines of Python, which are too many.
    """

    def train() -> None:
        with tempfile.TemporaryDirectory() as place:
            command = recipe_of_rows(Path(place), rows=16)
            changes = [f"trainer.total_steps={size}", "tracking.console=off", "tracking.plot=false"]
            assert rondo([*command, *changes]) == 0

    return train


DIMENSIONS: dict[Callable[[int], Callable[[], object]], int] = {
    buffer_in_prompt_order: 128,
    buffer_in_completion_order: 128,
    checkpoint_after_drops: 4096,
    checkpoint_of_waiting_groups: 32,
    resume_of_a_journal: 2048,
    columns_of_passes: 256,
    recorded_groups: 1024,
    curves: 1024,
    urgent_requests: 256,
    turns_by_token_ids: 32,
    rollouts_that_are_kept: 16,
    timeline_of_a_run: 256,
    metrics_elsewhere: 16,
    resume_of_metrics: 256,
    replay_of_a_journal: 256,
    first_prompts: 16_384,
    turns_of_chat: 8,
    rewards_of_rows: 128,
    tokens_of_a_vocabulary: 4096,
    steps_of_a_run: 8,
}
"""Each with its smallest size."""


@contextmanager
def _peak(found: list[int]) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Returns e of cost ~ size^e between the two largest sizes."""
    before, after = (max(cost, 1e-9) for cost in costs[-2:])
    return math.log(after / before) / math.log(sizes[-1] / sizes[-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [dimension.__name__ for dimension in DIMENSIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--sizes", type=int, default=4, help="how many, each four times the last")
    arguments = parser.parse_args()
    os.environ["RONDO_CACHE"] = ""  # what was made of files in another run is made again
    if unknown := sorted(set(arguments.names) - set(names)):
        parser.error(f"no dimension {', '.join(unknown)}; there are {', '.join(names)}")
    print(f"{platform.machine()}, Python {platform.python_version()}; CPU seconds at each size\n")
    print("| dimension | sizes | CPU s | exponent | peak, MB | of the peak |")
    print("|---|---|---|---|---|---|")
    for dimension, smallest in DIMENSIONS.items():
        if arguments.names and dimension.__name__ not in arguments.names:
            continue
        sizes, seconds, peaks = [smallest * 4**i for i in range(arguments.sizes)], [], list[int]()
        for size in sizes:
            seconds.append(_seconds(dimension(size)))
            work = dimension(size)
            with _peak(peaks):
                work()
        grows = exponent(sizes, seconds)
        mark = " **above 1.1**" if grows > 1.1 and seconds[-1] >= 0.02 else ""
        cells = (
            ", ".join(f"{value:.3g}" for value in values) for values in (seconds, [p / 1e6 for p in peaks])
        )
        times, memory = cells
        print(
            f"| {dimension.__name__} | {', '.join(map(str, sizes))} | {times} | {grows:.2f}{mark} | {memory} "
            f"| {exponent(sizes, peaks):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
