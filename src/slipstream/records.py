"""The records that cross from one stage to the next. Frozen; torch is imported for type checkers only.

Shape letters: R rows, S tokens of a row, N anchors (blocks) of a row, B block size, K tapped layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

ROLES = ("system", "developer", "user", "assistant", "tool")
PADDING_DOCUMENT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation, in the fields that chat templates read."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def as_template_dict(self) -> dict[str, Any]:
        """Return the dict that ``apply_chat_template`` takes; absent fields are left out."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        for key in ("reasoning_content", "tool_call_id", "name"):
            value = getattr(self, key)
            if value is not None:
                row[key] = value
        if self.tool_calls is not None:
            row["tool_calls"] = list(self.tool_calls)
        return row


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One sample as read. ``origin`` names file and line (``train.jsonl:7``) for messages.

    ``chat`` rows are rendered by the tokenizer's chat template. ``raw`` rows are ``prompt`` (never supervised, may be
    empty) followed by ``completion`` (supervised), without a template.
    """

    origin: str
    kind: Literal["chat", "raw"] = "chat"
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    prompt: str = ""
    completion: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedSample:
    """Token ids ``int32 [tokens]`` and loss mask ``bool [tokens]``: True where the target itself would have written."""

    ids: np.ndarray
    loss_mask: np.ndarray
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Rows of fixed length. Documents are contiguous within a row; padding has document id -1 and position 0.

    ids int64 [R, S]; loss_mask bool [R, S]; document_ids int64 [R, S]; positions int64 [R, S], from 0 in each document.
    ``index`` is the micro-batch's number in the run: the same index is the same rows whatever computes it.
    """

    index: int
    ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    positions: Tensor

    def to(self, device: Any) -> PackedBatch:
        """Return the batch with its tensors on ``device``."""
        return PackedBatch(
            index=self.index,
            ids=self.ids.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureBatch:
    """A packed batch and what the target computed for it.

    features [R, S, K*H]: context features, taps concatenated in the order of target_layer_ids. final_states [R, S, H]:
    what the final norm gives, from which the target's head predicts the next token; None unless labels are soft. Both
    may be parts of one tensor, so that they are not contiguous.
    """

    batch: PackedBatch
    features: Tensor
    final_states: Tensor | None = None

    def to(self, device: Any) -> FeatureBatch:
        """Return the batch with all its tensors on ``device``."""
        states = self.final_states
        return FeatureBatch(
            batch=self.batch.to(device),
            features=self.features.to(device, non_blocking=True),
            final_states=None if states is None else states.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one micro-batch gave. All are 0-d or 1-d tensors on the drafter's device, so that no host sync is needed.

    loss_sum: sum of weight * cross-entropy (carries the gradient); weight_sum: sum of weights (no gradient); hard_sum:
    sum of weight * cross-entropy of the data's tokens (no gradient): the value of loss_sum unless labels are soft;
    blocks: anchors that were kept; accepted: sum over kept blocks of the leading slots whose argmax equals the label
    (teacher-forced); correct_by_slot / valid_by_slot: [B-1] counts of right and of supervised slots.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    blocks: Tensor
    accepted: Tensor
    correct_by_slot: Tensor
    valid_by_slot: Tensor
    hard_sum: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One decoded response.

    output_ids: generated tokens, eos included when it was generated. accept_lengths: tokens committed by each target
    pass after the prefill's own token (bonus included, each in 1..B; the last may be cut by eos or the token limit).
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    accept_lengths: tuple[int, ...] = ()
    finish: Literal["eos", "length"] = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Measured by real block decoding. ``as_json`` is the layout of ``evaluation.json``."""

    tau: float
    tau_per_response: float
    acceptance_by_position: tuple[float, ...]
    histogram: tuple[int, ...]
    lossless_responses: int
    lossless_equal: int
    first_differences: tuple[dict[str, Any], ...]
    tokens_per_second: float
    baseline_tokens_per_second: float
    baselines: dict[str, float]
    prompts: int
    generated_tokens: int
    temperature: float
    block_size: int
    batch_size: int
    max_new_tokens: int
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values. ``tau`` is token-weighted, bonus token included; ``accepted_drafts`` is tau-1."""
        return {
            "tau": self.tau,
            "tau_per_response": self.tau_per_response,
            "accepted_drafts": self.tau - 1.0,
            "acceptance_by_position": list(self.acceptance_by_position),
            "histogram": list(self.histogram),
            "lossless": {
                "responses": self.lossless_responses,
                "equal": self.lossless_equal,
                "first_differences": list(self.first_differences),
            },
            "speedup": self.tokens_per_second / self.baseline_tokens_per_second
            if self.baseline_tokens_per_second > 0
            else None,
            "tokens_per_second": self.tokens_per_second,
            "baseline_tokens_per_second": self.baseline_tokens_per_second,
            "baselines": dict(self.baselines),
            "prompts": self.prompts,
            "generated_tokens": self.generated_tokens,
            "temperature": self.temperature,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "max_new_tokens": self.max_new_tokens,
            **self.details,
        }
