"""What a chapter shows in its notebook: data by MIME type, numbers for its prose, the code that it rests on."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any


def in_notebook() -> bool:
    shell = sys.modules.get("IPython")  # a notebook has loaded it
    return shell is not None and shell.get_ipython() is not None


def show(bundle: dict[str, Any], **metadata: Any) -> None:
    """Show data by MIME type in a notebook; elsewhere print the plain text among them.

    >>> show({"text/plain": "a line", "text/markdown": "a *line*"})
    a line
    """
    if in_notebook():
        from IPython.display import display

        display(bundle, metadata=metadata, raw=True)
    elif "text/plain" in bundle:
        print(bundle["text/plain"])


def glue(**numbers: str) -> None:
    """Keep numbers of the run, already formatted, for the prose of the chapter: it shows them by ``{glue:text}``.

    Writes what ``myst_nb.glue`` writes, without needing it: Colab does not have it. Outside the book it prints, too.

    >>> glue(exponent=f"{-0.5:.2f}")  # with a minus sign, not a hyphen
    exponent = −0.50
    """
    for name, given in numbers.items():
        text = re.sub(r"(?<![\w.)])-(?=[\d.]|inf)", "−", str(given))
        scrap = {"name": name, "mime_prefix": "application/papermill.record/"}
        show({"application/papermill.record/text/plain": repr(text)}, scrapbook=scrap)
        if not os.environ.get("NBUTILS_BOOK"):
            print(f"{name} = {text}")


def listing(*functions: Callable[..., Any]) -> None:
    """Show the source of functions or classes, so that a chapter's mathematics can be read in the chapter.

    >>> import nbutils.intervals
    >>> listing(nbutils.intervals.rounding)  # doctest: +ELLIPSIS
    def rounding(terms: int, bits: int = 53) -> float:
    ...
    """
    text = "\n\n".join(inspect.getsource(function).rstrip() for function in functions)
    show({"text/plain": text, "text/markdown": f"```python\n{text}\n```"})
