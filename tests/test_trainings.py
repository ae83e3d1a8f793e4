"""The shared language models: what each recipe leaves, and its null model."""

import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from nbutils import devices, models, saturation, text, training, trainings
from nbutils.trainings import recipes_lm, recipes_small, recipes_t5
from nbutils.trainings.runs import load_run, save_run

SMALL = {"profile": "smoke", "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def runs():
    return {name: trainings.make(name, **SMALL) for name in ("lm-pre-adamw", "null-pre-adamw")}


def test_the_shared_trainings():
    """Nine language models and their null models, a slow one, nine draws of three recipes; T5, its draws and noise."""
    lms = recipes_lm.LANGUAGE_MODELS
    for placement in ("pre", "post", "residual-post"):
        for optimizer in ("sgd", "adamw", "adafactor"):
            recipe = lms[f"lm-{placement}-{optimizer}"]
            assert (recipe.placement, recipe.optimizer, recipe.gradients) == (placement, optimizer, "loss")
            assert lms[f"null-{placement}-{optimizer}"] == replace(recipe, gradients="noise")
    rates = {placement: lms[f"lm-{placement}-sgd"].lr for placement in recipes_lm.PLACEMENTS}
    assert rates["pre"] == rates["post"] > 10 * rates["residual-post"] > 0 and lms["lm-pre-adafactor"].lr == 1
    again = [f"again-{r}-{d}" for r in ("pre-adamw", "pre-sgd", "post-gentle") for d in range(1, 10)]
    t5 = ["t5-own", "t5-null", *(f"t5-own-{d}" for d in range(2, 10))]
    assert len(lms) == 19 and sorted(trainings.names()) == sorted([*lms, *again, *recipes_small.RECIPES, *t5])
    with pytest.raises(ValueError, match="no shared training matches 'gpt'"):
        trainings.names("gpt")
    with pytest.raises(ValueError, match="no shared training is named 'lm-pre': there are lm-pre-sgd, lm-pre-adamw"):
        trainings.make("lm-pre", **SMALL)


def test_noise_moves_all_placements_alike():
    """Where the optimizer normalises, noise moves the blocks' matrices about alike wherever the layer norms stand.

    Not quite: the first queries and keys of post-norm have gradients below AdamW's ε, a sixth of their block's growth.
    """
    growth = []
    for placement in recipes_lm.PLACEMENTS:
        recipe = recipes_lm.Recipe(placement, gradients="noise")
        layers = recipes_lm.language_model(recipe, **SMALL).layers
        norms = layers[layers["layer"].isin(["block 0", "block 1"])].pivot(index="step", columns="layer", values="norm")
        growth.append(np.log(norms.iloc[-1] / norms.iloc[0]).to_numpy())
    np.testing.assert_allclose(growth, np.broadcast_to(growth[0], (3, 2)), rtol=0.2)
    np.testing.assert_allclose(np.array(growth)[:, 1], growth[0][1], rtol=0.05)


def test_noise_is_not_parallel_to_the_first_weights(monkeypatch):
    """One seed for both draws the first noise along the embedding."""
    seen = {}
    monkeypatch.setattr(training, "train", lambda model, windows, **options: seen.update(options, model=model) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainings.make("null-pre-adamw", **SMALL)
    training.noise_gradients(seen["model"], devices.generator(seen["seed"], "cpu"))
    weights = seen["model"].embedding.weight
    cosine = float((weights * weights.grad).sum() / weights.norm() / weights.grad.norm())
    assert abs(cosine) < 5 / weights.numel() ** 0.5


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


def test_slow_and_gentle_trainings_have_lower_rates_and_differ_in_nothing_else():
    """The chapter on pretrained networks speaks of a third and of a tenth of the rate."""
    usual, slow = recipes_lm.LANGUAGE_MODELS["lm-pre-adamw"], recipes_lm.LANGUAGE_MODELS["lm-pre-slow"]
    gentle = recipes_lm.AGAIN["post-gentle"]
    assert replace(slow, lr=usual.lr) == usual and slow.lr == pytest.approx(usual.lr / 10)
    assert replace(gentle, lr=usual.lr, placement="pre") == usual and gentle.lr == pytest.approx(usual.lr / 3)


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
    for last in (80, 800, 3000):
        kept = recipes_lm.log_steps(last)
        assert kept[:2] == [0, 1] and kept[-1] == last and kept == sorted(set(kept)) and 9 <= len(kept) <= 13


def test_noise_is_as_long_as_the_gradient_that_it_stands_for(runs):
    """In each part at the start, E‖noise‖² = ‖∇L‖² of the first batch; other batches have others of about this size."""
    first = [run.layers[run.layers["step"] == 2].set_index("layer")["grad_norm"] for run in runs.values()]
    assert len(first[0]) == 4 and (first[0] < 1).all()
    np.testing.assert_allclose(np.log(first[1] / first[0]), 0, atol=np.log(2))


def test_another_seed_or_another_version_is_trained_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path))
    places = {trainings.results_folder(**SMALL | {"seed": seed}) for seed in (0, 1)}
    changed = tmp_path / "module"
    changed.mkdir()
    (changed / "trainings.py").write_text("pass")
    monkeypatch.setattr(trainings, "CODE", changed)
    assert len(places | {trainings.results_folder(**SMALL)}) == 3


