"""Checkpoints as real libraries leave them: read to rounding, or refused with the name of what converts them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nbutils import checkpoints
from nbutils.checkpoints.sources import Skip, grouped, step_of
from tests.checkpoint_files import make, model, save
from workflow import ROOT

READ = ("transformers", "transformers-shards", "state-dict", "nested", "ema", "trainer", "accelerate", "lightning",
        "peft-merged", "zero-1")  # fmt: skip
REFUSED = {
    "unknown-key": r"not read \(net\): save the state_dict alone",
    "peft-unmerged": "not merged: merge_and_unload",
    "peft-adapter": "only an adapter: merge it .*merge_and_unload",
    "dcp": "dcp_to_torch", "fsdp-accelerate": "accelerate merge-weights", "dtensor": "full_tensor",
    "zero-3": "zero_to_fp32.py", "zero-3-module": "zero_to_fp32.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of all layouts, and what ``tests/layouts.py`` says of them."""
    root = tmp_path_factory.mktemp("layouts")
    code = [sys.executable, str(ROOT / "tests" / "layouts.py"), str(root)]
    done = subprocess.run(
        code, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return root, json.loads((root / "sums.json").read_text())


def there(made, layout):
    root, said = made
    if not (root / layout).exists():
        pytest.skip(f"not made here: {said['missing']}")
    return root / layout, said["squares"][layout]


@pytest.mark.parametrize("layout", READ)
def test_norm_is_that_of_the_models_own_parameters(made, layout):
    folder, square = there(made, layout)
    result = checkpoints.series(folder)
    np.testing.assert_allclose(result.table.norm.iloc[0] ** 2, square, rtol=1e-12)
    assert not result.skipped


@pytest.mark.parametrize("layout", REFUSED)
def test_refused_with_what_to_do(made, layout):
    folder, _ = there(made, layout)
    with pytest.raises(ValueError, match=REFUSED[layout]):
        checkpoints.series(folder)


def test_a_copy_and_an_optimizer_beside_are_told(made):
    assert checkpoints.series(there(made, "nested")[0]).left_out["ema"] == "an averaged copy"
    left_out = checkpoints.series(there(made, "ema")[0]).left_out
    assert "an averaged copy" in left_out.values()


FILES = {  # of layouts that need a cluster or another format, by the names that they leave
    "mp_rank_00/model_optim_rng.pt": "Megatron Bridge", "mp_rank_00_000/model_rng.pt": "Megatron Bridge",
    "zero_pp_rank_0_mp_rank_00_model_states.pt": "zero_to_fp32.py", "model-q4_0.gguf": r"gguf_file",
    "tf_model.h5": "TensorFlow or Flax", "actor/model.safetensors critic/model.safetensors": r"\(actor, critic\)",
}  # fmt: skip


@pytest.mark.parametrize("names", FILES)
def test_layouts_that_others_convert_are_named(tmp_path, names):
    for name in names.split():
        (tmp_path / "step1" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.empty(0)}, tmp_path / "step1" / name)
    with pytest.raises(ValueError, match=FILES[names]):
        checkpoints.series(tmp_path)


def test_steps_of_trainers_names():
    names = {
        "checkpoint_1_100": 100, "checkpoint_1_1600": 1600, "checkpoint_12_345678": 345678, "ep0-ba100-rank0": 100,
        "Step1000": 1000, "1000steps": 1000, "20k_steps": 20_000, "model_100": 100, "model_7b": None, "gpt2": None,
        "epoch_3-step_100": 100, "model_step_100": 100, "Iter-500": 500,
    }  # fmt: skip
    assert {name: step_of(name) for name in names} == names


def test_a_folder_that_may_not_be_read_and_a_dead_link_are_told(tmp_path, monkeypatch):
    states = make(tmp_path, steps=(1, 2))
    (tmp_path / "step3").mkdir()
    (tmp_path / "step4").symlink_to(tmp_path / "gone")
    (tmp_path / "step5.pt").symlink_to(tmp_path / "gone.pt")
    plain = type(tmp_path).iterdir

    def iterdir(path):  # root may read what mode 000 forbids others
        if path.name == "step3":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(type(tmp_path), "iterdir", iterdir)
    result = checkpoints.series(tmp_path)
    assert list(result.table.step) == sorted(states)
    said = sorted(map(str, result.skipped))
    assert len(said) == 3 and "Permission denied" in said[0]
    assert all("a symbolic link to nothing" in line for line in said[1:])


def test_buffers_of_known_models_are_left_out(tmp_path):
    state = model(0)
    known = ("mlp.gate.e_score_correction_bias", "final_logits_bias", "mlp.act_fn.eps", "layer_scalar")
    for step in (1, 2):
        save({**state, **{f"layers.0.{name}": torch.ones(3) for name in known}}, tmp_path / f"step{step}")
    assert len(checkpoints.series(tmp_path).left_out) == len(known)


def test_one_line_a_kind_of_skip():
    bad = [Skip(f"run/step{i}", f"run/step{i}: empty folder") for i in range(300)]
    other = Skip("run/x", "no step")
    assert grouped([*bad, other]) == ["run/step0: empty folder, and 299 more such", "run/x: no step"]


def families():
    """Tiny models of families whose files have more than parameters, or other names."""
    import transformers as hf

    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    rows = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    wide = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 40,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}  # fmt: skip
    deep = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "moe_intermediate_size": 16}  # fmt: skip
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small, **rows)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**small, **rows, num_local_experts=2)),
        "deepseek": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**small, **{**rows, **deep})),
        "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**wide)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40)
        ),
        "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**small)),
        "apertus": lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**small, **rows)),
    }


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("form", ["save_pretrained", "state_dict"])
def test_of_a_family_exactly_the_parameters_are_counted(tmp_path, family, form):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = families()[family]()
    folder = tmp_path / "step1"
    folder.mkdir()
    made.save_pretrained(folder) if form == "save_pretrained" else torch.save(made.state_dict(), folder / "a.pt")
    square = sum(float(p.detach().double().square().sum()) for p in made.parameters())
    result = checkpoints.series(tmp_path)
    np.testing.assert_allclose(result.table.norm.iloc[0] ** 2, square, rtol=1e-12)
    assert result.parameters == sum(p.numel() for p in made.parameters())
