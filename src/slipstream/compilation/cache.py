"""``slipstream cache``: the compile bundles of this machine, listed, carried to another one, and removed."""

from __future__ import annotations

import argparse
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.compilation.bundle import (
    DAMAGED,
    MAGIC,
    SUFFIX,
    UNREADABLE_ZIP,
    Bundle,
    DamagedBundle,
    cannot_write,
    directory,
    file_name,
    parse,
    read_bundle,
    read_header,
    write_bundle,
    write_whole,
    writing,
)
from slipstream.compilation.fingerprint import Fields, differences, environment
from slipstream.errors import CompilationError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``pack FILE``, ``unpack FILE`` and ``prune`` with their options. Loads no torch."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="key, size and age of each compile bundle")
    pack = actions.add_parser("pack", help="write all bundles into one file, to carry to another machine")
    pack.add_argument("file", metavar="FILE", help="the file to write; a pack of that name is replaced")
    unpack = actions.add_parser("unpack", help="check a packed file and place its bundles here")
    unpack.add_argument(
        "file", metavar="FILE", help="a file that `cache pack` wrote; it holds code: only from machines you trust"
    )
    prune = actions.add_parser("prune", help="remove bundles; damaged ones and leavings go in any case")
    prune.add_argument(
        "--elsewhere", action="store_true", help="those that another torch, GPU, driver or library version made"
    )
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="those that are older than so many days")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(args: argparse.Namespace, console: Console) -> int:
    """Do what the command line asks for; return the exit code, 0.

    Raises CompilationError for files that cannot be read or written or are no whole pack, ConfigError for options.
    """
    if args.action == "list":
        _list(console)
    elif args.action == "pack":
        _pack(Path(args.file), console)
    elif args.action == "unpack":
        _unpack(Path(args.file), console)
    else:
        _prune(args, console)
    return 0


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bundles(where: Path) -> list[Path]:
    return sorted(where.glob(f"*{SUFFIX}"))


def _count(number: int) -> str:
    return f"{number} bundle{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.1f} GiB"


def _days(created: str) -> float:
    """Return the age in days; a time that cannot be read is of no age."""
    try:
        made = datetime.fromisoformat(created)
        return (datetime.now(UTC) - made).total_seconds() / 86400
    except (ValueError, TypeError):
        return 0.0


def _age(created: str) -> str:
    days = _days(created)
    if days >= 2:
        return f"{days:.0f} days"
    return f"{days * 24:.0f} hours" if days * 24 >= 2 else f"{max(days * 1440, 0):.0f} minutes"


# -- list -------------------------------------------------------------------------------------------------------------


def _list(console: Console) -> None:
    from rich import box
    from rich.table import Table

    where = directory()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("bundle", "made for", "made with", "size", "age"):
        table.add_column(heading, overflow="fold")
    notes, total = [], 0
    for path in _bundles(where):
        try:
            head, size = read_header(path), path.stat().st_size
        except (OSError, DamagedBundle) as error:
            notes.append(f"{path.name}: {error}")
            continue
        total += size
        table.add_row(path.stem, _made_for(head), _made_with(head.environment), _size(size), _age(head.created))
    if table.row_count:
        console.print(table)
        _say(console, f"{_count(table.row_count)}, {_size(total)}, in {where}")
    else:
        _say(console, f"no compile bundles in {where}; `slipstream prewarm RECIPE` makes one")
    for note in notes:
        _say(console, note)
    if aside := len(list(where.glob(f"*{DAMAGED}"))):
        _say(console, f"{aside} damaged, set aside; `slipstream cache prune` removes them")


def _made_for(head: Bundle) -> str:
    work = head.work
    return (
        f"{head.about.get('target', work.get('target'))}: drafter of {work.get('drafter.layers')} layers, block "
        f"{work.get('drafter.block_size')}, rows x length x anchors {work.get('rows')} x {work.get('row length')} x "
        f"{work.get('anchors')}, {work.get('precision')}, {work.get('attention')}, {work.get('device')}; "
        f"{head.about.get('graphs', 0)} graphs, {head.about.get('tuning results', 0)} tuning results, "
        f"{head.about.get('kernels', 0)} Triton kernels"
    )


def _made_with(fields: Fields) -> str:
    commit = str(fields.get("torch commit"))[:10]
    return (
        f"{fields.get('gpu')} ({fields.get('capability')}, driver {fields.get('driver')}), torch {fields.get('torch')} "
        f"({commit}), CUDA {fields.get('cuda')}, Triton {fields.get('triton')}, FLA {fields.get('fla')}, Python "
        f"{fields.get('python')}"
    )


# -- pack and unpack --------------------------------------------------------------------------------------------------


def _pack(file: Path, console: Console) -> None:
    """A zip file, uncompressed: its directory is at its end, so that a cut is always seen."""
    if file.exists() and not _is_pack(file):
        raise CompilationError(f"{file} exists and is no pack; choose another name")
    buffer, packed = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as pack:
        for path in _bundles(directory()):
            try:
                content = path.read_bytes()
                parse(content)
            except (OSError, DamagedBundle) as error:
                _say(console, f"left out: {path.name}: {error}")
                continue
            pack.writestr(path.name, content)
            packed += 1
    if not packed:
        raise CompilationError(f"{directory()} holds no whole compile bundles; `slipstream prewarm RECIPE` makes one")
    try:
        write_whole(file, buffer.getvalue())
    except OSError as error:
        raise CompilationError(
            f"the pack {file} cannot be written ({error.strerror or error}); choose another place"
        ) from None
    _say(console, f"{_count(packed)} packed into {file}, {_size(len(buffer.getvalue()))}")


