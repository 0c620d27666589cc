from __future__ import annotations

from slipstream.data.reason import one_line


def test_whitespace_is_collapsed_and_nothing_is_empty() -> None:
    assert one_line(ValueError("\n  what is wrong \n\t more\r\n")) == "what is wrong more"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(ValueError()) == "ValueError"


def test_messages_that_are_only_a_value_are_named() -> None:
    assert one_line(KeyError("zzz")) == "KeyError: 'zzz'"
    assert one_line(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"


def test_long_messages_are_cut() -> None:
    text = one_line(ValueError("x" * 5000))
    assert len(text) <= 400
    assert text.endswith("...")
