"""One conversation while the target answers it anew: which prompt comes next, and what an answer becomes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from slipstream.data.loops import PERIODS, loop_period
from slipstream.data.render import Renderer
from slipstream.data.rows import as_cut, as_whole
from slipstream.data.template import template_text
from slipstream.errors import DataError
from slipstream.records import Conversation, Message

OPEN, CLOSE = "<think>", "</think>"


class Draft:
    """A conversation in the making: turns are answered in order, each on the history of the new answers.

    Assistant turns with tool calls are kept as they are, because their results, which follow, belong to them. The
    conversation ends early at an answer that is empty, cut at the token limit, or cannot be rendered by the template.
    ``counts`` are the report's counters. Not thread-safe (it uses the renderer).
    """

    def __init__(self, source: Conversation, renderer: Renderer, *, keep_unfinished: bool) -> None:
        self.source = source = as_whole(source)  # the old answer may have been cut; the new one is another
        self.counts: Counter[str] = Counter()
        self.finish: str | None = None
        self._renderer = renderer
        self._keep_unfinished = keep_unfinished
        self._messages: list[Message] = []
        self._answered = 0  # length of _messages just behind the last new answer
        self._place = 0  # messages of the source that are done
        self._completion = ""
        self._over = False
        if source.kind == "raw" and not source.prompt:
            raise DataError(f"{source.origin}: a text row has no prompt to answer; give prompt, or messages")

    def next_prompt(self) -> list[int] | None:
        """Return the ids to continue for the next answer, or None when the conversation is done."""
        if self._over:
            return None
        if self.source.kind == "raw":
            return self._renderer.prompt_ids(self.source)
        given = self.source.messages
        while self._place < len(given):
            message = given[self._place]
            if message.role == "assistant" and not message.tool_calls:
                return self._renderer.prompt_ids(self._with(message))
            self._messages.append(message)
            self._place += 1
            self.counts["kept_tool_calls"] += message.role == "assistant"
        if self._messages[-1].role == "assistant":
            self._over = True
            return None
        return self._renderer.prompt_ids(self._with())

    def set_aside(self, reason: str) -> None:
        """End the conversation before the turn that was to come; ``reason`` is the counter."""
        self.counts[reason] += 1
        self._over = True

    def take(self, prompt: list[int], output: list[int], *, finished: bool) -> None:
        """Add the answer ``output`` to ``prompt``; ``finished`` says that its last id is a stop token."""
        renderer = self._renderer
        self.counts["tokens"] += len(output)
        words = output[:-1] if finished else output
        text = renderer.decode(words)
        opened = renderer.decode(prompt[-8:]).rstrip().endswith(OPEN)
        if not text.replace(OPEN, "").replace(CLOSE, "").strip():
            self.set_aside("empty")
            return
        self.counts["unfinished"] += not finished
        self.counts["unbalanced_think"] += finished and text.count(OPEN) + opened != text.count(CLOSE)
        if not finished and not self._keep_unfinished:
            self._over = True
            return
        if self.source.kind == "raw":
            self._completion, self._over = text, True
            done = replace(self.source, completion=text)
            again = renderer.render(done if finished else as_cut(done))[-1].ids.tolist()
            self.counts["retokenised_differently"] += again != prompt + output
        else:
            message = self._message(text, opened, prompt + output, cut=not finished)
            if message is None:
                self.set_aside("unrenderable")
                return
            same = [m for m in self._messages if m.role == "assistant" and m.content == message.content != ""]
            self.counts["duplicate_turns"] += bool(same)
            self._messages.append(message)
            self._answered = len(self._messages)
            self._place += 1
            self._over = not finished or self._place > len(self.source.messages)
        self.counts["answers"] += 1
        for longest in PERIODS:
            self.counts[f"looping_{longest}"] += loop_period(words, longest) is not None
        self.finish = "eos" if finished else "length"

    def row(self) -> dict[str, Any] | None:
        """Return the row to write: everything through the last new answer. None if there is no new answer."""
        if self.finish is None:
            return None
        if self.source.kind == "raw":
            return {"prompt": self.source.prompt, "completion": self._completion, "finish": self.finish}
        row: dict[str, Any] = {"messages": [m.as_template_dict() for m in self._messages[: self._answered]]}
        if self.source.tools is not None:
            row["tools"] = list(self.source.tools)
        row["finish"] = self.finish
        return row

    def _with(self, *messages: Message) -> Conversation:
        return replace(self.source, messages=(*self._messages, *messages))

    def _message(self, text: str, opened: bool, ids: list[int], *, cut: bool) -> Message | None:
        """Return the message that renders back to the ids that were written; None if the template renders neither form.

        Reasoning goes to its own field, unless the template would not show it from there.
        """
        reasoning, content = split_reasoning(text, opened=opened)
        forms = [Message(role="assistant", content=text)]
        if reasoning is not None:
            split = Message(role="assistant", content=content, reasoning_content=reasoning)
            shown = "reasoning_content" in template_text(self._renderer.tokenizer)
            forms.insert(0 if shown else 1, split)
        usable: list[Message] = []
        for form in forms:
            conversation = self._with(form)
            try:
                again = self._renderer.render(as_cut(conversation) if cut else conversation)[-1].ids.tolist()
            except DataError:
                continue
            if again == (ids[: len(again)] if cut else ids):
                return form
            usable.append(form)
        if not usable:
            return None
        self.counts["retokenised_differently"] += 1
        return usable[0]


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """Split a written answer into (reasoning, content). ``opened``: the generation prompt already held the opening tag.

    Without reasoning the first is None. Reasoning that was never closed is all reasoning, with empty content.
    """
    body = text.lstrip()
    if not opened and not body.startswith(OPEN):
        return None, text
    body = body.removeprefix(OPEN)
    thought, close, content = body.partition(CLOSE)
    return thought.strip("\n"), content.lstrip("\n") if close else ""
