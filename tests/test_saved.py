"""One saved model of ``transformers``: what the commands say of it, what they refuse, and that nothing of it is run."""

import json
import os
import shutil
import sys
from copy import deepcopy

import pandas as pd
import pytest
import torch
from checkpoint_files import save
from test_your_own import llama, tokenizer
from tiny import tiny

from normgrowth import models, precision
from normgrowth.__main__ import main

WORDS = ["the words of a sentence", "to the end of the text is a word of the sentence"]
DEGREES = {"gpt2": 2, "bert": 1, "t5": 2}  # a norm's weight, then the output layer; an encoder ends in its norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of three kinds of models, in half precision, each with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for kind in DEGREES:
        tiny(kind).half().save_pretrained(root / kind)
        tokenizer().save_pretrained(root / kind)
    return root


@pytest.mark.parametrize("kind", DEGREES)
def test_three_kinds_of_models(folders, kind):
    state = torch.get_rng_state()
    one = models.load(folders / kind, WORDS)
    assert {p.dtype for p in one.model.parameters()} == {torch.float32} and not one.model.training
    parts = ("encoder ", "decoder ") if kind == "t5" else ("",)
    similar, heads = models.similarity(one), models.attention(one)
    assert list(map(str, similar.index)) == [f"{part}{i}" for part in parts for i in range(3)]
    assert similar.iloc[0].raw == pytest.approx(1), "an embedding only grows"
    assert len(heads) == 2 * 2 * len(parts) and (heads.masked_mass == 0).all() and (heads.share <= 1).all()
    wide = one._replace(model=deepcopy(one.model).double())
    pd.testing.assert_frame_equal(heads, models.attention(wide), rtol=1e-3, obj="no tie by rounding")
    assert models.degree(one).euler.iloc[-1] == pytest.approx(DEGREES[kind], abs=1e-2)
    pd.testing.assert_frame_equal(
        models.similarity(models.untrained(one, 5)), models.similarity(models.untrained(one, 5))
    )
    assert (models.similarity(models.untrained(one, 4)) != similar).to_numpy().any()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    fresh, control = type(one.model)(one.model.config), models.untrained(one, 5).model
    assert all(map(torch.equal, fresh.parameters(), control.parameters())), "the control has initial values"


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("GPT2Config", {}, "causal"), ("LlamaConfig", {}, "causal"), ("BertConfig", {}, "encoder"),
        ("BertConfig", {"is_decoder": True}, "causal"), ("XLMConfig", {}, "encoder"),
        ("XLMConfig", {"causal": True}, "causal"),
        ("XLNetConfig", {}, "encoder"), ("ModernBertConfig", {}, "encoder"), ("BartConfig", {}, "encoder–decoder"),
    ],
)  # fmt: skip
def test_the_configuration_says_which_positions_a_model_sees(name, options, kind):
    import transformers

    assert models.kind_of(getattr(transformers, name)(**options)) == kind


