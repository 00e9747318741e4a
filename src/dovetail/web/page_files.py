"""The page's files, the headers that they are served with, and the page as one file with its data."""

from __future__ import annotations

import base64
import hashlib
import re
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


_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|function|class) (\w+))", re.MULTILINE)
# JSON may have these in its strings only. There they could end the element that holds it.
_IN_HTML = {b"<": b"\\u003c", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def frozen_page(data: bytes) -> bytes:
    """The whole page as one HTML file that loads nothing. `data`: {about, answers} as JSON in UTF-8. `answers` has the
    answers to the page's questions by path. The browser runs the page's own script only, whatever texts the data
    has."""
    style, script = page_files()["page.css"].content.decode(), _one_script()
    for said, written in _IN_HTML.items():
        data = data.replace(said, written)
    page = page_files()[INDEX].content.decode()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    page = page.replace('<link rel="stylesheet" href="static/page.css">', head)
    page = page.replace(
        '<script type="module" src="static/main.js"></script>', f'<script type="module">{script}</script>'
    )
    before, after = page.split("</body>")
    element = b'<script type="application/json" id="data">' + data + b"</script>\n</body>"
    return before.encode() + element + after.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _one_script() -> str:
    """All scripts in one. Each module is a function that returns its exports, after those that it imports."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        text = page_files()[name].content.decode()
        for _, other in _IMPORT.findall(text):
            if other not in done:
                add(other)
        exports = ", ".join(exported for _, exported in _EXPORT.findall(text))
        text = _IMPORT.sub(lambda found: f'const {{{found[1].replace(" as ", ": ")}}} = modules["{found[2]}"];', text)
        inner = _EXPORT.sub(r"\1", text) + f"return {{{exports}}};"
        done[name] = f'modules["{name}"] = await (async () => {{\n{inner}\n}})();\n'

    add("main.js")
    return "const modules = {};\n" + "".join(done.values())
