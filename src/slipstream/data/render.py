"""Conversations to token ids and loss masks, by the tokenizer's own chat template.

For each assistant turn the template is rendered twice: everything before the turn with the generation prompt (what a
server prefills), and everything through the turn. Where the second extends the first is what the target would write:
that, through the token that ends the turn, is supervised, and nothing else::

    prompt  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    turn    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                                   ^^^^^^^^^^^^^^^ supervised

Rows of plain text have no template. Their text, or the completion behind their prompt, is supervised through the
tokenizer's end-of-text token, which is appended: there the target would stop. A tokenizer without one appends nothing.

No tag of any template is looked for. The ids of each supervised turn are preceded by exactly the ids that a server
prefills: a conversation is one sample when the ids of its later turns repeat those of the earlier ones, and otherwise
(a template that drops earlier reasoning, tokens that merge across the border) it is fanned out into several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np

from slipstream.config import DataConfig
from slipstream.data.rows import CutConversation
from slipstream.data.template import ChatTemplate, Turn
from slipstream.errors import DataError
from slipstream.records import Conversation, RenderedSample


@dataclass(kw_only=True)
class RenderStats:
    """What was rendered so far. ``boundary_merges`` counts turns whose first token would merge with the prompt's last;
    ``reasoning_turns`` those with reasoning: data with and without it trains for both modes of a thinking target."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    turns: int = 0
    reasoning_turns: int = 0
    fanned_out: int = 0
    boundary_merges: int = 0
    without_answer: int = 0

    def as_json(self) -> dict[str, int]:
        """Return the counters by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _TurnIds:
    """Ids of one turn: ``ids[:start]`` is the server's prefill, ``ids[start:]`` what the target writes after it."""

    ids: list[int]
    start: int