@pytest.mark.parametrize("command", ["saturation", "heads", "degree"])
def test_the_command_prints_a_table_and_all_of_it_as_json(folders, tmp_path, capsys, command):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(["", *WORDS, ""]))
    assert main([command, str(folders / "gpt2"), "--c", "10"]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    of_sentences = "the first of 24 sentences" if command == "degree" else "24 sentences"
    assert head.startswith(f"GPT2LMHeadModel, causal, 7,776 parameters; {of_sentences} of Python's docstrings, ")
    assert head.endswith("; c = 10") and len(table) >= 4
    assert main([command, str(folders / "gpt2"), "--text", str(lines), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    read = WORDS[:1] if command == "degree" else WORDS
    first = "the first of " if command == "degree" else ""
    assert found["sentences"] == f"{first}2 sentences of {lines}"
    assert found["tokens"] == sum(len(x.split()) for x in read)
    one = models.load(folders / "gpt2", WORDS)
    measure = {"saturation": models.similarity, "heads": models.attention, "degree": models.degree}[command]
    rows = pd.DataFrame([row for row in found["table"] if row["of"] == "trained"]).drop(columns="of")
    pd.testing.assert_frame_equal(rows, measure(one).reset_index(), check_dtype=False, rtol=1e-12)
    assert len(found["table"]) == len(rows) * (1 if command == "degree" else 2)


def test_where_a_number_overflows_the_largest_scale_without_is_taken_and_named(folders, capsys, monkeypatch):
    """In float64 far up; in float32, where the memory is said to be full, already where a square overflows."""
    scales = []
    for room in (1e12, 1.0):
        monkeypatch.setattr(precision, "free_memory", lambda _, room=room: room)
        assert main(["saturation", str(folders / "gpt2"), "--c", "1e300"]) == 0
        head, why, *_ = capsys.readouterr().out.splitlines()
        scales.append(float(head.rpartition("c = ")[2]))
        of_float32 = "float64 needs 1.1 GB beside the model, and 0.0 GB are free; " if room == 1 else ""
        kind = "float32" if room == 1 else "float64"
        assert why.startswith(f"in {kind} at c = {scales[-1]:g}, where c = 1e+300 was asked: {of_float32}")
        assert "overflows" in why or "not finite" in why
    assert 1e4 < scales[1] < 1e10 < 1e20 < scales[0] < 1e300


def copied(folders, folder, *names, **changed):
    """A folder with files of the tiny GPT-2, its configuration changed."""
    folder.mkdir(parents=True)
    for name in names:
        shutil.copy(folders / "gpt2" / name, folder)
    if changed:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


GONE = "transformer.h.1.mlp.c_fc.weight"
ALL = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def broken(folders, tmp_path, monkeypatch):
    """Folders that a first try may name."""
    monkeypatch.chdir(tmp_path)
    copied(folders, tmp_path / "runs" / "step1", *ALL)
    copied(folders, tmp_path / "words", *ALL[:2])
    copied(folders, tmp_path / "config", *ALL[1:])
    (copied(folders, tmp_path / "beside", *ALL) / "adapter_config.json").write_text("{}")
    state = {name: x for name, x in tiny("gpt2").state_dict().items() if name not in ("lm_head.weight", GONE)}
    save(state, copied(folders, tmp_path / "part", *ALL))
    copied(folders, tmp_path / "fewer", *ALL, n_layer=1)
    copied(folders, tmp_path / "wider", *ALL, n_inner=48)
    save({f"_orig_mod.{name}": x for name, x in state.items()}, copied(folders, tmp_path / "compiled", *ALL))
    llama().save_pretrained(tmp_path / "bare")
    (tmp_path / "empty.txt").write_text("\n \n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["runs"], "runs: no model, but a folder of 1: name one, such as runs/step1"),
        (["words"], "words, its tokenizer, if it has one (give another: --tokenizer): this tokenizer knows no word"),
        (["bare"], "the backend tokenizer from one of: (1) a `tokenizers` library serialization file"),
        (["config"], "config: Unrecognized model in config. Should have a `model_type` key in its config.json"),
        (["runs/step1/model.safetensors"], "model.safetensors: a file: give its folder"),
        (["beside"], "beside: an adapter that is not merged: merge it into its model first"),
        (["part"], f"GPT2LMHeadModel needs {GONE}, which is not among the saved weights"),
        (["fewer"], "among the saved weights: its configuration has fewer layers"),
        (["wider"], "c_fc.bias of shape (48,), and the saved one has (64,)"),
        (["compiled"], "among the saved weights; _orig_mod.transformer.h.0.attn."),
        (["runs/step1", "--text", "empty.txt"], "empty.txt: no sentence in it"),
        (["runs/step1", "--c", "inf"], "c = inf: give a positive number"),
        (["runs/step1", "--c", "nan"], "c = nan: give a positive number"),
        (["runs/step1", "--c", "-1"], "c = -1: give a positive number"),
        (["runs/step1", "--text", "none.txt"], "normgrowth saturation: none.txt: No such file or directory"),
    ],
)
def test_a_first_try_is_answered_in_one_line(broken, capsys, monkeypatch, words, why):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    assert main(["saturation", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("normgrowth")]
    assert why in line and not line.endswith((":", ",")), line


def test_another_tokenizer_and_no_transformers(broken, capsys, monkeypatch):
    assert main(["saturation", "words", "--tokenizer", "runs/step1"]) == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["heads", "runs/step1"]) == 2
    expected = "normgrowth heads: a saved model needs transformers: pip install 'transformers[torch]'"
    assert expected in capsys.readouterr().err


class Trap:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_of_a_folder_runs(folders, broken, capsys):
    """Neither pickled, nor in files beside the weights of model and tokenizer."""
    folder = copied(folders, broken / "pickle", *ALL[:1], *ALL[2:])
    torch.save({"transformer.wte.weight": Trap()}, folder / "pytorch_model.bin")
    own = {"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "model_type": "own"}
    for name, changed in (("model", own), ("class", {"auto_map": {"AutoModelForCausalLM": "own.M"}})):
        (copied(folders, broken / name, *ALL, **changed) / "own.py").write_text("import os\nos.mkdir('ran')\n")
    folder = copied(folders, broken / "tokenizer", *ALL)
    (folder / "own.py").write_text("import os\nos.mkdir('ran')\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.T", "own.T"]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, why in (("pickle", "holds no parameters"), ("model", "needs code of its own, which is not run here")):
        assert main(["saturation", name]) == 2, name
        assert why in capsys.readouterr().err
    for name in ("class", "tokenizer"):  # transformers has these itself
        assert main(["saturation", name]) == 0, name
    assert not (broken / "ran").exists()
