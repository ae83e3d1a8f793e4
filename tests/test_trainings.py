"""The shared trainings: what each recipe leaves, and its null model."""

import os

import numpy as np
import pandas as pd
import pytest
import torch

from nbutils import devices, models, saturation, text, training, trainings
from nbutils.trainings import recipes_lm, recipes_t5
from nbutils.trainings.runs import load_run, save_run

SMALL = {"profile": "smoke", "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def runs():
    return {name: trainings.make(name, **SMALL) for name in ("lm-pre-text", "lm-pre-noise")}


def test_the_shared_trainings():
    """Language models in three placements, fed three ways, and in two with the usual mask; T5, its draws and noise."""
    lms = [f"lm-{p}-{s}" for p in ("residual-post", "post", "pre") for s in ("text", "shuffled", "noise")]
    lms += ["lm-usual-residual-post", "lm-usual-pre"]
    t5 = ["t5-own", "t5-null", *(f"t5-own-{d}" for d in range(2, 10))]
    assert sorted(trainings.names()) == sorted([*(name for name in lms if name != "lm-post-shuffled"), *t5])
    with pytest.raises(ValueError, match="no shared training matches 'gpt'"):
        trainings.names("gpt")
    with pytest.raises(ValueError, match="no shared training is named 'lm-pre': there are lm-residual-post-text"):
        trainings.make("lm-pre", **SMALL)


def test_the_recipe_of_the_paper():
    """Published appendix A and the released code, but for the width, with which the rate goes."""
    of = recipes_lm.size("book")
    net = recipes_lm.network(of, "residual-post")
    first = net.blocks[0]
    assert (len(net.blocks), first.placement, first.attention.mask) == (12, "residual-post", "multiplicative")
    assert first.inner.out_features * 768 == first.inner.in_features * 512 and net.norm is None
    assert net.readout.bias is not None and net.readout.weight is not net.embedding.weight
    assert (
        abs(float(net.embedding.weight.detach().std()) - 1) < 0.05
        and float(first.inner.weight.detach().abs().max()) <= of.dim**-0.5
    )
    assert pytest.approx(1e-3) == recipes_lm.RATE / 768 and recipes_lm.DECAY == 0.01


def test_networks_of_one_draw_start_alike_and_those_of_two_do_not(runs):
    text, noise = (run.snapshots[0]["embedding.weight"] for run in runs.values())
    assert torch.equal(text, noise) and len({float(w.sum()) for w in text}) == recipes_lm.DRAWS
    first, last = (runs["lm-pre-text"].snapshots[step]["embedding.weight"] for step in (0, 60))
    assert (first != last).flatten(1).any(1).all()


def test_noise_is_not_parallel_to_the_first_weights(runs):
    """One seed for both draws the first noise along the embedding, and AdamW's step has its signs."""
    first, last = (runs["lm-pre-noise"].snapshots[step]["embedding.weight"] for step in (0, 60))
    moved = (last - first * (1 - recipes_lm.RATE / 24 * recipes_lm.DECAY) ** 60).flatten(1)  # less the decay
    cosines = torch.cosine_similarity(moved, first.flatten(1))
    assert abs(cosines).max() < 5 / moved.shape[1] ** 0.5


@pytest.fixture
def asked(monkeypatch):
    """What a T5 recipe asks for; no network is made or trained."""

    def options(name, profile="smoke", seed=0):
        seen = {}
        monkeypatch.setattr(text, "corpus", lambda size: text.Corpus("by hand", ("ab",), ()))
        monkeypatch.setattr(recipes_t5, "small_t5", lambda *sizes, seed, **more: seen.update(weights=seed))
        monkeypatch.setattr(text, "span_batches", lambda *given: seen.update(batches=given[3].initial_seed()))
        monkeypatch.setattr(training, "train", lambda model, batches, **more: seen.update(more) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainings.make(name, profile=profile, seed=seed, device="cpu")
        return seen

    return options


def test_draws_of_t5_share_no_seed_with_each_other_or_with_another_seed(asked):
    """Each has its own weights and batches; seed 1000 is not the second draw of seed 0."""
    names = ("t5-own", "t5-own-2", "t5-own-9")
    seen = [asked(name, seed=seed) for name in names for seed in (0, 1, 1000, 1001, 2000, 3000)]
    for kind in ("weights", "batches"):
        assert len({options[kind] for options in seen}) == 18
    assert asked("t5-null")["weights"] == asked("t5-own")["weights"], "of one seed, training and noise start alike"


def test_the_null_model_of_t5_has_its_rate(asked):
    trained, null = asked("t5-own"), asked("t5-null")
    assert (trained["gradients"], null["gradients"]) == ("loss", "noise")
    for t in (0, 16, 64):  # 1/√max(t, warm-up)
        assert trained["schedule"](t) == null["schedule"](t) == 1 / max(t, 16) ** 0.5


def test_noise_of_t5_is_not_parallel_to_its_weights():
    """One seed for both, but in another order: cos·√n is standard normal, for each matrix and step."""
    net, noise, cosines = recipes_t5.small_t5(512, 32, 2, heads=2, seed=0), devices.generator(0, "cpu"), []
    for _ in range(3):
        training.noise_gradients(net, noise)
        for weights in (p for p in net.parameters() if p.ndim > 1):
            cosine = (weights * weights.grad).sum() / weights.norm() / weights.grad.norm()
            cosines.append(float(cosine) * weights.numel() ** 0.5)
    assert len(cosines) > 60 and abs(np.array(cosines)).max() < 5 and np.std(cosines) == pytest.approx(1, abs=0.3)


def test_measures_of_language_models_are_evenly_spaced_in_the_logarithm():
    steps = recipes_lm.log_steps(10**6, 13)
    np.testing.assert_allclose(np.diff(np.log10(steps[1:])), 0.5, atol=0.06)  # rounded to whole steps
    for last in (60, 200, 1000):
        kept = recipes_lm.log_steps(last, 12)
        assert kept[:2] == [0, 1] and kept[-1] == last and kept == sorted(set(kept)) and 9 <= len(kept) <= 13


def test_another_seed_or_another_version_is_trained_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path))
    places = {trainings.results_folder(**SMALL | {"seed": seed}) for seed in (0, 1)}
    changed = tmp_path / "module"
    changed.mkdir()
    (changed / "trainings.py").write_text("pass")
    monkeypatch.setattr(trainings, "CODE", changed)
    assert len(places | {trainings.results_folder(**SMALL)}) == 3


