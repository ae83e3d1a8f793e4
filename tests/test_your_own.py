"""Chapter 24 on a reader's checkpoints: other families of models, half precision, a folder that is not the book's."""

import os

import nbformat
import pytest
import torch

from nbutils.claims import Ledger
from nbutils.experiments import your_own
from workflow import ROOT

NOTEBOOK = ROOT / "book" / "notebooks" / "24-your-own.ipynb"


def tokenizer():
    """Seven words, no padding token, and padding on the left as some have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ("[UNK]", "</s>", "the", "of", "a", "is", "to")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", padding_side="left")


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    """RMSNorm, rotary positions, no biases, and fewer positions than the longest sentence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {"bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=7, **SIZES, **ends)).bfloat16()


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=7, **size))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=7, **SIZES)).half()


def save(folder, model, seed, size=1.0, words=True):
    """A model of half precision, its parameters times ``size``, with a tokenizer or without."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model()
    for parameter in made.parameters():
        parameter.data *= size
    for part in (made, tokenizer()) if words else (made,):
        part.save_pretrained(folder)


def run(mine, *, tokenizer_from=None):
    """All code of the chapter, with the reader's path in the lines that ask for it."""
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    answers = {
        "mine = None ": f"mine = {str(mine)!r} ",
        "\ntokenizer_from = None": f"\ntokenizer_from = {tokenizer_from!r}",
    }
    answers |= {'profile = "auto"': 'profile = "smoke"', 'device = "auto"': 'device = "cpu"'}
    space = {"display": print}
    for asked in answers:
        assert sum(asked in cell for cell in cells) == 1
    for cell in cells:
        for asked, answer in answers.items():
            cell = cell.replace(asked, answer)
        exec(compile(cell, "24-your-own", "exec"), space)
    return space


@pytest.fixture
def claimed(monkeypatch):
    """Ids of the claims that the chapter checks."""
    seen, plain = [], Ledger._enter

    def keep(self, record, *holds):
        seen.append(record.claim)
        return plain(self, record, *holds)

    monkeypatch.setitem(os.environ, "MPLBACKEND", "Agg")
    monkeypatch.setattr(Ledger, "_enter", keep)
    return seen


def test_readers_own_series(tmp_path, claimed, capsys):
    for step in (1000, 2000, 4000):
        save(tmp_path / "run" / f"step{step}", llama, step)
    save(tmp_path / "run" / "step3000", llama, 2000)  # the weights of step 2000
    save(tmp_path / "run" / "step8000", llama, 1)
    (tmp_path / "run" / "step8000" / "model.safetensors").rename(
        tmp_path / "run" / "step8000" / "adapter_model.safetensors"
    )
    space = run(tmp_path / "run")
    printed = capsys.readouterr().out
    assert "only an adapter" in printed and "its weights are those of" in printed
    assert list(space["total"].step) == [1000, 2000, 4000] and space["live"] is None
    assert list(space["means"].index) == [1000, 2000, 4000]  # and no model that the series rejects
    assert [len(table) for table in space["by_step"].values()] == [2, 2, 2], "layers without the embedding"
    last, model = space["last"], space["compared"]["untrained"].model
    assert {p.dtype for one in space["compared"].values() for p in one.model.parameters()} == {torch.float32}
    assert len(space["control"]) == 2 and type(model).__name__ == "LlamaForCausalLM"
    assert max(map(len, last.sentences)) == 12 < max(len(text.split()) for text in space["sentences"])
    assert space["by_head"].masked_mass.max() == 0 and len(space["by_head"]) == 2 * 4 * 2 * 2
    again = space["trained"](space["shown"][-1])
    pairs = list(zip(space["permuted"](again).model.parameters(), last.model.parameters(), strict=True))
    assert all(torch.equal(p.flatten().sort()[0], q.flatten().sort()[0]) for p, q in pairs)
    assert not all(torch.equal(p, q) for p, q in pairs)
    assert space["measured"].euler.iloc[-1] == pytest.approx(2, abs=1e-3)  # RMSNorm and a matrix
    assert set(claimed) == {"own-degree"}, "the reader's model is in no claim"
    normed, bare = space["normed"], space["bare"]  # what the claim checks: at c = 1, or without LayerNorm, it fails
    assert (normed.loc[1].residual > 0.1).all() and (abs(bare.loc[1000].euler - 2) > 1).all()


def test_readers_own_encoder_with_a_falling_norm(tmp_path, claimed, capsys):
    save(tmp_path / "run" / "step0", bert, 0, words=False)
    save(tmp_path / "run" / "step500", bert, 0, size=0.5, words=False)
    tokenizer().save_pretrained(tmp_path / "words")
    space = run(tmp_path / "run", tokenizer_from=str(tmp_path / "words"))
    printed = capsys.readouterr().out
    assert "own_slope = –" in printed and "own_share = –" in printed and "nan" not in printed
    assert type(space["last"].model).__name__ == "BertModel" and len(space["means"]) == 2
    assert space["last"].kind == "encoder" and space["by_head"].masked_mass.max() == 0  # both ways
    assert space["by_head"].query("model == 'trained' and c == 1").positions.min() > 1.5
    assert space["measured"].euler.iloc[-1] == pytest.approx(1, abs=1e-2)  # it ends in a LayerNorm
    assert space["threshold"] == pytest.approx((1 / 4 - 1) / (2 * 2e-3 * 500), rel=1e-3)  # G/(2ηTρ₀²)


def test_readers_own_encoder_and_decoder(tmp_path, claimed):
    for step in (500, 1000):
        save(tmp_path / "run" / f"step{step}", t5, step)
    space = run(tmp_path / "run")
    assert list(space["control"].index) == ["encoder 1", "encoder 2", "decoder 1", "decoder 2"]
    assert {layer for _, _, layer, _ in space["by_head"].index} >= {"encoder 1", "decoder 2"}
    assert space["by_head"].masked_mass.max() == 0 and space["measured"].euler.notna().all()


def test_the_chapter_s_own_series_doubles_while_steps_are_whole(tmp_path):
    history = your_own.series(tmp_path, width=8, layers=1, steps=12, seed=0)
    assert {int(folder.name.removeprefix("checkpoint-")) for folder in tmp_path.iterdir()} == {0, 3, 6, 12}
    assert list(history["step"]) == list(range(13)) and history["loss"].iloc[-1] < history["loss"].iloc[1]
