"""Fetch the packages of ``packages.csv`` and lay out their Python files, and nothing else.

pip downloads the wheels from whatever index it is set up with, without dependencies and without building anything, and
refuses a file whose digest is not the table's. Wheels that lie in a folder already (``--wheels``) are not asked for
again. Folders that hold others' code are left out.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from audit_packages import Row, digest, read_table
from licences import vendored

BUILD = Path(__file__).resolve().parents[2] / "build" / "embedded_target"
BATCH = 25  # wheels in one call of pip: a broken download costs one batch


def present(rows: Iterable[Row], folders: list[Path]) -> dict[str, Path]:
    """The wheels that lie in the folders with the digest of the table."""
    found: dict[str, Path] = {}
    for row in rows:
        for folder in folders:
            path = folder / row.wheel
            if path.is_file() and digest(path) == row.sha256:
                found[row.name] = path
                break
    return found


def platforms(wheel: str) -> list[str]:
    """pip's options that make it look for this very wheel, whatever machine it runs on."""
    python, abi, platform = wheel.removesuffix(".whl").split("-")[-3:]
    options = [word for tag in platform.split(".") for word in ("--platform", tag)]
    options += [word for tag in abi.split(".") for word in ("--abi", tag)]
    # One version for all: a wheel for cp39-abi3 is found by a newer Python too, and its metadata may refuse the older.
    return [*options, "--implementation", "py" if python.startswith("py") else "cp", "--python-version", "3.11"]


def download(rows: list[Row], target: Path) -> None:
    """Let pip download the wheels, checking their digests; wheels with the same tags go together."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(platforms(row.wheel)), []).append(row)
    for options, members in groups.items():
        for start in range(0, len(members), BATCH):
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
                for row in members[start : start + BATCH]:
                    wanted.write(f"{row.name}=={row.version} --hash=sha256:{row.sha256}\n")
                wanted.flush()
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
                command += ["--only-binary", ":all:", "--dest", str(target), *options, "--requirement", wanted.name]
                subprocess.run(command, check=True)


def extract(wheel: Path, target: Path) -> int:
    """Write the wheel's own Python files under a folder and return how many there are."""
    shutil.rmtree(target, ignore_errors=True)
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = PurePosixPath(info.filename)
            if (
                info.is_dir()
                or path.suffix != ".py"
                or path.is_absolute()
                or ".." in path.parts
                or vendored(info.filename)
            ):
                continue
            place = target.joinpath(*path.parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(info))
            count += 1
    return count


def main() -> None:
    """Download what is missing, check everything, extract."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="working folder; wheels/ and source/ come in it")
    parser.add_argument("--wheels", type=Path, action="append", default=[], help="a folder of wheels; may be repeated")
    args = parser.parse_args()
    rows = read_table()
    own = args.build / "wheels"
    own.mkdir(parents=True, exist_ok=True)
    folders = [own, *args.wheels]
    found = present(rows, folders)
    missing = [row for row in rows if row.name not in found]
    print(f"{len(found)} wheels here, {len(missing)} to download")
    if missing:
        download(missing, own)
        found = present(rows, folders)
    lost = [row.wheel for row in rows if row.name not in found]
    if lost:
        raise SystemExit(f"missing, or of another digest: {', '.join(lost)}")
    source = args.build / "source"
    wanted = {row.name for row in rows}
    for folder in source.glob("*"):  # a package that left the table leaves the corpus
        if folder.name not in wanted:
            shutil.rmtree(folder)
    count = sum(extract(found[row.name], source / row.name) for row in rows)
    print(f"{count:,} Python files of {len(rows)} packages in {source}")


if __name__ == "__main__":
    main()
