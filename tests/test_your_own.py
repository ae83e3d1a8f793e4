"""*Your norm* on a reader's checkpoints: other families of models, half precision, a folder that is not the book's."""

import os

import matplotlib.pyplot as plt
import nbformat
import papermill
import pytest
import torch

from nbutils.claims import Ledger
from nbutils.experiments import your_model, your_own
from nbutils.experiments.your_model import Refused
from normgrowth import checkpoints, models, precision
from workflow import book, notebooks

CHAPTER = book.source("your-own")


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


def fnet():
    """An encoder without attention."""
    from transformers import FNetConfig, FNetForMaskedLM

    return FNetForMaskedLM(FNetConfig(vocab_size=7, hidden_size=16, intermediate_size=24, num_hidden_layers=2))


def save(folder, model, seed, size=1.0, words=True):
    """A model of half precision, its parameters times ``size``, with a tokenizer or without."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model()
    for parameter in made.parameters():
        parameter.data *= size
    for part in (made, tokenizer()) if words else (made,):
        part.save_pretrained(folder)


def run(mine, **parameters):
    """All code of the chapter, with parameters as papermill puts them in: in a cell after the one with the defaults."""
    parameters = {"mine": str(mine), "profile": "smoke", "device": "cpu"} | parameters
    space = {}
    for cell in notebooks.executable(CHAPTER).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "your-own", "exec"), space)
        if "parameters" in cell.metadata.get("tags", ()):
            assert set(parameters) <= set(space)
            space.update(parameters)
    return space


@pytest.fixture
def records(monkeypatch):
    """Records of the chapter's claims."""
    entered = []
    enter = Ledger._enter

    def keep(self, record, *holds):
        entered.append(record)
        return enter(self, record, *holds)

    monkeypatch.setitem(os.environ, "MPLBACKEND", "Agg")
    monkeypatch.setattr(Ledger, "_enter", keep)
    return entered


@pytest.fixture
def drawn(monkeypatch):
    """A list with an entry for each figure that the chapter shows."""
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    return shown


def reasons(records):
    """Why claims are open, by claim."""
    return {record.claim: record.reason for record in records if record.role == "open"}


