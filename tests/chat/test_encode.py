"""Token lists and masks through several templates: exact, not shapes."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from rondo.chat import (
    Conversation,
    MessageReader,
    as_messages,
    decode,
    encode_conversations,
    encode_prompt,
    encode_prompts,
    render,
    stop_token_ids,
    template_keys,
    tokenise_up_to,
)
from rondo.core.errors import ConfigError, DataError
from rondo.recipes.quickstart import tokenizer
from tests.messages import full_text

# As Qwen3 does: only the last assistant turn keeps (or gets) a thinking block; earlier ones lose theirs.
THINKING_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and loop.last %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.split('</think>')[-1] +
'<|im_end|>\\n' }} {%- elif message.role == 'assistant' %} {{- '<|im_start|>assistant\\n' +
message.content.split('</think>')[-1] + '<|im_end|>\\n' }} {%- else %} {{- '<|im_start|>' + message.role +
'\\n' + message.content + '<|im_end|>\\n' }} {%- endif %} {%- endfor %} {%- if add_generation_prompt %}{{
'<|im_start|>assistant\\n' }}{% endif %}
"""
# As DeepSeek-R1 does: the generation prompt opens a thinking block that a rendered turn does not have.
UNSTABLE_TEMPLATE = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}
"""
# As SmolVLM does: goes through a content as a list of parts; of a text it writes nothing, and says nothing.
IN_PARTS = """\
{%- for message in messages %}{{ message['role'] | capitalize }}
{%- if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}
"""
CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "plus 2?"},
    {"role": "assistant", "content": "9"},
]


def trained(tok, ids, mask):
    """The text of each stretch of ones, special tokens visible."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tok.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def encode_conversation(tok, messages):
    (encoded,) = encode_conversations(tok, [MessageReader(template_keys(tok)).read(messages)])
    return encoded


def test_prompt_is_the_template_with_generation_prompt(tok):
    ids = encode_prompt(tok, "Tom has 3 apples", "Be short.")
    assert ids.dtype == np.int32
    assert tok.decode(ids) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nTom has 3 "
        "apples<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Tom has 3 apples"}]
    assert np.array_equal(ids, encode_prompt(tok, messages))


def test_batched_prompts_equal_single_ones(tok):
    prompts = ["How many?", [{"role": "user", "content": "3 apples"}], "x" * 100]
    for one, other in zip(encode_prompts(tok, prompts), prompts, strict=True):
        assert np.array_equal(one, encode_prompt(tok, other))
    assert encode_prompts(tok, []) == []


def test_own_system_message_wins(tok):
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert as_messages(own, "other") == tuple(own)


def test_without_template_text_is_raw(with_template):
    tok = with_template(None)
    assert tok.decode(encode_prompt(tok, "How many?")) == "How many?"
    with pytest.raises(ConfigError, match="chat template"):
        encode_prompt(tok, [{"role": "user", "content": "b"}])
    with pytest.raises(ConfigError, match="chat template"):
        encode_prompt(tok, "b", "system prompt")
    ids, mask = encode_conversation(
        tok, [{"role": "user", "content": "a:"}, {"role": "assistant", "content": " 5"}]
    )
    assert tok.decode(ids) == "a: 5<|im_end|>"
    assert trained(tok, ids, mask) == [" 5<|im_end|>"]


@pytest.mark.parametrize("ends", [True, False])
def test_without_template_an_answer_follows_the_tokens_that_it_was_learnt_behind(ends):
    """A tokenizer may add its end-of-sequence token to texts: an answer would stand behind the end."""
    tok = tokenizer()
    tok.chat_template, tok.bos_token = None, "<|im_start|>"
    bos, eos = tok.bos_token_id, tok.eos_token_id
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A" + " <|im_end|>" * ends,
        special_tokens=[("<|im_start|>", bos), ("<|im_end|>", eos)],
    )
    assert (tok("a:")["input_ids"][-1] == eos) == ends
    talk = [{"role": "user", "content": "a:"}, {"role": "assistant", "content": " 5"}]
    (ids, mask), asked = encode_conversation(tok, talk), encode_prompt(tok, "a:")
    own = tok("a:", add_special_tokens=False)["input_ids"]
    assert asked.tolist() == ids[mask == 0].tolist() == [bos, *own]
    assert ids[mask > 0].tolist() == [*tok(" 5", add_special_tokens=False)["input_ids"], eos]
    assert tokenise_up_to(tok, "a:", 100, special=True).tolist() == [bos, *own]
    said = [text.tolist() for text in encode_prompts(tok, ["a:", "a:<|im_end|>"])]
    assert said == [[bos, *own], [bos, *own, eos]]  # what a text itself ends with stays


