"""Networks that chapters share and that are not sublayers (``nbutils.sublayers``).

Homogeneous networks, and small transformers whose normalisation, mask, biases and initial values can be chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbutils.sublayers import placed
from normgrowth.heads import causal_mask, multiplicative_mask

PLACEMENTS = ("post", "pre", "residual-post")
MASKS = {"causal": causal_mask, "multiplicative": multiplicative_mask, "none": lambda scores: scores}


class HomogeneousMLP(nn.Module):
    """ReLU network without biases, float64: homogeneous in its parameters, of the number of its layers as degree.

    Args:
        widths: ``(n_in, hidden…, n_out)``; the degree is ``len(widths) - 1``.
        generator: for the weights, normal with variance 2 / fan-in (1 / fan-in in the last layer).

    >>> net = HomogeneousMLP((4, 8, 8, 1))
    >>> net.degree, net(torch.ones(5, 4, dtype=torch.float64)).shape
    (3, torch.Size([5, 1]))
    """

    def __init__(self, widths: Sequence[int], *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.degree = len(widths) - 1
        self.weights = nn.ParameterList()
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths), start=1):
            std = ((2 if layer < self.degree else 1) / fan_in) ** 0.5
            drawn = torch.randn(fan_out, fan_in, generator=generator, dtype=torch.float64)
            self.weights.append(nn.Parameter(std * drawn))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., n_in)`` to ``(..., n_out)``."""
        *hidden, last = self.weights  # not self.weights[:-1]: a slice makes new parameters, cut off from torch.func
        for weight in hidden:
            x = torch.relu(x @ weight.mT)
        return x @ last.mT


