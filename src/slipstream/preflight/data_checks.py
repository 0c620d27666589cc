"""``render-parity``, ``mask-token``: trained ids are those that a server sees; the mask token means nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream.data.conversations import read_conversations
from slipstream.data.render import Renderer
from slipstream.preflight.report import CheckFailure
from slipstream.preflight.subject import DOCUMENTS, Subject
from slipstream.records import Conversation, Message, RenderedSample

CONVERSATIONS = 32
_MOST_DOCUMENTS = 20_000


def render_parity(subject: Subject) -> str:
    """Trained ids are those that a server prefills, and what it prefills is never supervised."""
    run = subject.run
    data, tokenizer = run.recipe.data, run.target.tokenizer
    renderer = Renderer(tokenizer, data=data, stop_ids=run.target.info.eos_ids)
    kept = _kept_documents(subject)
    turns = found = 0
    samples: list[RenderedSample] = []
    # What lies past data.max_samples was not packed, and is not looked for.
    most = min(CONVERSATIONS, data.max_samples or CONVERSATIONS)
    for conversation in read_conversations(data.train, prompt_completion=data.prompt_completion, max_samples=most):
        rendered = renderer.render(conversation)
        samples += rendered
        if conversation.kind == "raw":
            turns += _check_raw(conversation, rendered, renderer, tokenizer)
        else:
            turns += _check_chat(conversation, rendered, renderer, tokenizer, data)
        for sample in rendered:
            ids, mask = sample.ids[: data.row_length], sample.loss_mask[: data.row_length]
            over_long = len(sample.ids) > data.row_length and data.over_long == "drop"
            if kept is not None and mask.any() and not over_long:
                if _key(ids, mask) not in kept:
                    raise CheckFailure(
                        f"{sample.origin}: its ids and loss mask are in no packed row; rows were made from other "
                        "data or "
                        "settings: remove the cache of packed rows"
                    )
                found += 1
    supervised = sum(int(s.loss_mask.sum()) for s in samples)
    if supervised == 0 or run.dataset.report.supervised == 0:
        raise CheckFailure("no token is supervised; give conversations with answers of the assistant")
    share = run.dataset.report.supervised_share
    packed = f", {found} samples found in the rows" if kept is not None else ""
    return f"{turns} answers behind the ids that a server prefills{packed}; {share:.1%} of tokens supervised"


def _kept_documents(subject: Subject) -> set[bytes] | None:
    """Return a key of every packed document; None where there are too many to look through at each start."""
    if subject.run.dataset.report.samples > _MOST_DOCUMENTS:
        return None
    return {_key(ids, mask) for ids, mask in subject.run.dataset.documents()}


def _key(ids: np.ndarray, mask: np.ndarray) -> bytes:
    body = np.ascontiguousarray(ids, dtype=np.int32).tobytes() + np.ascontiguousarray(mask, dtype=np.bool_).tobytes()
    return hashlib.blake2b(body, digest_size=16).digest()


def _thinks(message: Message, setting: str) -> bool:
    """The server's ``enable_thinking`` for an answer: on where the answer has reasoning, unless the recipe fixes it."""
    if setting != "auto":
        return setting == "on"
    return bool((message.reasoning_content or "").strip()) or "</think>" in message.content