def test_readers_own_series(tmp_path, records, drawn, capsys):
    for step in (1000, 2000, 4000):
        save(tmp_path / "run" / f"step{step}", llama, step)
    save(tmp_path / "run" / "step3000", llama, 2000)  # the weights of step 2000
    save(tmp_path / "run" / "step8000", llama, 1)
    (tmp_path / "run" / "step8000" / "model.safetensors").rename(
        tmp_path / "run" / "step8000" / "adapter_model.safetensors"
    )
    save(tmp_path / "run" / "step9000", llama, 1)
    with (tmp_path / "run" / "step9000" / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    space = run(tmp_path / "run", lr=1e-3, decay=0.1)
    printed = capsys.readouterr().out
    assert "only an adapter" in printed and "its weights are those of" in printed and "step9000" in printed
    assert list(space["total"].step) == [1000, 2000, 4000] and not space["part"].reasons
    assert list(space["means"].index) == [1000, 2000, 4000], "and no model that the series rejects"
    assert [len(table) for table in space["by_step"].values()] == [2, 2, 2], "layers without the embedding"
    assert set(space["compared"]) == {"last", "untrained", "permuted"} and len(drawn) == 2
    last = space["last"]
    assert type(last.model).__name__ == "LlamaForCausalLM"
    assert {p.dtype for p in last.model.parameters()} == {torch.float32}
    assert max(map(len, last.sentences)) == 12 < max(len(text.split()) for text in space["sentences"])
    assert space["by_head"].masked_mass.max() == 0 and len(space["by_head"]) == 2 * 4 * 2 * 2
    again = space["trained"](space["shown"][-1])
    pairs = list(zip(space["permuted"](again).model.parameters(), last.model.parameters(), strict=True))
    assert all(torch.equal(p.flatten().sort()[0], q.flatten().sort()[0]) for p, q in pairs)
    assert not all(torch.equal(p, q) for p, q in pairs)
    assert space["measured"].euler.iloc[-1] == pytest.approx(2, abs=1e-3)  # RMSNorm and a matrix
    assert {record.claim for record in records if record.role != "open"} == {"own-degree", "own-exponents"}
    assert "no loop here" in reasons(records)["own-series"] and "GPT-2" in reasons(records)["own-mask"]
    normed, bare = space["normed"], space["bare"]  # what the claim checks: at c = 1, or without LayerNorm, it fails
    assert (normed.loc[1].residual > 0.1).all() and (abs(bare.loc[1000].euler - 2) > 1).all()


def test_readers_own_encoder_with_a_falling_norm(tmp_path, records, capsys):
    save(tmp_path / "run" / "step0", bert, 0, words=False)
    save(tmp_path / "run" / "step500", bert, 0, size=0.5, words=False)
    tokenizer().save_pretrained(tmp_path / "words")
    space = run(tmp_path / "run", tokenizer_from=str(tmp_path / "words"), lr=1e-3, decay=0.0)
    printed = capsys.readouterr().out
    assert "own_slope = –" in printed and "own_share = –" in printed and "nan" not in printed
    assert "without decay this norm would not grow" in printed and "λ/λ*" not in space["decays"]
    assert type(space["last"].model).__name__ == "BertModel" and len(space["means"]) == 2
    assert space["last"].kind == "encoder" and space["by_head"].masked_mass.max() == 0  # both ways
    assert space["by_head"].query("model == 'trained' and c == 1").positions.min() > 1.5
    assert space["measured"].euler.iloc[-1] == pytest.approx(1, abs=1e-2)  # it ends in a LayerNorm
    assert space["critical_decay"] == pytest.approx((1 / 4 - 1) / (2 * 1e-3 * 500), rel=1e-3)  # G/(2ηTρ₀²)


def test_the_decay_that_holds_a_norm_holds_it(tmp_path, records, capsys):
    """Where steps go on adding what they added to ρ² from step 200 to 400."""
    for step, size in ((100, 1), (200, 2), (400, 4)):
        save(tmp_path / "run" / f"step{step}", llama, 0, size=size)
    lr = 1e-3
    space = run(tmp_path / "run", lr=lr, decay=0.0)
    square = 16.0  # in units of the first
    for _ in range(2000):
        square = square * (1 - lr * space["holding_decay"]) ** 2 + (16 - 4) / 200
    assert square == pytest.approx(16, rel=0.01)
    unknown = run(tmp_path / "run", decay=0.1)
    assert "set lr and decay" in unknown["part"].reasons["weight decay"], "rates are not guessed"
    assert "own_threshold = –" in capsys.readouterr().out


def test_readers_own_encoder_and_decoder(tmp_path, records):
    for step in (500, 1000):
        save(tmp_path / "run" / f"step{step}", t5, step)
    space = run(tmp_path / "run")
    assert list(space["compared"]["untrained"].index) == ["encoder 1", "encoder 2", "decoder 1", "decoder 2"]
    assert {layer for _, _, layer, _ in space["by_head"].index} >= {"encoder 1", "decoder 2"}
    assert space["by_head"].masked_mass.max() == 0 and space["measured"].euler.notna().all()


def test_a_single_model_has_norms_by_layer_and_no_growth(tmp_path, records, drawn, capsys):
    save(tmp_path / "mine", llama, 0)
    (tmp_path / "text").write_text("the of a\n\nis to the a\n", encoding="utf-8")
    space = run(tmp_path / "mine", sentences=str(tmp_path / "text"))
    printed = capsys.readouterr().out
    assert space["sentences"] == ["the of a", "is to the a"]
    assert set(space["series"].table.layer) == {"total", "embeddings", "block 0", "block 1", "head", "rest"}
    assert all("growth" in title or "weight decay" in title for title in space["part"].reasons)
    assert "two checkpoints" in space["part"].reasons["weight decay"] and "own_slope = –" in printed
    assert len(drawn) == 2 and drawn[0].axes[0].get_xlabel() == r"parameter norm $\rho$", "bars by layer"
    assert len(space["compared"]["last"]) == 2 and len(space["by_head"]) == 2 * 4 * 2 * 2
    assert space["measured"].euler.iloc[-1] == pytest.approx(2, abs=1e-3)


def test_equal_checkpoints_give_a_sentence_in_place_of_nan(tmp_path, records, drawn, capsys):
    for step in (1, 2):
        save(tmp_path / "run" / f"step{step}", llama, 0)
    space = run(tmp_path / "run")
    assert "its weights are those of" in space["part"].reasons["weight decay"]
    assert "λ/λ*" not in capsys.readouterr().out and len(drawn) == 2


def test_a_part_that_fails_says_why_and_the_next_one_runs(tmp_path, records, drawn, capsys):
    """Without a tokenizer there are norms and growth; without attention, all but heads."""
    for step in (1, 2):
        save(tmp_path / "words" / f"step{step}", llama, step, words=False)
        save(tmp_path / "heads" / f"step{step}", fnet, step)
    space = run(tmp_path / "words", lr=1e-3, decay=0.0)
    printed = capsys.readouterr().out
    failed = space["part"].reasons
    assert {"saturation", "heads", "degree"} <= set(failed) and not {"norms", "growth", "weight decay"} & set(failed)
    assert "tokenizer_from" in failed["heads"] and failed["heads"] == reasons(records)["own-mask"]
    assert "own_raw = –" in printed and "the figure of the saturation: not drawn: " in printed and len(drawn) == 1
    records.clear()
    space = run(tmp_path / "heads", lr=1e-3, decay=0.1)
    assert set(space["part"].reasons) == {"heads"} and "attention" in reasons(records)["own-mask"]
    assert "\n" not in reasons(records)["own-mask"] and len(drawn) == 3
    assert space["measured"].euler.iloc[-1] == pytest.approx(1, abs=1e-3)  # it ends in a LayerNorm


def test_without_norms_the_model_is_measured_all_the_same(tmp_path, records, drawn, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("the disk\nis gone")

    for step in (1, 2, 4):
        save(tmp_path / f"step{step}", llama, step)
    monkeypatch.setattr(checkpoints, "series", fail)
    space = run(tmp_path)
    assert reasons(records)["own-series"] == "RuntimeError: the disk is gone"
    assert not {"saturation", "heads", "degree"} & set(space["part"].reasons) and len(drawn) == 1
    assert list(space["by_step"]) == [1, 4] and "own_end = –" in capsys.readouterr().out


def test_a_model_without_room_for_float64_says_so(tmp_path, records, monkeypatch, capsys):
    save(tmp_path / "mine", llama, 0)
    monkeypatch.setattr(precision, "choose", lambda model: (None, "float64 needs 9 GB"))
    space = run(tmp_path / "mine")
    printed = capsys.readouterr().out
    assert "untrained: at c = 1000 in float32: float64 needs 9 GB" in printed
    assert "('trained', 1000): at c = 1000 in float32: float64 needs 9 GB" in printed
    assert not {"saturation", "heads"} & set(space["part"].reasons)
    assert space["part"].reasons["degree"].startswith("float64 needs 9 GB. By the rules, without float64: ")


def test_a_large_model_is_measured_at_both_ends_of_its_series(tmp_path, records, monkeypatch, capsys):
    for step in (1, 2, 4, 8):
        save(tmp_path / f"step{step}", llama, step)
    monkeypatch.setattr(your_model, "LARGE", 100)
    space = run(tmp_path)
    assert list(space["by_step"]) == [1, 8] and set(space["by_head"].reset_index().c) == {1, 1000}
    assert "above 100 parameters: first and last checkpoint, heads at c = 1 1000" in capsys.readouterr().out
    assert list(space["total"].step) == [1, 2, 4, 8]


def test_on_the_chapter_s_own_series_nothing_may_fail():
    with pytest.raises(OverflowError), your_model.Parts(may_fail=False)("heads"):
        raise OverflowError("scores")
    with pytest.raises(NameError), your_model.Parts(may_fail=True)("heads"):  # a defect of the chapter
        raise NameError("scores")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mine": 7}, "mine = 7: give a folder, a repository org/name"),
        ({"mine": "  "}, "mine = '  ': give a folder"),
        ({"match": None}, "match = None: give a pattern"),
        ({"tokenizer_from": True}, "tokenizer_from = True: give a folder"),
        ({"lr": "fast"}, "lr = 'fast': give a number above 0"),
        ({"lr": 0}, "lr = 0: give a number above 0"),
        ({"lr": float("nan")}, "lr = nan: give a number above 0"),
        ({"decay": -0.1}, "decay = -0.1: give a number, 0 or above"),
        ({"decay": True}, "decay = True: give a number, 0 or above"),
        ({"sentences": []}, r"sentences: none in \[\]: give a list"),
        ({"sentences": [1, 2]}, "sentences: a list of int: give a list"),
        ({"sentences": 3}, "sentences = 3: give a list"),
        ({"sentences": "nowhere.txt"}, "sentences = 'nowhere.txt': No such file or directory; give a list"),
        ({"mine": "nowhere"}, "mine = 'nowhere': no such folder, and no name of a Hub repository"),
        ({"mine": "."}, "mine = '.': no model, and no checkpoint with a step in its name"),
        ({"mine": ".", "match": "b*"}, "mine = '.': .* that matches 'b"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused_in_one_line(wrong, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"mine": ".", "match": "*", "tokenizer_from": None, "lr": 1e-3, "decay": 0.0, "sentences": None} | wrong
    with pytest.raises(Refused, match=f"^{message}") as refusal:
        your_model.check_parameters(**{name: value for name, value in given.items() if name != "sentences"})
        your_model.read_sentences(given["sentences"])
        your_model.locate(given["mine"], given["match"])
    assert "\n" not in str(refusal.value) and refusal.value._render_traceback_() == [f"Refused: {refusal.value}"]


def test_a_repository_is_one_model_or_a_series_and_without_a_network_that_of_the_cache(hub):
    save(hub.add("lab/tiny", "main", None), llama, 0)
    for revision in ("step1", "step2"):
        save(hub.add("lab/run", revision, None), llama, 0)
    online = your_model.locate("lab/tiny")
    assert not online.is_series and online.checkpoints[0].label == "lab/tiny@main"
    assert [checkpoint.step for checkpoint in your_model.locate("lab/run").checkpoints] == [1, 2]
    assert [checkpoint.step for checkpoint in your_model.locate("lab/run", "*2").checkpoints] == [2]
    norm = checkpoints.single(online.place).table.norm[0]
    models.load("lab/tiny", ["the of", "a is"])  # downloads all of it
    hub.down = {"lab/tiny", "lab/run"}
    offline = your_model.locate("lab/tiny")
    assert not offline.is_series and checkpoints.single(offline.place).table.norm[0] == norm
    with pytest.raises(Refused, match=r"^mine = 'lab/run': .*Without a network"):
        your_model.locate("lab/run")


def test_papermill_finds_the_parameters(tmp_path):
    """In the notebook that it runs in the workflow, and in the one that readers open."""
    for make in (notebooks.executable, notebooks.plain):
        nbformat.write(make(CHAPTER), tmp_path / "24.ipynb")
        inferred = papermill.inspect_notebook(str(tmp_path / "24.ipynb"))
        assert {"mine", "match", "tokenizer_from", "lr", "decay", "sentences", "profile", "seed", "device"} == set(
            inferred
        )


def test_the_chapter_s_own_series_doubles_while_steps_are_whole(tmp_path):
    history = your_own.series(tmp_path, width=8, layers=1, steps=12, seed=0)
    assert {int(folder.name.removeprefix("checkpoint-")) for folder in tmp_path.iterdir()} == {0, 3, 6, 12}
    assert list(history["step"]) == list(range(13)) and history["loss"].iloc[-1] < history["loss"].iloc[1]
