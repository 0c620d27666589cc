from __future__ import annotations

from slipstream.compilation.stress_plan import Order, Round, Row


def test_an_order_and_a_round_survive_the_way_between_processes():
    order = Order("a:b", guard=True, rounds=3, first=1, threads=4, seed=5, seconds=6.0, hang=7.0, stacks="s", cache="c")
    assert Order.from_json(order.to_json()) == order
    found = Round(2, 0.5, errors=("x", "x"), dense=3, wrong=("w",), benches=8, tuned=4, hang=False)
    assert Round.from_json(found.to_json()) == found


def test_each_kind_of_trouble_makes_a_round_bad():
    assert not Round(0, 1.0, benches=4, tuned=4).bad
    assert Round(0, 1.0, errors=("x",)).bad
    assert Round(0, 1.0, dense=1).bad
    assert Round(0, 1.0, wrong=("w",)).bad
    assert Round(0, 1.0, hang=True).bad


def test_a_row_counts_rounds_and_messages():
    rounds = [
        Round(0, 1.0, errors=("A: x", "A: x")),
        Round(1, 1.0, errors=("B: y",), dense=2),
        Round(2, 1.0, wrong=("thread 1: 0.5", "thread 2: 0.5"), benches=12, tuned=4),
        Round(3, 1.0, hang=True),
        Round(4, 1.0, benches=4, tuned=4),
    ]
    row = Row("w", guard=True, processes=2, rounds=tuple(rounds))
    assert (row.failures, row.dense, row.hangs, row.wrong, row.bad) == (2, 2, 1, 2, 4)
    assert row.tunings == 2.0
    assert row.messages() == [("A: x", 2), ("B: y", 1)]
    assert not row.clean


def test_no_round_at_all_is_not_clean():
    assert not Row("w", guard=True, processes=1, rounds=()).clean
    assert Row("w", guard=True, processes=1, rounds=(Round(0, 1.0),)).clean
    assert Row("w", guard=True, processes=1, rounds=(Round(0, 1.0),)).tunings is None


def test_what_a_library_refuses_is_told_once_and_is_no_fault():
    from slipstream.compilation.stress_table import explain

    rounds = tuple(Round(n, 1.0, left_out=("the backward",)) for n in range(3))
    row = Row("fla", True, 3, tuple(Round.from_json(r.to_json()) for r in rounds))
    assert row.clean
    assert row.figures()["left_out"] == ["the backward"]
    assert explain([row]) == ["fla, guard on: left out: the backward"]
