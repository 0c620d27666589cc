"""A tokenizer's chat template, asked for what a server prefills and for what the target then writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config import DataConfig
from slipstream.data.reason import one_line
from slipstream.data.rows import CutConversation
from slipstream.errors import DataError
from slipstream.records import Conversation, Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One assistant turn as text: the server's ``prompt`` and the ``answer`` that the template writes after it.

    The answer goes to the end of the render, the end of the turn and what follows it included; a ``cut`` one goes to
    the end of its own words.
    """

    prompt: str
    answer: str
    reasoning: bool
    cut: bool = False


class ChatTemplate:
    """Renders message lists. Raises DataError for a tokenizer without template, at the first chat row."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.thinking = data.thinking
        self.kwargs: dict[str, Any] = dict(data.template_kwargs)
        if "enable_thinking" in self.kwargs:
            raise DataError("data.template_kwargs sets enable_thinking; set data.thinking to auto, on or off instead")
        self.has_thinking = "enable_thinking" in template_text(tokenizer)

    def turns(self, conversation: Conversation, *, last_only: bool = False) -> list[Turn]:
        """Return the assistant turns that are supervised, each behind the prompt that a server would give it."""
        places = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
        return [self._turn(conversation, i) for i in (places[-1:] if last_only else places)]

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that a server prefills: all before a last assistant message, and the generation prompt."""
        messages = conversation.messages
        last = messages[-1]
        before = messages[:-1] if last.role == "assistant" else messages
        return self._render(conversation, before, generation=True, thinks=self._thinks(last))

    def _thinks(self, message: Message) -> bool:
        """The value of ``enable_thinking`` for the turn that ``message`` is, or that follows it."""
        if self.thinking != "auto":
            return self.thinking == "on"
        return message.role == "assistant" and has_reasoning(message)

    def _turn(self, conversation: Conversation, place: int) -> Turn:
        messages = conversation.messages
        message = messages[place]
        thinks, reasoning = self._thinks(message), has_reasoning(message)
        if reasoning and self.thinking == "off" and self.has_thinking:
            raise DataError(
                f"{conversation.origin}: messages[{place}] has reasoning, but data.thinking is off; set it to auto or "
                "on, or let the target answer anew (prepare --regenerate)"
            )
        prompt = self._render(conversation, messages[:place], generation=True, thinks=thinks)
        whole = self._render(conversation, messages[: place + 1], generation=False, thinks=thinks)
        if whole.startswith(prompt):
            answer = whole[len(prompt) :]
        else:
            answer = self._answer_behind(conversation, place, prompt, whole, thinks)
        cut = isinstance(conversation, CutConversation) and place == len(messages) - 1
        if cut:
            answer = _own_words(answer, message, f"{conversation.origin}: messages[{place}]")
        return Turn(prompt=prompt, answer=answer, reasoning=reasoning, cut=cut)

    def _answer_behind(self, conversation: Conversation, place: int, prompt: str, whole: str, thinks: bool) -> str:
        """The render does not extend the prompt. Find the answer if the template merely leaves out, in finished turns,
        what ``enable_thinking = false`` adds to the generation prompt; else the template cannot be used.
        """
        message = conversation.messages[place]
        if self.has_thinking and not thinks:
            plain = self._render(conversation, conversation.messages[:place], generation=True, thinks=True)
            words = message.content.strip()
            if prompt.startswith(plain) and whole.startswith(plain) and words:
                answer = whole[len(plain) :]
                if answer.lstrip().startswith(words):
                    return answer
        at = next(
            (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
        )
        raise DataError(
            f"{conversation.origin}: the chat template's render of messages[{place}] does not extend its generation "
            f"prompt (prompt goes on with {prompt[at : at + 30]!r}, render with {whole[at : at + 30]!r}); "
            "set data.thinking or data.template_kwargs as the server will, or use a template that keeps what it prompts"
        )

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], *, generation: bool, thinks: bool
    ) -> str:
        if not template_text(self.tokenizer):
            raise DataError(
                f"{conversation.origin}: the tokenizer has no chat template, so chat rows cannot be rendered; use the "
                "tokenizer of an instruct model, add chat_template.jinja to its directory, or give rows with text"
            )
        if not messages:
            raise DataError(
                f"{conversation.origin}: the first message is an answer to nothing; delete it or add a user message"
            )
        values = {**self.kwargs, **({"enable_thinking": thinks} if self.has_thinking else {})}
        try:
            text = self.tokenizer.apply_chat_template(
                [m.as_template_dict() for m in messages],
                tools=None if conversation.tools is None else list(conversation.tools),
                tokenize=False,
                add_generation_prompt=generation,
                **values,
            )
            text.encode("utf-8")
        except Exception as error:  # a template is a program: it may fail as any program does
            raise DataError(
                f"{conversation.origin}: the chat template refuses the conversation: {one_line(error)}"
            ) from error
        return str(text)


def has_reasoning(message: Message) -> bool:
    """Whether an assistant message carries reasoning, in its own field or written into its content."""
    return bool((message.reasoning_content or "").strip()) or "</think>" in message.content


def template_text(tokenizer: Any) -> str:
    """Return the template's source; of several named ones, all. Empty if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(f"{name}\n{template[name]}" for name in sorted(template))
    return template or ""


def _own_words(answer: str, message: Message, where: str) -> str:
    """Cut a rendered answer behind the message's own last words; the template wrote what follows, not the target."""
    words = message.content.rstrip() or (message.reasoning_content or "").rstrip()
    at = answer.rfind(words) if words else -1
    if at < 0:
        raise DataError(
            f"{where} was cut at a token limit, and the chat template does not show its last words; delete it"
        )
    return answer[: at + len(words)]
