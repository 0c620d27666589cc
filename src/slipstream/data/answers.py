"""One conversation while the target answers it anew: which prompt comes next, and what an answer becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from slipstream.data.loops import PERIODS, loop_period
from slipstream.data.render import Renderer
from slipstream.data.rows import as_cut, as_whole
from slipstream.data.template import template_text
from slipstream.errors import DataError
from slipstream.records import Conversation, Message

OPEN, CLOSE = "<think>", "</think>"

_TOGETHER = 256  # answers that are tokenized at once


@dataclass(frozen=True, slots=True)
class _Written:
    """What the target wrote last: the ids with their prompt, those of its words alone, and whether it ended."""

    ids: list[int]
    words: list[int]
    finished: bool


class Draft:
    """A conversation in the making: turns are answered in order, each on the history of the new answers.

    Assistant turns with tool calls are kept as they are, because their results, which follow, belong to them. The
    conversation ends early at an answer that is empty, cut at the token limit, or cannot be rendered by the template.
    ``counts`` are the report's counters. For each turn: ``next_turn``, ``write`` the answer, ``settle`` its form
    (``settle_all`` for many drafts). Not thread-safe (it uses the renderer).
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
        self._written = _Written([], [], False)
        self._over = False
        if source.kind == "raw" and not source.prompt:
            raise DataError(f"{source.origin}: a text row has no prompt to answer; give prompt, or messages")

    def next_turn(self) -> Conversation | None:
        """Return the conversation whose prompt is to be continued for the next answer, or None when all is done."""
        if self._over:
            return None
        if self.source.kind == "raw":
            return self.source
        given = self.source.messages
        while self._place < len(given):
            message = given[self._place]
            if message.role == "assistant" and not message.tool_calls:
                return self._with(message)
            self._messages.append(message)
            self._place += 1
            self.counts["kept_tool_calls"] += message.role == "assistant"
        if self._messages[-1].role == "assistant":
            self._over = True
            return None
        return self._with()

    def set_aside(self, reason: str) -> None:
        """End the conversation before the turn that was to come; ``reason`` is the counter."""
        self.counts[reason] += 1
        self._over = True

    def write(self, prompt: list[int], output: list[int], *, finished: bool) -> list[Conversation]:
        """Read the answer ``output`` to ``prompt``; ``finished`` says that its last id is a stop token.

        Returns the forms in which it may be kept, best first, to be rendered for ``settle``; none if it is not kept.
        """
        renderer = self._renderer
        self.counts["tokens"] += len(output)
        words = output[:-1] if finished else output
        text = renderer.decode(words)
        opened = renderer.decode(prompt[-8:]).rstrip().endswith(OPEN)
        if not text.replace(OPEN, "").replace(CLOSE, "").strip():
            self.set_aside("empty")
            return []
        self.counts["unfinished"] += not finished
        self.counts["unbalanced_think"] += finished and text.count(OPEN) + opened != text.count(CLOSE)
        if not finished and not self._keep_unfinished:
            self._over = True
            return []
        self._written = _Written(prompt + output, words, finished)
        if self.source.kind == "raw":
            forms = [replace(self.source, completion=text)]
        else:
            forms = [self._with(message) for message in self._forms(text, opened)]
        return forms if finished else [as_cut(form) for form in forms]

    def settle(self, forms: Sequence[Conversation], rendered: Iterable[list[int] | None]) -> None:
        """Keep the form that renders back to the ids that were written, else the first that renders at all.

        ``rendered``: the ids of each form's last sample in turn, None where it cannot be rendered; it is not read
        further than needed.
        """
        written, cut = self._written, not self._written.finished
        usable: list[Conversation] = []
        for form, again in zip(forms, rendered, strict=False):
            if again is None:
                continue
            usable.append(form)
            if again == (written.ids[: len(again)] if cut and form.kind != "raw" else written.ids):
                usable = [form]
                break
        else:
            if not usable:
                self.set_aside("unrenderable")
                return
            self.counts["retokenised_differently"] += 1
        form = usable[0]
        if form.kind == "raw":
            self._completion, self._over = form.completion, True
        else:
            message = form.messages[-1]
            same = [m for m in self._messages if m.role == "assistant" and m.content == message.content != ""]
            self.counts["duplicate_turns"] += bool(same)
            self._messages.append(message)
            self._answered = len(self._messages)
            self._place += 1
            self._over = cut or self._place > len(self.source.messages)
        self.counts["answers"] += 1
        period = loop_period(written.words, max(PERIODS))
        for longest in PERIODS:
            self.counts[f"looping_{longest}"] += period is not None and period <= longest
        self.finish = "length" if cut else "eos"

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

    def _forms(self, text: str, opened: bool) -> list[Message]:
        """Return the messages that may render back to ``text``.

        Reasoning goes to its own field, unless the template would not show it from there.
        """
        reasoning, content = split_reasoning(text, opened=opened)
        forms = [Message(role="assistant", content=text)]
        if reasoning is not None:
            split = Message(role="assistant", content=content, reasoning_content=reasoning)
            shown = "reasoning_content" in template_text(self._renderer.tokenizer)
            forms.insert(0 if shown else 1, split)
        return forms


def settle_all(waiting: Sequence[tuple[Draft, Sequence[Conversation]]], renderer: Renderer) -> None:
    """Settle what each draft has written, given its forms. The first forms are tokenized together."""
    for begin in range(0, len(waiting), _TOGETHER):
        part = waiting[begin : begin + _TOGETHER]
        try:
            first: list[list[int] | None] = [
                samples[-1].ids.tolist() for samples in renderer.render_many([f[0] for _, f in part], chunk=len(part))
            ]
        except DataError:  # somebody's: each for itself
            first = [_rendered(forms[0], renderer) for _, forms in part]
        for (draft, forms), again in zip(part, first, strict=True):
            draft.settle(forms, chain([again], (_rendered(form, renderer) for form in forms[1:])))


def _rendered(form: Conversation, renderer: Renderer) -> list[int] | None:
    """Return the ids of the form's last sample, None if the template cannot render it."""
    try:
        ids: list[int] = renderer.render(form)[-1].ids.tolist()
    except DataError:
        return None
    return ids


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
