"""The shared language models: what each recipe leaves, and its null model."""

import numpy as np
import pytest

from nbutils import recipes_lm, training, trainings

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


def test_a_run_has_parts_measures_and_its_two_ends(runs, tmp_path):
    run, of = runs["lm-pre-adamw"], recipes_lm.size("smoke")
    assert set(run.layers["layer"]) == {"embedding", "vectors", *map(str, range(of.depth))}
    total = np.sqrt((run.layers.pivot(index="step", columns="layer", values="norm") ** 2).sum(axis=1))
    np.testing.assert_allclose(run.history["norm"], total, rtol=1e-6)
    assert list(run.measures["step"]) == recipes_lm.log_steps(of.steps) and sorted(run.snapshots) == [0, of.steps]
    np.testing.assert_allclose(run.measures["raw 0"], 1, atol=1e-6)  # scaling an embedding turns nothing
    training.save_run(run, tmp_path / "x")
    assert training.load_run(tmp_path / "x").settings == run.settings


def test_noise_learns_nothing_and_starts_from_the_same_weights(runs):
    run, null = runs.values()
    assert run.measures["loss"].iloc[-1] < run.measures["loss"].iloc[0] - 0.5 < null.measures["loss"].iloc[-1]
    for name, weights in run.snapshots[0].items():
        assert (weights == null.snapshots[0][name]).all()


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="no shared training matches 'gpt'"):
        trainings.names("gpt")
