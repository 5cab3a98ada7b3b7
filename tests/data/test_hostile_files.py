"""A data file or a corpus of somebody else's is data: whatever it holds, no code of it runs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.config.schema.data import FileSourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.data.sources import open_source
from rondo_search import index_of
from tests.raising import Calls


def evil(marker: Path) -> bytes:
    return pickle.dumps(Calls(os.system, f"touch {marker}"))


def extension(file: Path, marker: Path) -> None:
    """A column whose type says that Python makes it of a pickle (arrow.py_extension_type)."""
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": evil(marker),
    }
    schema = pa.schema([pa.field("prompt", pa.string(), metadata=metadata)])
    pq.write_table(pa.table({"prompt": ["a"]}, schema=schema), file)


def of_pandas(file: Path, marker: Path) -> None:
    """Metadata by which pandas makes columns and an index anew."""
    column = {"name": "prompt", "pandas_type": "object", "numpy_type": f"os.system('touch {marker}')"}
    told = {"index_columns": [f"__import__('os').system('touch {marker}')"], "columns": [column]}
    schema = pa.schema([pa.field("prompt", pa.string())], metadata={"pandas": json.dumps(told)})
    pq.write_table(pa.table({"prompt": ["a"]}, schema=schema), file)


def pickled_column(file: Path, marker: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "extra": [evil(marker)]}), file)


def of_text(text: str) -> Callable[[Path, Path], None]:
    def write(file: Path, marker: Path) -> None:
        file.write_text(text.replace("MARKER", str(marker)) + "\n")

    return write


FILES: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "a type that Python makes": ("a.parquet", extension),
    "metadata of pandas": ("a.parquet", of_pandas),
    "a column of pickles": ("a.parquet", pickled_column),
    "a file that is a pickle": ("a.parquet", lambda file, marker: file.write_bytes(evil(marker)) and None),
    "lines that are a pickle": ("a.jsonl", lambda file, marker: file.write_bytes(evil(marker)) and None),
    "an object of YAML": ("a.jsonl", of_text('!!python/object/apply:os.system ["touch MARKER"]')),
    "text of Python": ("a.jsonl", of_text("""{"prompt": __import__("os").system("touch MARKER")}""")),
    "text of a template": (
        "a.jsonl",
        of_text(json.dumps({"prompt": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}"})),
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_nothing_of_a_file_runs(what: str, tmp_path: Path) -> None:
    name, write = FILES[what]
    write(tmp_path / name, tmp_path / "marker")
    (tmp_path / "a.jsonl.index").write_bytes(evil(tmp_path / "marker"))
    kind: Any = "parquet" if name.endswith("parquet") else "jsonl"
    uses: list[Callable[[], object]] = [
        lambda: list(open_source(FileSourceConfig(type=kind, path=str(tmp_path / name))).rows),
        lambda: index_of(str(tmp_path / name)),
    ]
    for use in uses:
        try:
            use()
        except (ConfigError, DataError):
            pass
    assert not (tmp_path / "marker").exists()
