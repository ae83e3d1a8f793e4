"""A language model with some of its parameters multiplied: its readings, and the texts that it reads."""

import math

import pytest
import torch
import transformers as hf

from nbutils.devices import generator
from nbutils.experiments import passages, pretrained, rays, readings
from normgrowth import saturation
from normgrowth.saturation import along_ray

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
         "max_position_embeddings": 48, "attn_implementation": "eager", "tie_word_embeddings": True}  # fmt: skip
TOKENS = torch.randint(3, 40, (4, 12), generator=generator(1, "cpu"))


@pytest.fixture(scope="module")
def llama():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that heads differ
    return model.double()


def test_a_reading_is_what_the_ray_of_the_library_has(llama):
    table = along_ray(llama, TOKENS.tolist(), [1.0, 1.5])
    unscaled, scaled = (rays.read(llama, TOKENS, c, with_loss=True) for c in (1.0, 1.5))
    expected = table.set_index("c").loc[1.5]
    assert float(rays.agreement(scaled, unscaled).mean()) == pytest.approx(expected.agreement)
    assert float(scaled.right.mean()) == pytest.approx(expected.accuracy)
    assert float(rays.likeness(scaled, unscaled).mean()) == pytest.approx(expected.raw)
    assert float(scaled.positions.mean(0).quantile(0.5)) == pytest.approx(expected.effective_positions)
    assert 0 < scaled.loss <= math.log(40) + 1e-9


def test_only_the_named_parameters_are_multiplied_and_they_are_restored(llama):
    """The bits of copies that are written to, as the library scales a part; also of a matrix that two modules share."""
    before = [parameter.clone() for parameter in llama.parameters()]
    for part in ("q_proj", "norm", "embed_tokens"):
        entries = {name: torch.tensor(True) for name, _ in llama.named_parameters() if part in name}
        with saturation.mode(llama), saturation.part_scaled(llama, 3.0, entries, dtype=torch.float64):
            expected = llama(TOKENS).logits
        with readings.multiplied(llama, lambda name, part=part: 3.0 if part in name else 1.0):
            assert torch.equal(llama(TOKENS).logits, expected)
    assert all(map(torch.equal, before, llama.parameters()))
    assert llama.lm_head.weight is llama.model.embed_tokens.weight


def test_without_a_model_nothing_is_known():
    nothing = rays.nothing(TOKENS)
    assert rays.agreement(nothing, nothing).isnan().all()
    assert rays.likeness(nothing, nothing).isnan().all()
    assert all(math.isnan(c) for c in rays.half_scales([1.0, 2.0], torch.full((2, 3), torch.nan)))


def test_passages_are_long_enough_and_all_texts_differ():
    lines = [line for pair in passages.PARAPHRASES for line in pair]
    assert len(set(passages.ENGLISH)) == len(passages.ENGLISH) == 16
    assert len(set(lines)) == len(lines) == 32
    try:
        tokenizer = pretrained.from_package("smollm2").tokenizer
    except pretrained.ModelMissing as missing:
        pytest.skip(str(missing))
    assert min(len(tokenizer(passage)["input_ids"]) for passage in passages.ENGLISH) >= 32
