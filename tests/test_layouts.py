"""Layouts of the libraries that train: each is read as its model says, or refused with what converts it."""

import itertools
import json
import re

import pytest
import torch
import transformers
from layouts import CONTENT_REFUSED, NAMES_REFUSED, READ, norm, of_deepspeed, of_fsdp
from transformers.models.auto import modeling_auto

from normgrowth.checkpoints import classes, series

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


def assert_refused(folder, words):
    with pytest.raises(ValueError) as error:
        series(folder)
    assert words in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("names", NAMES_REFUSED)
def test_files_that_are_not_weights_as_such_are_refused_with_what_converts_them(tmp_path, names):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert_refused(tmp_path, NAMES_REFUSED[names])


@pytest.mark.parametrize("content", CONTENT_REFUSED)
def test_content_that_may_not_be_the_weights_is_refused_with_what_to_do(tmp_path, content):
    if content in NEEDS:
        pytest.importorskip(NEEDS[content])
    write, words = CONTENT_REFUSED[content]
    write(tmp_path)
    assert_refused(tmp_path, words)


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
    """The distributed checkpoint is read as its model says, and so is what torch's own tool makes of it."""
    wanted = of_fsdp(tmp_path)
    assert series(tmp_path / "step1").table.norm[0] == pytest.approx(wanted, rel=1e-12)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "step1", tmp_path / "step2.pt")
    assert series(tmp_path / "step2.pt").table.norm[0] == pytest.approx(wanted, rel=1e-12)
    (tmp_path / "rank0").rename(tmp_path / "step3.pt")
    with pytest.raises(ValueError, match=r"full_tensor\(\)"):
        series(tmp_path / "step3.pt")


# Tied weights, state-space, mixtures of experts, two stacks; and every kind of buffer that is saved.
ARCHITECTURES = [
    "GPT2LMHeadModel", "MambaForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "MiniMaxForCausalLM", "ZayaForCausalLM", "ApertusForCausalLM",
    "Gemma4ForCausalLM", "Gemma4AudioModel", "MistralLarge4TextModel", "IBertForMaskedLM", "EncodecModel",
    "FastSpeech2ConformerWithHifiGan", "Phi4MultimodalModel", "RadioModel", "Florence2Model", "AlignModel",
    "RTDetrV2Model",
]  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")


def all_architectures():
    """Names of the classes of models that transformers' automatic classes know."""
    mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch("MODEL.*MAPPING_NAMES", name)]
    classes = itertools.chain.from_iterable(mapping.values() for mapping in mappings)
    return sorted({name for names in classes for name in ([names] if isinstance(names, str) else names)})


def without_values(name, layers=2):
    """A model of two layers, otherwise of its default sizes, on torch's device without memory."""
    kind = getattr(transformers, name)
    config = kind.config_class()
    parts = [value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig)]
    for part in (config, *parts):
        for option in LAYERS:
            if layers and isinstance(getattr(part, option, None), int) and getattr(part, option) > layers:
                setattr(part, option, layers)
    with torch.device("meta"):
        return kind(config)


UNKNOWN = "the class is not known"


def miscounted(model, folder):
    """Saved tensors of which the class in ``config.json`` says something else than the model itself."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored = model.state_dict()
    kind = classes.of_folder(folder, stored)
    if kind is None:
        return {UNKNOWN}
    wrong = {name for name in stored if (name in parameters) != (name in kind.parameters)}
    return wrong | {name for name in stored if (name in kind.buffers) == (name in parameters)}


def miscounted_at_any_depth(model, folder):
    """The same; with all its layers where the configuration does not fit fewer than it has."""
    wrong = miscounted(model, folder)
    return miscounted(without_values(type(model).__name__, layers=0), folder) if wrong == {UNKNOWN} else wrong


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_of_an_architecture_are_what_its_class_says(tmp_path, name):
    assert miscounted_at_any_depth(without_values(name), tmp_path) == set()


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
SPEECH = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 60,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
}  # fmt: skip
SAVED = {  # models with buffers that are saved, frozen tables, tied weights, and other names in files than in the class
    "BartForConditionalGeneration": SPEECH | {"pad_token_id": 0}, "RoFormerForMaskedLM": SIZES | WORDS,
    "WhisperForConditionalGeneration": SPEECH | {"num_mel_bins": 8, "pad_token_id": 0},
    "MiniMaxForCausalLM": SIZES | WORDS | {"num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 8,
                                           "layer_types": ["linear_attention", "full_attention"]},
    "IBertForMaskedLM": SIZES | WORDS, "ApertusForCausalLM": SIZES | WORDS | {"num_key_value_heads": 2},
    "ViTForImageClassification": SIZES | {"image_size": 8, "patch_size": 4},
    "EncodecModel": {"num_filters": 4, "hidden_size": 8, "codebook_size": 16, "codebook_dim": 8,
                     "num_residual_layers": 1, "upsampling_ratios": [2, 2]},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_the_norm_of_a_saved_model_is_that_of_its_parameters(tmp_path, name):
    """Of one alone and in a series, whatever its buffers do from step to step."""
    kind = getattr(transformers, name)
    rng = torch.Generator().manual_seed(0)
    model = kind(kind.config_class(**SAVED[name]))
    wanted = []
    for step in (1, 2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=rng)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data += 0.25
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        wanted.append(norm(model))
    assert list(series(tmp_path).table.norm) == pytest.approx(wanted, rel=1e-12)
    assert list(series(tmp_path / "checkpoint-2").table.norm) == pytest.approx(wanted[1:], rel=1e-12)


def has_values_beside_parameters(model):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return any(value.is_floating_point() for name, value in model.state_dict().items() if name not in parameters)


@pytest.mark.slow
def test_parameters_of_all_architectures_are_what_their_classes_say(tmp_path):
    """Of all whose files hold floating tensors that are no parameters; an unknown class says nothing wrong."""
    wrong, unknown, asked = {}, [], 0
    for name in all_architectures():
        try:
            model = without_values(name)
        except Exception:  # its default configuration builds no model, or it needs another library
            continue
        if not has_values_beside_parameters(model):
            continue
        asked += 1
        names = miscounted_at_any_depth(model, tmp_path)
        if names == {UNKNOWN}:
            unknown.append(name)
        elif names:
            wrong[name] = sorted(names)[:3]
    assert wrong == {} and asked > 100 and 5 * len(unknown) < asked, (wrong, unknown)
