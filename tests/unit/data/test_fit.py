"""Placement in rows: nothing lost, nothing cut without being counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import DataConfig
from slipstream.data.fit import best_fit, pack_samples
from slipstream.data.render import RenderStats
from slipstream.errors import DataError
from slipstream.records import RenderedSample


def sample(length: int, prompt: int, first: int = 0) -> RenderedSample:
    """``length`` tokens counted from ``first``, supervised from ``prompt`` on."""
    ids = np.arange(first, first + length, dtype=np.int32)
    return RenderedSample(ids=ids, loss_mask=np.arange(length) >= prompt, origin="o")


def best_fit_by_search(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same rule, written as a search over all rows: the fullest row with room, the latest opened of equals."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r in range(len(rows)) if rooms[r] >= lengths[item]]
        if fitting:
            row = min(fitting, key=lambda r: rooms[r])
        else:
            rows.append([])
            rooms.append(capacity)
            row = len(rows) - 1
        rows[row].append(item)
        rooms[row] -= lengths[item]
    return rows


@given(st.lists(st.integers(1, 12), max_size=60))
def test_best_fit_places_each_item_once_within_capacity(lengths: list[int]) -> None:
    rows = best_fit(lengths, 12)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= 12 for row in rows)
    assert rows == best_fit(lengths, 12)
    # As tight as the plain search (which of two equally full rows is taken makes no difference to that).
    want = best_fit_by_search(lengths, 12)
    assert sorted(sum(lengths[i] for i in r) for r in rows) == sorted(sum(lengths[i] for i in r) for r in want)


def test_best_fit_fills_tightly() -> None:
    rows = best_fit([3, 7, 5, 5, 8, 2, 10], 10)
    assert len(rows) == 4
    assert best_fit([], 10) == []


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=30),
    st.sampled_from(["truncate", "drop"]),
)
def test_what_is_not_in_rows_is_counted(shapes: list[tuple[int, int]], over_long: str) -> None:
    samples = [sample(length, prompt, 1000 * i) for i, (length, prompt) in enumerate(shapes)]
    data = DataConfig(row_length=16, over_long=over_long)  # type: ignore[arg-type]
    try:
        arrays, report = pack_samples(samples, data, RenderStats(conversations=len(samples)))
    except DataError:
        fits = [s for s in samples if over_long == "truncate" or len(s.ids) <= 16]
        assert all((s.loss_mask[:16][:-1] & s.loss_mask[:16][1:]).sum() == 0 for s in fits)
        return
    assert report.samples + report.dropped == len(samples)
    assert report.supervised + report.supervised_lost == sum(int(s.loss_mask.sum()) for s in samples)
    assert report.tokens == len(arrays["ids"]) <= report.rows * 16
    assert report.supervised == int(arrays["loss_mask"].sum())
    assert report.longest == max(len(s.ids) for s in samples)
    if over_long == "drop":
        assert report.truncated == report.answers_cut == 0
    for begin, end in zip(arrays["starts"][:-1], arrays["starts"][1:], strict=True):
        document = samples[arrays["ids"][begin] // 1000]
        assert arrays["ids"][begin:end].tolist() == document.ids[:16].tolist()
        assert arrays["loss_mask"][begin:end].tolist() == document.loss_mask[:16].tolist()


def test_anchors_do_not_cross_documents() -> None:
    # Each document has one supervised pair; the neighbouring supervised tokens of two documents are none.
    _, report = pack_samples([sample(2, 0), sample(2, 0), sample(3, 1)], DataConfig(row_length=16), RenderStats())
    assert (report.rows, report.anchors) == (1, 3)


def test_a_prompt_longer_than_the_row_is_dropped_and_said() -> None:
    data = DataConfig(row_length=8)
    _, report = pack_samples([sample(12, 9), sample(12, 4), sample(6, 2)], data, RenderStats(conversations=3))
    assert (report.samples, report.dropped_unsupervised, report.truncated, report.answers_cut) == (2, 1, 1, 1)
    assert report.supervised_lost == 3 + 4
    text = "\n".join(report.lines())
    assert "1 samples were dropped: no answer token fits in a row behind the prompt; raise data.row_length" in text
    assert "1 samples longer than a row were truncated; 1 of them lost 7 supervised tokens" in text
    with pytest.raises(
        DataError, match=r"no answer token fits behind its prompt .*longest sample has 12.*raise data.row_length"
    ):
        pack_samples([sample(12, 9)], data, RenderStats(conversations=1))


def test_nothing_supervised() -> None:
    with pytest.raises(
        DataError, match="no supervised token anywhere: none of the 4 conversations has an assistant turn"
    ):
        pack_samples([], DataConfig(), RenderStats(conversations=4))
    with pytest.raises(DataError, match=r"no sample fits in a row of 8.*longest has 9.*over_long"):
        pack_samples([sample(9, 1)], DataConfig(row_length=8, over_long="drop"), RenderStats(conversations=1))
    with pytest.raises(DataError, match="no answer has two supervised tokens in a row"):
        pack_samples([sample(5, 4)], DataConfig(), RenderStats(conversations=1))


def test_report_has_shares_and_says_only_what_happened() -> None:
    _, report = pack_samples([sample(6, 2)], DataConfig(row_length=8), RenderStats(conversations=1))
    assert report.supervised_share == pytest.approx(4 / 6)
    assert report.padding_share == pytest.approx(2 / 8)
    assert report.as_json()["dropped"] == 0
    assert len(report.lines()) == 2
