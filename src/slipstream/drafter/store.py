"""A drafter on disk: one directory of ``config.json`` and ``model.safetensors``, in z-lab's layout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.data.reason import one_line
from slipstream.drafter.config import DrafterConfig
from slipstream.errors import DrafterError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slipstream.drafter.model import DraftModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the exact keys of a drafter's weights and their shapes: 11 a layer (15 with biases) and 3 more."""
    import torch

    from slipstream.drafter.model import DraftModel

    with torch.device("meta"):
        model = DraftModel(config)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _check_weights(state: Mapping[str, Tensor], config: DrafterConfig, origin: str) -> None:
    """Raise DrafterError unless ``state`` has exactly the keys and shapes of the config."""
    wanted = parameter_shapes(config)
    missing, extra = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    if missing:
        raise DrafterError(
            f"{origin} lacks {missing[0]} (and {len(missing) - 1} more); give a whole drafter of this config"
        )
    if extra:
        raise DrafterError(f"{origin} holds {extra[0]} (and {len(extra) - 1} more), which the network does not have")
    for key, shape in wanted.items():
        if tuple(state[key].shape) != shape:
            raise DrafterError(f"{origin}: {key} is {tuple(state[key].shape)}, but the config says {shape}")


def is_drafter_directory(directory: Path) -> bool:
    """Whether a directory holds a drafter's config (its weights are not looked at)."""
    try:
        tree = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and "dflash_config" in tree


def weights_digest(directory: Path) -> str:
    """Return a hex sha256 over the weights of a drafter directory: which training result it is, whatever its name.

    Raises DrafterError where there are none.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{directory} holds no *.safetensors; give a drafter directory")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Force a file's or directory's content to disk, so that a rename never outlives what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_drafter(
    model: DraftModel | Mapping[str, Tensor],
    config: DrafterConfig,
    directory: Path | str,
    *,
    dtype: torch.dtype,
    overwrite: bool = False,
) -> Path:
    """Write a drafter (module or state dict) to ``directory``, cast to ``dtype``, and return the directory.

    Written aside and renamed: a failure leaves what was there. An existing path is refused; ``overwrite`` replaces an
    existing drafter directory as a whole, and nothing else. Raises DrafterError.
    """
    import safetensors
    import torch
    from safetensors.torch import save_file

    directory = Path(directory)
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    _check_weights(state, config, "the state to save")
    if directory.exists() and not (overwrite and is_drafter_directory(directory)):
        cure = "it is not a drafter, so it is not replaced: give" if overwrite else "overwrite it on purpose, or give"
        raise DrafterError(f"{directory} exists; {cure} another directory")
    tensors = {key: value.detach().to(device="cpu", dtype=dtype).contiguous() for key, value in state.items()}
    text = json.dumps(config.to_json(str(dtype).removeprefix("torch.")), indent=2) + "\n"
    aside: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        aside.chmod(0o755)
        save_file(tensors, aside / WEIGHTS_FILE, metadata={"format": "pt"})
        (aside / WEIGHTS_FILE).chmod(0o644)  # the writer makes files for their owner alone
        (aside / CONFIG_FILE).write_text(text, encoding="utf-8")
        for path in (aside / WEIGHTS_FILE, aside / CONFIG_FILE, aside):
            _sync(path)
        _replace(aside, directory)
        _sync(directory.parent)
    except (OSError, safetensors.SafetensorError) as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise DrafterError(
            f"cannot write the drafter to {directory}: {error}; nothing was changed, free space and repeat"
        ) from error
    return directory


def _replace(aside: Path, directory: Path) -> None:
    """Rename ``aside`` to ``directory``; what was there is moved away first and deleted last."""
    if not directory.exists():
        aside.rename(directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
    directory.rename(old / directory.name)
    try:
        aside.rename(directory)
    except OSError:
        (old / directory.name).rename(directory)
        old.rmdir()
        raise
    shutil.rmtree(old)


def read_config(directory: Path | str) -> DrafterConfig:
    """Return the config of a drafter directory. Raises DrafterError, naming the file."""
    path = Path(directory) / CONFIG_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DrafterError(f"{path} does not exist; give a drafter directory ({CONFIG_FILE}, {WEIGHTS_FILE})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DrafterError(f"{path} cannot be read: {one_line(error)}; copy the drafter again") from None
    if not isinstance(tree, dict):
        raise DrafterError(f"{path} is not a JSON object; give a drafter directory")
    try:
        return DrafterConfig.from_json(tree)
    except DrafterError as error:
        raise DrafterError(f"{path}: {error}") from None


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Read one weights file, or the several that an index names."""
    import safetensors
    from safetensors.torch import load_file

    index = directory / INDEX_FILE
    try:
        files = [WEIGHTS_FILE]
        if not (directory / WEIGHTS_FILE).exists() and index.exists():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        state: dict[str, Tensor] = {}
        for name in files:
            state.update(load_file(directory / name))
    except FileNotFoundError as error:
        name = Path(str(error.filename or WEIGHTS_FILE)).name
        raise DrafterError(f"{directory} has no {name}; give a whole drafter directory") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise DrafterError(
            f"weights of {directory} cannot be read: {one_line(error)}; copy the drafter again"
        ) from None
    return state


def load_drafter(
    directory: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[DraftModel, DrafterConfig]:
    """Load a drafter directory (z-lab's layout). dtype None keeps the dtype of the file.

    Raises DrafterError for a missing file, an incomplete config, or weights whose keys or shapes are not the config's.
    """
    import torch

    from slipstream.drafter.model import DraftModel

    directory = Path(directory)
    config = read_config(directory)
    state = _read_weights(directory)
    _check_weights(state, config, str(directory / WEIGHTS_FILE))
    with torch.device("meta"):
        model = DraftModel(config)
    placed = {key: value.to(device=device, dtype=dtype or value.dtype) for key, value in state.items()}
    model.load_state_dict(placed, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model, config
