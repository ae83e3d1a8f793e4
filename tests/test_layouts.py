"""Layouts of the libraries that train: each is read as its model says, or refused with what converts it."""

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_is, make, model, save
from layouts import READ, REFUSED, net, norm, of_deepspeed, of_fsdp, state
from nbutils.checkpoints.tensors import why_left_out

from nbutils.checkpoints import series, sources
from nbutils.checkpoints.weights import ReadError, Weights

pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS = {
    "accelerate": "accelerate",
    "Trainer": "accelerate",
    "Lightning": "lightning",
    "Lightning, averages": "lightning",
}
NEEDS |= dict.fromkeys(("LoRA", "DoRA", "IA3", "LoHa", "OFT"), "peft")


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
    maker, said = REFUSED[layout]
    maker(tmp_path)
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    assert said in str(error.value) and str(tmp_path) in str(error.value)


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


def test_averages_that_are_left_out_are_told(tmp_path):
    READ["state_dict and ema_state_dict"](tmp_path)
    assert series(tmp_path).left_out["ema_state_dict"] == "an average of the weights, beside state_dict"
    READ["ema. in a state dict"](tmp_path)
    assert series(tmp_path).left_out["ema.0.weight"] == "an average of the weights"
    torch.save(torch.optim.swa_utils.AveragedModel(net()).state_dict(), tmp_path / "step1.pt")
    result = series(tmp_path)
    assert result.table.norm[0] == pytest.approx(norm(net()), rel=1e-12)
    assert "are averages" in result.left_out["n_averaged"]


def test_a_part_of_a_model_that_is_called_ema_counts(tmp_path):
    torch.save(
        {"block.ema_gate.weight": torch.tensor([3.0]), "block.ema.weight": torch.tensor([4.0])}, tmp_path / "1.pt"
    )
    assert series(tmp_path).table.norm[0] == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), "w is sparse or nested"),
        (lambda: torch.eye(4).to_sparse_csr(), "w is sparse or nested"),
        (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), "torch.qint8: a quantised model"),
        (lambda: torch.empty(3, device="meta"), "on the device meta"),
        (lambda: torch.ones(3, dtype=torch.complex64), "has dtype torch.complex64"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "w is sparse or nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "w is sparse or nested"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_plain_are_refused(tmp_path, value, said):
    torch.save({"v": torch.ones(3), "w": value()}, tmp_path / "step1.pt")
    with pytest.raises(ReadError) as error:
        Weights(tmp_path / "step1.pt")
    assert said in str(error.value) and "step1.pt" in str(error.value)


class Runs:
    def __init__(self, call, argument):
        self.call, self.argument = call, argument

    def __reduce__(self):
        return self.call, (self.argument,)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [os.system, eval])
def test_a_pickle_that_would_run_code_is_called_unsafe_and_runs_none(tmp_path, protocol, call):
    trap = Runs(call, f"touch {tmp_path}/ran" if call is os.system else f"open('{tmp_path}/ran', 'w')")
    (tmp_path / "step1.pt").write_bytes(pickle.dumps({"w": trap}, protocol))
    for _ in range(2):
        with pytest.raises(
            ReadError, match=rf"unsafe, refused: holds Python objects, [\w.]*{call.__name__}, which may"
        ):
            Weights(tmp_path / "step1.pt")
        torch.save({"w": trap}, tmp_path / "step1.pt", pickle_protocol=max(protocol, 2))
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_may_not_be_read_is_skipped(tmp_path, monkeypatch):
    states = make(tmp_path, steps=(1, 2))
    plain = Path.iterdir

    def iterdir(path):
        if path.name == "step2":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    result = series(tmp_path)
    assert list(result.table.step) == [1] and len(states) == 2
    assert [str(s) for s in result.skipped] == [f"{tmp_path / 'step2'}: cannot be read: Permission denied"]


def test_links_that_lead_nowhere_are_told(tmp_path):
    make(tmp_path, steps=(1, 2))
    (tmp_path / "step3").symlink_to(tmp_path / "gone")
    (tmp_path / "step4.pt").symlink_to("there.pt")
    (tmp_path / "notes").symlink_to("anywhere")
    result = series(tmp_path)
    assert len(result.table) == 2
    assert [str(s) for s in result.skipped] == [
        f"{tmp_path / 'step3'}: a link to {tmp_path / 'gone'}, which is not there",
        f"{tmp_path / 'step4.pt'}: a link to there.pt, which is not there",
    ]


