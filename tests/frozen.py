"""Imported last by a process that others are forked from. What each would make once and keep is there, and
collections of garbage in them leave alone what was imported, a million objects and no garbage.

No thread begins here: none would be in a fork.
"""

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

_compile = torch.compile


def _compiled_when_called(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled = functools.cache(lambda: _compile(function, **options))

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return compiled()(*arguments, **keywords)

    return call


# bitsandbytes, which peft imports, compiles functions as it is imported: six hundred modules of torch's, with
# which a process takes longer to end, too.
torch.compile = _compiled_when_called  # type: ignore[assignment]
with contextlib.suppress(ImportError):
    import peft  # noqa: F401
torch.compile = _compile

get_checkpoint_conversion_mapping("qwen3")  # of all models: a tenth of a second
gc.freeze()