def _ids(
    tokenizer: Any, conversation: Conversation, messages: Sequence[Message], prompt: bool, extra: dict[str, Any]
) -> list[int]:
    """Render and tokenize as an inference server does: the template's text, no special tokens added."""
    text = tokenizer.apply_chat_template(
        [m.as_template_dict() for m in messages],
        tools=None if conversation.tools is None else list(conversation.tools),
        tokenize=False,
        add_generation_prompt=prompt,
        **extra,
    )
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _check_chat(
    conversation: Conversation, samples: Sequence[RenderedSample], renderer: Renderer, tokenizer: Any, data: Any
) -> int:
    """Check every supervised turn of one conversation and return how many there were. Raises CheckFailure."""
    places = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
    if data.last_turn_only:
        places = places[-1:]
    template = str(getattr(tokenizer, "chat_template", "") or "")
    claimed = [np.zeros(len(s.ids), dtype=np.bool_) for s in samples]
    for place in places:
        message = conversation.messages[place]
        extra = dict(data.template_kwargs)
        if "enable_thinking" in template:
            extra["enable_thinking"] = _thinks(message, data.thinking)
        prefill = _ids(tokenizer, conversation, conversation.messages[:place], True, extra)
        through = _ids(tokenizer, conversation, conversation.messages[: place + 1], False, extra)
        if place == len(conversation.messages) - 1 and renderer.prompt_ids(conversation) != prefill:
            raise CheckFailure(
                f"{conversation.origin}: the prompt that is decoded is not what a server prefills; check data.thinking"
            )
        homes = [
            n for n, s in enumerate(samples)
            if s.ids[: len(prefill)].tolist() == prefill and len(s.ids) > len(prefill) and s.loss_mask[len(prefill)]
        ]  # fmt: skip
        if not homes:
            raise CheckFailure(
                f"{conversation.origin}: messages[{place}]: no sample has the {len(prefill)} ids that a server "
                "prefills, "
                "followed by a supervised token: template, special tokens or loss mask differ from serving"
            )
        for n in homes:
            # Where the answer ends in this sample: its own render, or that without what only the prompt holds.
            body = len(through) - len(prefill)
            end = len(prefill) + body if through[: len(prefill)] == prefill else len(samples[n].ids)
            claimed[n][len(prefill) : end] = True
    for sample, inside in zip(samples, claimed, strict=True):
        stray = np.flatnonzero(sample.loss_mask & ~inside)
        if len(stray):
            at = int(stray[0])
            text = tokenizer.decode(sample.ids[at : at + 3].tolist())
            raise CheckFailure(
                f"{conversation.origin}: token {at} ({text!r}) is supervised, but a server's prompt supplies it; only "
                "what the target writes may be supervised"
            )
    return len(places)


def _check_raw(
    conversation: Conversation, samples: Sequence[RenderedSample], renderer: Renderer, tokenizer: Any
) -> int:
    """Check a row without template: the prompt is not supervised and comes first. Raises CheckFailure."""
    if not conversation.prompt:
        return len(samples)
    prefill = [int(i) for i in tokenizer(conversation.prompt, verbose=False)["input_ids"]]
    while prefill and prefill[-1] == getattr(tokenizer, "eos_token_id", None):
        prefill.pop()
    if renderer.prompt_ids(conversation) != prefill:
        raise CheckFailure(f"{conversation.origin}: the prompt that is decoded is not what a server prefills")
    for sample in samples:
        if sample.loss_mask[: len(prefill)].any():
            raise CheckFailure(
                f"{conversation.origin}: a token of the prompt is supervised; only the completion may be"
            )
    return len(samples)


def mask_token(subject: Subject) -> str:
    """The mask token is a real, unused row of the target's embedding; every slot behind an anchor holds it."""
    run, info = subject.run, subject.run.target.info
    mask, tokenizer = run.config.mask_token_id, subject.run.target.tokenizer
    cure = "set drafter.mask_token_id to an unused row, or to -1 to have one found"
    rows = run.target.parts.embed_tokens.weight.shape[0]
    if not 0 <= mask < rows:
        raise CheckFailure(f"mask token {mask} is outside the target's {rows} embedding rows; {cure}")
    names = {
        "pad": tokenizer.pad_token_id,
        "eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id,
        "unk": tokenizer.unk_token_id,
    }
    for name, token in names.items():
        if token is not None and mask == token:
            raise CheckFailure(f"mask token {mask} is the tokenizer's {name} token; {cure}")
    if mask in info.eos_ids or mask == info.pad_id:
        raise CheckFailure(f"mask token {mask} ends or pads the target's text; {cure}")
    if mask in run.dataset.used_ids:
        raise CheckFailure(f"mask token {mask} ({tokenizer.convert_ids_to_tokens(mask)!r}) occurs in the data; {cure}")
    row = run.target.embed(torch.tensor([mask], device=run.target.device))
    if not bool(torch.isfinite(row).all()):
        raise CheckFailure(f"the embedding of mask token {mask} is not finite; {cure}")
    blocks = subject.blocks(subject.batch([range(DOCUMENTS)]))
    if not bool((blocks.noise_ids[..., 1:] == mask).all()):
        raise CheckFailure(
            f"a slot behind an anchor does not hold mask token {mask}: training and decoding would differ"
        )
    if not bool((blocks.noise_ids[..., 0] != mask).all()):
        raise CheckFailure(f"an anchor is the mask token {mask} itself; {cure}")
    kind = (
        "past the tokenizer"
        if mask >= max(tokenizer.get_vocab().values()) + 1
        else repr(tokenizer.convert_ids_to_tokens(mask))
    )
    return f"id {mask} ({kind}) of {rows} rows, unused in the data"
