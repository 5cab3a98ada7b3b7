"""rondo: reinforcement-learning post-training for language models, from a laptop's CPU to a GPU cluster.

Importing this package imports nothing heavy and has no effects.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rondo.api import (
        Run,
        Server,
        evaluate,
        generate,
        load,
        preference,
        reward_model,
        serve,
        sft,
        train,
    )

__version__ = "0.2.0"
__all__ = (
    "Run",
    "Server",
    "evaluate",
    "generate",
    "load",
    "preference",
    "reward_model",
    "serve",
    "sft",
    "train",
)


def __getattr__(name: str) -> Any:
    """Imports what `import rondo` offers when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rondo import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
