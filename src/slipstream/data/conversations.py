"""Conversations from JSON lines, Parquet, and Hugging Face data sets, on disk or hub. Errors name file and line."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.data.reason import one_line
from slipstream.data.rows import parse_row, without_nulls
from slipstream.errors import DataError
from slipstream.records import Conversation

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def read_conversations(
    sources: Sequence[str], *, prompt_completion: str = "chat", max_samples: int = 0
) -> Iterator[Conversation]:
    """Yield the conversations of all sources in order, at most ``max_samples`` of them (0: all).

    A source is a .jsonl, .json or .parquet file (JSON also gzipped), a Hugging Face data set directory or a hub id, the
    last two with ``:split`` behind them if wanted (without: the only split, or ``train``). ``prompt_completion`` is
    ``chat`` or ``raw`` and says how rows with prompt and completion strings are taken.

    Raises DataError, while iterating, for a missing, empty or damaged source and for a row that cannot be used.
    """
    if isinstance(sources, str):
        sources = (sources,)
    if not sources:
        raise DataError('no data is named; set data.train to a file, e.g. data.train = ["conversations.jsonl"]')
    count = 0
    for source in sources:
        empty = True
        for origin, row in _rows(source):
            empty = False
            yield parse_row(row, origin, prompt_completion=prompt_completion)
            count += 1
            if max_samples and count >= max_samples:
                return
        if empty:
            raise DataError(f"{source} is empty: it holds no rows; give a file with conversations, or leave it out")


def fingerprint(source: str) -> str:
    """Return a digest of a source's content: the same for equal bytes, whatever the file's name and time.

    Raises DataError when the source does not exist.
    """
    path, split = _locate(source)
    digest = hashlib.sha256()
    if path is None:
        return f"hub:{_dataset(source)._fingerprint}"
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        name = str(file.relative_to(path)) if path.is_dir() else "".join(path.suffixes[-2:])
        digest.update(f"{name}\0{split}\0{file.stat().st_size}\0".encode())
        try:
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _locate(source: str) -> tuple[Path | None, str | None]:
    """Return the local path of a source and its split; the path is None for a hub id. Raises DataError if missing."""
    if not source:
        raise DataError("a data source is an empty string; give a file, a directory or a data set id")
    if Path(source).exists():
        return Path(source), None
    name, _, split = source.rpartition(":")
    if name and Path(name).is_dir():
        return Path(name), split
    name = name or source
    if Path(source).suffix in (*TEXT_SUFFIXES, ".parquet", ".gz") or not HUB_ID.fullmatch(name):
        raise DataError(f"{source} does not exist; check the path (relative paths start at {Path.cwd()})")
    return None, split if name != source else None


def _rows(source: str) -> Iterator[tuple[str, Any]]:
    """Yield (origin, row) of one source."""
    path, _ = _locate(source)
    if path is None or path.is_dir():
        for number, row in enumerate(_dataset(source), start=1):
            yield f"{source}: row {number}", without_nulls(row)
        return
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] == [".parquet"]:
        yield from _parquet_rows(path)
    elif (suffixes[-2:-1] if suffixes[-1:] == [".gz"] else suffixes[-1:]) in [[s] for s in TEXT_SUFFIXES]:
        yield from _json_rows(path, gzipped=suffixes[-1] == ".gz")
    else:
        raise DataError(f"{source} has an unknown ending; read are .jsonl, .json (each also .gz) and .parquet")


def _json_rows(path: Path, *, gzipped: bool) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a JSON-lines file, or of a file that is one JSON array. Blank lines are skipped."""
    number = 0
    try:
        with gzip.open(path, "rb") if gzipped else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                    if line.lstrip().startswith(b"["):
                        yield from _array_rows(path, line + stream.read())
                        return
                if line.strip():
                    yield f"{path}:{number}", _decode(line, f"{path}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}:{number + 1}: the gzip stream is damaged ({error}); copy the file again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _decode(line: bytes, origin: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start}); convert the file") from None
    except json.JSONDecodeError as error:
        where = (
            f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} of the array, column {error.colno}"
        )
        raise DataError(f"{origin}: malformed JSON ({error.msg}, {where}); mend or delete the line") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{origin}: malformed JSON ({_beyond(error)}); mend or delete the line") from None


def _beyond(error: Exception) -> str:
    """Say what JSON Python refuses to hold: deep nesting, and whole numbers of thousands of digits."""
    return "nested too deeply" if isinstance(error, RecursionError) else one_line(error).partition(";")[0]


def _array_rows(path: Path, text: bytes) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert the file") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: malformed JSON ({error.msg}, column {error.colno}); mend the file"
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}: malformed JSON ({_beyond(error)}); mend the file") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a readable Parquet file after row {number} ({one_line(error)}); copy it again"
        ) from None


def _dataset(source: str) -> Any:
    """Return the ``datasets.Dataset`` of a directory or hub id. Raises DataError with the reason that was given."""
    import datasets

    path, split = _locate(source)
    name = str(path) if path is not None else source if split is None else source.rpartition(":")[0]
    saved = path is not None and any(
        (path / f).exists() for f in ("dataset_info.json", "state.json", "dataset_dict.json")
    )
    try:
        found = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # the library raises many kinds; each means that this source cannot be read
        reason = one_line(error)
        if path is None:
            raise DataError(
                f"{source} is neither a file or directory here nor a data set that loads: {reason}"
            ) from error
        raise DataError(f"{source} is not a readable data set directory: {reason}") from error
    if not isinstance(found, datasets.DatasetDict):
        if split not in (None, "train", str(getattr(found, "split", None))):
            raise DataError(f"{source} has no splits; leave out :{split}")
        return found
    splits = list(found.keys())
    chosen = split or (splits[0] if len(splits) == 1 else "train")
    if chosen not in splits:
        raise DataError(f"{source} has no split {chosen}; it has {', '.join(splits)}: write {name}:{splits[0]}")
    return found[chosen]
