"""Pin and audit the packages: read every wheel in some folders and write ``packages.csv`` and ``refused.csv``.

The table is the list that the target's training text comes from, so that anyone can check it: name, version, licence,
where the licence was read, and the digest of the file. It is made once and kept; rebuilding starts from the table.
"""

import argparse
import csv
import hashlib
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from licences import read_licence, vendored

HERE = Path(__file__).resolve().parent
TABLE = HERE / "packages.csv"
REFUSED = HERE / "refused.csv"
COLUMNS = ("name", "version", "role", "licence", "read_from", "wheel", "sha256", "files", "bytes")
MIN_PYTHON = 60_000  # a smaller package is not worth its download
MIN_SHARE = 0.005  # of a wheel: a large compiled library with a little Python around it is not, either

# Held out whole: no file of theirs, nor a copy of one, is trained on. Chosen by hand: different subjects, written in
# different hands, documented functions, and not vendored elsewhere to speak of.
HELD_OUT = frozenset(
    {"control", "dateparser", "geopandas", "graphql-core", "pint", "pymoo", "pypdf", "qutip", "sqlparse", "tornado"}
    | {"trio", "xmlschema"}
)

# Not source that anyone wrote as such: tables of words, parameters, coordinates or bindings with few lines of code.
# typeshed stubs are not .py; the second version of a package under another name is the same text again.
NOT_WANTED = {
    "faker": "word lists",
    "holidays": "tables",
    "pyopengl": "bindings",
    "anthropic": "mostly generated, without a mark that says so",
    "botocore": "tables",
    "pycryptodomex": "pycryptodome again",
    "lightning": "pytorch-lightning again",
    "tensorflow-cpu": "generated operators; large wheel",
    "chardet": "its change from the LGPL is disputed",
    "cmake": "a compiled tool",
}


class Row(NamedTuple):
    """One line of the table; files and bytes are what was used after cleaning, filled in by ``clean_corpus.py``."""

    name: str
    version: str
    role: str
    licence: str
    read_from: str
    wheel: str
    sha256: str
    files: int = 0
    bytes: int = 0


def read_table(path: Path = TABLE) -> list[Row]:
    """Read the table of packages."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Row(**{**row, "files": int(row["files"]), "bytes": int(row["bytes"])}) for row in rows]


def write_table(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write the table of packages, by name."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(rows))


def normal_name(wheel: Path) -> str:
    """The package's normalised name, from the file's name."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def version_key(wheel: Path) -> tuple[list[int], str]:
    """A key by which the newest release comes last; pre-releases are rare here, and no matter."""
    version = wheel.name.split("-")[1]
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])], wheel.name


def newest(folders: Iterable[Path]) -> dict[str, Path]:
    """The newest wheel of every package in the folders."""
    found: dict[str, Path] = {}
    for wheel in sorted((w for folder in folders for w in folder.glob("*.whl")), key=version_key):
        found[normal_name(wheel)] = wheel
    return dict(sorted(found.items()))


def python_bytes(wheel: zipfile.ZipFile) -> int:
    """How much Python the wheel holds of its own."""
    return sum(i.file_size for i in wheel.infolist() if i.filename.endswith(".py") and not vendored(i.filename))


def digest(path: Path) -> str:
    """The file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def audit(wheels: dict[str, Path]) -> Iterator[Row | tuple[str, str, str]]:
    """Judge each wheel: a row of the table, or (name, version, why not)."""
    for name, path in wheels.items():
        version = path.name.split("-")[1]
        with zipfile.ZipFile(path) as wheel:
            size = python_bytes(wheel)
            licence = read_licence(name, wheel)
        if size < MIN_PYTHON or size < MIN_SHARE * path.stat().st_size:
            continue  # not judged: nobody will wonder why a package with no Python is missing
        if name in NOT_WANTED:
            yield name, version, NOT_WANTED[name]
        elif licence.spdx is None:
            yield name, version, licence.source
        else:
            role = "heldout" if name in HELD_OUT else "train"
            yield Row(name, version, role, licence.spdx, licence.source, path.name, digest(path))


def main() -> None:
    """Audit the wheels in the given folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of wheels")
    args = parser.parse_args()
    judged = list(audit(newest(args.folders)))
    rows = [row for row in judged if isinstance(row, Row)]
    refused = sorted(row for row in judged if not isinstance(row, Row))
    write_table(rows)
    with REFUSED.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "version", "reason"))
        writer.writerows(refused)
    print(f"{len(rows)} packages taken, {len(refused)} refused")


if __name__ == "__main__":
    main()
