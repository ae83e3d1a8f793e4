"""Representation similarity of many sentences, batched by length, against one sentence at a time."""

from __future__ import annotations

import copy

import torch
from torch import nn

from maintenance.benchmarks.timing import Row, compare
from nbutils.devices import generator
from normgrowth import saturation


def model_and_sentences() -> tuple[nn.Module, list[list[int]]]:
    """A new BERT of 4 layers and width 64; 100 sentences of 8 to 39 tokens."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertModel(config).eval()
    rng = generator(0, "cpu")
    lengths = torch.randint(8, 40, (100,), generator=rng).tolist()
    return model, [torch.randint(5, 2000, (length,), generator=rng).tolist() for length in lengths]


@torch.no_grad()
def one_at_a_time(model: nn.Module, sentences: list[list[int]]) -> torch.Tensor:
    """The model and one scaled copy, sentence by sentence: the least that a loop needs."""
    other, found = copy.deepcopy(model), []
    for parameter in other.parameters():
        parameter.mul_(1000)
    for ids in sentences:
        both = [net(torch.tensor([ids]), output_hidden_states=True).hidden_states for net in (model, other)]
        pairs = zip(*both, strict=True)
        found.append(torch.stack([torch.cosine_similarity(a.double(), b.double(), dim=-1).mean() for a, b in pairs]))
    return torch.stack(found).mean(0)


def similarity() -> Row:
    """Ours also computes the centred similarity and the anisotropy; it must not be slower for that."""
    model, sentences = model_and_sentences()
    gap = float((one_at_a_time(model, sentences) - saturation.similarity(model, sentences).raw).abs().max())
    assert gap < 1e-5, f"they disagree by {gap:.2g}"
    return compare(
        "representation similarity, 100 sentences, against a loop with a scaled copy, raw similarity alone",
        lambda: saturation.similarity(model, sentences),
        lambda: one_at_a_time(model, sentences),
        5,
    )


PAIRS = (similarity,)
