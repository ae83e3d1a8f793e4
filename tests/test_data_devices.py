"""Tables, profiles and devices: what bad input says."""

import statistics
import subprocess
import sys

import numpy as np
import pytest

from nbutils import data, devices, profiles

ROWS = {
    "t5_norm": 104,
    "t5_norm_by_layer": 1248,
    "t5_cos_similarity": 103,
    "t5_cos_similarity_by_layer": 1236,
    "trans_scale": 80,
    "attn_histograms": 1200,
    "finetune_trans": 825,
    "sim_by_layer": 95,
}


@pytest.mark.parametrize(("name", "rows"), ROWS.items())
def test_published_tables_are_whole(name, rows):
    table = data.published(name)
    assert len(table) == rows
    lacking = 20 if name == "finetune_trans" else 0  # its pplx of one run that overflowed
    assert (~np.isfinite(table.select_dtypes("number").to_numpy(float))).sum() == lacking


def test_the_published_similarities_are_those_of_the_published_text():
    """§4.1: three last layers, RoBERTa before its last, pretrained above random, later layers of two models higher."""
    figure = data.published("sim_by_layer").pivot(index="layer", columns=["model", "init"], values="cosine_similarity")
    last = {"roberta-base": (11, 0.94, 0.65), "t5-base": (12, 0.91), "xlnet-base-cased": (11, 0.91)}
    for model in figure.columns.unique("model"):
        pretrained, random = (figure[model][init] for init in ("pretrained", "random"))
        shown = pretrained.dropna()
        assert (pretrained - random).mean() > 0 and shown.iloc[-1] > random[shown.index[-1]]
        assert (random.mean() < 0.1) == (model != "t5-base")
        first, *values = last.get(model, (12, shown.iloc[-1]))
        np.testing.assert_allclose(shown.loc[first : first + len(values) - 1], values, atol=0.005)
        if model in ("t5-base", "xlnet-base-cased"):
            assert shown.loc[7:].mean() > shown.loc[:6].mean() + 0.2
    bert, roberta = (figure[name]["pretrained"] for name in ("bert-base-cased", "roberta-base"))
    assert roberta.mean() > bert.mean() + 0.3 and roberta[12] > bert[12] + 0.3


def test_the_published_pre_norm_models_perform_substantially_better():
    """§4.3, on both corpora."""
    runs = data.published("finetune_trans").groupby(["metric", "dataset", "variant"])["value"]
    loss, accuracy = runs.min()["loss"].unstack(), runs.max()["acc1"].unstack()
    assert (np.exp(loss["control"] - loss["pre_norm"]) > 2).all()
    assert (accuracy["pre_norm"] > 2 * accuracy["control"]).all()


def test_profiles_and_tables():
    with pytest.raises(FileNotFoundError, match=r"no 'data/t6\.csv' in the checkout"):
        data.published("t6")
    assert [profiles.choose(name, smoke=1, book=2, gpu=3) for name in profiles.PROFILES] == [1, 2, 3]
    assert profiles.resolve("auto") == ("gpu" if devices.cuda_count() else "book")
    with pytest.raises(ValueError, match="unknown profile 'big': choose one of auto, smoke, book, gpu"):
        profiles.resolve("big")


@pytest.mark.parametrize(
    ("asked", "count", "found"),
    [
        ("cpu", 1, "cpu"), ("auto", 0, "cpu"), ("auto", 1, "cuda"), ("cuda", 1, "cuda"),
        ("tpu", 1, "unknown device 'tpu': choose one of auto, cpu, cuda"), ("cuda", 0, "no CUDA device here"),
    ],
)  # fmt: skip
def test_devices(monkeypatch, asked, count, found):
    monkeypatch.setattr(devices, "cuda_count", lambda: count)
    if found in ("cpu", "cuda"):
        assert devices.resolve(asked) == found
        return
    with pytest.raises((ValueError, RuntimeError), match=found):
        devices.resolve(asked)


def test_generators_are_explicit():
    import torch

    draws = [torch.randn(3, generator=devices.generator(seed, "cpu")) for seed in (0, 0, 1)]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()


def test_import_is_cheap():
    """Under 0.1 s of CPU time, median of five processes, and no torch before a function needs it."""
    code = (
        "import sys, time; start = time.process_time(); from nbutils import profiles;"
        "print(time.process_time() - start); profiles.choose('smoke', smoke=1, book=2, gpu=3);"
        "print('torch' in sys.modules)"
    )
    seconds = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        took, torch_is_there = done.stdout.split()
        assert torch_is_there == "False"
        seconds.append(float(took))
    assert statistics.median(seconds) < 0.1
