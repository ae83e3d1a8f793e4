"""Readings of models and of their controls: by sentence what the library has in the mean; models stay as they were."""

import numpy as np
import pytest
import torch
import transformers as hf

from nbutils.experiments import pretrained, readings
from normgrowth import saturation

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
SENTENCES = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 3], [4, 6]]
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES, max_position_embeddings=48),
    "bert": pretrained.configuration("bert-base-cased", width=16, depth=2, heads=2, vocab=40),
    "t5": pretrained.configuration("t5-base", width=16, depth=2, heads=2, vocab=40),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    return pretrained.random_model(CONFIGS[request.param], 1).double()


def text_for(model):
    (batch,) = saturation.batches_by_length(SENTENCES)
    if model.config.is_encoder_decoder:
        batch |= {f"decoder_{name}": tensor for name, tensor in batch.items()}
    return readings.Text(batch, batch["attention_mask"].nonzero()[:, 0])


def test_means_over_sentences_are_those_of_the_library(model):
    """Raw, common and centred similarity at c = 1000, each sentence of equal weight; the decoder's layers of T5."""
    decoder = SENTENCES if model.config.is_encoder_decoder else None
    expected = saturation.similarity(model, SENTENCES, decoder=decoder, dtype=torch.float64)
    (reading,) = readings.to_saturated(model, text_for(model))
    for row, values in ((readings.RAW, expected.raw), (readings.COMMON, expected.common),
                        (readings.CENTRED, expected.centred)):  # fmt: skip
        assert reading.shape == (4, 3, 2)
        assert reading[row].mean(0) == pytest.approx(values[-2:].numpy(), abs=1e-9)


def test_the_own_part_is_what_is_not_common(model):
    h, h_scaled = (readings.representations(model, text_for(model), c) for c in (1.0, 1000.0))
    rows = readings.compare(h, h_scaled, torch.arange(h.shape[1]))  # each token for itself: equal weights
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (h, h_scaled)]
    lengths = [x.mean(1).square().sum(-1).numpy() for x in unit]
    room = np.sqrt((1 - lengths[0]) * (1 - lengths[1]))
    raw, common, own, _ = rows.mean(1)
    assert own * room == pytest.approx(raw - common, abs=1e-9)


def test_a_control_is_drawn_from_its_seed_and_permuted_from_its_generator(model):
    def read(network):
        return readings.to_saturated(network, text_for(network))

    drawn = readings.of_untrained(model.config, [1, 2, 1], read)
    assert np.array_equal(drawn[0], drawn[2]) and not np.array_equal(drawn[0], drawn[1])
    assert np.array_equal(drawn[0], read(model))
    before = readings.norms(model)
    orders = readings.of_permuted(model, 2, torch.Generator().manual_seed(0), read)
    assert readings.norms(model) == pytest.approx(before) and not np.array_equal(*orders)


def test_an_untrained_language_model_has_its_logits():
    """Drawn from its seed, in float64; its embedding and the matrix of its logits are one where they are tied."""
    tokens = torch.tensor([[3, 4, 5]])
    config = hf.LlamaConfig(**SIZES, tie_word_embeddings=True)
    first, other = readings.of_untrained(config, [0, 1], lambda network: network(tokens).logits, with_logits=True)
    assert first.shape == (1, 3, 40) and first.dtype == torch.float64 and not torch.equal(first, other)
    model = pretrained.random_model(config, 0, with_logits=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.training


def test_a_model_is_as_before_once_it_was_changed(model):
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(KeyError), readings.changeable(model):
        readings.set_norms(model, {})
    with readings.changeable(model):
        readings.set_norms(model, dict.fromkeys(readings.norms(model), 3.0))
        lengths = set(np.round([*readings.norms(model).values()], 9))
    assert lengths <= {0.0, 3.0}
    assert all(map(torch.equal, before, model.parameters()))
