"""The scores that a configuration gives, by name, and whether they fit the sources of the prompts: what is
known before anything is scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from rondo.config.functions import did_you_mean
from rondo.config.schema import RewardConfig
from rondo.errors import ConfigError
from rondo.rewards.builtin import BUILTINS
from rondo.rewards.functions import load_functions


def score_names(
    reward: RewardConfig, sources: Sequence[str], *, reads_accuracy: bool = False
) -> tuple[str, ...]:
    """Returns the names of all scores of the reward functions. Raises ConfigError when a function is for a
    source that does not exist, or a source has no function.

    reads_accuracy: somebody reads whether an answer is right, so every source must have the score that says
    so.
    """
    functions = load_functions(reward.functions, BUILTINS)
    names = tuple(name for function in functions for name in function.names)
    accuracy = accuracy_among(names, reward)
    for function in functions:
        for source in function.sources or ():
            if source not in sources:
                raise ConfigError(
                    f"reward function {function.name}: there is no source "
                    f"{source!r}{did_you_mean(source, sources)} "
                    f"Sources: {', '.join(sources)}"
                )
        if reads_accuracy and accuracy in function.names:
            for source in sources:
                if not function.applies(source):
                    raise ConfigError(
                        f"the configured algorithm reads whether an answer is right, and the score that "
                        f"says so, reward.accuracy={accuracy}, is no score of source {source!r}: add "
                        f"it to the `sources` of {function.name}, or name another score"
                    )
    for source in sources:
        if not reward.models and not any(function.applies(source) for function in functions):
            raise ConfigError(
                f"source {source!r} has no reward function: add one, or add it to a function's sources"
            )
    return names


def accuracy_score(reward: RewardConfig) -> str | None:
    """`accuracy_among` the scores of the reward functions."""
    functions = load_functions(reward.functions, BUILTINS) if reward.functions else ()
    return accuracy_among([name for function in functions for name in function.names], reward)


def accuracy_among(names: Sequence[str], reward: RewardConfig) -> str | None:
    """Returns the score that says whether an answer is right (> 0): the name in `reward.accuracy`, else the
    only score there is; None when there are several, or none.

    Raises ConfigError for a name that is no score of a reward function.
    """
    wanted = reward.accuracy
    if wanted is None:
        return names[0] if len(names) == 1 else None
    if wanted not in names:
        model = any(model.name == wanted for model in reward.models)
        why = (
            " It is a reward model's, and an answer is right or wrong before the models see it."
            if model
            else ""
        )
        raise ConfigError(
            f"reward.accuracy={wanted} is no score of a reward function{did_you_mean(wanted, names)}{why} "
            f"Scores: {', '.join(names) or 'none'}"
        )
    return wanted
