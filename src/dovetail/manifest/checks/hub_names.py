"""Tells names of a hub's repositories from paths of files that are missing here."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from dovetail.manifest.fixed_names import DATA_SUFFIXES

_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")


_HUB_ADDRESS = re.compile(
    r"(?:https?://|hf://)?(?:www\.)?(?:(?:huggingface\.co|hf\.co)/|(?<=hf://))(?:datasets/|models/)?([\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+))?(?:[/?#].*)?"
)


def address_fix(text: str) -> str | None:
    """How to write what a web address or a bucket's address means. It is the end of a sentence. None if the text is no
    address."""
    if (found := _HUB_ADDRESS.fullmatch(text)) is not None:
        return f"write {found[1]}" + (f" with revision: {found[2]}" if found[2] else "")
    scheme, mark, _ = text.partition("://")
    if not mark:
        return None
    return f"no {scheme}:// is read: copy the files to a folder or a claim, or write the name in a hub as owner/name"


def hub_problem(name: str, what: str, base: Path, owner: bool = True) -> str | None:
    """The reason why `name`, which does not exist here, cannot be a repository of a hub. It is the end of a sentence
    that begins with the name. None if it can. A data file, or a path in a folder that exists here, counts as a mistyped
    path.

    `what` says what is missing, such as "file, and no data set". Relative paths start at `base`. With `owner`, names
    need an owner."""
    if (fix := address_fix(name)) is not None:
        return f"is an address; {fix}"
    if name.endswith(DATA_SUFFIXES):
        return "does not exist"
    if not _NAME.fullmatch(name) or (owner and "/" not in name):
        return f"is no {what} of a hub (owner/name)"
    folder = PurePath(name).parent
    if "/" in name and (base / folder).is_dir():
        return f"does not exist, but the folder {folder} does, so no hub is asked; correct the path"
    return None
