"""The small models of the chapter on today's transformers, and degrees of parts of models in some parameters."""

import pytest
import torch
from torch import nn

from nbutils.experiments import architectures
from normgrowth import homogeneity


@pytest.mark.parametrize("name", architectures.NAMES)
def test_scores_at_a_place_are_those_of_the_models_own_attention(name):
    """Their softmax gives the weights that the model returns for the last query; a sink is the last key."""
    network, tokens = architectures.model(name, 0), architectures.inputs(name, 0)
    with torch.no_grad():
        output = network(**tokens, output_attentions=True)
    returned = output.encoder_attentions + output.decoder_attentions if name == "T5" else output.attentions
    found = architectures.places(network, "scores")
    assert len(found) == len(returned)
    for place, weights in zip(found, returned, strict=True):
        scores = architectures.value(network, tokens, place)
        mine = scores.double().softmax(-1)[..., : weights.shape[-1]]
        torch.testing.assert_close(mine, weights[:, :, -1].double(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", architectures.NAMES)
def test_parameters_are_random_and_gains_positive(name):
    for parameter in architectures.model(name, 0).parameters():
        assert parameter.std() > 0 and not (parameter == 1).any() and not (parameter == 0).any()


def test_a_degree_in_some_parameters_is_that_of_the_outputs():
    """Of Qwen 3, layer by layer: 0 in queries and keys, 2 in their gains, and 1 + 0 in the last gain."""
    network, tokens = architectures.model("Qwen 3", 0), architectures.inputs("Qwen 3", 0)
    for place in architectures.places(network, "scores"):
        probe = architectures.Probe(network, place)
        for pattern, k in ((architectures.MATRICES, 0), (architectures.GAINS, 2)):
            names = {f"network.{name}" for name in architectures.names_like(network, place, pattern)}
            options = {"approximate": True, "parameters": names.__contains__}
            assert homogeneity.degree(probe, tokens, check=True, **options) == k
            table = homogeneity.measure_degree(probe, tokens, [1e3, 1e4], parameters=names.__contains__)
            assert table.log_ratio[0] == pytest.approx(k, abs=1e-6)
    assert homogeneity.degree(network, tokens, parameters=lambda name: name == "model.norm.weight") == 1


def test_parameters_that_a_module_does_not_have_are_refused():
    with pytest.raises(ValueError, match="none of the 2 parameters is selected"):
        homogeneity.degree(nn.Linear(2, 2), torch.ones(2), parameters=lambda name: name == "gain")


class Sink(nn.Module):
    """Attention with the logit of a sink beside its scores, as in gpt-oss."""

    def __init__(self, read_beside=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.sink = nn.Parameter(torch.tensor([0.3]))
        self.read_beside = read_beside

    def forward(self, x):
        scores = (x @ self.weight) @ (x @ self.weight).mT
        scores = torch.cat([scores, self.sink.expand(len(x), 1)], -1)
        if self.read_beside:
            return self.read_beside(scores)
        weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)
        return weights[:, :-1] @ x @ self.weight


def test_a_sink_beside_scores_counts_where_it_is_not_read_alone():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    assert homogeneity.degree(Sink(), x, approximate=True, check=True) == 1
    with pytest.raises(homogeneity.NotHomogeneous, match="cat: parts side by side need equal degrees"):
        homogeneity.degree(Sink(), x)
    assert homogeneity.degree(Sink(lambda scores: scores.sum(-1)), x, approximate=True, check=True) == 2
    with pytest.raises(homogeneity.NotHomogeneous, match="the leading part of the output is 0 here"):
        homogeneity.degree(Sink(lambda scores: scores[:, -1:] * scores.sum()), x, approximate=True)


class Router(nn.Module):
    """Weights of experts by sigmoids that are normalised, as in DeepSeek-V3."""

    def __init__(self, guard):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.guard = guard

    def forward(self, x):
        scores = (x @ self.weight).sigmoid()
        chosen = scores.gather(-1, scores.topk(2, -1).indices)
        return chosen / (chosen.sum(-1, keepdim=True) + self.guard)


def test_a_sum_of_sigmoids_divides_where_one_is_open_or_a_number_keeps_it_from_0():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for guard in (1e-20, 0):
        assert homogeneity.degree(Router(guard), x, approximate=True, check=True) == 0
    closed = Router(0)
    closed.weight.data = -closed.weight.data.abs()
    with pytest.raises(homogeneity.NotHomogeneous, match="the leading term of the divisor is 0 somewhere"):
        homogeneity.degree(closed, x.abs(), approximate=True)
