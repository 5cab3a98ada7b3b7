"""The field's silent faults: those that are planted where somebody else's code or data enters a run, and
those that only our own code could make. `docs/trust.md` is made of both (`python -m tests.planted`).
"""

from __future__ import annotations

import dataclasses

from tests.planted import engines, files, users
from tests.planted import fault as table

FAULTS = {
    name: one
    for module in (engines, files, users)
    for name, one in table.FAULTS.items()
    if one.plant.__module__ == module.__name__
}


@dataclasses.dataclass(frozen=True)
class Held:
    """A fault that nobody's code but ours could make, and the tests that fail where it is made. Each was made
    once by hand, and those tests failed.
    """

    what: str
    others: tuple[str, ...]
    why: str
    tests: tuple[str, ...]


HELD = (
    Held(
        "An agent's messages are tokenised once more for training",
        ("huggingface/trl/issues/5224", "verl-project/verl/issues/3720"),
        "rows are the tokens of the calls, as the engine had and gave them",
        (
            "tests/agents/test_record.py::test_every_sampled_token_is_trained_on_once_behind_what_the_engine_had",
        ),
    ),
    Held(
        "A template drops earlier reasoning, and what is trained on is another context than was answered",
        ("verl-project/verl/pull/7322",),
        "a context that was written anew is a row of its own",
        ("tests/agents/test_record.py::test_a_context_that_was_written_anew_is_a_row_of_its_own",),
    ),
    Held(
        "Output of tools carries loss",
        ("THUDM/slime/issues/1370",),
        "the mask is who wrote a token",
        ("tests/chat/test_encode.py::test_tool_calls_are_trained_and_tool_results_are_not",),
    ),
    Held(
        "A template's `{% generation %}` stands around what users or tools say",
        (),
        "those marks are not read: the mask is who wrote a token",
        ("tests/planted/test_foreign.py::test_marks_of_a_template_say_nothing_of_what_is_learnt",),
    ),
    Held(
        "Rows that another program has tokenised, with a mask of its own",
        (),
        "rows are messages, and what is learnt of them is said by message",
        ("tests/planted/test_foreign.py::test_rows_that_others_have_tokenised_are_refused",),
    ),
    Held(
        "An episode that the clock cut is scored as one that has ended",
        ("huggingface/trl/pull/1536",),
        "how it ended stands in each of its rows",
        ("tests/trainers/test_several_rows.py::test_all_rows_of_an_episode_that_was_cut_off_are_cut_off",),
    ),
    Held(
        "Prompts are lost or come twice when an asynchronous run is resumed",
        ("NVIDIA-NeMo/RL/pull/3599", "OpenRLHF/OpenRLHF/issues/1322"),
        "a checkpoint has the ledger of what was trained on, and the groups that wait",
        (
            "tests/trainers/test_async_faults.py::"
            "test_kill_nine_in_resume_mode_loses_no_prompt_and_no_buffered_group",
        ),
    ),
    Held(
        "A reference that trains with the policy",
        (),
        "a frozen engine has no optimizer, and its weights are compared",
        ("tests/training/test_optimizer.py::test_a_frozen_engine_refuses_to_train",),
    ),
    Held(
        "Values are read one token too late",
        ("verl-project/verl/issues/1758", "alibaba/ROLL/issues/3"),
        "a value stands before its token, a score behind it",
        ("tests/training/test_new_outputs.py::test_scores_are_read_after_each_token",),
    ),
    Held(
        "The end of a turn is masked as padding, where both are one token",
        ("huggingface/trl/issues/734",),
        "there is no padding: rows are packed, and no embedding has an index of it, which would not learn",
        (
            "tests/chat/test_encode.py::test_mask_covers_assistant_turns_and_their_end",
            "tests/planted/test_foreign.py::test_a_pad_that_is_the_end_of_a_turn_changes_no_bit",
        ),
    ),
    Held(
        "Moments of the optimizer are not restored",
        ("thinking-machines-lab/tinker-feedback/issues/127",),
        "a run that was interrupted ends with the bits of one that was not",
        ("tests/trainers/test_resume.py::test_interrupt_saves_at_once_and_resume_equals_undisturbed",),
    ),
)
