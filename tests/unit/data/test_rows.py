"""One row of every known shape, and every row that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.data.rows import CutConversation, parse_row, without_nulls
from slipstream.errors import DataError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def roles(row: dict[str, Any], **kwargs: Any) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in parse_row(row, "f.jsonl:1", **kwargs).messages]


def test_messages_with_tools_and_reasoning() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "think"},
            {"role": "tool", "content": "1", "tool_call_id": "x", "name": "add"},
            ANSWER,
        ],
        "tools": [tool],
    }
    conversation = parse_row(row, "f.jsonl:1")
    assert conversation.tools == (tool,)
    third = conversation.messages[2]
    assert third.content == ""
    assert third.reasoning_content == "think"
    assert third.tool_calls is not None
    # Servers parse the arguments before the template sees them.
    assert third.tool_calls[0]["function"]["arguments"] == {"a": 1}
    assert conversation.messages[3].tool_call_id == "x"


def test_tools_may_be_json_text_and_reasoning_has_a_second_name() -> None:
    row = {"messages": [USER, {**ANSWER, "reasoning": "hm"}], "tools": json.dumps([{"name": "f"}])}
    conversation = parse_row(row, "o")
    assert conversation.tools == ({"name": "f"},)
    assert conversation.messages[1].reasoning_content == "hm"


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert roles({"messages": [{"role": "user", "content": parts}, ANSWER]})[0] == ("user", "ab")


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_sharegpt(keys: tuple[str, str]) -> None:
    who, what = keys
    names = ["human", "gpt"] if who == "from" else ["user", "assistant"]
    row = {"conversations": [{who: names[0], what: "Hi"}, {who: names[1], what: "Hello"}]}
    assert roles(row) == [("user", "Hi"), ("assistant", "Hello")]


def test_sharegpt_tools() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "2+2"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "four"},
        ]
    }
    conversation = parse_row(row, "o")
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.messages[2].tool_calls == (
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
    )


def test_prompt_and_completion_as_chat_raw_and_lists() -> None:
    row = {"prompt": "Q", "completion": "A"}
    assert roles(row) == [("user", "Q"), ("assistant", "A")]
    raw = parse_row(row, "o", prompt_completion="raw")
    assert (raw.kind, raw.prompt, raw.completion) == ("raw", "Q", "A")
    assert roles({"prompt": [USER], "completion": [ANSWER]}) == [("user", "Hi"), ("assistant", "Hello")]
    assert roles({"prompt": [USER], "completion": [ANSWER]}, prompt_completion="raw") == roles(
        {"messages": [USER, ANSWER]}
    )
    assert roles({"prompt": "only a prompt"}) == [("user", "only a prompt")]
    assert parse_row({"prompt": "only"}, "o", prompt_completion="raw").completion == ""


def test_text_is_raw_and_messages_come_first() -> None:
    text = parse_row({"text": "abc"}, "o")
    assert (text.kind, text.prompt, text.completion) == ("raw", "", "abc")
    assert roles({"text": "abc", "prompt": "p", "messages": [USER]}) == [("user", "Hi")]


def test_a_cut_answer_is_marked() -> None:
    assert isinstance(parse_row({"messages": [USER, ANSWER], "finish": "length"}, "o"), CutConversation)
    assert not isinstance(parse_row({"messages": [USER, ANSWER], "finish": "eos"}, "o"), CutConversation)
    raw = parse_row({"prompt": "p", "completion": "c", "finish": "length"}, "o", prompt_completion="raw")
    assert isinstance(raw, CutConversation)


def test_nulls_of_columnar_files_are_dropped_at_every_depth() -> None:
    assert without_nulls({"a": None, "b": [{"c": None, "d": 0}]}) == {"b": [{"d": 0}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "a row is a JSON object"),
        ("text", "a row is a JSON object"),
        ({}, "the row has no messages; its keys are none at all"),
        ({"message": [USER]}, "the row has no messages; its keys are message"),
        ({"messages": []}, "messages is empty: the row has no messages"),
        ({"messages": "Hi"}, "messages is str 'Hi'; it must be a list"),
        ({"messages": ["Hi"]}, r"messages\[0\] is str 'Hi'; a message is an object"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\] has no role; its keys are content"),
        (
            {"messages": [USER, {"role": "asistant", "content": "x"}]},
            r"messages\[1\] has the unknown role 'asistant'.*Did you mean assistant",
        ),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, r"messages\[1\] is an empty answer"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty answer"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty answer"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "content is int 3; it must be a string"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'; only text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": 1}]}]}, "tool_calls holds dict"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "is a string that is not JSON",
        ),
        ({"messages": [USER, ANSWER], "tools": 3}, "tools is int 3; it must be a list"),
        ({"messages": [USER, ANSWER], "tools": [3]}, "tools holds int 3"),
        ({"prompt": "p", "completion": ""}, "completion is an empty answer"),
        ({"prompt": "", "completion": "c"}, "prompt is empty"),
        ({"text": "  "}, "text is an empty answer"),
        ({"text": 5}, "text is int 5; it must be a string"),
    ],
)
def test_bad_rows_name_their_origin(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"^data/f\.jsonl:7: .*" + message) as caught:
        parse_row(row, "data/f.jsonl:7")
    assert "\n" not in str(caught.value)
