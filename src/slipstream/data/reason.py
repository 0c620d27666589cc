"""What a library says of an error, as part of a message of one line."""

from __future__ import annotations

_MOST = 400
# Their messages are a bare value ('zzz') or say nothing of the place: the type's name makes them readable.
_TERSE = (LookupError, ArithmeticError, AttributeError, AssertionError, RecursionError)


def one_line(error: BaseException) -> str:
    """Return an error's message with its whitespace collapsed, cut at 400 characters; the type's name if empty."""
    name = type(error).__name__
    text = " ".join(str(error).split())
    if not text:
        return name
    if isinstance(error, _TERSE) and not isinstance(error, UnicodeError):
        text = f"{name}: {text}"
    return text if len(text) <= _MOST else text[: _MOST - 3] + "..."
