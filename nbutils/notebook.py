"""Outputs of a chapter's notebook: data by MIME type, numbers for the prose, and source code."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["glue", "in_notebook", "listing", "show"]


def in_notebook() -> bool:
    """Whether the code runs in IPython, as in a notebook."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return ipython is not None and ipython.get_ipython() is not None


def show(bundle: dict[str, Any], **metadata: Any) -> None:
    """Show data by MIME type in a notebook; elsewhere, print the plain text.

    >>> show({"text/plain": "a line", "text/markdown": "a *line*"})
    a line
    """
    if in_notebook():
        from IPython.display import display

        display(bundle, metadata=metadata, raw=True)
    elif "text/plain" in bundle:
        print(bundle["text/plain"])


def glue(**numbers: str) -> None:
    """Store formatted numbers of the run for the chapter's prose, which shows them by ``{glue:text}``.

    The output is that of ``myst_nb.glue``, which Colab does not have. Outside the book, the numbers are printed too.

    >>> glue(exponent=f"{-0.5:.2f}")  # with a minus sign, not a hyphen
    exponent = −0.50
    """
    for name, number in numbers.items():
        text = re.sub(r"(?<![\w.)])-(?=[\d.]|inf)", "−", str(number))
        scrap = {"name": name, "mime_prefix": "application/papermill.record/"}
        show({"application/papermill.record/text/plain": repr(text)}, scrapbook=scrap)
        if not os.environ.get("NBUTILS_BOOK"):
            print(f"{name} = {text}")


def listing(*functions: Callable[..., Any]) -> None:
    """Show the source code of functions or classes, so that readers see it in the chapter.

    >>> import nbutils.intervals
    >>> listing(nbutils.intervals.rounding)  # doctest: +ELLIPSIS
    def rounding(terms: int, bits: int = 53) -> float:
    ...
    """
    code = "\n\n".join(inspect.getsource(function).rstrip() for function in functions)
    show({"text/plain": code, "text/markdown": f"```python\n{code}\n```"})
