"""What a regeneration tells: where it is, and what became of the conversations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RegenerateProgress:
    """Conversations done and in all; tokens written and their rate in this process; seconds left (None at first)."""

    done: int
    total: int
    tokens: int
    tokens_per_second: float
    eta_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RegenerateReport:
    """What became of the conversations, resumed ones included.

    rows: conversations written. answers: new assistant turns in them. unfinished: answers cut at the token limit.
    empty: turns where nothing was said. unrenderable: answers that the chat template refuses. too_long: prompts without
    room for an answer. Those turns and what follows them are left out. retokenised_differently: answers whose text does
    not give back the ids that the target wrote. duplicate_turns: answers said before in the same conversation.
    looping_8, looping_24: answers with a loop of so many tokens at most (``loops``).
    unbalanced_think: finished answers whose think tags do not pair. kept_tool_calls: assistant turns kept as given.
    ``resumed`` conversations were answered by an earlier process; ``seconds`` are this one's.
    """

    output: str
    conversations: int
    rows: int
    answers: int
    tokens: int
    unfinished: int
    empty: int
    unrenderable: int
    too_long: int
    retokenised_differently: int
    duplicate_turns: int
    unbalanced_think: int
    kept_tool_calls: int
    resumed: int
    seconds: float
    looping_8: int = 0
    looping_24: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return every field."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines to print; a count that should be looked at has a line of its own."""
        out = [
            f"{self.rows:,} of {self.conversations:,} conversations written to {self.output}: {self.answers:,} "
            f"answers, {self.tokens:,} tokens"
        ]
        told = {
            "unfinished": "answers were cut at regenerate.max_new_tokens",
            "empty": "turns were left out: the target said nothing",
            "unrenderable": "turns were left out: the chat template refuses the answer",
            "too_long": "turns were left out: the prompt leaves no room for regenerate.max_new_tokens; lower it "
            "to keep them",
            "retokenised_differently": "answers do not tokenize to the ids that the target wrote",
            "duplicate_turns": "answers repeat an earlier one of their conversation",
            "looping_8": "answers loop with a piece of at most 8 tokens",
            "looping_24": "answers loop with a piece of at most 24 tokens (those of 8 among them)",
            "unbalanced_think": "answers have think tags that do not pair",
            "kept_tool_calls": "assistant turns with tool calls were kept as given",
        }
        return out + [f"{getattr(self, name):,} {text}" for name, text in told.items() if getattr(self, name)]


def no_answer_cure(report: RegenerateReport, max_new_tokens: int, max_positions: int) -> str:
    """Return what to do about a regeneration without one usable answer, by its commonest cause, in words."""
    cures = {
        "too_long": f"lower regenerate.max_new_tokens from {max_new_tokens}: with the prompt it must fit the target's "
        f"{max_positions} positions (and, to be trained on whole, data.row_length)",
        "unfinished": f"raise regenerate.max_new_tokens from {max_new_tokens} or set regenerate.keep_unfinished",
        "empty": "check the prompts and the chat template with slipstream prepare --show 3",
        "unrenderable": "the chat template refuses what the target writes: use the template that it was trained with",
    }
    return cures[max(cures, key=lambda name: getattr(report, name))]
