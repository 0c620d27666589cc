"""Samples into rows: what is too long is cut or dropped, the rest is placed whole, and every loss is counted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slipstream.config import DataConfig
from slipstream.data.render import RenderStats
from slipstream.errors import DataError
from slipstream.records import RenderedSample


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What became of the data. Tokens and supervised tokens are those that are in rows.

    truncated: samples cut to the row (drop mode: none). answers_cut: those of them that lost supervised tokens,
    supervised_lost in number. dropped: samples not in any row, being over-long (dropped_over_long, drop mode) or having
    nothing supervised within a row (dropped_unsupervised: a prompt as long as the row). anchors: places where a block
    can start, a supervised token followed by another. without_answer: conversations without an assistant turn.
    """

    conversations: int
    samples: int
    rows: int
    row_length: int
    tokens: int
    supervised: int
    anchors: int
    longest: int
    truncated: int
    answers_cut: int
    supervised_lost: int
    dropped_over_long: int
    dropped_unsupervised: int
    fanned_out: int
    boundary_merges: int
    without_answer: int
    turns: int
    reasoning_turns: int

    @property
    def dropped(self) -> int:
        """Samples that are in no row."""
        return self.dropped_over_long + self.dropped_unsupervised

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens, padding apart."""
        return self.supervised / self.tokens if self.tokens else 0.0

    @property
    def padding_share(self) -> float:
        """Padding over all places in rows."""
        return 1.0 - self.tokens / (self.rows * self.row_length) if self.rows else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return every count, and the shares."""
        return {
            **asdict(self),
            "dropped": self.dropped,
            "supervised_share": self.supervised_share,
            "padding_share": self.padding_share,
        }

    def lines(self) -> list[str]:
        """Return the report as lines to print; a count that should be looked at has a line of its own."""
        out = [
            f"{self.conversations:,} conversations, {self.samples:,} samples in {self.rows:,} rows of "
            f"{self.row_length:,} ({self.padding_share:.1%} padding)",
            f"{self.tokens:,} tokens, {self.supervised:,} supervised ({self.supervised_share:.1%}), "
            f"{self.anchors:,} places for a block",
        ]
        told = {
            "truncated": f"{self.truncated:,} samples longer than a row were truncated; {self.answers_cut:,} of them "
            f"lost {self.supervised_lost:,} supervised tokens (longest sample: {self.longest:,})",
            "dropped_over_long": f"{self.dropped_over_long:,} samples longer than a row were dropped, with "
            f"{self.supervised_lost:,} supervised tokens (longest: {self.longest:,})",
            "dropped_unsupervised": f"{self.dropped_unsupervised:,} samples were dropped: no answer token fits in a "
            "row behind the prompt; raise data.row_length to keep them",
            "without_answer": f"{self.without_answer:,} conversations have no assistant turn and were left out",
            "fanned_out": f"{self.fanned_out:,} conversations were fanned out into a sample for each turn, because the "
            "template rewrites earlier turns",
            "boundary_merges": f"{self.boundary_merges:,} answers would merge with their prompt's last token; they are "
            "tokenized apart, as a server does",
        }
        out += [line for name, line in told.items() if getattr(self, name)]
        if self.reasoning_turns:
            out.append(f"{self.reasoning_turns:,} of {self.turns:,} turns have reasoning")
        return out


def pack_samples(
    samples: Iterable[RenderedSample], data: DataConfig, stats: RenderStats
) -> tuple[dict[str, np.ndarray], PackReport]:
    """Return the arrays of a PackedDataset and the report. Raises DataError if nothing supervised is left."""
    kept, counts = _fit(samples, data)
    if not kept:
        raise DataError(_nothing(stats.conversations, counts, data))
    rows = best_fit([len(s.ids) for s in kept], data.row_length)
    order = [i for row in rows for i in row]
    ids = np.concatenate([kept[i].ids for i in order]).astype(np.int32, copy=False)
    mask = np.concatenate([kept[i].loss_mask for i in order])
    starts = np.concatenate([[0], np.cumsum([len(kept[i].ids) for i in order])]).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    anchors = mask[:-1] & mask[1:]
    anchors[starts[1:-1] - 1] = False  # a block may not start at the last token of a document
    if not anchors.any():
        raise DataError(
            f"no answer has two supervised tokens in a row ({int(mask.sum())} supervised in all), so no block can "
            "start; give longer answers or raise data.row_length"
        )
    arrays = {"ids": ids, "loss_mask": mask, "starts": starts, "rows": ends, "used_ids": np.unique(ids)}
    report = PackReport(
        conversations=stats.conversations,
        samples=len(kept),
        rows=len(rows),
        row_length=data.row_length,
        tokens=len(ids),
        supervised=int(mask.sum()),
        anchors=int(anchors.sum()),
        **counts,
        fanned_out=stats.fanned_out,
        boundary_merges=stats.boundary_merges,
        without_answer=stats.without_answer,
        turns=stats.turns,
        reasoning_turns=stats.reasoning_turns,
    )
    return arrays, report


def _fit(samples: Iterable[RenderedSample], data: DataConfig) -> tuple[list[RenderedSample], dict[str, int]]:
    """Cut or drop what is longer than a row, and drop what has nothing supervised; count both."""
    names = ("longest", "truncated", "answers_cut", "supervised_lost", "dropped_over_long", "dropped_unsupervised")
    counts = dict.fromkeys(names, 0)
    kept: list[RenderedSample] = []
    for sample in samples:
        counts["longest"] = max(counts["longest"], len(sample.ids))
        if len(sample.ids) > data.row_length:
            lost = int(sample.loss_mask[data.row_length :].sum())
            if data.over_long == "drop":
                counts["dropped_over_long"] += 1
                counts["supervised_lost"] += int(sample.loss_mask.sum())
                continue
            counts["supervised_lost"] += lost
            sample = RenderedSample(
                ids=sample.ids[: data.row_length], loss_mask=sample.loss_mask[: data.row_length], origin=sample.origin
            )
            if sample.loss_mask.any():
                counts["truncated"] += 1
                counts["answers_cut"] += lost > 0
        if not sample.loss_mask.any():
            counts["dropped_unsupervised"] += 1
            continue
        kept.append(sample)
    return kept, counts


def _nothing(conversations: int, counts: dict[str, int], data: DataConfig) -> str:
    """Say why no supervised token is left."""
    if counts["dropped_over_long"]:
        return (
            f"no sample fits in a row of {data.row_length} tokens (the longest has {counts['longest']}); "
            "raise data.row_length or set data.over_long to truncate"
        )
    if counts["dropped_unsupervised"]:
        return (
            f"no supervised token is left: in a row of {data.row_length} tokens no answer token fits behind its prompt "
            f"(the longest sample has {counts['longest']}); raise data.row_length"
        )
    return (
        f"no supervised token anywhere: none of the {conversations} conversations has an assistant turn; "
        "let the target answer them first (prepare --regenerate)"
    )


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Place items into rows, the longest first, each in the fullest row with room. Return the items of each row.

    Deterministic: equal lengths keep their order. O(n log capacity) searches; at most ``capacity`` distinct rooms.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # distinct amounts of free room, ascending
    having: dict[int, list[int]] = {}  # rows by their free room
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, capacity
        else:
            room = rooms[at]
            row = having[room].pop()
            if not having[room]:
                del having[room], rooms[at]
        rows[row].append(item)
        left = room - length
        if left:
            if left not in having:
                having[left] = []
                insort(rooms, left)
            having[left].append(row)
    return rows
