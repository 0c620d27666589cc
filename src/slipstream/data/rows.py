"""One row of a data set, in any of the known shapes, to one ``Conversation``.

===================  ==============================================================================
columns              becomes
===================  ==============================================================================
``messages``         chat; ``role``/``content`` with tools, tool calls and reasoning
``conversations``    chat; ShareGPT's ``from``/``value`` (or ``role``/``content``)
``prompt``           chat or raw, with ``completion``, each a string or a list of messages
``text``             raw: everything is supervised, its end of text too; no template
===================  ==============================================================================

The first column of the table that a row has decides. Assistant turns inside a ``prompt`` list count like any other.
``"finish": "length"`` marks a last answer or text that was cut at a token limit: its end is then not supervised.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from typing import Any, NoReturn

from slipstream.data.reason import one_line
from slipstream.errors import DataError
from slipstream.records import ROLES, Conversation, Message

COLUMNS = ("messages", "conversations", "prompt", "text")

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class CutConversation(Conversation):
    """A conversation whose last answer or text was cut at a token limit (``"finish": "length"`` in its row).

    The target never wrote the end of it, so the renderer supervises the words and stops there.
    """

    __slots__ = ()


def as_cut(conversation: Conversation) -> CutConversation:
    """Return the conversation marked as cut at a token limit."""
    return CutConversation(**{f.name: getattr(conversation, f.name) for f in fields(Conversation)})


def as_whole(conversation: Conversation) -> Conversation:
    """Return the conversation without the mark of ``as_cut``: its last answer ends."""
    return Conversation(**{f.name: getattr(conversation, f.name) for f in fields(Conversation)})


def without_nulls(value: Any) -> Any:
    """Drop keys whose value is None, at every depth. Columnar files fill absent keys of structs with None.

    A tool schema rendered with those nulls would give other token ids than the server's.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(v) for v in value]
    return value


def parse_row(row: Any, origin: str, *, prompt_completion: str = "chat") -> Conversation:
    """Return the conversation of one row. Raises DataError, beginning with ``origin``, for anything unusable."""
    if not isinstance(row, dict):
        _refuse(origin, f"a row is a JSON object, this one is {_brief(row)}; write an object with a messages list")
    column = next((c for c in COLUMNS if row.get(c) is not None), None)
    if column is None:
        keys = ", ".join(sorted(str(k) for k in row)) or "none at all"
        _refuse(origin, f"the row has no messages; its keys are {keys}: give messages, conversations, prompt or text")
    if column == "text":
        kind = CutConversation if row.get("finish") == "length" else Conversation
        return kind(origin=origin, kind="raw", completion=_answer(row["text"], "text", origin))
    if column == "prompt":
        return _prompt_row(row, origin, prompt_completion)
    return _chat(row, parse_messages(row[column], origin, column), origin)


def parse_messages(value: Any, origin: str, column: str) -> tuple[Message, ...]:
    """Return the messages of a list of dicts. Raises DataError naming ``origin`` and the message's number from 1."""
    if not isinstance(value, (list, tuple)):
        _refuse(origin, f"{column} is {_brief(value)}; it must be a list of messages")
    if not value:
        _refuse(origin, f"{column} is empty: the row has no messages; delete the row or fill it")
    return tuple(_message(m, f"{column}[{i}]", origin) for i, m in enumerate(value))


def _prompt_row(row: dict[str, Any], origin: str, prompt_completion: str) -> Conversation:
    """A ``prompt`` with or without ``completion``. Without one it can be decoded or answered, not trained on."""
    prompt, completion = row["prompt"], row.get("completion")
    if prompt_completion == "raw" and isinstance(prompt, str) and (completion is None or isinstance(completion, str)):
        if completion is None and not prompt:
            _refuse(origin, "prompt is empty and there is no completion; delete the row or fill it")
        text = "" if completion is None else _answer(completion, "completion", origin)
        kind = CutConversation if row.get("finish") == "length" else Conversation
        return kind(origin=origin, kind="raw", prompt=_text(prompt, "prompt", origin), completion=text)
    if isinstance(prompt, str):
        if not prompt.strip():
            _refuse(origin, "prompt is empty; delete the row or fill it")
        messages: tuple[Message, ...] = (Message(role="user", content=_text(prompt, "prompt", origin)),)
    else:
        messages = parse_messages(prompt, origin, "prompt")
    if isinstance(completion, str):
        messages += (Message(role="assistant", content=_answer(completion, "completion", origin)),)
    elif completion is not None:
        messages += parse_messages(completion, origin, "completion")
    return _chat(row, messages, origin)