class SelfAttention(nn.Module):
    """Multi-head attention with separate query, key and value matrices (T5's, so that Adafactor scales each alone).

    Args:
        mask: ``causal`` (future scores −∞), ``multiplicative`` (future scores times 0: what the paper's released code
            does; the future is then attended with weight e⁰ / Σ e^s) or ``none``.

    >>> for mask in ("causal", "multiplicative"):  # all scores are 0: what is left of the future?
    ...     attention = SelfAttention(2, 1, mask=mask, biases=False)
    ...     print(attention.scores(torch.zeros(1, 2, 2)).softmax(-1)[0, 0].tolist())
    [[1.0, 0.0], [0.5, 0.5]]
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def __init__(self, dim: int, heads: int, *, mask: str, biases: bool) -> None:
        super().__init__()
        if mask not in MASKS:
            raise ValueError(f"unknown mask {mask!r}: choose one of {', '.join(MASKS)}")
        self.heads, self.mask = heads, mask
        self.query = nn.Linear(dim, dim, bias=biases)
        self.key = nn.Linear(dim, dim, bias=biases)
        self.value = nn.Linear(dim, dim, bias=biases)
        self.output = nn.Linear(dim, dim, bias=biases)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)  # (..., T, dim) to (..., heads, T, d)

    def scores(self, x: Tensor) -> Tensor:
        """Scores of the input ``(batch, T, dim)`` as the softmax sees them: ``(batch, heads, T, T)``, queries first."""
        q, k = self._split(self.query(x)), self._split(self.key(x))
        return MASKS[self.mask](q @ k.mT / q.shape[-1] ** 0.5)

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        """``(batch, T, dim)`` in and out. A list ``seen`` gets the scores, at the cost of the fast kernel."""
        v = self._split(self.value(x))
        if seen is None and self.mask != "multiplicative":
            q, k = self._split(self.query(x)), self._split(self.key(x))
            heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.mask == "causal")
        else:
            scores = self.scores(x)
            if seen is not None:
                seen.append(scores)
            heads = scores.softmax(-1) @ v
        return self.output(heads.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Attention and a ReLU layer, each with residual and layer norm.

    Args:
        dim, heads: sizes; ``heads`` divides ``dim``.
        hidden: width of the ReLU layer.
        placement: of layer norm, ``post``: LN(x + f(x)); ``pre``: x + f(LN(x)); ``residual-post``: x + LN(f(x)), which
            the paper's released code calls pre-norm.
        mask: as of ``SelfAttention``.
        biases: of the linear maps; the layer norms keep gain and shift.
        dropout: acts on f(x).

    Raises:
        ValueError: unknown placement or mask.

    >>> block = Block(4, 2, 8, placement="post", mask="none")
    >>> block(torch.eye(4)[None]).norm(dim=-1).round(decimals=2).tolist()  # a layer norm comes last: √4
    [[2.0, 2.0, 2.0, 2.0]]
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        placement: str = "pre",
        mask: str = "causal",
        biases: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: choose one of {', '.join(PLACEMENTS)}")
        self.placement = placement
        self.attention = SelfAttention(dim, heads, mask=mask, biases=biases)
        self.attention_norm = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, hidden, bias=biases)
        self.outer = nn.Linear(hidden, dim, bias=biases)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        """``(batch, T, dim)`` in and out."""
        x = placed(self.placement, x, lambda y: self.dropout(self.attention(y, seen)), self.attention_norm)
        feed = lambda y: self.dropout(self.outer(torch.relu(self.inner(y))))  # noqa: E731
        return placed(self.placement, x, feed, self.feedforward_norm)


class Transformer(nn.Module):
    """Embedding, learned positions and ``depth`` blocks; pre-norm ends with one more layer norm.

    Args:
        vocab, dim, depth, heads: sizes.
        length: of the longest input.
        hidden: width of the ReLU layer, ``4 * dim`` if not given.
        positions: False leaves out the position embedding.
        init_std: of all matrices and embeddings, biases 0; ``"standard"`` draws as torch does by default: embeddings
            with deviation 1, matrices and biases uniform within ±1/√fan-in.
        generator: for the initial draw, seed 0 without one. The global generator is neither read nor moved.
        placement, biases, options: the rest of ``Block``.

    >>> model = Transformer(10, 4, depth=2, heads=2, length=8, biases=False)
    >>> [sum(p.numel() for p in block.parameters()) for block in model.blocks]  # 12 dim² and two norms of 2 dim
    [208, 208]
    >>> [tuple(states.shape) for states in model.hidden_states(torch.zeros(3, 8, dtype=torch.long))]
    [(3, 8, 4), (3, 8, 4), (3, 8, 4)]
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        depth: int,
        heads: int,
        length: int,
        *,
        hidden: int | None = None,
        placement: str = "pre",
        biases: bool = True,
        positions: bool = True,
        init_std: float | str = 0.02,
        generator: torch.Generator | None = None,
        outputs: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        with torch.device("meta"):  # shapes only: torch's own draw would use the global generator
            self.embedding = nn.Embedding(vocab, dim)
            self.position_embedding = nn.Embedding(length, dim) if positions else None
            self.blocks = nn.ModuleList(
                Block(dim, heads, hidden or 4 * dim, placement=placement, biases=biases, **options)
                for _ in range(depth)
            )
            self.norm = nn.LayerNorm(dim) if placement == "pre" else None
            self.readout = None if outputs is None else nn.Linear(dim, outputs, bias=biases)
        self.to_empty(device="cpu" if generator is None else generator.device)
        _draw(self, init_std, generator)

    def hidden_states(self, tokens: Tensor, seen: list[Tensor] | None = None) -> list[Tensor]:
        """``depth + 1`` tensors ``(batch, T, dim)``: the embedding, then each block's output.

        The last one is what the unembedding reads, so in pre-norm it is after the final layer norm.
        """
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: tokens.shape[-1]]
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], seen))
        if self.norm is not None:
            states[-1] = self.norm(states[-1])
        return states

    def read(self, x: Tensor) -> Tensor:
        """Logits of hidden states: by the readout, or by the embedding where there is none."""
        return x @ self.embedding.weight.mT if self.readout is None else self.readout(x)

    def attentions(self, tokens: Tensor) -> list[Tensor]:
        """Scores of each layer for ``tokens`` ``(batch, T)``."""
        seen: list[Tensor] = []
        self.hidden_states(tokens, seen)
        return seen


class CausalLM(Transformer):
    """Language model: logits of the next token at every position. Arguments as ``Transformer``, and

    Args:
        tied: the embedding is the unembedding too (no bias there).

    >>> model = CausalLM(50, 16, depth=2, heads=2, length=8)
    >>> model(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 8, 50])
    """

    def __init__(self, vocab: int, *sizes: int, tied: bool = True, **options: Any) -> None:
        super().__init__(vocab, *sizes, outputs=None if tied else vocab, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, T)`` to logits ``(batch, T, vocab)``."""
        return self.read(self.hidden_states(tokens)[-1])


@torch.no_grad()
def _draw(model: nn.Module, init_std: float | str, generator: torch.Generator | None) -> None:
    """Initial values, module by module; layer norms get gain 1 and shift 0."""
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    std = None if init_std == "standard" else float(init_std)
    for module in model.modules():
        match module:
            case nn.LayerNorm():
                module.reset_parameters()
            case nn.Embedding():
                module.weight.normal_(0, 1 if std is None else std, generator=generator)
            case nn.Linear():
                bound = module.in_features**-0.5
                for parameter in module.parameters():
                    if std is None:
                        parameter.uniform_(-bound, bound, generator=generator)
                    elif parameter.ndim == 2:
                        parameter.normal_(0, std, generator=generator)
                    else:
                        parameter.zero_()
