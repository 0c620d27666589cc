"""Every kind of source, read alike; and every source that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.conversations import fingerprint, read_conversations
from slipstream.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i} ü"}]} for i in range(5)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def write_source(directory: Path, kind: str) -> str:
    """Write ROWS in one of the formats and return the source's name."""
    path = directory / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n" + LINES.replace("\n", "\n\n"), encoding="utf-8")  # blank lines are no rows
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind in ("jsonl.gz", "json.gz"):
        path.write_bytes(gzip.compress(LINES.encode()))
    elif kind == "bom.jsonl":
        path.write_text("\ufeff" + LINES, encoding="utf-8")
    else:
        import datasets

        found = datasets.Dataset.from_list(ROWS)
        if kind == "parquet":
            found.to_parquet(path)
        elif kind == "saved":
            found.save_to_disk(path)
        elif kind == "splits":
            datasets.DatasetDict({"train": found, "test": found.select(range(2))}).save_to_disk(path)
        elif kind == "folder":
            path.mkdir()
            found.to_parquet(path / "train.parquet")
    return str(path)


@pytest.fixture(autouse=True)
def _private_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "jsonl.gz", "json.gz", "bom.jsonl", "parquet", "saved", "splits", "folder"]
)
def test_every_source_gives_the_same_conversations(tmp_path: Path, kind: str) -> None:
    read = list(read_conversations([write_source(tmp_path, kind)]))
    assert [[(m.role, m.content) for m in c.messages] for c in read] == [
        [("user", f"Q{i}"), ("assistant", f"A{i} ü")] for i in range(5)
    ]
    assert all(m.tool_calls is None and m.name is None for c in read for m in c.messages)


def test_a_split_is_picked_with_a_colon(tmp_path: Path) -> None:
    source = write_source(tmp_path, "splits")
    assert len(list(read_conversations([f"{source}:test"]))) == 2
    with pytest.raises(DataError, match="has no split dev; it has train, test"):
        list(read_conversations([f"{source}:dev"]))


def test_parquet_nulls_do_not_reach_tools_and_calls(tmp_path: Path) -> None:
    import datasets

    tools = [{"name": "a", "parameters": {"x": 1}}, {"name": "b", "parameters": {"y": 2}}]
    datasets.Dataset.from_list([{**ROWS[0], "tools": tools}]).to_parquet(tmp_path / "t.parquet")
    (conversation,) = read_conversations([str(tmp_path / "t.parquet")])
    assert conversation.tools == tuple(tools)


def test_origins_and_order_over_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.jsonl").write_text(LINES)
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    origins = [c.origin for c in read_conversations(names)]
    assert origins[0] == f"{names[0]}:1"
    assert origins[5] == f"{names[1]}:1"
    assert [c.origin for c in read_conversations(names, max_samples=6)] == origins[:6]


def test_malformed_json_names_line_seven_and_nothing_before_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(ROWS[0]) + "\n" for _ in range(6)) + '{"messages": [\n' + LINES)
    stream = read_conversations([str(path)])
    assert len([next(stream) for _ in range(6)]) == 6
    with pytest.raises(DataError, match=r"train\.jsonl:7: malformed JSON \(.*column \d+\)"):
        next(stream)


def test_a_bad_row_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(LINES + '{"id": 3}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:6: the row has no messages; its keys are id"):
        list(read_conversations([str(path)]))


@pytest.mark.parametrize("name", ["gone.jsonl", "no/such/dir/x.parquet", "./gone", "gone.jsonl.gz"])
def test_missing_file(name: str) -> None:
    with pytest.raises(DataError, match=f"{name} does not exist"):
        list(read_conversations([name]))


@pytest.mark.parametrize("content", ["", "\n\n  \n", "[]"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        list(read_conversations([str(path)]))


def test_damaged_files(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(LINES.encode())[:-20])
    with pytest.raises(DataError, match="the gzip stream is damaged"):
        list(read_conversations([str(cut)]))
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text(LINES)
    with pytest.raises(DataError, match="the gzip stream is damaged"):
        list(read_conversations([str(plain)]))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(LINES.encode() + '{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:6: not UTF-8 text"):
        list(read_conversations([str(latin)]))
    parquet = tmp_path / "bad.parquet"
    parquet.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet is not a readable Parquet file"):
        list(read_conversations([str(parquet)]))
    array = tmp_path / "bad.json"
    array.write_text('[\n{"text": "a"},\n{"text": }\n]')
    with pytest.raises(DataError, match=r"bad\.json:3: malformed JSON"):
        list(read_conversations([str(array)]))


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data is named"):
        list(read_conversations([]))
    with pytest.raises(DataError, match="empty string"):
        list(read_conversations([""]))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="unknown ending"):
        list(read_conversations([str(tmp_path / "notes.txt")]))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="nothing is not a readable data set directory"):
        list(read_conversations([str(tmp_path / "nothing")]))


def test_a_name_that_is_no_file_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(list(read_conversations(["org/name:test"]))) == 5
    assert asked == ["org/name"]

    def fail(name: str) -> Any:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match=r"org/name is neither a file or directory here nor a data set that loads: no route more$"
    ):
        list(read_conversations(["org/name"]))


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(LINES)
    b.write_text(LINES)
    assert fingerprint(str(a)) == fingerprint(str(b))
    b.write_text(LINES.replace("Q1", "Q9"))
    assert fingerprint(str(a)) != fingerprint(str(b))
    folder = write_source(tmp_path, "splits")
    assert fingerprint(folder) == fingerprint(folder)
    assert fingerprint(f"{folder}:test") != fingerprint(folder)
    with pytest.raises(DataError, match="does not exist"):
        fingerprint(str(tmp_path / "gone.jsonl"))


DIGITS = '{"text": "a", "id": ' + "7" * 5000 + "}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINES + DIGITS, r"odd\.json:6: malformed JSON \(.*digits.*mend or delete"),
        ("[" + DIGITS + "]", r"odd\.json: malformed JSON \(.*digits.*mend"),
        ("[" * 200_000, r"odd\.json: malformed JSON \(nested too deeply\); mend"),
        (LINES + '{"text": ' + "[" * 200_000, r"odd\.json:6: malformed JSON \(nested too deeply\)"),
    ],
)
def test_json_that_python_refuses_to_hold(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_conversations([str(tmp_path / "odd.json")]))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("arguments", ["7" * 5000, "[" * 200_000])
def test_arguments_that_python_refuses_to_hold(tmp_path: Path, arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"odd\.jsonl:1: .*not JSON"):
        list(read_conversations([str(tmp_path / "odd.jsonl")]))
