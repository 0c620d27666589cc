"""A rendered sample as text for a terminal."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import Any

from slipstream.records import RenderedSample

GREEN, DIM, REVERSE, RESET = "\x1b[32m", "\x1b[2m", "\x1b[7m", "\x1b[0m"


def as_ansi(tokenizer: Any, sample: RenderedSample, special_ids: Collection[int] = ()) -> str:
    """Return the sample's text with supervised tokens in green, the others dim, and special tokens in reverse.

    Neighbouring tokens of one kind are decoded together, so that characters of several tokens stay whole. Line breaks
    are kept and marked; other control characters are escaped, so that data cannot steer the terminal.
    """
    marks = [(bool(on), int(i) in special_ids, int(i)) for i, on in zip(sample.ids, sample.loss_mask, strict=True)]
    out: list[str] = []
    for (supervised, special), run in groupby(marks, key=lambda m: m[:2]):
        text = tokenizer.decode([i for _, _, i in run], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        out.append((GREEN if supervised else DIM) + (REVERSE if special else "") + _printable(text) + RESET)
    return "".join(out)


def _printable(text: str) -> str:
    """Mark line breaks and escape the other unprintable characters."""
    return "".join("⏎\n" if c == "\n" else c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)
