"""Small models of Llama's and Qwen 3's classes: what they share, their scores, Muon, and the null of their norms."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers as hf
from torch.optim import _muon

from nbutils import ensembles, training
from nbutils.devices import generator
from nbutils.experiments import ensemble_muon, llama_readings, llamas, rays

OF = replace(llamas.size("smoke"), steps=60, draws=2)
TOKENS = torch.randint(2, OF.vocab, (3, OF.length), generator=generator(1, "cpu"))


def net_of(qk_norm, seed=3):
    return llamas.network(OF, qk_norm=qk_norm, generator=generator(seed, "cpu"))


def logits_of(net):
    with torch.no_grad():
        return net(input_ids=TOKENS).logits


def test_the_classes_are_those_of_transformers_and_differ_in_qk_norm_alone():
    llama, qwen = net_of(False), net_of(True)
    assert isinstance(llama, hf.LlamaForCausalLM) and isinstance(qwen, hf.Qwen3ForCausalLM)
    of_llama, of_qwen = (dict(net.named_parameters()) for net in (llama, qwen))
    only_qwen = of_qwen.keys() - of_llama.keys()
    assert {name.split(".")[-2] for name in only_qwen} == {"q_norm", "k_norm"}
    assert of_llama.keys() < of_qwen.keys()
    assert all(torch.equal(p, of_qwen[name]) for name, p in of_llama.items())
    for layer in qwen.model.layers:  # without the two norms it computes what the other class does
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    assert torch.equal(logits_of(qwen), logits_of(llama))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_first_values_have_the_law_of_transformers(qk_norm):
    net = net_of(qk_norm)
    config = type(net.config)(**net.config.to_dict() | {"initializer_range": llamas.START / OF.dim**0.5})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = dict(type(net)(config).named_parameters())
    for name, ours in net.named_parameters():
        if ours.ndim == 1:
            assert torch.equal(ours, theirs[name])
        else:
            assert ours.std().item() == pytest.approx(theirs[name].std().item(), rel=0.15)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    net_of(True)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_scores_are_those_of_the_models_attention(qk_norm):
    net = net_of(qk_norm)
    with torch.no_grad():
        weights = net(input_ids=TOKENS, output_attentions=True).attentions
    past = torch.ones(OF.length, OF.length, dtype=torch.bool).tril()
    ours = llama_readings.scores(net, TOKENS).masked_fill(~past, -torch.inf).softmax(-1)
    assert torch.allclose(ours, torch.stack(weights), atol=1e-6)


def test_gains_alone_bound_the_scores_of_qk_norm():
    net = net_of(True)
    first = llama_readings.scores(net, TOKENS)
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.q_proj.weight.mul_(1000)
    assert torch.allclose(llama_readings.scores(net, TOKENS), first, atol=1e-4)
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.q_norm.weight.normal_(0, 3, generator=generator(0, "cpu"))
    large = llama_readings.scores(net, TOKENS).abs().amax((1, 2, 3, 4))
    assert (large <= llama_readings.caps(net) * (1 + 1e-6)).all()
    assert (large > first.abs().amax((1, 2, 3, 4))).all()
    assert llama_readings.caps(net_of(False)).isinf().all()


SHAPES = [(24, 24), (12, 24), (72, 24), (24, 72), (96, 32)]


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_orthogonalised_as_torchs_muon_does(shape):
    """To the bit, but where products of many matrices at once add in another order; that is bfloat16's rounding."""
    matrices = torch.randn(100, *shape, generator=generator(2, "cpu"))
    theirs = torch.stack(
        [_muon._zeropower_via_newtonschulz(x, ensemble_muon.NEWTON_SCHULZ, 5, _muon.EPS) for x in matrices]
    )
    ours = ensemble_muon.orthogonalised(matrices)
    equal = (ours == theirs).flatten(1).all(1)
    assert equal.double().mean() > 0.95
    assert (ours - theirs).float().norm() < 1e-2 * theirs.float().norm()


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_the_muon_of_an_ensemble_is_torchs_for_each_network(monkeypatch, momentum):
    """Its momentum, iteration, length of a step and decay, to rounding in float64, in which both iterate here."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    rng = generator(5, "cpu")
    stacked = [torch.randn(3, *shape, generator=rng).double().requires_grad_() for shape in SHAPES]
    alone = [[w[number].detach().clone().requires_grad_() for w in stacked] for number in range(3)]
    first = [w.detach().clone() for w in stacked]
    ours = ensemble_muon.EnsembleMuon(stacked, 0.01, 0.3, momentum=momentum)
    options = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
    torchs = [torch.optim.Muon(weights, 0.01, 0.3, **options) for weights in alone]
    for _ in range(50):
        for place, w in enumerate(stacked):
            w.grad = torch.randn(w.shape, generator=rng).double()
            for number, weights in enumerate(alone):
                weights[place].grad = w.grad[number].clone()
        ours.step()
        for optimizer in torchs:
            optimizer.step()
    for place, w in enumerate(stacked):
        theirs = torch.stack([weights[place] for weights in alone])
        moved = (theirs - first[place]).norm()
        assert (w - theirs).norm() / moved < 1e-9


def test_decay_is_a_share_of_the_rate_and_spares_gains():
    net = net_of(True)
    names = [name for name, _ in net.named_parameters()]
    kinds = [llamas.kind_of(name) for name in names]
    for name in ("adamw", "muon"):
        theta = [w.requires_grad_() for w in ensembles.stack([net])]
        before = [w.detach().clone() for w in theta]
        one = llamas.optimizer(name, theta, kinds, rate=0.1, decay=0.5)
        for w in theta:
            w.grad = torch.zeros_like(w)
        one.step()
        for kind, w, first in zip(kinds, theta, before, strict=True):
            assert torch.allclose(w, first * (1.0 if kind == "gain" else 0.95))
    with pytest.raises(ValueError, match="choose one of adamw, muon"):
        llamas.optimizer("sgd", theta, kinds, rate=0.1, decay=0.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_noise_has_the_squares_of_its_law(name, decay):
    nets = [net_of(False, seed) for seed in range(6)]
    chosen = [number for number, (one, _) in enumerate(nets[0].named_parameters()) if llamas.kind_of(one) == "matrix"]
    stacked = ensembles.stack(nets)
    theta = [stacked[number].detach() for number in chosen]
    start = sum(w.double().square().flatten(1).sum(1) for w in theta).numpy()
    noise = partial(training.noise_gradients, generator=generator(77, "cpu"))
    make = partial(llamas.optimizer, name, kinds=["matrix"] * len(theta), rate=llamas.RATE, decay=decay)
    steps = list(ensembles.train(theta, noise, make, OF.steps, rate=llamas.schedule(OF)))
    end = sum(w.double().square().flatten(1).sum(1) for w in steps[-1].after).numpy()
    low, high = llama_readings.noise_squares(OF, name, decay, start, generator=generator(1, "cpu"))[:, -1].mean(-1)
    assert low <= high
    room = 0.1 if name == "adamw" else 0.03  # AdamW's size of the gradient is a mean over 20 steps, and not a constant
    assert low * (1 - room) < end.mean() < high * (1 + room)


def test_a_population_is_paired_over_sources_and_measures_at_its_marks():
    of = replace(OF, steps=20, dev=2)
    read = llamas.texts(of, seed=0)
    common = {"qk_norm": True, "optimizer_name": "muon", "decay": 0.1, "seed": 0, "device": "cpu"}
    text, noise = (
        llamas.population(of, read, llama_readings.measure, source=source, **common) for source in ("text", "noise")
    )
    assert set(text.measures["step"]) == set(llamas.marks(of))
    assert len(text.measures) == of.draws * len(llamas.marks(of))
    assert all(torch.equal(w, noise.snapshots[0][name]) for name, w in text.snapshots[0].items())
    assert not all(torch.equal(w, noise.snapshots[20][name]) for name, w in text.snapshots[20].items())
    first, _ = llamas.members(of, text, 0)
    assert torch.equal(first.lm_head.weight, text.snapshots[0]["lm_head.weight"][1])
    assert (text.measures["room"] >= 0).all()


def test_along_the_ray_a_network_is_itself_at_one():
    net = net_of(False).double()
    values = llama_readings.reading_along(net, TOKENS, scales=(1.0,))
    assert values["stay 1"] == 1 and values["raw"] == pytest.approx(1) and values["centred"] == pytest.approx(1)
    reading = rays.read(net, TOKENS)
    assert values["positions"] == pytest.approx(float(reading.positions.mean(0).median()))
    assert -1 < values["anisotropy"] < 1


def test_the_window_is_two_doublings_of_the_constant_rate():
    for profile in ("book", "gpu"):
        of = llamas.size(profile)
        low, high = llamas.window(of)
        assert (high - of.warm) / (low - of.warm) == pytest.approx(4, rel=0.05)
        assert {llamas.schedule(of)(t) for t in range(low, high + 1)} == {llamas.RATE}
        assert np.isclose(llamas.schedule(of)(of.steps), llamas.LEAST * llamas.RATE)
