"""Representation similarity of many sentences, batched by length, against one sentence at a time."""

from __future__ import annotations

import torch

from benchmarks.timing import Row, compare
from nbutils import saturation
from nbutils.device import generator


def representation_similarity() -> Row:
    """100 sentences of 8 to 39 tokens at c = 1000, a new BERT of 4 layers and width 64.

    The plain side is ``similarity``, sentence by sentence; it scales the model each time, ours does so once. Ours also
    computes the centred similarity and the anisotropy.
    """
    import transformers

    size = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(vocab_size=2000, **size))
    rng = generator(0, "cpu")
    lengths = torch.randint(8, 40, (100,), generator=rng).tolist()
    sentences = [torch.randint(5, 2000, (length,), generator=rng).tolist() for length in lengths]

    def plain() -> torch.Tensor:
        single = [saturation.similarity(model, {"input_ids": torch.tensor([sentence])}) for sentence in sentences]
        return torch.stack(single).mean(0)

    def ours() -> torch.Tensor:
        return saturation.similarity_many(model, sentences).raw

    gap = float((plain() - ours()).abs().max())
    assert gap < 1e-5, f"the two sides disagree by {gap:.2g}"
    return compare("representation similarity, 100 sentences, against one at a time", ours, plain, 5, repeats=3)


PAIRS = (representation_similarity,)