class Renderer:
    """Renders conversations with one tokenizer and one set of data settings.

    ``tokenizer`` is a transformers tokenizer. ``stop_ids`` are further ids that end a turn (the target's eos ids); the
    tokenizer's own eos is always one. Not thread-safe: it counts in ``stats``; use one per thread.
    """

    def __init__(self, tokenizer: Any, *, data: DataConfig, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.data = data
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids: frozenset[int] = frozenset([*stop_ids, *([] if eos is None else [eos])])
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids) | self.stop_ids
        self.stats = RenderStats()
        self._template = ChatTemplate(tokenizer, data)

    def render(self, conversation: Conversation) -> list[RenderedSample]:
        """Return the samples of a conversation, in the order of their last turns; the last turn is in the last sample.

        A conversation without an assistant turn gives none (counted in ``stats.without_answer``). Raises DataError,
        naming the conversation's origin, for a template that cannot render it or, with ``history = "error"``, one that
        rewrites earlier turns.
        """
        return next(self.render_many([conversation]))

    def render_many(self, conversations: Iterable[Conversation], *, chunk: int = 64) -> Iterator[list[RenderedSample]]:
        """Yield each conversation's samples, tokenizing ``chunk`` conversations at once (the tokenizer is parallel)."""
        stream = iter(conversations)
        while batch := list(islice(stream, chunk)):
            turns = [self._turns(c) for c in batch]
            chat = [
                text for c, ts in zip(batch, turns, strict=True) if c.kind == "chat" for t in ts for text in _texts(t)
            ]
            encoded = iter(self._encode(chat))
            for conversation, ts in zip(batch, turns, strict=True):
                if conversation.kind == "raw":
                    found = [self._raw_ids(conversation)] if conversation.completion else []
                else:
                    found = [self._turn_ids(t, next(encoded), next(encoded)) for t in ts]
                yield self._samples(conversation, found)

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids that a server prefills before the last assistant turn, generation prompt included.

        A conversation that ends with another role is prefilled whole. Raises DataError if nothing would be prefilled.
        """
        return self.prompts([conversation])[0]

    def prompts(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """As ``prompt_ids``, for many: they are tokenized at once (the tokenizer is parallel)."""
        chat = iter(self._encode([self._template.prompt(c) for c in conversations if c.kind == "chat"]))
        found = []
        for conversation in conversations:
            ids = self._raw_prompt(conversation.prompt) if conversation.kind == "raw" else next(chat)
            if not ids:
                raise DataError(f"{conversation.origin}: there is no prompt to decode from; give messages or a prompt")
            found.append(ids)
        return found

    def as_ansi(self, sample: RenderedSample) -> str:
        """Return a sample's text for a terminal: supervised tokens green, specials in reverse, controls escaped."""
        from slipstream.data.display import as_ansi

        return as_ansi(self.tokenizer, sample, self.special_ids)

    def _turns(self, conversation: Conversation) -> list[Turn]:
        if conversation.kind == "raw":
            return []
        turns = self._template.turns(conversation, last_only=self.data.last_turn_only)
        self.stats.reasoning_turns += sum(t.reasoning for t in turns)
        return turns

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize without adding specials: a template writes its own."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return ids

    def _turn_ids(self, turn: Turn, prompt: list[int], whole: list[int]) -> _TurnIds:
        """Join the server's ids of the prompt and the ids of the answer, cut after the token that ends the turn."""
        if whole[: len(prompt)] != prompt:
            whole = self._joined(prompt, whole, turn.answer)
        start = self._border(prompt, whole)
        return _TurnIds(ids=whole if turn.cut else whole[: self._turn_end(whole, start)], start=start)

    def _joined(self, prompt: list[int], whole: list[int], answer: str) -> list[int]:
        """A token of ``whole`` spans the border. A server would prefill ``prompt`` and go on, so tokenize apart.

        Some tokenizers add a space at the start of a text; if the parts do not read as the whole did, the whole is
        kept, and the merged token is left unsupervised.
        """
        self.stats.boundary_merges += 1
        apart = prompt + self._encode([answer])[0]
        same = self.decode(apart) == self.decode(whole)
        return apart if same else whole

    def _border(self, prompt: list[int], whole: list[int]) -> int:
        """Return the first index of ``whole`` whose token begins at or after the prompt's end."""
        if whole[: len(prompt)] == prompt:
            return len(prompt)
        length = len(self.decode(prompt))
        index = _common(prompt, whole)
        while index < len(whole) and len(self.decode(whole[:index])) < length:
            index += 1
        return index

    def _turn_end(self, ids: list[int], start: int) -> int:
        """Return the index after the turn's last supervised token.

        That is the first stop token (a server stops there); else the last special token, if only white space follows;
        else the end of the text without the template's trailing white space.
        """
        for i in range(start, len(ids)):
            if ids[i] in self.stop_ids:
                return i + 1
        end = len(ids)
        while end > start and ids[end - 1] not in self.special_ids and not self.decode([ids[end - 1]]).strip():
            end -= 1
        return end

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, specials written out."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _raw_prompt(self, prompt: str) -> list[int]:
        """Ids of a raw prompt, with the beginning-of-text token where the tokenizer adds one, as servers do; no eos."""
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=True, verbose=False)["input_ids"]
        eos = getattr(self.tokenizer, "eos_token_id", None)
        plain = self._encode([prompt])[0]
        if ids and ids[-1] == eos and plain[-1:] != [eos]:
            ids = ids[:-1]
        return ids

    def _raw_ids(self, conversation: Conversation) -> _TurnIds:
        """Ids of a raw row, the end of text behind it unless it was cut at a token limit or brings its own."""
        prompt = self._raw_prompt(conversation.prompt)
        whole = self._raw_prompt(conversation.prompt + conversation.completion)
        if whole[: len(prompt)] != prompt:
            whole = self._joined(prompt, whole, conversation.completion)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if eos is not None and whole[-1:] != [eos] and not isinstance(conversation, CutConversation):
            whole = [*whole, eos]
        return _TurnIds(ids=whole, start=self._border(prompt, whole))

    def _samples(self, conversation: Conversation, turns: list[_TurnIds]) -> list[RenderedSample]:
        """Group turns into as few samples as hold each turn behind its own prefill; count them."""
        pending = list(turns)
        samples: list[RenderedSample] = []
        while pending:
            base = pending.pop()
            spans: list[_TurnIds] = [base]
            left: list[_TurnIds] = []
            for turn in pending:
                (spans if base.ids[: len(turn.ids)] == turn.ids else left).append(turn)
            if left and self.data.history == "error":
                raise DataError(
                    f"{conversation.origin}: the chat template rewrites earlier turns (a server's ids of turn "
                    f"{len(left)} are not repeated later); set data.history to fan_out, or data.last_turn_only"
                )
            pending = left
            mask = np.zeros(len(base.ids), dtype=np.bool_)
            for span in spans:
                mask[span.start : len(span.ids)] = True
            ids = np.asarray(base.ids, dtype=np.int32)
            samples.append(RenderedSample(ids=ids, loss_mask=mask, origin=conversation.origin))
        stats = self.stats
        stats.conversations += 1
        stats.turns += len(turns)
        stats.samples += len(samples)
        stats.tokens += sum(len(s.ids) for s in samples)
        stats.supervised += sum(int(s.loss_mask.sum()) for s in samples)
        stats.fanned_out += len(samples) > 1
        stats.without_answer += not turns
        return samples[::-1]


def _texts(turn: Turn) -> tuple[str, str]:
    return turn.prompt, turn.prompt + turn.answer


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading items are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
