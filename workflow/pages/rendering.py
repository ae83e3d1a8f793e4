"""Templates of pages and summaries, and the words that they use for a check."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from nbutils.claims.records import Record, format_band, format_measured, format_number
from workflow import book, notebooks


def state(record: Record) -> str:
    """What became of a check, in a word."""
    return "open" if record.role == "open" else "holds" if record.holds else "noted" if record.noted else "fails"


@cache
def gpu() -> dict[str, Any]:
    """What a GPU measured, as ``book/gpu.json`` keeps it."""
    return json.loads(notebooks.ON_GPU.read_text(encoding="utf-8"))


def on_gpu(record: Record) -> str:
    """What a GPU measured of a check; empty where it was not run there, or is open."""
    value = gpu()["checks"].get(f"{record.claim}: {record.check}")
    return "" if value is None else format_number(value)


TEMPLATES = Environment(
    loader=PackageLoader("workflow.pages"),
    undefined=StrictUndefined,  # a placeholder that stands for nothing is an error that names it
    autoescape=lambda name: ".html." in (name or ""),  # Markdown is escaped where it holds HTML
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"measured": format_measured, "band": format_band, "state": state, "origin": book.origin}
TEMPLATES.filters |= {"version": book.version, "on_gpu": on_gpu, "number": book.number}


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(template).render(values)
