"""Tiny models of ``transformers`` with random weights."""

import torch


def tiny(kind, attention=None):
    """In training mode; the global generator stays as it was."""
    import transformers as tf

    common = {"vocab_size": 50, "attn_implementation": attention}
    of_bert = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, **common}
    of_gpt2 = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    of_t5 = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "decoder_start_token_id": 0}
    made, config = {
        "bert": (tf.BertModel, tf.BertConfig(max_position_embeddings=24, **of_bert)),
        "roberta": (tf.RobertaForMaskedLM, tf.RobertaConfig(max_position_embeddings=26, **of_bert)),
        "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(**of_gpt2, **common)),
        "t5": (tf.T5ForConditionalGeneration, tf.T5Config(**of_t5, **common)),
        "xlnet": (tf.XLNetLMHeadModel, tf.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=32)),
        "xlm": (tf.XLMModel, tf.XLMConfig(emb_dim=16, n_layers=2, n_heads=2, **common)),
    }[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = made(config).train()
    with torch.no_grad():  # the standard 0.02 makes every score 0: larger weights, so that heads differ
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model