def test_measures_of_a_language_model_by_hand():
    """Loss, accuracy and answers of the next token; norms; the last layer against the network at a thousand."""
    model = models.CausalLM(13, 8, 2, 2, 8, init_std=0.3, generator=devices.generator(0, "cpu"))
    windows = torch.randint(0, 13, (5, 8), generator=devices.generator(1, "cpu"))
    logits = model(windows[:, :-1]).detach()
    windows[:, 1:][:, ::3] = logits.argmax(-1)[:, ::3]  # some are right, and then the inputs are others
    found = recipes_lm.measured(model, windows)
    logits = model(windows[:, :-1]).detach().double()
    right, answers = windows[:, 1:, None], logits.argmax(-1)
    assert found["loss"] == pytest.approx(-float(logits.log_softmax(-1).gather(-1, right).mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((answers == windows[:, 1:]).double().mean()))
    assert found["answers"] == len(set(answers.flatten().tolist()))
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    matrices = [w for name, w in weights.items() if name.startswith("blocks.") and w.ndim == 2]
    assert found["norm"] ** 2 == pytest.approx(sum(float((w**2).sum()) for w in weights.values()))
    assert found["matrices"] ** 2 == pytest.approx(sum(float((w**2).sum()) for w in matrices))
    last = saturation.compare(model, [{"input_ids": windows[:, :-1]}], 1000.0)
    assert all(found[name] == float(getattr(last, name)[-1]) for name in ("raw", "centred", "anisotropy"))


def test_points_of_a_path_have_the_distances_of_the_snapshots():
    rng = devices.generator(0, "cpu")
    shapes = {"shared.weight": (9, 4), "a.shared.weight": (3, 4), "b": (5,), "c": (2, 2, 2)}
    runs = {
        step: {name: torch.randn(*shape, generator=rng) for name, shape in shapes.items()} for step in (7, 0, 30, 2)
    }
    steps, points = recipes_t5.path(runs)
    flat = [torch.cat([runs[step][name].double().flatten() for name in list(shapes)[1:]]).numpy() for step in steps]
    assert steps.tolist() == [0, 2, 7, 30] and points.shape == (4, 4)
    np.testing.assert_allclose(points @ points.T, np.array(flat) @ np.array(flat).T, atol=1e-6)


def test_a_small_t5():
    """T5's convention: padding is id 0 and begins the decoder's input; a text ends with id 1."""
    config = recipes_t5.small_t5(30, 16, 3).config
    assert (config.num_heads, config.d_kv, config.d_ff, config.dropout_rate) == (4, 4, 64, 0)
    assert (config.num_layers, config.num_decoder_layers, config.vocab_size) == (3, 3, 30)
    assert (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id) == (0, 0, 1)
    first, zero, one = (recipes_t5.small_t5(30, 16, 1, **seed).shared.weight for seed in ({}, {"seed": 0}, {"seed": 1}))
    assert torch.equal(first, zero) and not torch.equal(first, one)


def kept(norm):
    return training.Run(pd.DataFrame({"step": [0], "norm": [norm]}))


def test_what_the_workflow_trained_comes_before_what_a_session_kept(tmp_path, monkeypatch):
    made = []

    def norm():
        return trainings.load("lm-pre-text", **SMALL)["lm-pre-text"].history["norm"].tolist()

    monkeypatch.setattr(trainings, "make", lambda name, **given: made.append((name, given)) or kept(3.0))
    monkeypatch.delenv("NBUTILS_TRAININGS", raising=False)
    monkeypatch.setenv("NBUTILS_RESULTS", "")
    monkeypatch.chdir(tmp_path)
    assert norm() == norm() == [3.0] and made == [("lm-pre-text", SMALL)] * 2
    assert trainings.results_folder(**SMALL) is None and not list(tmp_path.iterdir())
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path / "drive"))
    assert norm() == norm() == [3.0] and len(made) == 3, "what one session has trained the next one reads"
    own = trainings.results_folder(**SMALL)
    assert own.parent == tmp_path / "drive" / "trainings" and len(own.name.rpartition("-")[2]) == 12
    monkeypatch.setenv("NBUTILS_TRAININGS", str(tmp_path / "workflow"))
    with pytest.raises(FileNotFoundError, match=r"lm-pre-text has no run\.pt: it is not a saved run"):
        norm()
    save_run(kept(1.0), tmp_path / "workflow" / "lm-pre-text")
    assert norm() == [1.0] and len(made) == 3


