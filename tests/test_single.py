"""Norms of a single model by layer: which sources are one, and numbers against numpy's."""

import json

import numpy as np
import pytest
import torch
from checkpoint_files import make, model, save

from normgrowth import checkpoints
from normgrowth.__main__ import main
from normgrowth.checkpoints.single import locate


def norms_by_numpy(state):
    total = np.sqrt(sum((tensor.double().numpy() ** 2).sum() for tensor in state.values()))
    return {name: np.linalg.norm(tensor.double().numpy()) for name, tensor in state.items()} | {"total": total}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["total", "layer", "type", "tensor"])
def test_rows_are_those_of_the_files(tmp_path, by, dtype):
    state = model(3, dtype=dtype)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()  # tied, stored twice
    save({**state, "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path)
    measured = checkpoints.single(tmp_path, by=by)
    left_out = {"transformer.h.0.attn.bias": "attention mask", "lm_head.weight": "tied to transformer.wte.weight"}
    assert measured.left_out == left_out
    del state["lm_head.weight"]
    expected = norms_by_numpy(state)
    table = measured.table.set_index("layer")
    assert table.norm["total"] == pytest.approx(expected["total"], rel=1e-12)
    assert table.parameters["total"] == sum(tensor.numel() for tensor in state.values())
    rows = table.drop("total")
    assert len(rows) == {"total": 0, "layer": 4, "type": 4, "tensor": len(state)}[by]
    if len(rows):
        assert (rows.norm**2).sum() == pytest.approx(expected["total"] ** 2, rel=1e-12)
        assert rows.share.sum() == pytest.approx(100) and rows.parameters.sum() == table.parameters["total"]
    if by == "tensor":
        assert all(table.norm[name] == pytest.approx(norm, rel=1e-12) for name, norm in expected.items())
    if by == "layer":
        assert list(table.index) == ["total", "embeddings", "block 0", "block 1", "rest"]


def shards(folder):
    state = model(0)
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(names.values()):
        save({name: state[name] for name in state if names[name] == file}, folder, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def beside(folder, name):
    """Weights with other folders and files beside them, as trainers leave them."""
    save(model(0), folder, name)
    (folder / "logs").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    return folder


@pytest.mark.parametrize(
    "single",
    [
        lambda root: beside(root / "mine", "model.safetensors"),
        lambda root: beside(root / "mine", "pytorch_model.bin"),
        lambda root: beside(root / "runs" / "step1000", "model.safetensors"),
        lambda root: beside(root / "runs" / "checkpoint-500" / "hf", "model.safetensors").parent,
        lambda root: beside(root / "mine", "last.ckpt") / "last.ckpt",
        lambda root: beside(root / "runs", "step1000.pt") / "step1000.pt",
        lambda root: shards(root / "mine"),
        lambda root: f"{beside(root / 'mine', 'model.safetensors')}/",
    ],
)
def test_sources_of_one_model(tmp_path, single):
    source = single(tmp_path)
    assert locate(source)
    assert checkpoints.single(source).table.norm[0] == pytest.approx(norms_by_numpy(model(0))["total"], rel=1e-12)


def with_final(root):
    make(root, steps=(10,))
    save(model(0), root / "final")
    return root


def with_weights_above(root):
    make(root, label="checkpoint-{}")
    save(model(0), root)
    return root


@pytest.mark.parametrize(
    "series",
    [
        lambda root: [make(root), root][1],
        lambda root: [make(root, steps=(10,)), root][1],  # a training that has just begun
        lambda root: [make(root, label="step{}/hf"), root][1],
        lambda root: [save(model(0), root, "step10.safetensors"), root][1],
        with_final,
        with_weights_above,
    ],
)
def test_sources_of_a_series_stay_one(tmp_path, series, capsys):
    source = series(tmp_path)
    assert locate(source) is None
    with pytest.raises(ValueError, match="no single model: name one of its checkpoints"):
        checkpoints.single(source)
    assert main(["norms", str(source)]) == 0
    assert capsys.readouterr().out.startswith("step,layer,norm,cos_similarity")


def test_step_and_match_ask_for_a_series(tmp_path, capsys):
    save(model(0), tmp_path / "phase2_30k")
    for options in (["--step", r"phase2_(\d+k)"], ["--step", r"_(\d+k)", "--match", "phase2*"]):
        assert main(["norms", str(tmp_path / "phase2_30k"), *options]) == 0
        assert capsys.readouterr().out.startswith("step,layer,norm")
    assert main(["norms", str(tmp_path / "phase2_30k"), "--by", "total"]) == 0
    assert "parameters\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("revisions", "source", "is_single"),
    [
        (["main"], "org/model", True),
        (["main", "refs-pr"], "org/model", True),
        (["main", "step10"], "org/model", False),
        (["main", "step10"], "org/model@step10", True),
        (["main", "step10"], "org/model@main", True),
    ],
)
def test_on_the_hub(hub, revisions, source, is_single):
    for i, revision in enumerate(revisions):
        hub.add("org/model", revision, model(i))
    if not is_single:
        assert locate(source) is None
        return
    number = revisions.index(source.partition("@")[2] or "main")
    for keep in (True, False):
        measured = checkpoints.single(source, keep=keep)
        assert measured.table.norm[0] == pytest.approx(norms_by_numpy(model(number))["total"], rel=1e-12)
    assert measured.label == f"org/model@{revisions[number]}"


@pytest.mark.parametrize(("refs", "is_single"), [(["main"], True), (["main", "step10"], False)])
def test_in_the_hubs_cache(tmp_path, refs, is_single):
    cache = tmp_path / "models--org--model"
    for i, ref in enumerate(refs):
        save(model(i), cache / "snapshots" / f"{i:040}")
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / ref).write_text(f"{i:040}")
    assert bool(locate(cache)) == is_single
    if is_single:
        assert checkpoints.single(cache).table.norm[0] == pytest.approx(norms_by_numpy(model(0))["total"], rel=1e-12)


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    save({**model(0), "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "mine")
    out, figure = tmp_path / "norms.csv", tmp_path / "norms.png"
    assert main(["norms", str(tmp_path / "mine"), "--out", str(out), "--plot", str(figure)]) == 0
    printed = capsys.readouterr().out
    for words in ("mine: norm ", "672 parameters", "% of ρ²", "block 1", "transformer.h.0.attn.bias: attention mask"):
        assert words in printed, words
    assert out.read_text().startswith("layer,norm,share,parameters\ntotal,") and figure.stat().st_size > 10_000
    assert main(["norms", str(tmp_path / "mine"), "--json", "--by", "type"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == 672 and document["left_out"] == {"transformer.h.0.attn.bias": "attention mask"}
    assert {row["layer"] for row in document["table"]} == {"total", "mlp", "bias", "norm", "embeddings"}
    (tmp_path / "norms.csv.state.json").write_text("{}")
    assert main(["norms", str(tmp_path / "mine"), "--out", str(out)]) == 2
    assert "belongs to a series" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda state: state | {"transformer.wte.weight": torch.full((11, 8), torch.nan)}, "holds values that are not"),
        (lambda state: state | {"h.0.lora_A.weight": torch.ones(2, 2)}, "belongs to an adapter that is not merged"),
    ],
)
def test_refused_with_the_reason(tmp_path, capsys, break_it, why):
    save(break_it(model(0)), tmp_path / "mine")
    assert main(["norms", str(tmp_path / "mine")]) == 2
    assert why in capsys.readouterr().err


def test_the_norm_is_that_of_a_series_of_this_one_checkpoint(tmp_path, capsys):
    """An adapter alone, and a model with a mask of −∞: counted, left out and told of alike."""
    adapter = {"h.0.q.lora_A.weight": torch.full((2, 3), 2.0), "h.0.q.lora_B.weight": torch.ones(3, 2)}
    masked = model(0) | {"mask": torch.full((3, 3), -torch.inf)}
    for name, state in (("adapter", adapter), ("masked", masked)):
        save(state, tmp_path / name)
        one = checkpoints.single(tmp_path / name)
        series = checkpoints.series(tmp_path / name)
        assert one.table.norm[0] == pytest.approx(series.table.norm[0], rel=1e-15)
        assert one.table.parameters[0] == series.parameters and one.left_out == series.left_out
        without_step = [note for note in series.notes if "written as step 0" not in note]
        assert list(one.notes) == without_step and one.notes
    assert main(["norms", str(tmp_path / "adapter")]) == 0
    assert "to know:\n  an adapter alone" in capsys.readouterr().out
    assert main(["norms", str(tmp_path / "masked"), "--trained"]) == 2
    assert "does not say what was trained" in capsys.readouterr().err
