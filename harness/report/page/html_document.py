"""HTML documents in one file: template, style, scripts and data, with names that cannot become markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.base.text import printable_lines


def render_html(template: str, scripts: Sequence[str], data: Any, values: Mapping[str, Any]) -> str:
    """Return a filled template of `harness/report/assets`.

    Values are escaped, and the data are JSON without "<". A content security policy allows only the page's own scripts
    and no loading, so an unescaped name could do no harm.

    Args:
        scripts: Names of the scripts in order; they read the element "data".
        data: JSON data without NaN.
        values: Values of the template's other variables by name.
    """
    sources = [_read_asset(name) for name in scripts]
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
    parts = (
        _template_environment()
        .get_template(template)
        .stream(
            **values,
            style=Markup(_read_asset("style.css")),
            scripts=[Markup(source) for source in sources],
            # Hash sources of inline scripts (CSP level 3, section 2.3.1).
            hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
            data=Markup(_encode_json(data)),
        )
    )
    # A table cell is several template parts; without buffering each is a string of its own.
    parts.enable_buffering(1000)
    return "".join(parts)


def pack_json(data: Any) -> str:
    """Return JSON without NaN, compressed and in base 64; `assets/page.js` decompresses it."""
    return base64.b64encode(gzip.compress(_encode_json(data).encode(), mtime=0)).decode()


def _encode_json(data: Any) -> str:
    """Return JSON with printable strings and without the characters that could end its element."""

    def escape(match: re.Match[str]) -> str:
        decoded = json.loads(f'"{match[0]}"')
        return match[0] if decoded.isprintable() else json.dumps(printable_lines(decoded))[1:-1]

    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII, so that one search finds all
    text = re.sub(r"\\\\|(?:\\u[0-9a-f]{4})+", escape, text)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@lru_cache(maxsize=1)
def _template_environment() -> Environment:
    loader = PackageLoader("harness.report", "assets")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,  # Markup is a subclass
    )  # fmt: skip


@lru_cache(maxsize=8)
def _read_asset(name: str) -> str:
    return files("harness.report").joinpath("assets", name).read_text(encoding="utf-8")
