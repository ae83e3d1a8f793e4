"""The shared trainings: what each recipe leaves, and its null model."""

import numpy as np
import pandas as pd
import pytest
import torch

from nbutils import devices, ensembles, models, shared_runs, text, training
from nbutils.shared_runs import catalogue, recipes_lm, recipes_t5
from normgrowth import saturation

SMALL = {"profile": "smoke", "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def runs():
    return {name: shared_runs.RECIPES[name](**SMALL) for name in ("lm-pre-text", "lm-pre-noise")}


def test_the_shared_trainings():
    """Language models in three placements, fed three ways, and in two with the usual mask; T5, its draws and noise."""
    lms = [f"lm-{p}-{s}" for p in ("residual-post", "post", "pre") for s in ("text", "shuffled", "noise")]
    lms += ["lm-usual-residual-post", "lm-usual-pre"]
    t5 = ["t5-own", "t5-null", *(f"t5-own-{d}" for d in range(2, 10))]
    assert sorted(shared_runs.names()) == sorted([*(name for name in lms if name != "lm-post-shuffled"), *t5])
    with pytest.raises(ValueError, match="no shared training matches 'gpt'"):
        shared_runs.names("gpt")


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
    learns, noise = (run.snapshots[0]["embedding.weight"] for run in runs.values())
    assert torch.equal(learns, noise) and len({float(w.sum()) for w in learns}) == recipes_lm.DRAWS
    first, last = (runs["lm-pre-text"].snapshots[step]["embedding.weight"] for step in (0, 60))
    assert (first != last).flatten(1).any(1).all()


def test_networks_of_two_draws_or_two_seeds_read_other_windows_of_their_text(monkeypatch):
    read = []

    def windows(tokens, count, length, generator):
        read.append((length, generator.initial_seed(), tokens))
        return iter([torch.zeros(count, length, dtype=torch.long)])

    monkeypatch.setattr(text, "random_windows", windows)
    monkeypatch.setattr(ensembles, "loss_gradients", lambda *_: 1 / 0)
    for seed, source in enumerate(("text", "text", "shuffled")):
        with pytest.raises(ZeroDivisionError):
            recipes_lm.population("pre", source, **SMALL | {"seed": seed})
    lengths, seeds, read_by = zip(*read, strict=True)
    assert set(lengths) == {17}, "16 tokens, and the one behind each is to be predicted"
    assert len(set(seeds)) == 3 * recipes_lm.DRAWS, "and what is measured on is of seed 0 at all three"
    first, other, shuffled = (read_by[i * (recipes_lm.DRAWS + 1) + 1] for i in range(3))
    assert torch.equal(first, other) and not torch.equal(first, shuffled)
    assert torch.equal(first.sort().values, shuffled.sort().values)


def test_noise_is_not_parallel_to_the_first_weights(runs):
    """One seed for both draws the first noise along the embedding, and AdamW's step has its signs."""
    first, last = (runs["lm-pre-noise"].snapshots[step]["embedding.weight"] for step in (0, 60))
    moved = (last - first * (1 - recipes_lm.RATE / 24 * recipes_lm.DECAY) ** 60).flatten(1)  # less the decay
    cosines = torch.cosine_similarity(moved, first.flatten(1))
    assert abs(cosines).max() < 5 / moved.shape[1] ** 0.5


def test_draws_of_t5_share_no_seed_with_each_other_or_with_another_seed():
    pairs = [(seed, draw) for seed in (0, 1, 999, 1000, 1001, 2000, 3000) for draw in range(recipes_t5.DRAWS)]
    assert len({recipes_t5.draw_seed(*pair) for pair in pairs}) == len(pairs)


def test_t5_its_null_model_and_that_of_its_second_draw():
    first, null, second = recipes_t5.t5(**SMALL), *(recipes_t5.t5(draw, null=True, **SMALL) for draw in (0, 1))
    for run in (first, null, second):  # 1/√max(t, warm-up)
        np.testing.assert_allclose(run.history["lr"][1:], 1 / np.sqrt(np.maximum(range(128), 16)))
    start, alike, other = (run.history["norm"][0] for run in (first, null, second))
    assert alike == pytest.approx(start, rel=1e-12) != other
    assert first.history["loss"].iloc[-1] < first.history["loss"][1] and null.history["loss"].isna().all()
    assert "embeddings" in first.layers["layer"].to_numpy() and len(first.measures) == 9


def test_noise_of_t5_is_not_parallel_to_its_weights():
    """One seed for both, but in another order: cos·√n is standard normal, for each matrix and step."""
    net, noise, cosines = recipes_t5.small_t5(512, 32, 2, heads=2, seed=0), devices.generator(0, "cpu"), []
    for _ in range(3):
        training.noise_gradients(net.parameters(), noise)
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


def test_measures_of_a_language_model_by_hand():
    """Loss, accuracy and answers of the next token; norms; the last layer against the network at a thousand."""
    model = models.CausalLM(13, 8, 2, 2, 8, init_std=0.3, generator=devices.generator(0, "cpu"))
    windows = torch.randint(0, 13, (5, 8), generator=devices.generator(1, "cpu"))
    logits = model(windows[:, :-1]).detach()
    windows[:, 1:][:, ::3] = logits.argmax(-1)[:, ::3]  # some are right, and then the inputs are others
    found = recipes_lm.measure(model, windows)
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
    path = recipes_t5.path_coordinates(runs)
    steps, points = path["step"].tolist(), path.drop(columns="step").to_numpy()
    flat = [torch.cat([runs[step][name].double().flatten() for name in list(shapes)[1:]]).numpy() for step in steps]
    assert steps == [0, 2, 7, 30] and points.shape == (4, 4)
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
    return training.TrainingRun(pd.DataFrame({"step": [0], "norm": [norm]}))


def test_what_the_workflow_trained_comes_before_what_a_session_kept(tmp_path, monkeypatch):
    made = []

    def norm(seed=0):
        return shared_runs.load("lm-pre-text", **SMALL | {"seed": seed})["lm-pre-text"].history["norm"].tolist()

    monkeypatch.setattr(catalogue, "RECIPES", {"lm-pre-text": lambda **given: made.append(given) or kept(3.0)})
    monkeypatch.delenv("NBUTILS_TRAININGS", raising=False)
    monkeypatch.delenv("NBUTILS_RESULTS", raising=False)
    assert norm() == norm() == [3.0] and made == [SMALL] * 2
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path / "drive"))
    assert norm() == norm() == [3.0] and len(made) == 3, "what one session has trained the next one reads"
    assert norm(seed=1) == norm(seed=1) == [3.0] and len(made) == 4, "of another seed"
    assert {folder.name for folder in catalogue.CODE} == {"normgrowth", "nbutils"}
    monkeypatch.setattr(catalogue, "CODE", (tmp_path,))
    assert norm() == [3.0] and len(made) == 5, "of other code"
    monkeypatch.setenv("NBUTILS_TRAININGS", str(tmp_path / "workflow"))
    with pytest.raises(FileNotFoundError, match=r"lm-pre-text/run\.pt"):
        norm()
    kept(1.0).save(tmp_path / "workflow" / "lm-pre-text")
    assert norm() == [1.0] and len(made) == 5


def test_a_saved_run_comes_back_to_the_bit(tmp_path, monkeypatch):
    """Names beyond ASCII, views, a text "nan", numbers that decimals would round; a failed save leaves the old run."""
    odd = {"step": [0, 10, 2], "norm": [0.1, float("nan"), 1e-310], "loss": [float("inf"), -0.0, 1 / 3]}
    run = training.TrainingRun(
        pd.DataFrame(odd),
        pd.DataFrame({"step": [0], "layer": ["nan"], "norm": [2.0]}),
        {9: {"w": torch.zeros(1)}, 10: {"w": torch.arange(6.0).view(2, 3).mT}},
        settings={"größe": [1, None]},
    )
    kept(1.0).save(tmp_path)
    run.save(tmp_path)  # replaces
    monkeypatch.setattr(torch, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept(2.0).save(tmp_path)
    read = training.TrainingRun.load(tmp_path)
    for name in ("history", "layers", "measures"):
        pd.testing.assert_frame_equal(getattr(read, name), getattr(run, name), check_exact=True)
    assert read.settings == run.settings and list(read.snapshots) == list(run.snapshots)
    assert all(torch.equal(read.snapshots[step]["w"], run.snapshots[step]["w"]) for step in (9, 10))