def test_a_saved_run_comes_back_to_the_bit(tmp_path, runs):
    """Names beyond ASCII, views, a text "nan", numbers that decimals would round; what a recipe makes."""
    odd = {"step": [0, 10, 2], "norm": [0.1, float("nan"), 1e-310], "loss": [float("inf"), -0.0, 1 / 3]}
    by_hand = training.Run(
        pd.DataFrame(odd),
        pd.DataFrame({"step": [0], "layer": ["nan"], "norm": [2.0]}),
        {9: {"w": torch.zeros(1)}, 10: {"w": torch.arange(6.0).view(2, 3).mT}},
        settings={"größe": [1, None]},
    )
    for run in (by_hand, runs["lm-pre-text"]):
        save_run(kept(1.0), tmp_path)
        save_run(run, tmp_path)  # replaces
        read = load_run(tmp_path)
        for name in ("history", "layers", "measures"):
            pd.testing.assert_frame_equal(getattr(read, name), getattr(run, name), check_exact=True)
        assert read.settings == run.settings and list(read.snapshots) == list(run.snapshots)
        for step, values in run.snapshots.items():
            assert all(torch.equal(read.snapshots[step][name], value) for name, value in values.items())


@pytest.mark.parametrize(("where", "name"), [(torch, "save"), (os, "replace")])
def test_a_failed_save_leaves_the_old_run(tmp_path, monkeypatch, where, name):
    def fails(*_):
        raise OSError("disk full")

    save_run(kept(1.0), tmp_path)
    monkeypatch.setattr(where, name, fails)
    with pytest.raises(OSError, match="disk full"):
        save_run(kept(2.0), tmp_path)
    assert load_run(tmp_path).history["norm"].tolist() == [1.0]
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
