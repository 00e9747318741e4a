"""The page's files and the headers that they are served with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
INDEX = "index.html"
# Browsers take scripts and styles from this server only, so that text of a model cannot run as a script.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page. `kind`: its media type, without the charset."""

    content: bytes
    kind: str


@cache
def page_files() -> dict[str, PageFile]:
    """All files by name. A server looks names up here, so no path of a request reaches the disk."""
    folder = resources.files("dovetail.web") / "static"
    found = {}
    for entry in folder.iterdir():
        kind = TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None and entry.is_file():
            found[entry.name] = PageFile(entry.read_bytes(), kind)
    return found
