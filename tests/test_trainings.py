"""The shared language models: what each recipe leaves, and its null model."""

import numpy as np
import pytest

from nbutils import device, recipes_lm, training, trainings

SMALL = {"profile": "smoke", "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def runs():
    return {name: trainings.make(name, **SMALL) for name in ("lm-pre-adamw", "null-pre-adamw")}


def test_every_recipe_has_its_null_model():
    for name in trainings.names("null-*"):
        recipe, null = recipes_lm.LANGUAGE_MODELS[name.replace("null", "lm")], recipes_lm.LANGUAGE_MODELS[name]
        assert (null.placement, null.optimizer, null.lr) == (recipe.placement, recipe.optimizer, recipe.lr)
        assert (recipe.gradients, null.gradients) == ("loss", "noise")
    assert len(trainings.names("null-*")) == 9


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_noise_moves_all_placements_alike(optimizer):
    """Where the optimizer normalises, noise moves the blocks' matrices about alike wherever the layer norms stand.

    Not quite: the first queries and keys of post-norm have gradients below AdamW's ε, a sixth of their block's growth.
    """
    growth = []
    for placement in recipes_lm.PLACEMENTS:
        recipe = recipes_lm.Recipe(placement, optimizer, recipes_lm.RATES[optimizer], gradients="noise")
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
    training.noise_gradients(seen["model"], device.generator(seen["seed"], "cpu"))
    weights = seen["model"].embedding.weight
    cosine = float((weights * weights.grad).sum() / weights.norm() / weights.grad.norm())
    assert abs(cosine) < 5 / weights.numel() ** 0.5


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="no shared training matches 'gpt'"):
        trainings.names("gpt")


def test_results_outlive_a_session(tmp_path, monkeypatch):
    """What one session has trained the next one reads, to the last bit; without the variable nothing is written."""
    monkeypatch.delenv("NBUTILS_TRAININGS", raising=False)
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path / "drive"))
    first = trainings.load("null-pre-adamw", **SMALL)["null-pre-adamw"]
    monkeypatch.setattr(trainings, "make", lambda *_, **__: pytest.fail("trained again"))
    again = trainings.load("null-pre-adamw", **SMALL)["null-pre-adamw"]
    assert again.history.equals(first.history)
    monkeypatch.delenv("NBUTILS_RESULTS")
    assert trainings.results_folder(**SMALL) is None


def test_another_seed_or_another_version_is_trained_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("NBUTILS_RESULTS", str(tmp_path))
    places = {trainings.results_folder(**SMALL | {"seed": seed}) for seed in (0, 1)}
    changed = tmp_path / "module"
    changed.mkdir()
    (changed / "trainings.py").write_text("pass")
    monkeypatch.setattr(trainings, "__file__", str(changed / "trainings.py"))
    assert len(places | {trainings.results_folder(**SMALL)}) == 3
