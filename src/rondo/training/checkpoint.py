"""An engine's state on disk: sharded (torch.distributed.checkpoint), and as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException

from rondo.errors import CheckpointError
from rondo.models.loading import load_model_config
from rondo.models.source import ModelSource
from rondo.models.value_head import save_value_head

State = dict[str, torch.Tensor]  # flat; sharded entries are DTensors

_VALUE_HEAD = "value_head."


def save(state: State, path: str, group: dist.ProcessGroup) -> None:
    """Write every rank's shards. Collective. Raises CheckpointError (disk full, not writable)."""
    try:
        dcp.save(state, checkpoint_id=path, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path} could not be written: {_cause(error)}") from error


def load(state: State, path: str, group: dist.ProcessGroup) -> None:
    """Read into the tensors of `state`, in place, whatever the number of ranks that saved. Collective."""
    try:
        dcp.load(state, checkpoint_id=path, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded into this model: {_cause(error)}. Was it made with another "
            "model, or is a file missing or damaged?"
        ) from error


def export_folder(tensors: State, source: ModelSource, path: str) -> None:
    """A folder that AutoModelForCausalLM loads (a critic: its trunk, and the value head in a file of its
    own).
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    trunk = {
        name: tensor.contiguous() for name, tensor in tensors.items() if not name.startswith(_VALUE_HEAD)
    }
    head = {name.removeprefix(_VALUE_HEAD): t for name, t in tensors.items() if name.startswith(_VALUE_HEAD)}
    config = load_model_config(source)
    config.dtype = next(iter(trunk.values())).dtype
    config.architectures = [_architecture(config)]
    config.save_pretrained(folder)
    save_torch_state_dict(trunk, folder, metadata={"format": "pt"})
    if head:
        save_value_head(head, path)


def _architecture(config: object) -> str:
    from transformers import AutoModelForCausalLM

    return str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def _cause(error: BaseException) -> str:
    """The first line of the innermost failure."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        inner = failure[0] if isinstance(failure, tuple) else failure
        return f"rank {rank}: {type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else ''}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