def _is_pack(file: Path) -> bool:
    """Whether a file is a zip of bundles from its first byte on: weights are zips as well, and bundles end in one."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"PK\x03\x04":
                return False
        with zipfile.ZipFile(file) as pack:
            members = pack.infolist()
    except (OSError, *UNREADABLE_ZIP):
        return False
    return bool(members) and all(m.filename.endswith(SUFFIX) and "/" not in m.filename for m in members)


def _unpack(file: Path, console: Console) -> None:
    bundles = []
    try:
        with file.open("rb") as stream:
            begins = stream.read(len(MAGIC))
        if begins == MAGIC:
            raise CompilationError(f"{file} is a bundle, not a pack; copy it into {directory()} as it is")
        with zipfile.ZipFile(file) as pack:
            for member in pack.infolist():
                # A pack holds bundles alone, as they are. In what is left of one that was cut, zipfile finds the
                # archive at the end of the last whole bundle.
                if not member.filename.endswith(SUFFIX) or member.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"it holds {member.filename!r}")
                try:
                    bundles.append(parse(pack.read(member)))
                except DamagedBundle as damage:
                    raise CompilationError(
                        f"the pack {file} holds no bundle in {member.filename!r}: {damage}; nothing was placed; pack "
                        "it again"
                    ) from None
    except OSError as error:
        raise CompilationError(f"the pack {file} cannot be read ({error.strerror or error})") from None
    except UNREADABLE_ZIP as error:
        raise CompilationError(
            f"{file} is not a whole pack ({error}); nothing was placed; copy it again, or pack it again"
        ) from None
    if not bundles:
        raise CompilationError(f"the pack {file} holds no bundle; pack it again")
    for bundle in bundles:
        # The key decides the name, never the pack.
        known = (directory() / file_name(bundle.environment, bundle.work)).exists()
        path = write_bundle(directory(), bundle)
        _say(console, f"{'replaced' if known else 'placed'} {path.name}: {_made_for(bundle)}")
    _say(console, f"{_count(len(bundles))} unpacked into {directory()}; a run loads the one that fits it and no other")


# -- prune ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    path: Path
    why: str


def _chosen(where: Path, *, elsewhere: bool, days: float | None) -> Iterator[_Choice]:
    """Yield what is to go, with the reason."""
    here = _environments() if elsewhere else []
    for path in _bundles(where):
        try:
            head = read_bundle(path)
        except OSError:  # gone meanwhile, or not to be read: nothing is known of it
            continue
        except DamagedBundle as error:
            yield _Choice(path, f"damaged: {error}")
            continue
        if days is not None and _days(head.created) > days:
            yield _Choice(path, f"{_age(head.created)} old")
        elif here:
            wrong = min((differences(mine, head.environment) for mine in here), key=len)
            if wrong:
                yield _Choice(path, "; ".join(wrong))
    for path in sorted(where.glob(f"*{DAMAGED}")):
        yield _Choice(path, "damaged, set aside")


def _environments() -> list[Fields]:
    """Return what bundles of this machine are made with: one environment for each GPU, and that of the CPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        raise CompilationError(
            "--elsewhere cannot tell which bundles are this machine's: CUDA_VISIBLE_DEVICES hides its GPUs; unset it"
        )
    found = [environment("cpu"), *(environment(torch.device("cuda", index)) for index in range(count))]
    if any(e["driver"] is None for e in found[1:]):
        raise CompilationError(
            "--elsewhere cannot tell which bundles are this machine's: nvidia-smi does not name the driver; mend that, "
            "or prune by --older-than"
        )
    return found


def _prune(args: argparse.Namespace, console: Console) -> None:
    if not args.elsewhere and args.older_than is None:
        raise ConfigError("cache prune was not told what to remove; give --elsewhere, --older-than DAYS, or both")
    if args.older_than is not None and not args.older_than >= 0:
        raise ConfigError(f"--older-than is {args.older_than:g}; give a number of days, 0 or more")
    where, removed, stuck = directory(), 0, []
    for choice in list(_chosen(where, elsewhere=args.elsewhere, days=args.older_than)):
        size = choice.path.stat().st_size if choice.path.exists() else 0
        if not args.dry_run:
            try:
                choice.path.unlink(missing_ok=True)
            except OSError as error:
                stuck.append(f"{choice.path.name} ({error.strerror or error})")
                continue
        removed += 1
        _say(
            console, f"{'would remove' if args.dry_run else 'removed'} {choice.path.name}, {_size(size)}: {choice.why}"
        )
    if not args.dry_run and where.is_dir() and os.access(where, os.W_OK):
        try:
            with writing(where):  # which clears what killed writers left
                pass
        except OSError as error:
            raise cannot_write(where, error) from None
    if stuck:
        raise CompilationError(f"in {where} these cannot be removed: {', '.join(stuck)}; remove them by hand")
    if not removed:
        _say(console, f"nothing to remove in {where}")
