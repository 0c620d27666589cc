"""What a number must be read with: the weights, the target, the machine, and where the record goes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Recipe
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch


# Of the identity that a run keeps, what its drafter depends on wherever it is used.
_NEEDED = ("target.digest", "tokenizer.digest")


def trained_with(run: Path) -> dict[str, str] | None:
    """Return the digests of target and tokenizer that a run was trained with; None for a run that does not tell."""
    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        return {name: str(record["identity"][name]) for name in _NEEDED}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{run / 'run.json'} does not tell which target was trained on ({type(error).__name__}); "
            "evaluate with a recipe and --drafter instead"
        ) from None


def circumstances(
    recipe: Recipe, drafter: Path, device: torch.device, *, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return which weights were measured, and where. Raises DrafterError for a directory without weights."""
    import platform

    import torch
    import transformers

    from slipstream.drafter.store import weights_digest

    return {
        "drafter": str(drafter),
        "drafter_digest": weights_digest(drafter),
        "target": recipe.target.path,
        "overrides": list(overrides),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "thinking": recipe.data.thinking,
        "heldout": list(recipe.data.heldout),
        "seed": recipe.run.seed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def output_path(run: Path, *, overridden: bool) -> Path:
    """Return where a run's evaluation is written.

    ``evaluation.json`` is the run's own, with the run's settings; one with other settings is ``evaluation_2.json`` and
    so on.
    """
    if not overridden:
        return run / "evaluation.json"
    number = 2
    while (run / f"evaluation_{number}.json").exists():
        number += 1
    return run / f"evaluation_{number}.json"


def write_record(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the JSON atomically. Raises ConfigError where it cannot be written."""
    from slipstream.provenance import write_json

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, tree)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; free space or name another --output") from None
