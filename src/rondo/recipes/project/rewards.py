"""What is rewarded."""

from rondo.core.types import Prompt, Trajectory


def score(prompt: Prompt, trajectory: Trajectory) -> float:
    """Returns 1 for a right answer. Called once per response.

    prompt.fields: the row's columns in data/train.jsonl. trajectory.text: the response.
    """
    return float(trajectory.text.strip().endswith(f"#### {prompt.fields['answer']}"))
