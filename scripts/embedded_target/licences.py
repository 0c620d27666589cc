"""Read what licence a wheel is under, and refuse what is not plainly permissive.

A package passes when its metadata names permissive licences only, or, where the metadata is silent or says no more than
"BSD", when its licence file reads as one of them. A licence file that reads as copyleft refuses the package whatever
the metadata says. Doubt refuses: there is enough source whose licence is clear.
"""

import re
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import NamedTuple

PERMISSIVE = frozenset(
    {"MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "ISC", "PSF-2.0", "Python-2.0"}
    | {"Unlicense", "0BSD", "CC0-1.0", "Zlib"}
)

# The expression of such a wheel speaks of compiled libraries that it carries; its Python, which is all that is used, is
# under its own licence file, read by hand.
READ_BY_HAND = {"torch": ("BSD-3-Clause", "hand: LICENSE text; the expression adds compiled third-party code")}

CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
    "BSD License": "BSD",  # two or three clauses: only the text can tell
}

FIELDS = {
    "mit": "MIT",
    "mit license": "MIT",
    "the mit license": "MIT",
    "bsd": "BSD",
    "bsd license": "BSD",
    "new bsd": "BSD",
    "simplified bsd": "BSD",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd-3-clause license": "BSD-3-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache2.0": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
}

# Names of licences that are not wanted, wherever a source file speaks of them.
FOREIGN = re.compile(
    r"GNU\s+(?:Lesser |Library |Affero )?General\s+Public|\b[LA]?GPL(?:v?[123]|\b)|\bMPL[- ]?[12]"
    r"|Mozilla\s+Public\s+Licen|Eclipse\s+Public\s+Licen|\bCDDL\b|CeCILL|Creative\s+Commons|\bCC[- ]BY|Commons\s+Clause"
    r"|Business\s+Source\s+Licen|Server\s+Side\s+Public|Elastic\s+License|strictly\s+prohibited"
    r"|\bproprietary\b.{0,80}\bconfidential\b"
    r"|NVIDIA\s+CORPORATION.{0,200}express\s+license\s+agreement",
    re.IGNORECASE | re.DOTALL,
)
RESERVED = re.compile(r"all\s+rights\s+reserved", re.IGNORECASE)
GRANT = re.compile(r"licen[sc]e|permission\s+is\s+hereby|redistribution\s+and\s+use|SPDX|\bBSD\b", re.IGNORECASE)

SENTENCES = {
    "GPL": re.compile(r"gnu (?:lesser |library |affero )?general public license version"),
    "MPL": re.compile(r"mozilla public license,? version"),
    "Apache-2.0": re.compile(r"apache license,? version 2\.0"),
    "BSD": re.compile(r"redistribution and use (?:of this software )?in source and binary forms"),
    "MIT": re.compile(r"permission is hereby granted, free of charge"),
    # The text that asks for a mention in "supporting documentation" is an older one (HPND), not wanted.
    "ISC": re.compile(
        r"permission to use, copy, modify, and(?:/or)? distribute this software (?!and its documentation)"
    ),
    "Unlicense": re.compile(r"this is free and unencumbered software"),
    "Zlib": re.compile(r"altered source versions must be plainly marked"),
    "CC0-1.0": re.compile(r"cc0 1\.0 universal"),
    "PSF-2.0": re.compile(r"python software foundation license"),
}

VENDOR_FOLDERS = frozenset(
    {"vendor", "vendors", "vendored", "third_party", "thirdparty", "thirdparty_files", "third_party_files", "3rdparty"}
    | {"extern", "externals", "external", "ext_libs", "bundled", "node_modules", "site-packages", "lib2to3", "pydevd"}
)


class Licence(NamedTuple):
    """The licence as read: SPDX text and where it was read from. A refusal has no SPDX text but its reason."""

    spdx: str | None
    source: str


def identify(text: str) -> str | None:
    """The licence that a licence file's text is, by sentences that only it has.

    Many files append the licences of compiled parts: the sentence that comes first is the package's own. GPL stands
    for its whole family.
    """
    flat = " ".join(text.lower().split())
    found = [(match.start(), spdx) for spdx, sentence in SENTENCES.items() if (match := sentence.search(flat))]
    if not found:
        return None
    start, spdx = min(found)
    own = flat[start : start + 2500]
    if spdx == "BSD":
        if "all advertising materials" in own:
            return "BSD-4-Clause"
        return "BSD-3-Clause" if re.search(r"neither the names? |may not be used to endorse", own) else "BSD-2-Clause"
    return spdx


