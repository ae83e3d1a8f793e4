"""The networks of the book."""

import pytest
import torch
from torch.func import functional_call

from nbutils.devices import generator
from nbutils.experiments.counting import Classifier
from nbutils.experiments.homogeneous import HomogeneousMLP
from nbutils.models import BLOCK_PLACEMENTS, CausalLM, SelfAttention
from nbutils.shared_runs.recipes_t5 import small_t5
from normgrowth.homogeneity import degree


@pytest.mark.parametrize("k", range(1, 7))
def test_mlp_is_homogeneous_of_its_depth(k):
    net = HomogeneousMLP((5, *[7] * (k - 1), 1), generator=generator(k, "cpu"))
    x = torch.randn(11, 5, generator=generator(0, "cpu"), dtype=torch.float64)
    doubled = functional_call(net, {name: 2 * value for name, value in net.named_parameters()}, (x,))
    assert net.degree == k
    assert torch.equal(doubled, 2**k * net(x))  # powers of two scale without rounding
    assert degree(net, x) == k


TOKENS = torch.randint(0, 11, (3, 7), generator=generator(5, "cpu"))


def language_model(**options):
    options = {"generator": generator(1, "cpu"), "init_std": 0.3} | options
    return CausalLM(11, 12, 2, 3, 9, **options).double()


def block_by_block(model):
    """What the last block puts out, before the final norm."""
    x = model.hidden_states(TOKENS)[0]
    for block in model.blocks:
        x = block(x, None)
    return x


def test_placements_are_their_formulas():
    """By hand from the parameters of one block, from the embedding to the last hidden state."""
    for placement in BLOCK_PLACEMENTS:
        model = language_model(placement=placement)
        block, states = model.blocks[0], model.hidden_states(TOKENS)
        x, attend = states[0], block.attention
        assert torch.equal(x, model.embedding(TOKENS) + model.position_embedding.weight[:7])

        def feed(y, block=block):
            return block.outer(block.inner(y).clamp(min=0))

        first, second = block.attention_norm, block.feedforward_norm
        match placement:
            case "post":
                x = first(x + attend(x))
                x = second(x + feed(x))
            case "pre":
                x = x + attend(first(x))
                x = x + feed(second(x))
            case "residual-post":
                x = x + first(attend(x))
                x = x + second(feed(x))
        torch.testing.assert_close(x, states[1])
        last = block_by_block(model)
        torch.testing.assert_close(states[-1], last if model.norm is None else model.norm(last))
        torch.testing.assert_close(model(TOKENS), states[-1] @ model.embedding.weight.T)
    assert language_model(placement="post").norm is None and language_model(placement="pre").norm is not None


def test_no_position_sees_the_future():
    """Also at scores of 1e13, where a mask of −1e9 leaks."""
    model = language_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.mul_(1e13)
    changed = TOKENS.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    assert torch.equal(model(TOKENS)[:, :4], model(changed)[:, :4])
    for scores in model.attentions(TOKENS):
        assert (scores[..., 0, 1:] == -torch.inf).all() and (scores.softmax(-1).triu(1) == 0).all()


def test_classifier_without_positions_counts_and_does_not_order():
    """Attention without a mask and positions is equivariant, so all but the last token may be permuted."""
    model = Classifier(
        11, 12, 2, 3, 9, classes=2, positions=False, generator=generator(2, "cpu"), init_std=0.3
    ).double()
    order = [3, 1, 5, 0, 2, 4, 6]
    assert model(TOKENS).shape == (3, 2)
    torch.testing.assert_close(model(TOKENS), model(TOKENS[:, order]))


def test_tied_or_not():
    tied, untied = language_model(), language_model(tied=False)
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == 12 * 11 + 11
    assert untied(TOKENS).shape == (3, 7, 11)


def test_initial_values():
    model = CausalLM(400, 64, 2, 4, 9, generator=generator(3, "cpu"))
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].inner.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (model.blocks[0].inner.bias == 0).all() and (model.norm.weight == 1).all()


def test_draws_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    models = [language_model(), small_t5(30, 16, 1, seed=4)]
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(9)  # and do not depend on it
    for first, again in zip(models, [language_model(), small_t5(30, 16, 1, seed=4)], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    torch.random.set_rng_state(before)


def test_t5_has_its_embedding_once_and_a_loss():
    model = small_t5(30, 16, 2)
    names = [name for name, _ in model.named_parameters()]
    assert len([name for name in names if "shared" in name or "embed_tokens" in name or "lm_head" in name]) == 1
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    assert loss.ndim == 0 and loss.isfinite()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": "before"}, "unknown placement 'before': choose one of post, pre"),
        ({"mask": "minus"}, "unknown mask 'minus'"),
        ({"init_std": "small"}, "small"),
    ],
)
def test_unknown_options_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        language_model(**options)


def test_initial_variance_of_a_homogeneous_network():
    """2 over fan-in in front of a ReLU, 1 over fan-in in the last layer."""
    net = HomogeneousMLP((200, 300, 400), generator=generator(0, "cpu"))
    for weight, expected in zip(net.weights, (2, 1), strict=True):
        assert float(weight.var() * weight.shape[1]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("placement", BLOCK_PLACEMENTS)
def test_what_is_dropped_is_the_branch_and_not_the_stream(placement):
    """With everything dropped x stays, behind two layer norms in post-norm."""
    model = language_model(placement=placement, dropout=1.0).train()
    first, second = model.hidden_states(TOKENS)[:2]
    block = model.blocks[0]
    expected = block.feedforward_norm(block.attention_norm(first)) if placement == "post" else first
    torch.testing.assert_close(second, expected)


def test_standard_values_are_uniform_within_the_root_of_fan_in():
    """Biases, too, and by the inputs of a matrix, not its outputs."""
    model = CausalLM(40, 16, 1, 2, 300, hidden=400, init_std="standard", generator=generator(2, "cpu"))
    inner, outer = model.blocks[0].inner, model.blocks[0].outer
    for values, bound in ((inner.bias, 1 / 4), (outer.weight, 1 / 20), (inner.weight, 1 / 4)):
        assert 0.95 * bound < float(values.detach().abs().max()) <= bound
        assert float(values.detach().min()) < -0.9 * bound and float(values.detach().max()) > 0.9 * bound
    assert model.position_embedding.weight.std().item() == pytest.approx(1, rel=0.1)
    assert (model.norm.bias == 0).all() and (model.norm.weight == 1).all()


@pytest.mark.parametrize("mask", ["causal", "none", "multiplicative"])
def test_attention_is_that_of_torch(mask):
    """Three heads of width 4 against nn.MultiheadAttention; scores are divided by the root of 4."""
    attention = SelfAttention(12, 3, mask=mask, biases=True).double()
    x = torch.randn(2, 7, 12, generator=generator(0, "cpu"), dtype=torch.float64)
    other = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    parts = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        other.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        other.out_proj.load_state_dict(attention.output.state_dict())
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    seen = []
    fast, slow = attention(x), attention(x, seen)
    torch.testing.assert_close(fast, slow)
    if mask == "multiplicative":
        q, k = (part(x).reshape(2, 7, 3, 4) for part in parts[:2])
        want = torch.einsum("bihd,bjhd->bhij", q, k) / 2 * ~future
        torch.testing.assert_close(seen[0], want)
    else:
        want, weights = other(x, x, x, attn_mask=future if mask == "causal" else None, average_attn_weights=False)
        torch.testing.assert_close(fast, want)
        torch.testing.assert_close(seen[0].softmax(-1), weights)
