"""The shared language models: what each recipe leaves, and its null model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbutils import device, text, training, trainings
from nbutils.trainings import recipes_lm, recipes_t5

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


@pytest.fixture
def asked(monkeypatch):
    """What a T5 recipe asks for; no network is made or trained."""

    def options(name, profile="smoke", seed=0):
        seen = {}
        monkeypatch.setattr(recipes_t5, "small_t5", lambda *sizes, seed, **more: seen.update(weights=seed))
        monkeypatch.setattr(text, "span_batches", lambda *given: seen.update(batches=given[3].initial_seed()))
        monkeypatch.setattr(training, "train", lambda model, batches, **more: seen.update(more) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainings.make(name, profile=profile, seed=seed, device="cpu")
        return seen

    return options


def test_draws_of_t5_share_no_seed_with_each_other_or_with_another_seed(asked):
    """Each has its own weights and batches; seed 1000 is not the second draw of seed 0."""
    names = ("t5-alpha-1", "t5-alpha-1-2", "t5-alpha-1-9")
    seen = [asked(name, seed=seed) for name in names for seed in (0, 1, 1000, 1001, 2000, 3000)]
    for kind in ("weights", "batches"):
        assert len({options[kind] for options in seen}) == 18
    same_weights = asked("t5-alpha-2")["weights"], asked("t5-null-1")["weights"]
    assert same_weights == (asked("t5-alpha-1")["weights"],) * 2, "of one seed, rates and noise start alike"


def test_every_rate_of_t5_has_its_null_model(asked):
    for alpha, rate in (("half", 0.5), ("1", 1.0), ("2", 2.0)):
        trained, null = asked(f"t5-alpha-{alpha}"), asked(f"t5-null-{alpha}")
        assert (trained["gradients"], null["gradients"]) == ("loss", "noise")
        for t in (0, 16, 64):  # α/√max(t, warm-up)
            assert trained["schedule"](t) == null["schedule"](t) == rate / max(t, 16) ** 0.5


def test_slow_and_gentle_trainings_have_lower_rates_and_differ_in_nothing_else():
    """The chapter on pretrained networks speaks of a third and of a tenth of the rate."""
    usual, slow = recipes_lm.LANGUAGE_MODELS["lm-pre-adamw"], recipes_lm.LANGUAGE_MODELS["lm-pre-slow"]
    gentle = recipes_lm.AGAIN["post-gentle"]
    assert replace(slow, lr=usual.lr) == usual and slow.lr == pytest.approx(usual.lr / 10)
    assert replace(gentle, lr=usual.lr, placement="pre") == usual and gentle.lr == pytest.approx(usual.lr / 3)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, recipes_t5.DRAWS - 1)), min_size=2, max_size=50, unique=True
    )
)
def test_no_two_repetitions_share_a_seed(repetitions):
    assert len({recipes_t5.own_seed(*each) for each in repetitions}) == len(repetitions)


@given(st.integers(0, 999), st.integers(0, recipes_t5.DRAWS - 1))
def test_small_seeds_have_readable_draws(seed, draw):
    assert recipes_t5.own_seed(seed, draw) == 1000 * draw + seed


def test_a_draw_too_many_is_refused():
    with pytest.raises(ValueError, match="draw = 9: choose one of 0 to 8"):
        recipes_t5.own_seed(0, 9)


@pytest.mark.parametrize("profile", ["smoke", "book", "gpu"])
def test_snapshots_of_t5_are_evenly_spaced_from_the_start_to_the_end(asked, profile):
    options = asked("t5-null-1", profile)
    kept = list(options["snapshots"])
    assert kept[0] == 0 and kept[-1] == options["steps"] and len(set(np.diff(kept))) == 1
    assert len(kept) == {"smoke": 8, "book": 32, "gpu": 8}[profile] + 1
    assert not list(asked("t5-null-2", profile)["snapshots"])


def test_noise_of_t5_is_not_parallel_to_its_weights():
    """One seed for both, but in another order: cos·√n is standard normal, for each matrix and step."""
    net, noise, cosines = recipes_t5.small_t5(512, 32, 2, heads=2, seed=0), device.generator(0, "cpu"), []
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
    monkeypatch.setattr(trainings, "CODE", changed)
    assert len(places | {trainings.results_folder(**SMALL)}) == 3


@pytest.mark.parametrize(("asked", "sized"), [("auto", "book"), ("gpu", "book"), ("smoke", "smoke")])
def test_a_population_never_has_the_size_of_a_gpus_models(monkeypatch, asked, sized):
    """A notebook on Colab asks for ``auto``, which is ``gpu`` there."""
    seen = {}
    monkeypatch.setattr(device, "cuda_count", lambda: 1)
    monkeypatch.setattr(recipes_lm, "language_model", lambda recipe, **given: seen.update(given))
    trainings.RECIPES["again-pre-sgd-2"](profile=asked, seed=5, device="cpu")
    assert seen == {"profile": sized, "seed": 2_000_005, "device": "cpu"}


def test_padding_begins_the_decoder_and_ends_nothing():
    """T5's convention: padding is id 0 and begins the decoder's input; a text ends with id 1."""
    settings = recipes_t5.small_t5(300, 16, 1, heads=2, seed=0).config
    assert (settings.pad_token_id, settings.decoder_start_token_id, settings.eos_token_id) == (0, 0, 1)


def test_each_window_of_text_has_one_token_more_than_the_model_reads(monkeypatch):
    """Input and target are the window without its last and without its first token."""
    lengths, windows = [], text.random_windows

    def seen(tokens, batch, length, generator):
        lengths.append(length)
        return windows(tokens, batch, length, generator)

    monkeypatch.setattr(text, "random_windows", seen)
    recipes_lm.language_model(recipes_lm.Recipe(), profile="smoke", seed=0, device="cpu")
    assert lengths == [recipes_lm.size("smoke").length + 1] * 2