@pytest.mark.parametrize(("asked", "sized"), [("auto", "book"), ("gpu", "book"), ("smoke", "smoke")])
def test_a_population_never_has_the_size_of_a_gpus_models(monkeypatch, asked, sized):
    """A notebook on Colab asks for ``auto``, which is ``gpu`` there."""
    seen = {}
    monkeypatch.setattr(devices, "cuda_count", lambda: 1)
    monkeypatch.setattr(recipes_lm, "language_model", lambda recipe, **given: seen.update(given))
    trainings.RECIPES["again-pre-sgd-2"](profile=asked, seed=5, device="cpu")
    assert seen == {"profile": sized, "seed": 2_000_005, "device": "cpu"}


def test_measures_of_a_language_model_by_hand():
    """Loss and accuracy of the next token; each number against the network at a thousand, its mean over the blocks."""
    model = models.CausalLM(13, 8, 2, 2, 8, init_std=0.3, generator=devices.generator(0, "cpu"))
    windows = torch.randint(0, 13, (5, 8), generator=devices.generator(1, "cpu"))
    logits = model(windows[:, :-1]).detach()
    windows[:, 1:][:, ::3] = logits.argmax(-1)[:, ::3]  # some are right, and then the inputs are others
    found = recipes_lm._measure(model, windows)
    logits = model(windows[:, :-1]).detach().double()
    right = windows[:, 1:, None]
    assert found["loss"] == pytest.approx(-float(logits.log_softmax(-1).gather(-1, right).mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == windows[:, 1:]).double().mean()))
    for name, values in saturation.compare(model, [{"input_ids": windows[:, :-1]}], 1000.0)._asdict().items():
        assert [found[f"{name} {i}"] for i in range(3)] == values.tolist()
        assert found[name] == pytest.approx(float(values[1:].mean()), abs=1e-12)
    assert f"{name} 3" not in found and len(found) == 2 + 5 * 4


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
        return trainings.load("lm-pre-slow", **SMALL)["lm-pre-slow"].history["norm"].tolist()

    monkeypatch.setattr(trainings, "make", lambda name, **given: made.append((name, given)) or kept(3.0))
    monkeypatch.delenv("NBUTILS_TRAININGS", raising=False)
    monkeypatch.setenv("NBUTILS_RESULTS", "")
    monkeypatch.chdir(tmp_path)
    assert norm() == norm() == [3.0] and made == [("lm-pre-slow", SMALL)] * 2
    assert trainings.results_folder(**SMALL) is None and not list(tmp_path.iterdir())
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path / "drive"))
    assert norm() == norm() == [3.0] and len(made) == 3, "what one session has trained the next one reads"
    own = trainings.results_folder(**SMALL)
    assert own.parent == tmp_path / "drive" / "trainings" and len(own.name.rpartition("-")[2]) == 12
    monkeypatch.setenv("NBUTILS_TRAININGS", str(tmp_path / "workflow"))
    with pytest.raises(FileNotFoundError, match=r"lm-pre-slow has no run\.pt: it is not a saved run"):
        norm()
    save_run(kept(1.0), tmp_path / "workflow" / "lm-pre-slow")
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
    for run in (by_hand, runs["lm-pre-adamw"]):
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
