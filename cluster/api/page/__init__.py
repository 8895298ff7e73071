"""The page at `/`: the engine live, read from `/metrics`, and a chat over the API. Plain files
without a build step; nothing is loaded from elsewhere.
"""

from __future__ import annotations

from importlib import resources

# By path: the file, and its type.
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/events.js": ("events.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# A browser loads and runs only what this server sends.
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def load() -> dict[str, tuple[bytes, str]]:
    """The content and its type by path."""
    folder = resources.files(__name__)
    files = FILES.items()
    return {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in files}
