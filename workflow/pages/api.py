"""The reference of nbutils: a page for each module, with links to torch, numpy and pandas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workflow import sources

if TYPE_CHECKING:  # only Sphinx itself needs them
    from docutils import nodes
    from sphinx.application import Sphinx

OWN = ("checkpoints", "norms", "callbacks", "fits", "intervals", "saturation", "heads", "homogeneity", "text", "layers")
TORCH, NUMPY = "https://docs.pytorch.org/docs/stable/", "https://numpy.org/doc/stable/reference/typing.html"
EXTERNAL = {
    "Tensor": f"{TORCH}tensors.html",
    "Module": f"{TORCH}generated/torch.nn.Module.html",
    "Generator": f"{TORCH}generated/torch.Generator.html",
    "Optimizer": f"{TORCH}optim.html#torch.optim.Optimizer",
    "DataFrame": "https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.html",
    "NDArray": f"{NUMPY}#numpy.typing.NDArray",
    "ArrayLike": f"{NUMPY}#numpy.typing.ArrayLike",
}  # by the last part of what signatures write


def groups() -> dict[str, dict[str, str]]:
    """What each module is for, by its name: those for one's own models, those that chapters share, a chapter's own."""
    found: dict[str, dict[str, str]] = {"For your own models": {}, "What chapters share": {}, "Of a chapter or two": {}}
    own, shared, single = found.values()
    codes = sources.modules()
    names = sorted(codes, key=lambda name: (OWN.index(part) if (part := _part(name)) in OWN else 0, name))
    for name in names:
        if _part(name) not in ("", "__main__") and name != "nbutils.experiments":
            group = single if _part(name) == "chapters" else own if _part(name) in OWN else shared
            group[name] = (ast.get_docstring(ast.parse(codes[name])) or "").partition("\n")[0]
    return found


def _part(name: str) -> str:
    """The first name below nbutils."""
    return f"{name}..".split(".")[1]


def pages() -> Iterator[tuple[str, bytes]]:
    """Path and text of the page of each module."""
    for name in [name for group in groups().values() for name in group]:
        text = f"---\norphan: true\n---\n\n# `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"
        yield f"api/{name}.md", text.encode()


def external_link(app: Sphinx, env: object, node: nodes.Element, text: nodes.Element) -> nodes.reference | None:
    """A link to the documentation of torch, numpy or pandas."""
    from docutils import nodes

    url = EXTERNAL.get(node.get("reftarget", "").rpartition(".")[2])
    return nodes.reference("", "", text, refuri=url, internal=False) if url else None


def skip_alias(app: Sphinx, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Leave out the fields of a named tuple, of which Python says no more than their numbers."""
    return True if str(member.__doc__).startswith("Alias for field number") else None
