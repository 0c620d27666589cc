"""The mask token: a real row of the target's embedding that means nothing else.

A new row would be neither trained nor served; pad and eos mean something to the target. So the id is looked for, never
made, and where none is fit that is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import Any

from slipstream.data.template import template_text
from slipstream.errors import DrafterError

_SPARE_NAME = re.compile(r"reserved|unused|mask", re.IGNORECASE)


def resolve_mask_token(
    tokenizer: Any,
    vocab_rows: int,
    requested: int = -1,
    used_ids: Container[int] | None = None,
    *,
    eos_ids: Collection[int] = (),
) -> int:
    """Return the mask token's id: ``requested`` if it is fit (-1: choose).

    Chosen, in this order: the first id past the tokenizer that still has an embedding row; a special token whose name
    says reserved, unused or mask; any other special token that neither the chat template nor the data uses.
    ``used_ids`` are the ids that occur in the training data; without them only the chat template is searched.
    ``eos_ids`` are further ids that end a generation. Raises DrafterError. Thread-safe.
    """
    barred = _barred(tokenizer, eos_ids)
    if requested != -1:
        return _checked(requested, tokenizer, vocab_rows, used_ids, barred)
    used: Container[int] = used_ids if used_ids is not None else ()
    vocabulary = tokenizer.get_vocab()
    first_free = max(vocabulary.values(), default=-1) + 1
    for token_id in range(first_free, vocab_rows):
        if token_id not in barred and token_id not in used:
            return token_id
    template = template_text(tokenizer)
    specials = {
        i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special and i < vocab_rows
    }
    named: set[int | None] = {tokenizer.bos_token_id, tokenizer.unk_token_id}
    fit = [
        (0 if _SPARE_NAME.search(text) else 1, i)
        for i, text in specials.items()
        if i not in barred and i not in named and i not in used and text not in template
    ]
    if fit:
        return int(min(fit)[1])
    raise DrafterError(
        f"no mask token can be found: the tokenizer fills all {vocab_rows} embedding rows and its "
        f"{len(specials)} special tokens are pad, eos or in use; set drafter.mask_token_id to an id unused in your data"
    )


def _barred(tokenizer: Any, eos_ids: Collection[int]) -> dict[int, str]:
    """Return the ids that may never be the mask token, with what each of them is."""
    barred = {int(i): "an end-of-sequence token" for i in eos_ids}
    if tokenizer.pad_token_id is not None:
        barred[int(tokenizer.pad_token_id)] = "the padding token"
    if tokenizer.eos_token_id is not None:
        barred[int(tokenizer.eos_token_id)] = "the end-of-sequence token"
    return barred


def _checked(
    requested: int, tokenizer: Any, vocab_rows: int, used_ids: Container[int] | None, barred: dict[int, str]
) -> int:
    """Return ``requested``, or raise DrafterError saying why it cannot be the mask token."""
    cure = "set drafter.mask_token_id to an unused id, or to -1 to have one chosen"
    if not 0 <= requested < vocab_rows:
        raise DrafterError(f"mask token {requested} is outside the target's {vocab_rows} embedding rows; {cure}")
    if requested in barred:
        raise DrafterError(f"mask token {requested} is {barred[requested]} of the target; {cure}")
    if used_ids is not None and requested in used_ids:
        text = tokenizer.convert_ids_to_tokens(requested)
        raise DrafterError(f"mask token {requested} ({text!r}) occurs in the training data; {cure}")
    return requested
