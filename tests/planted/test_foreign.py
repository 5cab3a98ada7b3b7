"""Files of others that are no fault here: what they would break elsewhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from rondo.chat import Conversation, MessageReader, encode_conversations, loses_thoughts, template_keys
from rondo.recipes.quickstart import CHAT_TEMPLATE, tokenizer
from tests.planted.files import FORGETFUL, THOUGHTFUL, model_folder
from tests.trainers.conftest import SFT_RECIPE, inline

CALLS = (
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "look"},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "#### 7"},
)


def learnt(words: Any, *messages: dict[str, str]) -> tuple[str, str]:
    """All text of a conversation, and what is learnt of it."""
    said: Conversation = MessageReader(template_keys(words)).read(list(messages))
    ((ids, mask),) = encode_conversations(words, [said])
    return words.decode(ids), words.decode(ids[mask > 0])


def test_marks_of_a_template_say_nothing_of_what_is_learnt() -> None:
    """`{% generation %}` around what users and tools say, as a wrong template for another trainer has it."""
    words = tokenizer()
    before = learnt(words, *CALLS)
    assert before[1] == "look<|im_end|>#### 7<|im_end|>"
    words.chat_template = "{% generation %}" + CHAT_TEMPLATE + "{% endgeneration %}"
    assert learnt(words, *CALLS) == before


def test_what_a_forgetful_template_has_learnt_to_the_token() -> None:
    words = tokenizer()
    words.chat_template = FORGETFUL
    whole, said = learnt(words, *THOUGHTFUL)
    assert "three" not in whole  # the first answer's thought; its answer is learnt without it
    assert said == "3<|im_end|><think>\nfour more\n</think>\n\n7<|im_end|>"
    read = MessageReader(template_keys(words)).read
    assert loses_thoughts(words, read(list(THOUGHTFUL)))
    assert not loses_thoughts(words, read(list(THOUGHTFUL[:2])))
    # As docs/data.md has it: the first answer is context alone.
    unlearnt = [THOUGHTFUL[0], {**THOUGHTFUL[1], "weight": 0}, *THOUGHTFUL[2:]]
    assert not loses_thoughts(words, MessageReader(template_keys(words), takes_flags=True).read(unlearnt))
    words.chat_template = CHAT_TEMPLATE
    assert not loses_thoughts(words, read(list(THOUGHTFUL)))


def trained_with(folder: Path, pad: str) -> dict[str, bytes]:
    """The weights behind SFT of others' model folder, whose tokenizer and config.json pad with this token."""
    where = model_folder(folder / "model")
    words = tokenizer()
    words.pad_token = pad
    words.save_pretrained(where)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "pad_token_id": words.pad_token_id}))
    (folder / "r.yaml").write_text(yaml.safe_dump({**SFT_RECIPE, "model": {"path": str(where)}}))
    inline("sft", str(folder / "r.yaml"), f"trainer.run_dir={folder}/run")
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in load_file(folder / "run/export/model.safetensors").items()
    }


def test_a_pad_that_is_the_end_of_a_turn_changes_no_bit(tmp_path: Path) -> None:
    """Its embedding learns, too: rows have several turns, which it stands between."""
    runs = []
    for pad in ("<|endoftext|>", "<|im_end|>"):
        (tmp_path / pad).mkdir()
        runs.append(trained_with(tmp_path / pad, pad))
    assert tokenizer().eos_token == "<|im_end|>"
    assert runs[0] == runs[1]


@pytest.mark.parametrize("columns", [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "assistant_masks": [0, 1]}])
def test_rows_that_others_have_tokenised_are_refused(columns: dict[str, list[int]], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(columns) + "\n")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(SFT_RECIPE))
    rows = f"data.train=[{{type: jsonl, path: {tmp_path}/rows.jsonl}}]"
    done = inline("sft", str(tmp_path / "r.yaml"), rows, f"trainer.run_dir={tmp_path}/run", check=False)
    assert done.returncode == 2
    assert f"a row needs 'messages', or 'prompt' and 'response'; it has {', '.join(columns)}" in done.stderr
