"""Layers by the names that models in use give their parameters."""

import random

import pytest
import torch

from nbutils import models
from nbutils.experiments import counting
from nbutils.shared_runs import recipes_t5
from normgrowth import checkpoints
from normgrowth.layers import layer_of, layer_order, layers
from normgrowth.norms import NormTracker


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.3.attn.c_attn.weight", "block 3"), ("model.layers.31.mlp.gate_proj.weight", "block 31"),
        ("encoder.block.3.layer.1.wo.weight", "encoder 3"), ("bert.encoder.layer.11.output.dense.weight", "encoder 11"),
        ("transformer.blocks.1.ffn.weight", "block 1"), ("transformer.wte.weight", "embeddings"),
        ("transformer.wpe.weight", "embeddings"), ("shared.weight", "embeddings"),
        ("decoder.embed_tokens.weight", "embeddings"), ("bert.embeddings.LayerNorm.weight", "embeddings"),
        ("embed_out.weight", "head"), ("lm_head.weight", "head"), ("cls.predictions.decoder.weight", "head"),
        ("transformer.ln_f.weight", "rest"), ("decoder.final_layer_norm.weight", "decoder rest"),
        ("head.weight", "head"), ("encoder", "rest"), ("0.bias", "rest"),
        ("token_embedding_table.weight", "embeddings"), ("embedding_layer.weight", "embeddings"),
        ("pos_embed.W_pos", "embeddings"), ("readout.weight", "head"),
        ("layers.3.autoencoder.encoder.weight", "block 3"), ("unembed.W_U", "head"), ("unembedding.weight", "head"),
        ("decoder.bert.encoder.layer.3.output.dense.weight", "decoder 3"),  # BERT as the decoder of a pair
        ("model.transformer.ff_out.weight", "head"), ("model.transformer.blocks.3.ff_out.weight", "block 3"),  # OLMo
        ("language_model.output_layer.weight", "head"),  # Megatron
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
        found = {name: layer_of(name) for name, _ in model.named_parameters()}
        assert {"embeddings"} < set(found.values()) and ("head" in found.values()) == (model in untied)
        assert all("norm" in name for name, layer in found.items() if layer.endswith("rest"))


def test_towers_keep_their_names_in_a_wrapper():
    names = ("text_model.layers.0.fc1", "vision_model.layers.0.fc1")
    for wrapper in ("", "model.", "net.clip."):
        assert list(layers(wrapper + name for name in names).values()) == ["text block 0", "vision block 0"]


def two_towers():
    """Tiny models with several stacks of blocks, and models whose files name their blocks otherwise."""
    import transformers as hf

    part = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {**part, "image_size": 16, "patch_size": 8}
    text = {**part, "vocab_size": 40, "max_position_embeddings": 16}
    return {
        "clip": lambda: hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)),
        "siglip": lambda: hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=image)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**image)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**text)),
        "llava": lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**image))
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40)
        ),
    }


@pytest.mark.parametrize("family", ["clip", "siglip", "vit", "bert", "llava", "t5"])
def test_towers_share_no_name_and_files_agree_with_the_tracker(tmp_path, family):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = two_towers()[family]()
    model.save_pretrained(tmp_path / "step1")
    table = checkpoints.series(tmp_path, by="layer").table
    live = NormTracker(model.named_parameters()).history()
    mine, theirs = (dict(zip(x.layer, x.norm, strict=True)) for x in (live, table))
    assert mine.keys() == theirs.keys()
    assert all(mine[layer] == pytest.approx(theirs[layer], rel=1e-12) for layer in mine)
    blocks = [layer for layer in mine if layer[-1] == "0"]
    assert len(blocks) == {"clip": 2, "siglip": 2, "llava": 2, "t5": 2}.get(family, 1), blocks
