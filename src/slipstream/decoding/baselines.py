"""Drafters that cost nothing: what a table or a search in the text itself would have accepted on the same answers.

Greedy block decoding is a walk over the target's answer, so a free drafter's acceptance needs no target: at each anchor
it proposes B-1 tokens, those that agree with the answer are accepted, and the walk goes on after the bonus token.
Passes are counted as ``acceptance.summarise`` counts them: a pass is left out when everything up to the end of the
answer was accepted, because the real pass would have been cut there.

========================  ===================================================================================
bigram                    the most frequent follower of the last token in the training sequences, chained
trigram                   the same for the last two tokens; falls back to the bigram table
prompt_lookup             the newest earlier place in prompt and answer where the last 3 tokens stood (else 2,
                          else 1), copied on; a copy that reaches the end goes on into what it proposed
lookup_bigram             prompt lookup on 3 or 2 tokens, else the bigram table, at every slot
========================  ===================================================================================

Ties in a table go to the smaller token id. Where a drafter knows nothing, its block ends early.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

Draft = Callable[[list[int], int], int | None]
"""Takes the text so far, drafts included, and how many of its last tokens are drafts; returns the next, or None."""


class NextTokenTable:
    """The most frequent follower of each run of ``order`` tokens."""

    def __init__(self, sequences: Iterable[Sequence[int]], order: int) -> None:
        counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for sequence in sequences:
            for at in range(order, len(sequence)):
                counts[tuple(sequence[at - order : at])][sequence[at]] += 1
        self.order = order
        self._best = {key: min(c, key=lambda t: (-c[t], t)) for key, c in counts.items()}

    def next(self, text: Sequence[int]) -> int | None:
        """Return the follower of the last tokens of ``text``, or None."""
        return self._best.get(tuple(text[-self.order :])) if len(text) >= self.order else None


class Lookup:
    """Finds the newest earlier occurrence of the last n tokens of a growing text, in constant time a token."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def learn(self, text: Sequence[int]) -> None:
        """Index the runs of ``text`` that have a successor in it; called with ever longer prefixes of one text."""
        for end in range(max(self._known, 1), len(text)):
            for size in self._sizes:
                if end >= size:
                    self._after[tuple(text[end - size : end])] = end
        self._known = len(text)

    def find(self, text: Sequence[int]) -> int | None:
        """Return the place that follows the newest earlier occurrence of the longest run that has one, or None."""
        for size in self._sizes:
            if len(text) >= size and (at := self._after.get(tuple(text[-size:]))) is not None:
                return at
        return None


def walk(
    prompt: Sequence[int], answer: Sequence[int], block_size: int, draft: Draft, lookup: Lookup | None
) -> list[int]:
    """Return the accept lengths (bonus included) of one answer's whole passes."""
    text, lengths, at = list(prompt) + list(answer[:1]), [], 0
    while at < len(answer) - 1:
        if lookup is not None:
            lookup.learn(text)
        proposal: list[int] = []
        remaining = len(answer) - 1 - at
        for slot in range(min(block_size - 1, remaining)):
            token = draft(text + proposal, slot)
            if token is None or token != answer[at + 1 + slot]:
                break
            proposal.append(token)
        if len(proposal) < remaining:
            lengths.append(len(proposal) + 1)
        taken = min(len(proposal) + 1, remaining)
        text.extend(answer[at + 1 : at + 1 + taken])
        at += taken
    return lengths


def _lookup_draft(lookup: Lookup, otherwise: NextTokenTable | None) -> Draft:
    """Return a drafter that copies from the newest match, and asks ``otherwise`` where there is none."""
    source: int | None = None

    def draft(text: list[int], slot: int) -> int | None:
        nonlocal source
        source = lookup.find(text) if slot == 0 or source is None else source + 1
        if source is not None and source < len(text):
            return text[source]
        source = None
        return otherwise.next(text) if otherwise is not None else None

    return draft


def baseline_taus(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    training_sequences: Sequence[Sequence[int]],
    block_size: int,
) -> dict[str, float]:
    """Return token-weighted tau (bonus included) of the free drafters on ``answers``. Pure; thread-safe.

    prompts, answers: token ids, one answer for each prompt (its first token comes from the prefill and is no pass);
    training_sequences: what the tables are counted on; without any, only ``prompt_lookup`` is returned.
    A drafter none of whose passes is whole (short answers, all accepted) gets the block size, its upper bound.
    """
    lists = list(training_sequences)
    bigram, trigram = NextTokenTable(lists, 1), NextTokenTable(lists, 2)
    walks: dict[str, list[int]] = {"prompt_lookup": []}
    if lists:
        walks = {"bigram": [], "trigram": [], "prompt_lookup": [], "lookup_bigram": []}

    def from_trigram(text: list[int], _: int) -> int | None:
        token = trigram.next(text)
        return bigram.next(text) if token is None else token

    for prompt, answer in zip(prompts, answers, strict=True):
        for name, lengths in walks.items():
            lookup = None
            draft: Draft
            if name == "bigram":
                draft = lambda text, _: bigram.next(text)  # noqa: E731
            elif name == "trigram":
                draft = from_trigram
            elif name == "prompt_lookup":
                lookup = Lookup((3, 2, 1))
                draft = _lookup_draft(lookup, None)
            else:
                lookup = Lookup((3, 2))
                draft = _lookup_draft(lookup, bigram)
            lengths.extend(walk(prompt, answer, block_size, draft, lookup))
    return {name: sum(lengths) / len(lengths) if lengths else float(block_size) for name, lengths in walks.items()}
