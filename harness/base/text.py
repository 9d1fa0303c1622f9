"""Text from outside (names in models, data, results and files), made printable and escaped for each output format.

HTML pages are escaped by their templates, see `harness.report.page.html_document`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_FILE_NAME_CHARS = 100
MAX_VALUE_CHARS, MAX_LINE_CHARS = 200, 2000  # of a value in a message, and of a line of one
#: Longer than 255 bytes, the limit of a file name.
_LONG_WORD = re.compile(rf"([^\s/]{{{MAX_VALUE_CHARS}}})[^\s/]{{55,}}?(:?)(?=[\s/]|\Z)")
MAX_NAMES_SHOWN = 5
_LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)  # fmt: skip

_CSV_FORMULA = re.compile(r"\s*([=@]|[+-](?!$|[\d.]+(e[+-]?\d+)?$))")  # a signed number is no formula


def short_version(version: object) -> str:
    """Return a version without the name of its commit; it has only letters, digits, "_" and ".", or nothing."""
    return re.split(r"[^\w.]", str(version or ""), maxsplit=1)[0]


def printable(text: str, keep: str = "") -> str:
    r"""Return text on one line without control, bidirectional and invisible characters (Unicode C*, Z*).

    Space of any kind becomes a space, all others an escape such as `\x1b`.

    Args:
        keep: Characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return text as `printable` does, but keep line breaks and tabs."""
    return printable(text, keep="\n\t")


def shorten(value: object) -> str:
    """Return a value of a user as text for a message, cut after `MAX_VALUE_CHARS`; a text stays as it is."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def shorten_values(text: str) -> str:
    """Return a message whose words and lines are cut: it may quote a value of any length.

    Words that may be paths are cut only if a name in them is longer than any file name.
    """
    text = _LONG_WORD.sub(r"\1...\2", text)
    if len(text) <= MAX_LINE_CHARS:
        return text
    head, tail = MAX_LINE_CHARS * 3 // 4, MAX_LINE_CHARS // 5
    return "\n".join(
        line if len(line) <= MAX_LINE_CHARS else f"{line[:head]} ... {line[-tail:]}" for line in text.split("\n")
    )


def truncate(text: str, width: int) -> str:
    """Truncate text to `width` characters, ending with an ellipsis."""
    return text if len(text) <= width else f"{text[: width - 1].rstrip(' ,')}…"


def escape_markdown(text: str) -> str:
    """Escape Markdown markup and characters that are not printable."""
    safe = re.sub(r"[\\|<*`]|\](?=[(\[])", lambda match: f"\\{match[0]}", printable(text))
    return re.sub(r"^(\s*\[[^\]]*)\](?=:)", r"\1\\]", safe)  # a line that begins so defines a link


def escape_latex(text: str) -> str:
    """Escape characters with a meaning in LaTeX, and those that are not printable."""
    safe = printable(text).translate(_LATEX_ESCAPES)
    # At the start of a row LaTeX would read these as arguments of the line break before.
    return f"{{}}{safe}" if safe.startswith(("[", "*")) else safe


def escape_csv(value: object) -> object:
    """Return a cell for CSV; text that spreadsheets would compute starts with an apostrophe (OWASP, CSV injection)."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if _CSV_FORMULA.match(text) else text


def safe_file_name(text: str) -> str:
    """Return a text as a file name of letters, digits and `._-` ("-" for others) that does not start with a dot."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:MAX_FILE_NAME_CHARS]
    return f"-{name}" if name[:1] in (".", "") else name


def format_names(names: Collection[str]) -> str:
    """Return the first names in quotes, separated by commas, and the number of the others."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(map(repr, list(names)[:MAX_NAMES_SHOWN])) + more


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: "1 table", "2 tables"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
