from __future__ import annotations

import pytest

from slipstream.errors import DrafterError
from slipstream.target.mask_token import resolve_mask_token
from support.tiny import tiny_tokenizer

ROWS, ENTRIES = 320, 262
IM_START, EOS, PAD, THINK, END_THINK, RESERVED = range(256, 262)


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def test_first_id_past_the_tokenizer(tokenizer):
    assert resolve_mask_token(tokenizer, ROWS) == ENTRIES
    assert resolve_mask_token(tokenizer, ENTRIES + 1) == ENTRIES


def test_ids_past_the_tokenizer_are_skipped_where_taken(tokenizer):
    assert resolve_mask_token(tokenizer, ROWS, eos_ids=(ENTRIES,), used_ids={ENTRIES + 1}) == ENTRIES + 2


def test_a_reserved_special_token_where_the_tokenizer_fills_the_embedding(tokenizer):
    assert resolve_mask_token(tokenizer, ENTRIES) == RESERVED


def test_reserved_token_that_the_data_use_gives_way_to_another_special(tokenizer):
    assert resolve_mask_token(tokenizer, ENTRIES, used_ids={RESERVED}) == THINK


def test_specials_of_the_chat_template_are_never_chosen(tokenizer):
    # <|im_start|> stands in the template; the others are in the data.
    with pytest.raises(DrafterError, match="no mask token can be found: the tokenizer fills all 262 embedding rows"):
        resolve_mask_token(tokenizer, ENTRIES, used_ids={RESERVED, THINK, END_THINK})


def test_specials_of_any_of_several_templates_are_never_chosen(tokenizer):
    tokenizer.chat_template = {"default": "{{ '<think>' }}", "tools": "<|im_start|> </think>"}
    with pytest.raises(DrafterError):
        resolve_mask_token(tokenizer, ENTRIES, used_ids={RESERVED})


def test_bos_and_unk_are_never_chosen(tokenizer):
    tokenizer.bos_token, tokenizer.unk_token = "<think>", "</think>"
    tokenizer.chat_template = None
    assert resolve_mask_token(tokenizer, ENTRIES, used_ids={RESERVED}) == IM_START


def test_pad_and_eos_are_never_chosen(tokenizer):
    used = set(range(ENTRIES)) - {EOS, PAD}
    with pytest.raises(DrafterError, match=r"set drafter\.mask_token_id"):
        resolve_mask_token(tokenizer, ENTRIES, used_ids=used)


@pytest.mark.parametrize("wanted", [THINK, RESERVED, ENTRIES, ROWS - 1, 0])
def test_requested_and_fit(tokenizer, wanted):
    assert resolve_mask_token(tokenizer, ROWS, wanted, used_ids={7}) == wanted


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (PAD, "mask token 258 is the padding token"),
        (EOS, "mask token 257 is the end-of-sequence token"),
        (300, "mask token 300 is an end-of-sequence token"),
        (ROWS, "mask token 320 is outside the target's 320 embedding rows"),
        (-2, "mask token -2 is outside"),
        (97, "occurs in the training data"),
    ],
)
def test_requested_and_refused(tokenizer, wanted, message):
    with pytest.raises(DrafterError, match=message) as caught:
        resolve_mask_token(tokenizer, ROWS, wanted, used_ids={97, 98}, eos_ids=(300,))
    assert "set drafter.mask_token_id" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_token_in_use_is_named(tokenizer):
    with pytest.raises(DrafterError, match=r"mask token 259 \('<think>'\) occurs"):
        resolve_mask_token(tokenizer, ROWS, THINK, used_ids={THINK})


def test_tokenizer_without_pad_or_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    assert resolve_mask_token(tokenizer, ROWS, EOS) == EOS
