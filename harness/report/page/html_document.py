"""HTML documents in one file: template, style, scripts and data, with names that cannot become markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["render_html"]


def render_html(template: str, scripts: Sequence[str], data: Any, values: Mapping[str, Any]) -> str:
    """Return a filled template of `harness/report/assets`.

    Values are escaped, and the data are JSON without "<". A content security policy allows only the page's own scripts
    and no loading, so an unescaped name could do no harm.

    Args:
        template: Name of the template.
        scripts: Names of the scripts in order; they read the element "data".
        data: JSON data without NaN.
        values: Variables of the template.
    """
    sources = [_read_asset(name) for name in scripts]
    filled: str = (
        _template_environment()
        .get_template(template)
        .render(
            **values,
            style=Markup(_read_asset("style.css")),
            scripts=[Markup(source) for source in sources],
            hashes=Markup(" ".join(f"'{_csp_hash(source)}'" for source in sources)),
            data=Markup(_escape_script_end(json.dumps(data, separators=(",", ":"), allow_nan=False))),
        )
    )
    return filled


def _csp_hash(source: str) -> str:
    """Return the hash source of an inline script (CSP level 3, section 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _escape_script_end(text: str) -> str:
    """Return equal JSON without the characters that could end its element."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@lru_cache(maxsize=1)
def _template_environment() -> Environment:
    loader = PackageLoader("harness.report", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@lru_cache(maxsize=8)
def _read_asset(name: str) -> str:
    return files("harness.report").joinpath("assets", name).read_text(encoding="utf-8")
