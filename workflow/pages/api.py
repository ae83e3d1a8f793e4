"""The reference of nbutils: a page for each module, with links to the sources and to torch."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workflow import ROOT, sources

if TYPE_CHECKING:  # only Sphinx itself needs them
    from docutils import nodes
    from sphinx.application import Sphinx

OWN = ("checkpoints", "norms", "callbacks", "fits", "intervals", "saturation", "heads", "homogeneity", "text", "layers")
TORCH = "https://docs.pytorch.org/docs/stable/"
ELSEWHERE = {
    "Tensor": TORCH + "tensors.html",
    "nn.Module": TORCH + "generated/torch.nn.Module.html",
    "torch.Generator": TORCH + "generated/torch.Generator.html",
    "torch.optim.Optimizer": TORCH + "optim.html#torch.optim.Optimizer",
    "pd.DataFrame": "https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.html",
    "NDArray": "https://numpy.org/doc/stable/reference/typing.html#numpy.typing.NDArray",
    "ArrayLike": "https://numpy.org/doc/stable/reference/typing.html#numpy.typing.ArrayLike",
}  # as signatures write them
SHORT = {name.rpartition(".")[2]: url for name, url in ELSEWHERE.items()}


def groups() -> dict[str, dict[str, str]]:
    """What each module is for, by its name: those for one's own models, those that chapters share, a chapter's own."""
    found: dict[str, dict[str, str]] = {"For your own models": {}, "What chapters share": {}, "Of single chapters": {}}
    for name, code in sources.modules().items():
        first, _, rest = name.removeprefix("nbutils").removeprefix(".").partition(".")
        if first and first != "__main__" and name != "nbutils.chapters":
            own, shared, single = found.values()
            group = single if first == "chapters" else own if first in OWN else shared
            group[name] = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
    rank = {name: place for place, name in enumerate(OWN)}
    own = found["For your own models"]
    found["For your own models"] = dict(sorted(own.items(), key=lambda item: (rank[item[0].split(".")[1]], item[0])))
    return found


def pages() -> Iterator[tuple[str, bytes]]:
    """Path and text of the page of each module."""
    for name in [name for group in groups().values() for name in group]:
        text = f"---\norphan: true\n---\n\n# `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"
        yield f"api/{name}.md", text.encode()


def source(domain: str, info: dict[str, str]) -> str | None:
    """Where the code of a function or class stands, from the root of the repository; None of what has no code."""
    if domain != "py" or not info["module"]:
        return None
    found: object = importlib.import_module(info["module"])
    try:
        for part in info["fullname"].split("."):
            found = getattr(found, part)
        found = inspect.unwrap(getattr(found, "fget", found))  # type: ignore[arg-type]
        file, (_, line) = inspect.getsourcefile(found), inspect.getsourcelines(found)  # type: ignore[arg-type]
    except (AttributeError, TypeError, OSError):
        return None
    if file is None or not Path(file).is_relative_to(ROOT / "nbutils"):
        return None
    return f"{Path(file).relative_to(ROOT)}#L{line}"


def elsewhere(app: Sphinx, env: object, node: nodes.Element, text: nodes.Element) -> nodes.reference | None:
    """A link to the documentation of torch, numpy or pandas."""
    from docutils import nodes

    url = SHORT.get(node.get("reftarget", "").rpartition(".")[2])
    return nodes.reference("", "", text, refuri=url, internal=False) if url else None
