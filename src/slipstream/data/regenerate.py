"""Replaces the answers of conversations by the target's own: a drafter is trained on what its target would say.

The target is not imported: a function that continues prompts is handed in. Conversations are answered in groups that
depend on the conversations and settings alone, each group is logged when it is done, and the output is written when all
are, so that a run that was killed and resumed gives the same file as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from slipstream.config import RegenerateConfig
from slipstream.data.answers import Draft, settle_all
from slipstream.data.journal import Journal, describe_difference, file_digest, write_whole
from slipstream.data.pack import tokenizer_digest
from slipstream.data.regenerate_report import RegenerateProgress, RegenerateReport, no_answer_cure
from slipstream.data.render import Renderer
from slipstream.errors import DataError
from slipstream.records import Conversation

__all__ = ["Generate", "RegenerateProgress", "RegenerateReport", "regenerate"]

FORMAT = 1
_TOGETHER = 1024  # prompts that are tokenized at once


class Generate(Protocol):
    """Continues prompts: returns, for each, at most ``max_new_tokens`` ids, the stop token included if one was written.

    It must depend on its arguments alone. Prompts of one call are of similar length.
    """

    def __call__(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]: ...


def regenerate(
    conversations: Iterable[Conversation],
    *,
    renderer: Renderer,
    generate: Generate,
    output: Path,
    settings: RegenerateConfig,
    progress: Callable[[RegenerateProgress], None] | None = None,
    target_digest: str = "",
    target_settings: Mapping[str, str] | None = None,
    max_positions: int = 0,
    seed: int = 0,
) -> RegenerateReport:
    """Answer every assistant turn anew and write the conversations to ``output`` (.jsonl or .jsonl.gz), in their order.

    ``target_settings``: what else of the target decides its answers, by name (dtype, attention, device).
    ``max_positions`` is the target's longest sequence (0: unknown); prompts without room for ``max_new_tokens`` are
    left out and counted. While it runs, ``output`` with ``.partial`` behind it is the journal; after it, one with
    ``.report.json`` holds report and identity. Called again for the same work it resumes, or returns the report of what
    is complete. Use the renderer, and this function, from one thread.

    Raises DataError: an output of other work (nothing is overwritten), no conversation, a prompt that cannot be
    rendered, a full disk (finished answers are kept), no usable answer at all (the cure follows the commonest cause).
    """
    sources = list(conversations)
    if not sources:
        raise DataError("there are no conversations to answer; name files in data.train")
    if output.name.removesuffix(".gz").rpartition(".")[2] not in ("jsonl", "ndjson"):
        raise DataError(f"the output {output} must end in .jsonl or .jsonl.gz")
    target = {"target": target_digest, **(target_settings or {})}
    identity = _identity(sources, renderer, settings, target, max_positions, seed)
    told = _complete(output, identity)
    if told is not None:
        return told
    # A renderer of our own: checking answers must not count in the caller's statistics.
    renderer = Renderer(renderer.tokenizer, data=renderer.data, stop_ids=sorted(renderer.stop_ids))
    started = time.monotonic()
    with Journal(_beside(output, ".partial"), identity) as journal:
        resumed = {entry["i"] for entry in journal.entries}
        written, done = 0, len(resumed)
        if progress is not None:
            progress(_progress(done, len(sources), 0, 0, 0.0))
        for number, group in _groups(sources, renderer, settings.batch_size):
            if all(i in resumed for i in group):
                continue
            # A group that is logged in part is answered whole again, so that batches never depend on the interruption.
            drafts = {i: Draft(sources[i], renderer, keep_unfinished=settings.keep_unfinished) for i in group}
            _answer(drafts, generate, renderer, settings, max_positions, _seed(seed, number))
            fresh = [i for i in group if i not in resumed]
            journal.append({"i": i, "row": drafts[i].row(), "counts": dict(drafts[i].counts)} for i in fresh)
            written += sum(d.counts["tokens"] for d in drafts.values())
            done += len(fresh)
            if progress is not None:
                progress(_progress(done, len(sources), done - len(resumed), written, time.monotonic() - started))
        report = _finish(journal, output, identity, len(sources), len(resumed), time.monotonic() - started)
        journal.delete()
    return report


def _answer(
    drafts: dict[int, Draft],
    generate: Generate,
    renderer: Renderer,
    settings: RegenerateConfig,
    max_positions: int,
    seed: int,
) -> None:
    """Answer all turns of one group: the first turns together, then the second ones, and so on."""
    number = 0
    while True:
        turns = [(draft, turn) for draft in drafts.values() if (turn := draft.next_turn()) is not None]
        waiting: list[tuple[Draft, list[int]]] = []
        for (draft, _), prompt in zip(turns, renderer.prompts([turn for _, turn in turns]), strict=True):
            if max_positions and len(prompt) + settings.max_new_tokens > max_positions:
                draft.set_aside("too_long")
            else:
                waiting.append((draft, prompt))
        if not waiting:
            return
        outputs = generate(
            [prompt for _, prompt in waiting],
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=_seed(seed, number),
        )
        written: list[tuple[Draft, list[Conversation]]] = []
        for (draft, prompt), output in zip(waiting, outputs, strict=True):
            finished = bool(output) and output[-1] in renderer.stop_ids
            if not finished and len(output) < settings.max_new_tokens:
                raise ValueError(
                    f"generate ended after {len(output)} of {settings.max_new_tokens} tokens without a stop token of "
                    f"the renderer ({sorted(renderer.stop_ids)}): give the renderer the target's eos ids as stop_ids"
                )
            if forms := draft.write(prompt, output, finished=finished):
                written.append((draft, forms))
        settle_all(written, renderer)
        number += 1


def _groups(sources: list[Conversation], renderer: Renderer, size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield number and indices of each group; a group has prompts of like length, and number 0 the longest.

    The longest come first: too large a batch then fails at once, not at the end. The others come in a drawn order that
    is always the same: the rate so far foretells the rest, and answers of a run that was ended are of all lengths.
    """
    lengths: list[int] = []
    for begin in range(0, len(sources), _TOGETHER):
        drafts = (Draft(source, renderer, keep_unfinished=True) for source in sources[begin : begin + _TOGETHER])
        turns = [draft.next_turn() for draft in drafts]
        prompts = iter(renderer.prompts([turn for turn in turns if turn is not None]))
        lengths += [0 if turn is None else len(next(prompts)) for turn in turns]
    order = sorted(range(len(sources)), key=lambda i: (-lengths[i], i))
    later = list(range(1, -(-len(order) // size)))
    random.Random(0).shuffle(later)
    for number in (0, *later):
        yield number, order[number * size : (number + 1) * size]


def _finish(
    journal: Journal, output: Path, identity: dict[str, Any], total: int, resumed: int, seconds: float
) -> RegenerateReport:
    """Write the output and its report from the journal. The report comes first: an output without one is not ours."""
    entries = sorted(journal.entries, key=lambda e: e["i"])
    counts: Counter[str] = Counter()
    for entry in entries:
        counts.update(entry["counts"])
    rows = [entry["row"] for entry in entries if entry["row"] is not None]
    names = [n for n in RegenerateReport.__dataclass_fields__ if n in counts]
    zeros = dict.fromkeys(RegenerateReport.__dataclass_fields__, 0)
    told: dict[str, Any] = {
        **zeros,
        **{n: counts[n] for n in names},
        "output": str(output),
        "conversations": total,
        "rows": len(rows),
        "resumed": resumed,
        "seconds": round(seconds, 3),
    }
    report = RegenerateReport(**told)
    if not rows:
        raise DataError(
            f"the target gave no usable answer to any of {total} conversations ({report.empty} empty, "
            f"{report.unfinished} cut, {report.too_long} too long, {report.unrenderable} not renderable), so nothing "
            f"was written; {no_answer_cure(report, identity['regenerate.max_new_tokens'], identity['max_positions'])}"
        )
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    digest = hashlib.sha256(data).hexdigest()
    text = json.dumps({"identity": identity, "report": report.as_json(), "rows_sha256": digest}, indent=1)
    write_whole(_beside(output, ".report.json"), text.encode())
    write_whole(output, data)
    return report


def _complete(output: Path, identity: dict[str, Any]) -> RegenerateReport | None:
    """Return the report of an output that is there and is of this work. Raises DataError if it is of other work."""
    if not output.exists():
        return None
    beside = _beside(output, ".report.json")
    try:
        told = json.loads(beside.read_text(encoding="utf-8"))
        report = RegenerateReport(**told["report"])
        difference = describe_difference(told["identity"], identity)
    except FileNotFoundError:
        difference = f"there is no {beside.name} beside it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        difference = f"{beside.name} cannot be read ({type(error).__name__})"
    if not difference and told["rows_sha256"] != _rows_digest(output):
        difference = "it was changed since it was written"
    if difference:
        raise DataError(
            f"{output} exists and is not overwritten ({difference}); choose another --output, or move it away"
        )
    return report


def _rows_digest(output: Path) -> str:
    import gzip

    if output.suffix != ".gz":
        return file_digest(output)
    try:
        with gzip.open(output, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    except (OSError, EOFError):
        return "damaged"


def _identity(
    sources: list[Conversation],
    renderer: Renderer,
    settings: RegenerateConfig,
    target: Mapping[str, str],
    max_positions: int,
    seed: int,
) -> dict[str, Any]:
    """Everything that decides the answers. Each part has a name, so that a refusal can say what was changed."""
    digest = hashlib.sha256()
    for source in sources:
        parts = [[m.as_template_dict() for m in source.messages], source.tools, source.kind, source.prompt]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode() + b"\n")
    data = renderer.data
    return {
        "format": FORMAT,
        "conversations": digest.hexdigest(),
        **target,
        "tokenizer": tokenizer_digest(renderer.tokenizer),
        "stop_ids": sorted(renderer.stop_ids),
        "data.thinking": data.thinking,
        "data.template_kwargs": dict(data.template_kwargs),
        "regenerate.max_new_tokens": settings.max_new_tokens,
        "regenerate.temperature": settings.temperature,
        "regenerate.batch_size": settings.batch_size,
        "regenerate.keep_unfinished": settings.keep_unfinished,
        "max_positions": max_positions,
        "seed": seed,
    }


def _progress(done: int, total: int, here: int, tokens: int, seconds: float) -> RegenerateProgress:
    rate = here / seconds if seconds > 0 else 0.0
    return RegenerateProgress(
        done=done,
        total=total,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        eta_seconds=(total - done) / rate if rate > 0 else None,
    )


def _seed(seed: int, number: int) -> int:
    """Return a seed of 62 bits for part ``number`` of what ``seed`` seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8], "little") >> 2


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(output.name + ending)
