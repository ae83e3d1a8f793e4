"""Small transformers with a choice of normalisation, mask, biases and initial values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nbutils.sublayers import apply_placement
from normgrowth.heads import causal_mask, multiplicative_mask

__all__ = ["BLOCK_PLACEMENTS", "MASKS", "Block", "CausalLM", "SelfAttention", "Transformer"]

BLOCK_PLACEMENTS = ("post", "pre", "residual-post")
MASKS = {"causal": causal_mask, "multiplicative": multiplicative_mask, "none": lambda scores: scores}


class SelfAttention(nn.Module):
    """Multi-head attention with separate query, key and value matrices, as in T5: Adafactor scales every matrix alone.

    Args:
        mask: ``causal`` (future scores are −∞), ``multiplicative`` (future scores are multiplied by 0, as in the
            paper's released code; the future is then attended to with weight e⁰ / Σ e^s) or ``none``.

    >>> for mask in ("causal", "multiplicative"):  # all scores are 0; how much weight has the future?
    ...     attention = SelfAttention(2, 1, mask=mask, biases=False)
    ...     print(attention.scores(torch.zeros(1, 2, 2)).softmax(-1)[0, 0].tolist())
    [[1.0, 0.0], [0.5, 0.5]]
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def __init__(self, dim: int, heads: int, *, mask: str, biases: bool) -> None:
        super().__init__()
        if mask not in MASKS:
            raise ValueError(f"unknown mask {mask!r}: choose one of {', '.join(MASKS)}")
        self.heads = heads
        self.mask = mask
        self.query = nn.Linear(dim, dim, bias=biases)
        self.key = nn.Linear(dim, dim, bias=biases)
        self.value = nn.Linear(dim, dim, bias=biases)
        self.output = nn.Linear(dim, dim, bias=biases)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)  # (..., T, dim) to (..., heads, T, d)

    def scores(self, x: Tensor) -> Tensor:
        """Masked scores before softmax, ``(batch, heads, T, T)`` with queries first, for ``(batch, T, dim)``."""
        q = self._split_heads(self.query(x))
        k = self._split_heads(self.key(x))
        return MASKS[self.mask](q @ k.mT / q.shape[-1] ** 0.5)

    def forward(self, x: Tensor, score_log: list[Tensor] | None = None) -> Tensor:
        """``(batch, T, dim)`` in and out. The scores are appended to ``score_log``, which rules out the fast kernel."""
        v = self._split_heads(self.value(x))
        if score_log is None and self.mask != "multiplicative":
            q = self._split_heads(self.query(x))
            k = self._split_heads(self.key(x))
            heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.mask == "causal")
        else:
            scores = self.scores(x)
            if score_log is not None:
                score_log.append(scores)
            heads = scores.softmax(-1) @ v
        return self.output(heads.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Attention and a ReLU layer, both with a residual connection and layer norm.

    Args:
        dim, heads, hidden: sizes, ``hidden`` that of the ReLU layer; ``heads`` divides ``dim``.
        placement: of layer norm; ``post``: LN(x + f(x)); ``pre``: x + f(LN(x)); ``residual-post``: x + LN(f(x)), which
            the paper's released code calls pre-norm.
        mask: as in ``SelfAttention``.
        biases: whether the linear maps have biases; the layer norms keep gain and shift.
        dropout: its rate; it acts on f(x).

    Raises:
        ValueError: unknown placement or mask.

    >>> block = Block(4, 2, 8, placement="post", mask="none")
    >>> block(torch.eye(4)[None]).norm(dim=-1).round(decimals=2).tolist()  # layer norm comes last, so the length is √4
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
        if placement not in BLOCK_PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: choose one of {', '.join(BLOCK_PLACEMENTS)}")
        self.placement = placement
        self.attention = SelfAttention(dim, heads, mask=mask, biases=biases)
        self.attention_norm = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, hidden, bias=biases)
        self.outer = nn.Linear(hidden, dim, bias=biases)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, score_log: list[Tensor] | None = None) -> Tensor:
        """``(batch, T, dim)`` in and out."""
        attend = partial(self._attend, score_log=score_log)
        x = apply_placement(self.placement, x, attend, self.attention_norm)
        return apply_placement(self.placement, x, self._feed_forward, self.feedforward_norm)

    def _attend(self, x: Tensor, score_log: list[Tensor] | None) -> Tensor:
        return self.dropout(self.attention(x, score_log))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.outer(torch.relu(self.inner(x))))


class Transformer(nn.Module):
    """Embedding, learned positions and ``depth`` blocks; pre-norm ends with one more layer norm.

    Args:
        vocab, dim, depth, heads: sizes.
        length: of the longest input.
        hidden: width of the ReLU layer; ``4 * dim`` by default.
        positions: False leaves out the position embedding.
        init_std: standard deviation of all matrices and embeddings, with biases 0; ``"standard"`` draws like torch:
            embeddings with standard deviation 1, matrices and biases uniform within ±1/√fan-in.
        generator: of the initial values; by default a new one with seed 0. The global generator is not used.
        outputs: number of classes of the readout; without it, the logits are inner products with the embedding.
        placement, biases, options: arguments of ``Block``.

    >>> model = Transformer(10, 4, depth=2, heads=2, length=8, biases=False)
    >>> [sum(p.numel() for p in block.parameters()) for block in model.blocks]  # 12 dim² + two norms of 2 dim
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
        _initialise(self, init_std, generator)

    def hidden_states(self, tokens: Tensor, score_log: list[Tensor] | None = None) -> list[Tensor]:
        """``depth + 1`` tensors ``(batch, T, dim)``: the embedding, then the output of every block.

        The last tensor is the input of the readout: in pre-norm, it is taken after the final layer norm.
        """
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: tokens.shape[-1]]
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], score_log))
        if self.norm is not None:
            states[-1] = self.norm(states[-1])
        return states

    def read(self, x: Tensor) -> Tensor:
        """Logits of hidden states ``(..., dim)``, from the readout, or from the embedding if there is no readout."""
        if self.readout is None:
            return x @ self.embedding.weight.mT
        return self.readout(x)

    def attentions(self, tokens: Tensor) -> list[Tensor]:
        """Scores of every layer for ``tokens`` ``(batch, T)``, each ``(batch, heads, T, T)``."""
        scores: list[Tensor] = []
        self.hidden_states(tokens, scores)
        return scores


class CausalLM(Transformer):
    """Language model: logits of the next token at every position.

    Args:
        vocab, sizes, options: arguments of ``Transformer``.
        tied: the embedding serves as readout too, without a bias.

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
def _initialise(model: nn.Module, init_std: float | str, generator: torch.Generator | None) -> None:
    """Draw initial values, module by module; layer norms get gain 1 and shift 0."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
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
