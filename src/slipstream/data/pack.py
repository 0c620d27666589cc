"""Rendered samples to rows of fixed length, and rows to batches.

Whole samples are placed best-fit: the longest first, each in the fullest row that still has room. The order of batches
depends on (seed, index) alone, so that any process, at any time, makes the same batch ``index``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import DataConfig
from slipstream.data.cache import DamagedCache, build_lock, read_arrays, write_arrays
from slipstream.data.conversations import fingerprint, read_conversations
from slipstream.data.fit import PackReport, pack_samples
from slipstream.data.render import Renderer
from slipstream.data.template import template_text
from slipstream.errors import DataError
from slipstream.places import cache_directory
from slipstream.records import PADDING_DOCUMENT, PackedBatch, RenderedSample

__all__ = ["PackReport", "PackedDataset", "build_dataset", "dataset_key", "tokenizer_digest"]

FORMAT = 1
log = logging.getLogger("slipstream.data")


class PackedDataset:
    """Rows of packed documents, from memory or a memory-mapped cache file. Thread-safe: nothing changes after creation.

    Arrays: ids int32 [tokens]; loss_mask bool [tokens]; starts int64 [documents+1] into them; rows int64 [rows+1] into
    the documents, which are stored in the order of the rows; used_ids int32, the distinct ids.
    ``notes`` are lines that the user should see (a damaged cache was rebuilt).
    """

    def __init__(
        self, arrays: dict[str, np.ndarray], *, report: PackReport, key: str, notes: tuple[str, ...] = ()
    ) -> None:
        self.report = report
        self.key = key
        self.notes = notes
        self.row_length = report.row_length
        self._ids, self._mask = arrays["ids"], arrays["loss_mask"]
        self._starts, self._rows = arrays["starts"], arrays["rows"]
        self._used_ids = arrays["used_ids"]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows) - 1

    @property
    def used_ids(self) -> frozenset[int]:
        """Every token id that occurs in the rows; a mask token may not be one of them."""
        return frozenset(self._used_ids.tolist())

    def documents(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids int32 [tokens], loss mask bool [tokens]) of each packed document, in the order of the rows."""
        for begin, end in zip(self._starts[:-1], self._starts[1:], strict=True):
            yield self._ids[begin:end], self._mask[begin:end]

    def token_chunks(self, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids int32 [tokens], starts int64 [documents+1] into them) of runs of whole documents.

        A run has at most ``tokens`` tokens, or one document.
        """
        first, last = 0, len(self._starts) - 1
        while first < last:
            begin = int(self._starts[first])
            after = int(np.searchsorted(self._starts, begin + tokens, side="right")) - 1
            after = min(max(after, first + 1), last)
            yield self._ids[begin : int(self._starts[after])], np.asarray(self._starts[first : after + 1]) - begin
            first = after

    def row_numbers(self, index: int, rows: int, seed: int) -> np.ndarray:
        """Return the numbers of the rows of micro-batch ``index``, int64 [rows].

        The run is an endless stream of epochs, each a permutation of all rows drawn from (seed, epoch); micro-batch i
        is places i*rows to (i+1)*rows of it, so that one at the end of an epoch is filled from the next.
        """
        if index < 0 or rows < 1:
            raise ValueError(f"index is {index} and rows is {rows}; they must be at least 0 and 1")
        places = np.arange(index * rows, (index + 1) * rows, dtype=np.int64)
        epochs = places // len(self)
        return np.array(
            [_epoch_order(len(self), seed, int(e))[int(p) % len(self)] for p, e in zip(places, epochs, strict=True)],
            dtype=np.int64,
        )

    def batch(self, index: int, rows: int, seed: int) -> PackedBatch:
        """Return micro-batch ``index`` of ``rows`` rows, as CPU tensors [rows, row_length]. Thread-safe."""
        import torch

        shape = (rows, self.row_length)
        ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask, documents = np.zeros(shape, np.bool_), np.full(shape, PADDING_DOCUMENT, np.int64)
        for r, row in enumerate(self.row_numbers(index, rows, seed)):
            starts = self._starts[self._rows[row] : self._rows[row + 1] + 1]
            first, lengths = int(starts[0]), np.diff(starts)
            length = int(starts[-1]) - first
            ids[r, :length] = self._ids[first : first + length]
            mask[r, :length] = self._mask[first : first + length]
            documents[r, :length] = np.repeat(np.arange(len(lengths)), lengths)
            positions[r, :length] = np.arange(length) - np.repeat(starts[:-1] - first, lengths)
        return PackedBatch(
            index=index,
            ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(mask),
            document_ids=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
        )


@lru_cache(maxsize=8)
def _epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(rows): the order of a counter-based generator's raw words, alike in every numpy."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable")
    order.setflags(write=False)
    return order


def build_dataset(
    data: DataConfig,
    tokenizer: Any,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[int], None] | None = None,
    stop_ids: Sequence[int] = (),
) -> PackedDataset:
    """Read, render and pack ``data.train``; or take it from the cache if content, tokenizer and settings agree.

    ``cache_dir`` defaults to ``cache_directory()/packed``. ``progress`` is called with the number of conversations
    rendered so far. ``stop_ids`` are ids that end a turn besides the tokenizer's eos. A damaged cache file is rebuilt,
    which is logged as a warning and kept in ``notes``. Several processes may call it at once: one builds, others wait.

    Raises DataError for unusable data, and when nothing at all is supervised.
    """
    key = dataset_key(data, tokenizer, stop_ids)
    path = (cache_dir if cache_dir is not None else cache_directory() / "packed") / f"{key}.safetensors"
    notes: list[str] = []
    with build_lock(path):
        try:
            arrays, note = read_arrays(path)
            report = PackReport(**note)
        except FileNotFoundError:
            pass
        except (DamagedCache, TypeError) as error:
            notes.append(f"the cache file {path} was damaged ({error}) and has been rebuilt")
        else:
            return PackedDataset(arrays, report=report, key=key)
        renderer = Renderer(tokenizer, data=data, stop_ids=stop_ids)
        samples: list[RenderedSample] = []
        for group in renderer.render_many(
            read_conversations(data.train, prompt_completion=data.prompt_completion, max_samples=data.max_samples)
        ):
            samples += group
            if progress is not None:
                progress(renderer.stats.conversations)
        arrays, report = pack_samples(samples, data, renderer.stats)
        write_arrays(path, arrays, {f.name: getattr(report, f.name) for f in fields(report)})
        arrays, _ = read_arrays(path)
    for line in notes:
        log.warning(line)
    return PackedDataset(arrays, report=report, key=key, notes=tuple(notes))


def dataset_key(data: DataConfig, tokenizer: Any, stop_ids: Sequence[int] = ()) -> str:
    """Return the digest under which packed rows are cached: content of the sources, tokenizer, template, settings."""
    if not data.train:
        raise DataError("data.train is empty; name a file of conversations")
    settings = {k: v for k, v in asdict(data).items() if k not in ("train", "heldout")}
    parts = {
        "format": FORMAT,
        "settings": settings,
        "sources": [fingerprint(source) for source in data.train],
        "tokenizer": tokenizer_digest(tokenizer),
        "stop_ids": sorted(set(stop_ids)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything that decides a tokenizer's ids: its model, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for state in ("padding", "truncation"):  # left behind by whoever padded last; they do not decide ids
        parts.pop(state, None)
    model = json.dumps(parts, sort_keys=True)
    specials = sorted((str(k), str(v)) for k, v in tokenizer.special_tokens_map.items())
    text = "\0".join([type(tokenizer).__name__, model, json.dumps(specials), template_text(tokenizer)])
    return hashlib.sha256(text.encode()).hexdigest()
