"""Loss masks from where renders extend each other: templates of many habits, merges at borders, fan-out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import DataConfig
from slipstream.data.display import GREEN
from slipstream.data.render import Renderer
from slipstream.data.rows import as_cut, parse_row
from slipstream.errors import DataError
from slipstream.records import Conversation, RenderedSample
from support.tiny import CHATML, THINKING, tiny_tokenizer

IM_END = 257

# Like Gemma's: the turn ends with a special token that is not the tokenizer's eos.
OTHER_END = CHATML.replace("<|im_end|>", "<|reserved_0|>")
# No special tokens at all.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Finished turns leave out the empty block that the generation prompt supplies with thinking off.
LEAVES_OUT = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
# The generation prompt opens a think block that no finished turn shows.
FORCED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}",
)


def chat(*contents: str, **row: Any) -> Conversation:
    """A conversation of user and assistant in turn; contents beginning with ``think:x|`` carry reasoning x."""
    messages = []
    for i, content in enumerate(contents):
        message: dict[str, Any] = {"role": ("user", "assistant")[i % 2], "content": content}
        if content.startswith("think:"):
            message["reasoning_content"], _, message["content"] = content[6:].partition("|")
        messages.append(message)
    return parse_row({"messages": messages, **row}, "chat.jsonl:1")


def renderer(template: str | None = CHATML, **data: Any) -> Renderer:
    return Renderer(tiny_tokenizer(template), data=DataConfig(**data))


def supervised(r: Renderer, sample: RenderedSample) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[str] = []
    run: list[int] = []
    for i, on in zip([*sample.ids.tolist(), 0], [*sample.loss_mask.tolist(), False], strict=True):
        if on:
            run.append(i)
        elif run:
            runs.append(r.decode(run))
            run = []
    return runs


def test_chatml_supervises_each_answer_through_its_end_and_nothing_else() -> None:
    r = renderer()
    (sample,) = r.render(chat("Hi", "Hello", "Bye", "Ciao"))
    assert supervised(r, sample) == ["Hello<|im_end|>", "Ciao<|im_end|>"]
    text = "".join(
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
        for q, a in (("Hi", "Hello"), ("Bye", "Ciao"))
    ).removesuffix("\n")
    assert r.decode(sample.ids.tolist()) == text
    assert sample.ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.bool_
    assert (r.stats.conversations, r.stats.samples, r.stats.turns, r.stats.fanned_out) == (1, 1, 2, 0)
    assert r.stats.supervised == int(sample.loss_mask.sum())


def test_ids_are_what_the_template_tokenizes_to_itself() -> None:
    r = renderer()
    conversation = chat("Hi", "Hello", "Bye", "Ciao")
    whole = r.tokenizer.apply_chat_template(
        [m.as_template_dict() for m in conversation.messages], tokenize=True, return_dict=False
    )
    (sample,) = r.render(conversation)
    assert sample.ids.tolist() == whole[:-1]  # without the newline after the last turn


def test_empty_think_block_of_the_generation_prompt_is_not_supervised() -> None:
    r = renderer(THINKING)
    (sample,) = r.render(chat("Hi", "Hello"))
    assert supervised(r, sample) == ["Hello<|im_end|>"]
    assert "<think>\n\n</think>\n\nHello" in r.decode(sample.ids.tolist())


def test_reasoning_that_the_target_writes_is_supervised() -> None:
    r = renderer(THINKING)
    (sample,) = r.render(chat("Hi", "think:hm|Hello"))
    assert supervised(r, sample) == ["<think>\nhm\n</think>\n\nHello<|im_end|>"]
    assert r.stats.reasoning_turns == 1


def test_thinking_on_and_off() -> None:
    on = renderer(THINKING, thinking="on")
    (sample,) = on.render(chat("Hi", "Hello"))
    assert supervised(on, sample) == ["<think>\n\n</think>\n\nHello<|im_end|>"]
    off = renderer(THINKING, thinking="off")
    (sample,) = off.render(chat("Hi", "Hello"))
    assert supervised(off, sample) == ["Hello<|im_end|>"]
    with pytest.raises(DataError, match=r"chat\.jsonl:1: messages\[1\] has reasoning, but data\.thinking is off"):
        off.render(chat("Hi", "think:hm|Hello"))
    with pytest.raises(DataError, match=r"set data.thinking"):
        renderer(THINKING, template_kwargs={"enable_thinking": True})


def test_history_rewriting_template_is_fanned_out_per_turn() -> None:
    r = renderer(THINKING)
    samples = r.render(chat("Hi", "think:hm|Hello", "Bye", "Ciao"))
    assert [supervised(r, s) for s in samples] == [
        ["<think>\nhm\n</think>\n\nHello<|im_end|>"],
        ["Ciao<|im_end|>"],
    ]
    # The second turn is trained on the history that a server shows: earlier reasoning is gone.
    assert "assistant\nHello<|im_end|>" in r.decode(samples[1].ids.tolist())
    assert (r.stats.fanned_out, r.stats.samples) == (1, 2)


def test_fan_out_keeps_together_what_the_template_keeps_together() -> None:
    """Within one tool loop nothing is rewritten, so that its turns share a sample."""
    call = {"name": "f", "arguments": {}}
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "calling", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "R"},
        {"role": "assistant", "content": "five"},
    ]
    r = renderer(THINKING)
    samples = r.render(parse_row({"messages": messages}, "o"))
    assert [supervised(r, s) for s in samples] == [["calling<|im_end|>", "four<|im_end|>"], ["five<|im_end|>"]]


def test_history_error_says_so() -> None:
    r = renderer(THINKING, history="error")
    with pytest.raises(DataError, match=r"chat\.jsonl:1: the chat template rewrites earlier turns.*data\.history"):
        r.render(chat("Hi", "Hello", "Bye", "Ciao"))
    assert len(r.render(chat("Hi", "Hello"))) == 1
    assert len(renderer(THINKING, history="error", last_turn_only=True).render(chat("a", "b", "c", "d"))) == 1


def test_last_turn_only() -> None:
    r = renderer(last_turn_only=True)
    (sample,) = r.render(chat("Hi", "Hello", "Bye", "Ciao"))
    assert supervised(r, sample) == ["Ciao<|im_end|>"]


def test_a_trailing_user_turn_is_left_out_and_prompts_alone_give_nothing() -> None:
    r = renderer()
    (sample,) = r.render(chat("Hi", "Hello", "and?"))
    assert r.decode(sample.ids.tolist()).endswith("Hello<|im_end|>")
    assert r.render(chat("Hi")) == []
    assert r.stats.without_answer == 1


def test_turn_end_that_is_not_eos() -> None:
    r = renderer(OTHER_END)
    (sample,) = r.render(chat("Hi", "Hello", "Bye", "Ciao"))
    assert supervised(r, sample) == ["Hello<|reserved_0|>", "Ciao<|reserved_0|>"]


def test_turn_end_from_stop_ids_of_the_target() -> None:
    ord_bang = tiny_tokenizer()("!")["input_ids"][0]
    r = Renderer(tiny_tokenizer(PLAIN), data=DataConfig(), stop_ids=[ord_bang])
    (sample,) = r.render(chat("Hi", "Hello! never"))
    assert supervised(r, sample) == [" Hello!"]


def test_template_without_any_end_token() -> None:
    r = renderer(PLAIN)
    (sample,) = r.render(chat("Hi", "Hello", "Bye", "Ciao"))
    assert supervised(r, sample) == [" Hello", " Ciao"]


def test_template_that_leaves_out_the_empty_block_in_finished_turns() -> None:
    r = renderer(LEAVES_OUT)
    samples = r.render(chat("Hi", "Hello", "Bye", "Ciao"))
    assert [supervised(r, s) for s in samples] == [["Hello<|im_end|>"], ["Ciao<|im_end|>"]]
    # Each answer follows the block that the server prefills; earlier turns are as the template writes them.
    assert all(
        r.decode(s.ids.tolist()).endswith(end)
        for s, end in zip(samples, ["\n\nHello<|im_end|>", "\n\nCiao<|im_end|>"], strict=True)
    )
    assert "assistant\nHello" in r.decode(samples[1].ids.tolist())


def test_template_that_cannot_show_its_own_answer_is_an_error() -> None:
    with pytest.raises(DataError, match=r"render of messages\[1\] does not extend its generation prompt .*'<think>"):
        renderer(FORCED).render(chat("Hi", "Hello"))


def test_no_chat_template() -> None:
    r = renderer(None)
    with pytest.raises(DataError, match=r"chat\.jsonl:1: the tokenizer has no chat template"):
        r.render(chat("Hi", "Hello"))
    with pytest.raises(DataError, match="no chat template"):
        r.prompt_ids(chat("Hi"))
    assert r.render(parse_row({"text": "abc"}, "o"))[0].loss_mask.all()


def test_template_that_refuses() -> None:
    r = renderer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        DataError, match=r"chat\.jsonl:1: the chat template refuses the conversation: roles must alternate$"
    ):
        r.render(chat("Hi", "Hello"))
    with pytest.raises(DataError, match="the first message is an answer to nothing"):
        renderer().render(parse_row({"messages": [{"role": "assistant", "content": "x"}]}, "o"))


def test_tools_reach_the_template_and_calls_are_supervised() -> None:
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    r = renderer(TOOLS)
    (sample,) = r.render(parse_row({"messages": messages, "tools": [{"name": "f"}]}, "o"))
    assert supervised(r, sample) == ['<call>f{"a": 1}</call><|im_end|>', "four<|im_end|>"]
    assert r.decode(sample.ids.tolist()).startswith('[{"name": "f"}]\n')


def test_template_kwargs() -> None:
    r = renderer("{{ style }}" + CHATML, template_kwargs={"style": "short"})
    assert r.decode(r.prompt_ids(chat("Hi"))).startswith("short<|im_start|>")


def test_prompt_ids_are_the_prefix_of_what_is_trained_on() -> None:
    for template in (CHATML, THINKING, OTHER_END, PLAIN, LEAVES_OUT):
        r = renderer(template)
        conversation = chat("Hi", "Hello", "Bye", "Ciao")
        last = r.render(conversation)[-1]
        prompt = r.prompt_ids(conversation)
        assert last.ids[: len(prompt)].tolist() == prompt
        assert last.loss_mask[len(prompt) :].all()
        assert r.prompt_ids(chat("Hi", "Hello", "Bye")) == prompt
        assert prompt == r.tokenizer.apply_chat_template(
            [m.as_template_dict() for m in conversation.messages[:-1]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            enable_thinking=False,
        )


def test_raw_rows() -> None:
    r = renderer(None)
    (sample,) = r.render(parse_row({"prompt": "def f", "completion": "(x): pass"}, "o", prompt_completion="raw"))
    assert supervised(r, sample) == ["(x): pass<|im_end|>"]
    assert r.decode(r.prompt_ids(Conversation(origin="o", kind="raw", prompt="def f"))) == "def f"
    with pytest.raises(DataError, match="no prompt to decode from"):
        r.prompt_ids(Conversation(origin="o", kind="raw", completion="x"))
    assert r.render(Conversation(origin="o", kind="raw", prompt="x")) == []


def test_the_end_of_a_text_is_supervised_once() -> None:
    r = renderer(None)
    for text in ("abc", "abc<|im_end|>"):
        (sample,) = r.render(parse_row({"text": text}, "o"))
        assert supervised(r, sample) == ["abc<|im_end|>"]
    (sample,) = r.render(parse_row({"text": "abc", "finish": "length"}, "o"))
    assert supervised(r, sample) == ["abc"]  # cut at a token limit: the text goes on
    row = {"prompt": "def f", "completion": "(x", "finish": "length"}
    (sample,) = r.render(parse_row(row, "o", prompt_completion="raw"))
    assert supervised(r, sample) == ["(x"]
    endless = tiny_tokenizer(None)
    endless.eos_token = None
    r = Renderer(endless, data=DataConfig())
    assert supervised(r, r.render(parse_row({"text": "abc"}, "o"))[0]) == ["abc"]


def test_beginning_of_text_is_prefilled_not_supervised() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|reserved_0|> $A <|im_end|>", special_tokens=[("<|reserved_0|>", 261), ("<|im_end|>", IM_END)]
    )
    r = Renderer(tokenizer, data=DataConfig())
    (sample,) = r.render(parse_row({"text": "abc"}, "o"))
    assert sample.ids[0] == 261
    assert sample.ids.tolist().count(IM_END) == 1
    assert sample.ids[-1] == IM_END
    assert sample.loss_mask.tolist() == [False, True, True, True, True]


def test_an_answer_cut_at_the_token_limit_has_no_turn_end() -> None:
    r = renderer(THINKING)
    (sample,) = r.render(as_cut(chat("Hi", "think:hm|Hello wor")))
    assert supervised(r, sample) == ["<think>\nhm\n</think>\n\nHello wor"]
    (sample,) = r.render(as_cut(chat("Hi", "think:I wonder|")))
    assert supervised(r, sample) == ["<think>\nI wonder"]
    with pytest.raises(DataError, match="does not show its last words"):
        renderer(CHATML).render(as_cut(chat("Hi", "think:I wonder|")))


def merging_tokenizer(template: str | None) -> Any:
    """A tokenizer that merges across words: ``: H`` style borders become one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space, newline = "\u0120", "\u010a"
    merges = [(":", space), (":" + space, "H"), (newline, newline), ("b", "c"), ("a", "bc")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


MERGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_token_that_spans_the_border_is_tokenized_as_a_server_would() -> None:
    r = Renderer(merging_tokenizer(MERGES), data=DataConfig())
    conversation = chat("q", "Hi")
    (sample,) = r.render(conversation)
    prompt = r.prompt_ids(conversation)
    whole = r.tokenizer("user: q\nassistant: Hi</s>", add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] != prompt  # ": H" is one token there
    assert sample.ids[: len(prompt)].tolist() == prompt
    assert supervised(r, sample) == ["Hi</s>"]
    assert r.stats.boundary_merges == 1


def test_border_merges_in_earlier_turns_are_fanned_out() -> None:
    r = Renderer(merging_tokenizer(MERGES), data=DataConfig())
    conversation = chat("q", "Hi", "r", "yes")
    samples = r.render(conversation)
    assert [supervised(r, s) for s in samples] == [["Hi</s>"], ["yes</s>"]]
    prompt = r.prompt_ids(conversation)
    assert samples[-1].ids[: len(prompt)].tolist() == prompt
    # Without a merge at the first border both turns are one sample.
    assert len(r.render(chat("q", "yes", "r", "Hi"))) == 1


def test_a_tokenizer_that_adds_a_space_keeps_the_merged_token_unsupervised() -> None:
    from tokenizers import pre_tokenizers

    tokenizer = merging_tokenizer(MERGES)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    r = Renderer(tokenizer, data=DataConfig())
    (sample,) = r.render(chat("q", "Hi"))
    assert supervised(r, sample) == ["i</s>"]
    assert r.stats.boundary_merges == 1


def test_many_are_rendered_like_each_alone() -> None:
    conversations = [chat(f"q{i}", f"a{i}", *(["r", "s"] if i % 3 == 0 else [])) for i in range(10)]
    conversations.insert(4, parse_row({"text": "raw text"}, "o"))
    conversations.insert(6, chat("no answer"))
    together = list(renderer(THINKING).render_many(conversations, chunk=4))
    alone = [renderer(THINKING).render(c) for c in conversations]
    assert len(together) == len(alone)
    for a, b in zip(together, alone, strict=True):
        assert [s.ids.tolist() for s in a] == [s.ids.tolist() for s in b]
        assert [s.loss_mask.tolist() for s in a] == [s.loss_mask.tolist() for s in b]


TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "plain": PLAIN, "leaves_out": LEAVES_OUT, "merges": MERGES}
RENDERERS = {
    name: Renderer(merging_tokenizer(t) if name == "merges" else tiny_tokenizer(t), data=DataConfig())
    for name, t in TEMPLATES.items()
}
WORDS = st.text(st.sampled_from("aHbc :\nüé\u4e2d!"), min_size=1, max_size=12).filter(lambda s: s == s.strip())


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.lists(WORDS, min_size=2, max_size=6))
def test_every_turn_is_supervised_once_behind_its_own_prefill(name: str, contents: list[str]) -> None:
    r = RENDERERS[name]
    conversation = chat(*contents)
    answers = contents[1::2]
    found: list[str] = []
    for sample in r.render(conversation):
        found += supervised(r, sample)
        # Each run starts right behind the ids that a server prefills for that turn.
        starts = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0) == 1)
        for start in starts:
            ids = sample.ids[:start].tolist()
            assert any(ids == r.prompt_ids(chat(*contents[: 2 * turn + 2])) for turn in range(len(answers))), r.decode(
                ids
            )
    ends = re.compile(r"(<\|im_end\|>|</s>)$")
    # Samples are in the order of their last turns, so that turns of several samples may interleave.
    assert sorted(ends.sub("", f).strip() for f in found) == sorted(answers)


def test_ansi_shows_supervised_tokens_and_cannot_steer_the_terminal() -> None:
    r = renderer()
    (sample,) = r.render(chat("\x1b[31mü", "Hello ü"))
    text = r.as_ansi(sample)
    assert f"{GREEN}Hello ü" in text
    assert "\\x1b[31mü" in text
    assert "<|im_end|>" in text
    assert "\x1b[31m" not in text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.encode('ascii', 'none') }}", "refuses the conversation: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('one\\ntwo') }}", "refuses the conversation: one two$"),
    ],
)
def test_a_template_may_fail_in_any_way(template: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"chat\.jsonl:1: the chat template .*{message}") as caught:
        renderer(template).render(chat("Hé", "Hello"))
    assert "\n" not in str(caught.value)
