"""Small models of the language models in ``transformers``, from the settings that their configurations have."""

import torch
import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LARGEST = 20_000_000  # parameters; a configuration whose sizes have other names is left out
SETTINGS = (
    (40, "vocab_size"),
    (16, "hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim"),
    (24, "intermediate_size d_ff ffn_dim n_inner hidden_dim d_inner moe_intermediate_size ffn_hidden_size"),
    (24, "decoder_ffn_dim encoder_ffn_dim shared_expert_intermediate_size shared_intermediate_size"),
    (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers"),
    (2, "num_attention_heads num_heads n_head n_heads num_key_value_heads encoder_attention_heads type_vocab_size"),
    (2, "decoder_attention_heads num_experts_per_tok moe_k"),
    (8, "head_dim d_kv attention_head_size kv_channels q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim"),
    (8, "v_head_dim"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts sliding_window rotary_dim"),
    (1, "n_group topk_group bos_token_id"),
    (64, "max_position_embeddings n_positions n_ctx"),
    (0, "pad_token_id decoder_start_token_id"),
    (2, "eos_token_id"),
)
MAY_BE_UNSET = {"pad_token_id", "head_dim", "num_experts_per_tok", "n_group", "topk_group", "num_key_value_heads"}
CLASSES = {
    hf.AutoModelForSeq2SeqLM: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    hf.AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    hf.AutoModelForMaskedLM: modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
NAMES = sorted(set().union(*CLASSES.values()))
TOKENS = torch.tensor([[3, 7, 5, 11, 4, 9, 6, 13, 8, 10, 12, 14]])


def settings(default):
    """The small settings that a configuration has, as its class gives them without arguments."""
    small = {}
    for value, names in SETTINGS:
        for name in names.split():
            present = getattr(default, name, None)
            unset = name in MAY_BE_UNSET and hasattr(default, name) and present is None
            if unset or isinstance(present, int | float):
                small[name] = value
    return small


def small_model(name):
    """A small model of a configuration with random parameters.

    Raises whatever the class raises, and ValueError for one that stays large.
    """
    config_class = CONFIG_MAPPING[name]
    config = config_class(**settings(config_class()), use_cache=False)
    model_class = next(cls for cls, names in CLASSES.items() if name in names)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class.from_config(config, attn_implementation="eager").eval()


def inputs_of(model):
    """Twelve tokens, for the decoder too if there is one."""
    if model.config.is_encoder_decoder:
        return {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    return {"input_ids": TOKENS}


def fill(model):
    """Add noise to all parameters, so that none is 0 or 1 as in a fresh model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                size = 0.3 if parameter.dim() < 2 else 0.05
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model
