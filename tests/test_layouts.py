"""Layouts of the libraries that train: each is read as its model says, or refused with what converts it."""

import warnings

import pytest
import torch
from layouts import READ, REFUSED, norm, of_deepspeed, of_fsdp

from normgrowth.checkpoints import series

pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS = {"Trainer": "accelerate", "Lightning": "lightning", "Lightning, averages": "lightning"}
NEEDS |= {"accelerate": "accelerate"} | dict.fromkeys(("LoRA", "DoRA", "IA3", "LoHa", "OFT"), "peft")


@pytest.mark.parametrize("layout", READ)
def test_a_layout_is_read_as_its_model_says(tmp_path, layout):
    if layout in NEEDS:
        pytest.importorskip(NEEDS[layout])
    wanted = READ[layout](tmp_path)
    result = series(tmp_path)
    assert len(result.table) == 1 and not result.skipped
    assert result.table.norm[0] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("layout", REFUSED)
def test_a_layout_is_refused_with_what_to_do(tmp_path, layout):
    if layout in NEEDS:
        pytest.importorskip(NEEDS[layout])
    maker, words = REFUSED[layout]
    maker(tmp_path)
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path, stage):
    """ZeRO-1 and 2 keep the weights whole in one file, and ZeRO-3 leaves them empty, in any file."""
    pytest.importorskip("deepspeed")
    wanted = of_deepspeed(stage, tmp_path)
    if stage < 3:
        assert series(tmp_path, match="global_step1").table.norm[0] == pytest.approx(wanted, rel=1e-12)
        return
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all("zero_to_fp32.py" in line for line in lines[1:])


def test_fsdp_of_two_processes(tmp_path):
    """The distributed checkpoint is refused; what the refusal names makes a file of the same norm."""
    wanted = of_fsdp(tmp_path)
    with pytest.raises(ValueError, match=r"format_utils\.dcp_to_torch_save"):
        series(tmp_path / "step1")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "step1", tmp_path / "step2.pt")
    assert series(tmp_path / "step2.pt").table.norm[0] == pytest.approx(wanted, rel=1e-12)
    (tmp_path / "rank0").rename(tmp_path / "step3.pt")
    with pytest.raises(ValueError, match=r"full_tensor\(\)"):
        series(tmp_path / "step3.pt")


# Architectures of transformers: with buffers of their own, tied, mixtures of experts, state-space, of two stacks.
KINDS = [
    "ApertusForCausalLM", "BartForConditionalGeneration", "BertForMaskedLM", "BlenderbotForConditionalGeneration",
    "DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "Gemma3ForCausalLM", "Glm4MoeForCausalLM",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "IBertForMaskedLM", "LlamaForCausalLM", "MambaForCausalLM",
    "MBartForConditionalGeneration", "MiniMaxForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "RobertaForMaskedLM",
    "T5ForConditionalGeneration",
]  # fmt: skip
SMALL = {
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "intermediate_size": 24, "ffn_dim": 24, "d_ff": 24, "d_kv": 4,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 48, "num_hidden_layers": 2, "n_layer": 2,
    "num_layers": 2,
    "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 4, "n_head": 4, "num_heads": 4,
    "num_key_value_heads": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "head_dim": 4,
    "max_position_embeddings": 32, "n_positions": 32, "num_local_experts": 4, "n_routed_experts": 8, "num_experts": 4,
    "moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "block_size": 8, "word_embed_proj_dim": 16, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    "state_size": 4, "time_step_rank": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 3,
}  # fmt: skip


def small(name):
    import transformers

    kind = getattr(transformers, name)
    default = kind.config_class()
    options = {k: v for k, v in SMALL.items() if isinstance(getattr(default, k, None), int)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(kind.config_class(**options))


@pytest.mark.parametrize("name", KINDS)
def test_parameters_of_an_architecture_are_those_that_its_files_are_read_as(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = small(name)
    with torch.no_grad():  # buffers that are zero at the start would pass unseen
        for buffer in built.buffers():
            if buffer.is_floating_point() and not buffer.any():
                buffer += 1
    built.save_pretrained(tmp_path / "step1")
    torch.save(built.state_dict(), tmp_path / "step2.pt")
    trained = [p for p in built.parameters() if p.requires_grad]  # Ernie's routers hold one that no gradient moves
    wanted = norm(torch.nn.ParameterList(trained))
    for place in ("step1", "step2.pt"):
        result = series(tmp_path / place)
        assert result.table.norm[0] == pytest.approx(wanted, rel=1e-12), sorted(result.left_out)
        assert result.parameters == sum(p.numel() for p in trained)
