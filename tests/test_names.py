"""Layers by the names that models in use give their parameters."""

import random

import pytest

from nbutils import models
from nbutils.chapters import counting
from nbutils.names import layer_of, layer_order
from nbutils.trainings import recipes_lm, recipes_t5


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.3.attn.c_attn.weight", "block 3"), ("model.layers.31.mlp.gate_proj.weight", "block 31"),
        ("gpt_neox.layers.0.attention.dense.bias", "block 0"), ("encoder.block.3.layer.1.wo.weight", "encoder 3"),
        ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "decoder 0"),
        ("bert.encoder.layer.11.output.dense.weight", "encoder 11"), ("model.decoder.layers.2.fc1.bias", "decoder 2"),
        ("transformer.blocks.1.ffn.weight", "block 1"), ("transformer.wte.weight", "embeddings"),
        ("transformer.wpe.weight", "embeddings"), ("shared.weight", "embeddings"),
        ("decoder.embed_tokens.weight", "embeddings"),
        ("bert.embeddings.LayerNorm.weight", "embeddings"), ("gpt_neox.embed_in.weight", "embeddings"),
        ("embed_out.weight", "head"), ("lm_head.weight", "head"), ("cls.predictions.decoder.weight", "head"),
        ("transformer.ln_f.weight", "rest"), ("model.norm.weight", "rest"), ("bert.pooler.dense.weight", "rest"),
        ("h.3.mlp.weight", "block 3"), ("embedding.weight", "embeddings"), ("blocks.2.inner.weight", "block 2"),
        ("token_embedding.weight", "embeddings"), ("encoder.embed_tokens.weight", "embeddings"),
        ("encoder.final_layer_norm.weight", "encoder rest"), ("decoder.final_layer_norm.weight", "decoder rest"),
        ("bert.encoder.layer.5.output.dense.bias", "encoder 5"), ("head.weight", "head"), ("encoder", "rest"),
        ("model.decoder.layers.12.encoder_attn.k_proj.weight", "decoder 12"), ("0.bias", "rest"),
        ("token_embedding_table.weight", "embeddings"), ("position_embedding_table.weight", "embeddings"),
        ("embedding_layer.weight", "embeddings"), ("pos_embed.W_pos", "embeddings"), ("readout.weight", "head"),
        ("layers.3.autoencoder.encoder.weight", "block 3"),
        ("decoder.bert.encoder.layer.3.output.dense.weight", "decoder 3"),  # BERT as the decoder of a pair
        ("unembed.W_U", "head"), ("unembedding.weight", "head"),
    ],
)  # fmt: skip
def test_layer_of(name, layer):
    assert layer_of(name) == layer


def test_order_of_a_table():
    wanted = ["total", "embeddings", "block 0", "block 2", "block 10", "encoder 0", "encoder 11", "encoder rest"]
    wanted += ["decoder 0", "decoder rest", "head", "rest"]
    for seed in range(20):
        assert sorted(random.Random(seed).sample(wanted, len(wanted)), key=layer_order) == wanted


def test_our_own_models_have_no_unnamed_matrix():
    """What is left over in the book's language models and T5 is final norms alone."""
    tied = (recipes_t5.small_t5(64, 16, 2, heads=2, seed=0), models.CausalLM(64, 16, 2, 2, 32))
    untied = (models.CausalLM(64, 16, 2, 2, 32, tied=False), counting.Classifier(64, 16, 1, 2, 9, classes=2))
    for model in (*tied, *untied):
        layers = {name: layer_of(name) for name, _ in model.named_parameters()}
        assert {"embeddings"} < set(layers.values()) and ("head" in layers.values()) == (model in untied)
        assert all("norm" in name for name, layer in layers.items() if layer.endswith("rest"))


def test_parts_of_a_language_model_are_its_layers_and_vectors():
    assert recipes_lm.part_of("blocks.2.inner.weight") == layer_of("blocks.2.inner.weight")
    assert recipes_lm.part_of("embedding.weight") == layer_of("embedding.weight")
    assert recipes_lm.part_of("blocks.2.inner.bias") == recipes_lm.part_of("norm.weight") == "vectors"