def _chat(row: dict[str, Any], messages: tuple[Message, ...], origin: str) -> Conversation:
    kind = CutConversation if row.get("finish") == "length" and messages[-1].role == "assistant" else Conversation
    return kind(origin=origin, messages=messages, tools=_dicts(row.get("tools"), "tools", origin))


def _message(value: Any, where: str, origin: str) -> Message:
    if not isinstance(value, dict):
        _refuse(origin, f"{where} is {_brief(value)}; a message is an object with role and content")
    if "role" in value and value["role"] is not None:
        role = given = value["role"]
    elif "from" in value:
        given = value["from"]
        role = SHAREGPT_ROLES.get(given, given) if isinstance(given, str) else given
    else:
        _refuse(origin, f"{where} has no role; its keys are {', '.join(sorted(map(str, value)))}: add role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        _refuse(origin, f"{where} has the unknown role {given!r}; use {', '.join(ROLES)}.{hint}")
    content = value["content"] if "content" in value else value.get("value")
    tool_calls = _tool_calls(value.get("tool_calls"), where, origin)
    if "from" in value and given == "function_call" and tool_calls is None:
        tool_calls, content = _tool_calls(_json(content, where, origin), where, origin), ""
    text = "" if content is None else _text(content, f"{where}.content", origin)
    thought = value.get("reasoning_content")
    if thought is None:
        thought = value.get("reasoning")
    reasoning = None if thought is None else _text(thought, f"{where}.reasoning_content", origin)
    if role == "assistant" and not text.strip() and not tool_calls and not (reasoning or "").strip():
        _refuse(
            origin, f"{where} is an empty answer; delete the row or let the target answer it (prepare --regenerate)"
        )
    if role == "user" and content is None:
        _refuse(origin, f"{where} has no content; delete the row or fill it")
    return Message(
        role=role,
        content=text,
        reasoning_content=reasoning,
        tool_calls=tool_calls,
        tool_call_id=_name(value.get("tool_call_id"), f"{where}.tool_call_id", origin),
        name=_name(value.get("name"), f"{where}.name", origin),
    )


def _tool_calls(value: Any, where: str, origin: str) -> tuple[dict[str, Any], ...] | None:
    """Return tool calls with their arguments as objects, which is how servers hand them to the chat template."""
    if isinstance(value, dict):
        value = [value]
    calls = _dicts(value, f"{where}.tool_calls", origin)
    if not calls:
        return None
    out = []
    for given in calls:
        call = dict(given)
        if "function" not in call and "name" in call:
            call = {"type": "function", "function": call}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(
                origin, f"{where}.tool_calls holds {_brief(given)}; a call has function.name and function.arguments"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", f"{where}.tool_calls.function.arguments", origin)
        call["function"] = {**function, "arguments": {} if arguments is None else arguments}
        out.append(call)
    return tuple(out)


def _dicts(value: Any, where: str, origin: str) -> tuple[dict[str, Any], ...] | None:
    """Return a list of objects, given as such or as its JSON text. None and an empty list are None."""
    if isinstance(value, str):
        value = _json(value, where, origin) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        _refuse(origin, f"{where} is {_brief(value)}; it must be a list of objects")
    items = [_json(v, where, origin) if isinstance(v, str) else v for v in value]
    for item in items:
        if not isinstance(item, dict):
            _refuse(origin, f"{where} holds {_brief(item)}; it must be a list of objects")
    return tuple(items) or None


def _text(value: Any, where: str, origin: str) -> str:
    """Return a string, or the joined text parts of an OpenAI content list."""
    if isinstance(value, (list, tuple)):
        parts = []
        for part in value:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
                parts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, dict) else None
                what = f"a part of type {kind!r}" if kind else _brief(part)
                _refuse(origin, f"{where} holds {what}; only text is read: delete the row")
        value = "".join(parts)
    if not isinstance(value, str):
        _refuse(origin, f"{where} is {_brief(value)}; it must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(origin, f"{where} holds half of a surrogate pair, which is not text; mend or delete the row")
    return value


def _answer(value: Any, where: str, origin: str) -> str:
    text = _text(value, where, origin)
    if not text.strip():
        _refuse(
            origin, f"{where} is an empty answer; delete the row or let the target answer it (prepare --regenerate)"
        )
    return text


def _name(value: Any, where: str, origin: str) -> str | None:
    return None if value is None else _text(value, where, origin)


def _json(value: Any, where: str, origin: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        _refuse(origin, f"{where} is a string that is not JSON ({one_line(error)}): {_brief(value)}")


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _refuse(origin: str, message: str) -> NoReturn:
    raise DataError(f"{origin}: {message}")
