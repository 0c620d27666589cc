"""A cheap, path-independent identity of a target: what it is, not where it lies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from slipstream.errors import TargetError

_WHOLE = 1 << 30  # files up to 1 GiB are read whole, larger ones by sample
_SAMPLE = 1 << 20
_SAMPLES = 64
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
CONVERSION = "conversion.json"
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def file_digest(path: Path) -> str:
    """Return a hex sha256 of size and content. Above 1 GiB: 64 samples of 1 MiB, evenly spaced, both ends included."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        if size <= _WHOLE:
            while chunk := stream.read(_SAMPLE):
                digest.update(chunk)
        else:
            for i in range(_SAMPLES):
                stream.seek((size - _SAMPLE) * i // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def directory_digest(directory: Path) -> str:
    """Return a hex sha256 over the configuration and the weight files of a model directory.

    Fields that say where or by which version the model was written are left out, so that a copy has the same digest.
    A converted GGUF is identified by the file it came from, whichever version converted it. Raises TargetError where
    there are no weights.
    """
    conversion = directory / CONVERSION
    if conversion.is_file():
        return str(json.loads(conversion.read_text(encoding="utf-8"))["digest"])
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    files = sorted({file for pattern in _WEIGHTS for file in directory.glob(pattern)})
    if not files:
        raise TargetError(f"{directory} holds no *.safetensors or pytorch_model*.bin; give a complete model directory")
    for file in files:
        digest.update(file.name.encode())
        digest.update(file_digest(file).encode())
    return digest.hexdigest()
