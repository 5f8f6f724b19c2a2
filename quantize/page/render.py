"""Owns the last step to the page: the template and its assets, and how numbers are written.

Everything that comes from a file is escaped by the template engine. The page says in its own
security policy that it loads nothing and runs no script but the one here, by digest.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4q.artifact.files import beginning
from ds4q.quantize.errors import PageError
from ds4q.quantize.page.heatmap import frame, sections

if TYPE_CHECKING:
    from jinja2 import Template

is_page = beginning(
    rb'\s*<!doctype html>\s*<html lang="en">\s*<head>\s*<meta charset="utf-8">\s*'
    rb'<meta name="generator" content="ds4q '
)
"""Whether a file that begins so is such a page."""

_FOLDER = Path(__file__).parent
_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")


def load_template() -> Template:
    """The compiled template; ``PageError`` where jinja2 is not installed."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise PageError() from None
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"size": size, "count": count, "percent": percent, "figure": figure}
    return environment.from_string(_asset("page.html.j2"))


def render(page: dict[str, Any]) -> str:
    """The page of what ``gather`` gives."""
    from markupsafe import Markup

    template = load_template()
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    experts = page["experts"]
    drawn = experts is not None and bool(experts["parts"])
    return template.render(
        page=page,
        maps=sections(experts) if drawn else [],
        frame=frame(experts["layers"], experts["columns"]) if drawn else None,
        style=Markup(_asset("page.css")),
        script=Markup(script),
        script_sha256=digest,
    )


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def size(nbytes: int) -> str:
    """Bytes for people, in powers of 1000: ``98.3 GB``."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_SIZES) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} bytes" if unit == 0 else f"{value:.3g} {_SIZES[unit]}"


def count(value: int) -> str:
    """An integer with its thousands apart."""
    return f"{value:,}"


def percent(share: float) -> str:
    """A share of one; what is there is never shown as nothing."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"


def figure(value: float | None, digits: int = 4) -> str:
    """A number with so many decimals; a dash for none."""
    return "\N{EN DASH}" if value is None else f"{value:.{digits}f}"