def test_one_of_two_folders_of_weights_can_be_given(tmp_path):
    for step in (1, 2):
        for part in ("unet", "vae"):
            save(model(step if part == "unet" else 9), tmp_path / f"step{step}" / part)
    result = series(sorted(tmp_path.glob("*/unet")))
    assert list(result.table.step) == [1, 2] and not result.skipped


def test_one_checkpoint_with_its_weights_in_a_folder_can_be_given(tmp_path):
    state = model(3)
    save(state, tmp_path / "step3" / "model")
    save(state, tmp_path / "step_3")
    for source in ("step3", "step3/model", "step_3/model.safetensors"):
        assert_is(series(tmp_path / source).table, {3: state})


def test_what_is_stored_beside_weights_and_looks_like_weights_is_told(tmp_path):
    parts = {"model": state(), "data_norm": {"a.weight": torch.ones(2)}, "optimizer": {"x": torch.ones(2)}}
    torch.save(parts | {"lr": torch.tensor(0.1)}, tmp_path / "step1.pt")
    result = series(tmp_path)
    assert result.table.norm[0] == pytest.approx(norm(net()), rel=1e-12)
    beside = {name: why for name, why in result.left_out.items() if why != "buffer"}
    assert beside == {"data_norm": "stored beside model", "lr": "stored beside model"}


@pytest.mark.parametrize("shape", [(2,), (3,)])
def test_one_module_called_ema_among_others_is_not_left_out(tmp_path, shape):
    parts = {f"{name}.weight": torch.ones(2) for name in "abc"}
    torch.save(parts | {"ema.weight": torch.ones(shape)}, tmp_path / "step1.pt")
    with pytest.raises(ValueError, match=r"ema\.weight may be an average"):
        series(tmp_path)


def test_of_300_folders_of_one_kind_one_line_is_said(tmp_path):
    make(tmp_path, steps=(1, 2))
    for step in range(10, 310):
        (tmp_path / f"step{step}").mkdir()
    (tmp_path / "step400").mkdir()
    torch.save(state("base_layer."), tmp_path / "step400" / "w.pt")
    lines = sources.grouped(series(tmp_path).skipped)
    assert lines[0] == f"{tmp_path / 'step10'}: empty folder (and 299 more like it, to {tmp_path / 'step309'})"
    assert len(lines) == 2 and "merge_and_unload" in lines[1]
    assert sources.grouped([]) == []


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


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.gate.e_score_correction_bias", "mlp.expert_bias",
        "mlp.gate.balancing_biases", "final_logits_bias",
        "model.layers.0.layer_scalar", "layers.0.mlp.act_fn.beta", "layers.0.mlp.act_fn.eps", "rotary_emb.alpha",
        "layers.1.self_attn.slope_rate", "layers.1.self_attn.diagonal_decay", "quantizer.layers.0.codebook.embed_avg",
        "layers.0.self_attn.q_proj.input_max", "embeddings.word_embeddings.weight_integer", "LayerNorm.shift",
        "embeddings.embeddings_act1.act_scaling_factor", "vocoder.scale", "input_conditioner.norm_std", "x.global_mean",
        "decoder.layers.0.encoder_attn.n_points_scale", "multi_modal_projector.visual_temporal_embed.pos_idx_to_embed",
    ],
)  # fmt: skip
def test_buffers_of_transformers_models_are_known_by_name(name):
    """Of 848 classes of 560 kinds in transformers 5.23, on the device meta, these are saved and are no parameters."""
    assert why_left_out(name, "F32", (8,)) == "buffer"


@pytest.mark.parametrize(
    "name",
    ["lm_head.bias", "mlp.gate.bias", "act.beta", "model.latent_scaling_factor", "codebook.weight", "shift.weight"],
)
def test_parameters_of_like_names_count(name):
    assert why_left_out(name, "F32", (8,)) is None