def accepted_expression(expression: str) -> bool:
    """Whether an SPDX expression can be met by permissive licences alone: every AND part, one side of each OR."""

    def flat(part: str) -> bool:
        return any(all(one.strip() in PERMISSIVE for one in side.split(" AND ")) for side in part.split(" OR "))

    while (inner := re.sub(r"\(([^()]*)\)", lambda m: "MIT" if flat(m[1]) else "refused", expression)) != expression:
        expression = inner
    return flat(expression)


def from_metadata(meta: Message) -> tuple[str | None, str]:
    """The licence that the metadata names, and where: its expression, its classifiers or its free field."""
    if expression := meta.get("License-Expression"):
        return expression.strip(), "expression"
    classified = [c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith("License :: ")]
    classified = [c for c in classified if c not in ("OSI Approved", "DFSG approved")]
    if classified:
        return " AND ".join(sorted({CLASSIFIERS.get(c, c.replace(" ", "-")) for c in classified})), "classifier"
    field = (meta.get("License") or "").strip()
    if field:
        short = len(field) < 60 and "\n" not in field
        return FIELDS.get(field.lower(), field) if short else identify(field), "field"
    return None, "none"


def licence_texts(wheel: zipfile.ZipFile, info: str) -> list[str]:
    """The texts of the package's own licence files; those in deeper folders belong to compiled parts."""
    own = []
    for name in wheel.namelist():
        path = PurePosixPath(name)
        folder, stem = path.parent.as_posix(), path.name.upper()
        if folder in (info, f"{info}/licenses") and stem.startswith(("LICENSE", "LICENCE", "COPYING")):
            own.append(wheel.read(name).decode("utf-8", "replace"))
    return own


def read_licence(name: str, wheel: zipfile.ZipFile) -> Licence:
    """Read one wheel's licence; a refusal says why."""
    infos = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
    if not infos:
        return Licence(None, "no metadata")
    meta = HeaderParser().parsestr(wheel.read(infos[0]).decode("utf-8", "replace"))
    named, source = from_metadata(meta)
    texts = [found for text in licence_texts(wheel, infos[0].split("/")[0]) if (found := identify(text))]
    if unwanted := [text for text in texts if text not in PERMISSIVE]:
        return Licence(None, f"a licence file reads as {unwanted[0]}")
    if name in READ_BY_HAND:
        return Licence(*READ_BY_HAND[name])
    return combine(named, source, texts)


def combine(named: str | None, source: str, texts: list[str]) -> Licence:
    """Join what the metadata names and what the licence files read as."""
    if named is not None:
        parts = named.split(" AND ")
        if "BSD" in parts:
            bsd = [text for text in texts if text.startswith("BSD")]
            if not bsd:
                return Licence(None, "BSD named, clauses unknown: no licence file that tells")
            named, source = " AND ".join(bsd[0] if p == "BSD" else p for p in parts), f"{source}+text"
        if not accepted_expression(named):
            return Licence(None, f"{source}: {named[:80]}")
        agrees = "+text" if any(t in named for t in texts) and "+text" not in source else ""
        return Licence(named, source + agrees)
    if texts:
        return Licence(" AND ".join(sorted(set(texts))), "text")
    return Licence(None, "metadata names no licence and no licence file reads as one")


def foreign_source(text: str, head: str) -> str | None:
    """Why a source file is left out for its own words: it names another licence, or reserves rights and grants none."""
    if found := FOREIGN.search(text):
        return f"names {found.group(0)[:40]!r}"
    if RESERVED.search(head) and not GRANT.search(head):
        return "all rights reserved, nothing granted"
    return None


def vendored(path: str) -> bool:
    """Whether a file lies in a folder that holds others' code (a leading underscore does not matter)."""
    return any(
        part.lstrip("_").lower() in VENDOR_FOLDERS or part.endswith((".dist-info", ".data"))
        for part in PurePosixPath(path).parts[:-1]
    )