def test_prompt_must_await_an_answer(tok):
    with pytest.raises(DataError, match="ends with 'assistant'"):
        encode_prompt(tok, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_mask_covers_assistant_turns_and_their_end(tok):
    ids, mask = encode_conversation(tok, CONVERSATION)
    assert mask.dtype == np.uint8
    assert trained(tok, ids, mask) == ["7<|im_end|>", "9<|im_end|>"]
    # The prompt's part is, token for token, what a rollout would start from; so is the second turn's.
    first = encode_prompt(tok, CONVERSATION[:2])
    assert np.array_equal(ids[: len(first)], first)
    second = encode_prompt(tok, CONVERSATION[:4])
    assert np.array_equal(ids[: len(second)], second)
    assert ids[-1] == tok.eos_token_id


def test_border_never_merges_with_the_answer(with_template):
    """A tokenizer that has ` 5` or `\\n\\n` as one token must not fuse the answer with the generation
    prompt.
    """
    tok = with_template("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
                        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")  # fmt: skip
    ids, mask = encode_conversation(
        tok, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "apples"}]
    )
    prompt = encode_prompt(tok, "q")
    assert np.array_equal(ids[: len(prompt)], prompt)
    assert mask.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert tok.decode(ids) == "user: qassistant: apples"


def test_many_conversations_at_once_equal_one_at_a_time(tok):
    several = [CONVERSATION, CONVERSATION[:3], CONVERSATION[1:3]]
    encoded = encode_conversations(tok, [Conversation(tuple(messages)) for messages in several])
    for (ids, mask), messages in zip(encoded, several, strict=True):
        one_ids, one_mask = encode_conversation(tok, messages)
        assert np.array_equal(ids, one_ids)
        assert np.array_equal(mask, one_mask)


def test_template_that_renders_the_last_turn_differently(with_template):
    tok = with_template(THINKING_TEMPLATE)
    ids, mask = encode_conversation(tok, CONVERSATION)
    assert trained(tok, ids, mask) == ["7<|im_end|>", "<think>\n\n</think>\n\n9<|im_end|>"]
    assert tok.decode(ids) == tok.apply_chat_template(CONVERSATION, tokenize=False).rstrip()


def test_template_that_is_not_prefix_stable_is_an_error(with_template):
    tok = with_template(UNSTABLE_TEMPLATE)
    with pytest.raises(DataError, match=r"not prefix-stable.*assistant message 1"):
        encode_conversation(tok, CONVERSATION[1:3])


def test_a_template_that_reads_parts_is_given_texts_as_parts(with_template):
    tok = with_template(IN_PARTS)
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "3+4?"}]}]
    assert render(tok, [*shown, *CONVERSATION[2:4]], generation=True) == (
        "User:<image>3+4?<|im_end|>\nAssistant: 7<|im_end|>\nUser: plus 2?<|im_end|>\nAssistant: "
    )
    assert decode(tok, encode_prompt(tok, "Tom", "Be short."), special=True) == (
        "System: Be short.<|im_end|>\nUser: Tom<|im_end|>\nAssistant: "
    )
    ids, mask = encode_conversation(tok, CONVERSATION)
    assert trained(tok, ids, mask) == ["7<|im_end|>", "9<|im_end|>"]


def test_template_that_refuses_is_told(with_template):
    tok = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=full_text("roles must alternate")):
        encode_prompt(tok, "a")


