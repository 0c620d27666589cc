"""``head-parity``, ``tied-head``: what is read from the target, and what is borrowed from it, are the target's own."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.preflight.report import CheckFailure
from slipstream.preflight.subject import Subject
from slipstream.target.families import text_config
from slipstream.training.step import soft_labels

_AGREEMENT = 0.99  # ties in low precision may fall either way


def head_parity(subject: Subject) -> str:
    """head(norm(captured last state)) chooses the target's own next tokens; each tap is hidden_states[id + 1].

    Soft labels, as the training step makes them, are the target's own distribution before each slot's token.
    """
    agree = total = 0
    compared = 0
    layer_ids, hidden = subject.run.config.target_layer_ids, subject.run.target.info.hidden_size
    for alone in subject.alone:
        agree += int((alone.from_last == alone.argmax).sum())
        total += len(alone.argmax)
        if alone.hidden is None:
            continue
        for slot, layer in enumerate(layer_ids):
            part = slice(slot * hidden, (slot + 1) * hidden)
            if not torch.equal(alone.features[:, part], alone.hidden[:, part]):
                raise CheckFailure(
                    f"the features of layer {layer} are not its output (hidden_states[{layer + 1}]): an index is "
                    "off by "
                    "one, or another layer is hooked; a drafter trained on them fails in every server"
                )
            compared += 1
    if agree < _AGREEMENT * total:
        raise CheckFailure(
            f"head(norm(last layer's state)) agrees with the target's next token at {agree} of {total} positions: "
            "the last "
            "state, the norm or the head is not the target's; check the family's layers and that all weights "
            "were loaded"
        )
    taps = f", {len(layer_ids)} taps are the layers' outputs" if compared else " (the model returns no hidden_states)"
    return f"{agree} of {total} positions agree{taps}{_soft_labels(subject)}"


def _soft_labels(subject: Subject) -> str:
    """Compare soft labels with what the model itself returns for each document alone; say nothing if labels are hard.

    The measure is total variation, 0 to 1: half the sum over the vocabulary of the difference of two probabilities.
    """
    packed, target, share = subject.packed, subject.run.target, subject.run.settings.soft_share
    if not share:
        return ""
    blocks = subject.blocks(packed.batch)
    valid = blocks.valid[0]
    labels = soft_labels(packed, blocks, target.head, share)
    found = labels.head(labels.states[labels.source[0][valid]]).float().softmax(-1)
    # Where a label's token stands in its document is worked out here without the sources that are being checked.
    slots = torch.arange(1, blocks.valid.shape[-1] + 1, device=valid.device)
    token = (blocks.anchors[0][:, None] + slots)[valid]
    places = zip(packed.batch.document_ids[0, token].tolist(), packed.batch.positions[0, token].tolist(), strict=True)
    own = torch.stack([_logits(subject, document)[position - 1] for document, position in places])
    apart = 0.5 * (found - own.float().softmax(-1)).abs().sum(-1)
    worst, middle = float(apart.max()), float(apart.median())
    # As for features: in low precision rounding depends on a matmul's shape, and the typical token decides.
    if (not worst <= 1e-3) if target.dtype == torch.float32 else (not middle <= 0.1):
        raise CheckFailure(
            f"soft labels differ from the target's own distribution by up to {worst:.2g} (median {middle:.2g}, total "
            "variation): they are another token's, or head, scale or cap are not the target's; set training.labels = "
            "hard"
        )
    return f"; {len(apart)} soft labels within {worst:.1e} of its own distribution"


def _logits(subject: Subject, document: int) -> Tensor:
    """Return what the model returned for a document of the slice alone, [T, V]."""
    logits = subject.alone[document].logits
    assert logits is not None
    return logits


def tied_head(subject: Subject) -> str:
    """Embedding and head are the target's, through its own tying, and no part of the drafter."""
    run, target = subject.run, subject.run.target
    own = target.model.get_output_embeddings().weight
    if target.head_weight.data_ptr() != own.data_ptr() or target.head_weight.shape != own.shape:
        raise CheckFailure(
            "the head that the loss uses is not the target's output embedding; take it through the model's own tying"
        )
    config = text_config(target.model.config)
    tied = bool(getattr(target.model.config, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))
    embedding = target.parts.embed_tokens.weight
    if tied and not (own.data_ptr() == embedding.data_ptr() or torch.equal(own, embedding)):
        raise CheckFailure(
            "the target ties its head to its embedding, but the two differ: the head was initialised at random"
        )
    agree = total = 0
    for document, alone in zip(subject.documents, subject.alone, strict=True):
        ids = torch.tensor(document.ids, device=target.device)
        worst = _relative(target.embed(ids), alone.first_input)
        if not worst <= (1e-3 if target.dtype == torch.float32 else 2e-2):
            raise CheckFailure(
                f"the borrowed embedding differs by {worst:.2g} from what the target's first layer is given: a "
                "scale or a "
                "norm is left out; the drafter's blocks would not look like the target's tokens"
            )
        agree += int((alone.from_weight == alone.argmax).sum())
        total += len(alone.argmax)
    if agree < _AGREEMENT * total:
        raise CheckFailure(
            f"the head's weight alone chooses the target's next token at {agree} of {total} positions; the loss "
            "would train "
            "towards another head than the one that verifies"
        )
    names = [n for n in run.draft_model.state_dict() if "embed" in n or "lm_head" in n]
    trainable = [n for n, p in target.model.named_parameters() if p.requires_grad]
    if names or trainable:
        raise CheckFailure(
            f"{(names + trainable)[0]} would be trained; embedding and head stay the target's and frozen"
        )
    return (
        f"{'tied' if tied else 'untied'}, {agree} of {total} next tokens from the head's weight, embedding as in "
        "the first layer"
    )


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)).max())
