"""The state of random generators, as JSON, and back."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from rondo.errors import CheckpointError

AnyGenerator: TypeAlias = random.Random | np.random.Generator | torch.Generator


def capture_random_state() -> dict[str, Any]:
    """The global generators of this process: python, numpy, torch on CPU and, once CUDA is in use, on every
    device."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": [name, _bytes_to_text(np.asarray(keys, np.uint32).tobytes()), position, has_gauss, gauss],
        "torch": _tensor_to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # the generators themselves, since torch.cuda.get_rng_state would create a context on every device
        state["cuda"] = [
            _tensor_to_text(generator.get_state()) for generator in torch.cuda.default_generators
        ]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo everything drawn since `capture_random_state`. Devices that are not there are left out.

    Raises CheckpointError when the state is not one.
    """
    try:
        _restore_python(random, state["python"])
        name, keys, position, has_gauss, gauss = state["numpy"]
        words = np.frombuffer(_text_to_bytes(keys), np.uint32)
        np.random.set_state((name, words, position, has_gauss, gauss))
        torch.set_rng_state(_text_to_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.init()
            for generator, text in zip(torch.cuda.default_generators, state["cuda"], strict=False):
                generator.set_state(_text_to_tensor(text))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random state in the checkpoint cannot be restored: {error}") from error


def generator_state(generator: AnyGenerator) -> dict[str, Any]:
    """The state of one generator object, as JSON."""
    if isinstance(generator, random.Random):
        return {"kind": "python", "state": _python_state(generator.getstate())}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": _arrays_to_json(generator.bit_generator.state)}
    return {"kind": "torch", "state": _tensor_to_text(generator.get_state())}


def restore_generator(generator: AnyGenerator, state: Mapping[str, Any]) -> None:
    """Put a generator back to `state`. Raises CheckpointError when it is of another kind."""
    kind = "python" if isinstance(generator, random.Random) else ""
    kind = kind or ("numpy" if isinstance(generator, np.random.Generator) else "torch")
    if state.get("kind") != kind:
        raise CheckpointError(
            f"the checkpoint has a {state.get('kind')!r} generator where the run has a {kind!r} one"
        )
    try:
        if isinstance(generator, random.Random):
            _restore_python(generator, state["state"])
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _json_to_arrays(state["state"])
        else:
            generator.set_state(_text_to_tensor(state["state"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the {kind} generator's state in the checkpoint cannot be restored: {error}"
        ) from error


def _python_state(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    return [version, list(words), gauss]


def _restore_python(target: Any, state: list[Any]) -> None:
    version, words, gauss = state
    target.setstate((version, tuple(words), gauss))


def _bytes_to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _text_to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor_to_text(tensor: torch.Tensor) -> str:
    return _bytes_to_text(tensor.cpu().numpy().tobytes())


def _text_to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_text_to_bytes(text)), dtype=torch.uint8)


def _arrays_to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays_to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return int(value) if isinstance(value, np.integer) else value


def _json_to_arrays(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        return np.array(value["array"], value["dtype"])
    if isinstance(value, dict):
        return {key: _json_to_arrays(item) for key, item in value.items()}
    return value
