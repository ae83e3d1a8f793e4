"""The reference of both packages: a page for each module, with links to torch, numpy and pandas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workflow import sources

if TYPE_CHECKING:  # only Sphinx itself needs them
    from docutils import nodes
    from sphinx.application import Sphinx

TORCH = "https://docs.pytorch.org/docs/stable/"
NUMPY = "https://numpy.org/doc/stable/reference/typing.html"
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
    """What each module is for, by its name, in three groups: normgrowth, nbutils, and the experiments of nbutils."""
    codes = sources.modules()
    instruments: dict[str, str] = {}
    shared: dict[str, str] = {}
    experiments: dict[str, str] = {}
    for name in sorted(codes):
        is_face = any(module.startswith(f"{name}.") for module in codes)  # what it hands on has a page elsewhere
        if is_face or name.endswith("__main__"):
            continue
        purpose = (ast.get_docstring(ast.parse(codes[name])) or "").partition("\n")[0]
        if name.startswith("normgrowth."):
            instruments[name] = purpose
        elif name.startswith("nbutils.experiments."):
            experiments[name] = purpose
        else:
            shared[name] = purpose
    return {
        "normgrowth: for your own models": instruments,
        "nbutils: what chapters share": shared,
        "nbutils.experiments: what one to four chapters use": experiments,
    }


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