def test_tool_calls_are_trained_and_tool_results_are_not(tok):
    call = {"function": {"name": "calc", "arguments": {"expr": "4*3"}}}
    messages = [
        {"role": "user", "content": "4*3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "#### 12", "tool_calls": None},
    ]
    ids, mask = encode_conversation(tok, messages)
    assert trained(tok, ids, mask) == [
        '<tool_call>{"name": "calc", "arguments": {"expr": "4*3"}}</tool_call><|im_end|>',
        "#### 12<|im_end|>",
    ]
    tools = [{"name": "calc"}]
    assert "calc" in tok.decode(encode_prompt(tok, "4*3?", tools=tools))


def test_conversation_without_assistant_is_an_error(tok):
    with pytest.raises(DataError, match="no assistant turn"):
        encode_conversation(tok, CONVERSATION[:2])


def test_stop_tokens(tok, with_template):
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(tok) == (end,)
    # A template whose turns end with another token than the end of sequence: both stop (Llama 3).
    other = with_template("{% for m in messages %}{{ m.content + '<|endoftext|>' }}{% endfor %}")
    assert stop_token_ids(other) == tuple(sorted((end, tok.convert_tokens_to_ids("<|endoftext|>"))))


def test_decode_hides_chat_tokens_and_keeps_tool_calls(tok):
    ids = tok("<tool_call>3+4</tool_call><|im_end|>")["input_ids"]
    assert decode(tok, np.array(ids, np.int32)) == "<tool_call>3+4</tool_call>"


def test_a_text_that_fits_is_tokenised_whole_however_long(tok):
    """Where it is cut, the first tokens are those of the whole text."""
    dense = "<|im_start|>" * 6000
    assert tokenise_up_to(tok, dense, 6000, special=False).tolist() == tok(dense)["input_ids"]
    text = "Tom has 3 red apples. " * 3200
    (whole,) = tok([text], add_special_tokens=False)["input_ids"]
    cut = tokenise_up_to(tok, text, 8000, special=False)
    assert 8000 < len(cut) < 16000 < len(whole)
    assert cut[:5900].tolist() == whole[:5900]


def test_ways_to_write_an_answer_for_learning(with_template):
    """Of the template that writes a line break behind each turn, and a system prompt before a first user."""
    tok = with_template(
        "{% if messages[0].role == 'user' %}{{ '<|im_start|>system\\nHi<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    said = Conversation(tuple(CONVERSATION[1:]))

    def learnt(conversation, turns):
        ((ids, mask),) = encode_conversations(tok, [conversation], turns=turns)
        return tok.decode(ids), trained(tok, ids, mask)

    whole, end = render(tok, CONVERSATION[1:], generation=False), "<|im_end|>"
    assert learnt(said, "sampled") == (whole.rstrip(), [f"7{end}", f"9{end}"])
    assert learnt(said, "template") == (whole, [f"7{end}\n", f"9{end}\n"])
    assert learnt(said, "messages") == (whole, [f"7{end}\n", f"9{end}\n"])
    one = Conversation(tuple(CONVERSATION[1:3]))
    assert learnt(one, "eos")[1] == [f"7{tok.eos_token}"]
    assert learnt(one, "eos")[0].endswith(f"<|im_start|>assistant\n7{tok.eos_token}")
    unlearnt = Conversation(said.messages, frozenset([1]))
    assert learnt(unlearnt, "messages")[1] == [f"9{end}\n"]
    with pytest.raises(DataError, match="for a prompt and one answer"):
        learnt(said, "eos")


def test_messages_written_by_themselves_lose_what_only_the_last_has(with_template):
    tok = with_template(THINKING_TEMPLATE)
    said = Conversation(tuple(CONVERSATION[1:]))
    ((ids, mask),) = encode_conversations(tok, [said], turns="messages")
    thought = "<think>\n\n</think>\n\n"
    assert trained(tok, ids, mask) == [f"{thought}7<|im_end|>\n", f"{thought}9<|im_end|>\n"]
