"""One's own prompts as the quickstart's data: some held out, the others answered by the target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import Recipe
from slipstream.data.conversations import fingerprint, read_conversations
from slipstream.data.journal import write_whole
from slipstream.errors import ConfigError, DataError
from slipstream.preparation import prepare

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.records import Conversation

FEWEST = 20
MOST_HELDOUT = 60


def use_own_prompts(recipe: Recipe, prompts: Path, console: Console) -> Recipe:
    """Return the recipe with ``prompts`` as its data, after the target has answered them.

    Every tenth prompt is held out, 60 at most. What is written lies beside the run, in ``<run.directory>-prompts/``
    under the file's digest: the same prompts are answered once, and an interrupted answering goes on. Raises DataError
    for a file that holds fewer than 20 prompts or cannot be read, ConfigError for a directory that cannot be written.
    """
    conversations = list(read_conversations([str(prompts)], prompt_completion=recipe.data.prompt_completion))
    if len(conversations) < FEWEST:
        raise DataError(
            f"{prompts} holds {len(conversations)} prompts; give {FEWEST} or more: every tenth is held out, to measure"
        )
    training, heldout = split(conversations)
    directory = Path(f"{recipe.run.directory}-prompts") / fingerprint(str(prompts))[:12]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}; choose another --run.directory") from None
    for name, rows in (("prompts", training), ("heldout", heldout)):
        write_whole(directory / f"{name}.jsonl", _as_lines(rows))
    answers = directory / "answers.jsonl"
    asked = replace(recipe, data=replace(recipe.data, train=(str(directory / "prompts.jsonl"),)))
    prepare(asked, regenerate_to=answers, console=console)
    return replace(
        recipe, data=replace(recipe.data, train=(str(answers),), heldout=(str(directory / "heldout.jsonl"),))
    )


def split(conversations: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Return (training, held out): every tenth is held out, 60 at most. By place alone, so that it can be repeated."""
    held = set(range(9, len(conversations), 10)[:MOST_HELDOUT])
    training = [c for i, c in enumerate(conversations) if i not in held]
    return training, [conversations[i] for i in sorted(held)]


def _as_lines(conversations: Iterable[Conversation]) -> bytes:
    """Return the conversations as JSON lines that ``read_conversations`` reads back."""
    rows = []
    for conversation in conversations:
        row: dict[str, object] = {"messages": [m.as_template_dict() for m in conversation.messages]}
        if conversation.kind == "raw":
            row = {"prompt": conversation.prompt}
        if conversation.tools is not None:
            row["tools"] = list(conversation.tools)
        rows.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(rows).encode()
