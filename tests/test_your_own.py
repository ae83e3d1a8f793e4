"""Chapter 14 on a reader's checkpoints: another family of models, half precision, a folder that is not the book's."""

import os

import nbformat
import pytest
import torch

from nbutils.sources import Checkpoint
from workflow import ROOT

NOTEBOOK = ROOT / "book" / "notebooks" / "14-your-own.ipynb"


def save_llama(folder, seed):
    """A small Llama (RMSNorm, rotary positions, no biases) in bfloat16, with a tokenizer that has no padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "the": 2, "of": 3, "a": 4, "is": 5}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        ends = {"bos_token_id": None, "eos_token_id": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=6, **sizes, **ends))
    for part in (model.bfloat16(), PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")):
        part.save_pretrained(folder)


def run(mine):
    """All code of the chapter, with the reader's path in the one line that asks for it."""
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    asks = [cell for cell in cells if "\nmine = None" in cell]
    assert len(asks) == 1
    space = {"display": print}
    for cell in cells:
        code = cell.replace("\nmine = None", f"\nmine = {str(mine)!r}").replace('"auto"  #', '"smoke"  #', 1)
        exec(compile(code.replace('device = "auto"', 'device = "cpu"'), "14-your-own", "exec"), space)
    return space


def test_readers_own_series(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "MPLBACKEND", "Agg")
    for step in (1000, 2000, 4000):
        save_llama(tmp_path / "run" / f"step{step}", step)
    space = run(tmp_path / "run")
    assert list(space["total"].step) == [1000, 2000, 4000] and space["live"] is None
    assert len(space["by_step"]) == 3 * 3 and (space["by_step"].query("layer == 0").raw > 0.9999).all()
    assert space["by_head"].leak.abs().max() < 1e-6 and len(space["by_head"]) == 4 * 2 * 2
    assert space["measured"].euler.iloc[-1] == pytest.approx(2, abs=1e-3)  # RMSNorm and a matrix


def test_a_checkpoint_says_how_to_load_it(tmp_path):
    here = Checkpoint(5, "x", "", tmp_path)
    assert here.pretrained == {"pretrained_model_name_or_path": str(tmp_path)}
    there = Checkpoint(5, "org/name@step5", "", repo="org/name", commit="c0ffee")
    assert there.pretrained == {"pretrained_model_name_or_path": "org/name", "revision": "c0ffee"}
