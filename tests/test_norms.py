"""The norm budget, the drift-free cap and the tracker against whole vectors and simulated optimizers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from normgrowth.norms import NormTracker, drift_free_cap, kernels, norm, norm_budget
from normgrowth.norms.pieces import Pieces
from normgrowth.norms.tracker import CHECK_EVERY


@given(arrays(np.float64, st.tuples(st.integers(2, 8), st.integers(1, 5)), elements=st.floats(-1e3, 1e3)))
def test_budget_of_real_vectors(path):
    rho = np.linalg.norm(path, axis=1)
    if (rho < 1e-6).any():
        return
    cos = np.clip((path[1:] * path[:-1]).sum(1) / (rho[1:] * rho[:-1]), -1, 1)
    budget, delta = norm_budget(rho, cos), np.diff(path, axis=0)
    scale = (rho**2).max()
    np.testing.assert_allclose(budget.displacement_sq, (delta**2).sum(1), atol=1e-11 * scale)
    np.testing.assert_allclose(budget.inner, 2 * (path[:-1] * delta).sum(1), atol=1e-11 * scale)
    np.testing.assert_allclose(budget.displacement_sq + budget.inner, np.diff(rho**2), atol=1e-11 * scale)


def test_budget_keeps_digits_where_it_cancels():
    gap = 1e-9  # 1 − cos, at equal norms: ‖Δ‖² = 2ρ²(1 − cos)
    budget = norm_budget([1e3, 1e3], [1 - gap])
    assert budget.displacement_sq[0] == pytest.approx(2e6 * gap, rel=1e-6)


@pytest.mark.parametrize(
    ("rho", "cos", "text"),
    [
        ([1, 2, 3], [0.5], r"need n - 1 neighbour cosines.*got shapes \(3,\) and \(1,\)"),
        ([[1, 2], [3, 4]], [0.5], r"got shapes \(2, 2\)"),
        ([1, 2, 3], [0.1, -1.2], r"must lie in \[-1, 1\]; got -1.2"),
        ([1, 2], [np.nan], "must lie in"),
        ([1, -2, -3], [0.5, 0.5], r"not negative; got -2\.0"),
        ([np.nan, 2], [0.5], "finite and not negative; got nan"),
        ([1, np.inf], [0.5], "finite"),
    ],
)
def test_budget_names_bad_input(rho, cos, text):
    with pytest.raises(ValueError, match=text):
        norm_budget(rho, cos)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40), st.floats(0.1, 1.0))
def test_no_orthogonal_relative_step_beats_the_cap(seed, warmup, clip):
    """Steps of relative length clip/√max(s, k), orthogonal to θ: ρ² stays under the cap, and reaches it at clip 1."""
    rng, steps = np.random.default_rng(seed), 120
    for length in (clip, 1.0):
        theta = rng.normal(size=7)
        start = theta @ theta
        for s in range(steps):
            delta = rng.normal(size=7)
            delta -= (delta @ theta) / (theta @ theta) * theta
            theta = theta + length / np.sqrt(max(s, warmup) * (delta @ delta) / (theta @ theta)) * delta
        growth, cap = np.log(theta @ theta / start), drift_free_cap([0, steps], warmup=warmup)[0]
        assert growth <= cap * (1 + 1e-12)
    assert growth == pytest.approx(cap, rel=1e-9)


@pytest.mark.parametrize("steps", [[2, 1], [1, 1], [-1, 1]])
def test_a_cap_needs_steps_in_order(steps):
    with pytest.raises(ValueError, match="increasing and not negative"):
        drift_free_cap(steps)


def network(seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 70_001), nn.ReLU(), nn.Linear(70_001, 3)).to(dtype)  # more than one block
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return net


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
}


def choose_sums(monkeypatch, sums):
    """``compiled`` by numba, ``by blocks`` of numpy, or ``as on CUDA`` by torch, here on CPU."""
    if sums.startswith("by blocks"):
        monkeypatch.setattr(kernels, "loops", lambda: kernels.BY_BLOCKS)
    if sums == "as on CUDA":
        monkeypatch.setattr(kernels, "_is_on_cpu", lambda x: False)


def without_numba(monkeypatch):
    """``import numba`` fails, as where it is not installed."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(kernels, "loops", kernels.loops.__wrapped__)  # not what this process has chosen before


def float64(x):
    return x.detach().double().numpy().copy()


@pytest.mark.parametrize("sums", ["compiled", "by blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [0, 1, 7, kernels.BLOCK - 1, kernels.BLOCK, 2 * kernels.BLOCK + 13])
@pytest.mark.parametrize("scale", [1e-3, 1e2], ids=["small steps", "steps that dwarf θ"])
def test_sums_of_a_step_are_those_of_plain_float64(monkeypatch, sums, dtype, length, scale):
    """Also with a snapshot that is a step old; the copy moves on, and a gradient is read."""
    choose_sums(monkeypatch, sums)
    rng = np.random.default_rng(0)
    theta = nn.Parameter(torch.from_numpy(rng.normal(size=length)).to(dtype))
    pieces = Pieces([(theta, "all")])
    kept = float64(theta)
    pieces.refresh()
    pieces.snapshot()
    for _ in range(2):
        before = float64(theta)
        with torch.no_grad():
            theta.add_(torch.from_numpy(scale * rng.normal(size=length)).to(dtype))
        after = float64(theta)
        delta = after - before
        measured = pieces.advance()[:, 0].numpy()
        wanted = [before @ delta, delta @ delta, after @ after, after @ kept]
        norm_before, step, norm_after, norm_kept = (np.linalg.norm(x) for x in (before, delta, after, kept))
        sizes = [norm_before * step, step**2, norm_after**2, norm_after * norm_kept]
        assert (abs(measured - wanted) <= 1e-13 * np.array(sizes)).all()
    theta.grad = torch.from_numpy(rng.normal(size=length)).to(dtype)
    gradient = float64(theta.grad)
    product, square = pieces.gradient()[:, 0].tolist()
    assert abs(product - after @ gradient) <= 1e-13 * norm_after * np.linalg.norm(gradient)
    assert square == pytest.approx(gradient @ gradient, rel=1e-13)


@pytest.mark.parametrize("sums", ["compiled", "by blocks"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_without_a_warning(monkeypatch, recwarn, sums, bad):
    choose_sums(monkeypatch, sums)
    old = torch.tensor([1.0, bad, 2.0])
    now = torch.tensor([1.0, bad, 3.0])
    inner, step, square, beside = kernels.advance(now, old, now)
    assert np.isnan([inner, step]).all()
    assert not np.isfinite([square, beside]).any() and not list(recwarn)


def test_a_tracker_without_numba_is_the_one_with_it(monkeypatch):
    def history():
        net = network()
        opt, rng = OPTIMIZERS["momentum"](net.parameters()), torch.Generator().manual_seed(1)
        tracker = NormTracker(net.named_parameters(), gradients=True)
        tracker.snapshot()
        tracker.attach(opt)
        for _ in range(4):
            opt.zero_grad()
            net(torch.randn(4, 6, generator=rng)).square().mean().backward()
            opt.step()
        return tracker.history()

    assert kernels.loops() is not kernels.BY_BLOCKS
    compiled = history()
    without_numba(monkeypatch)
    assert kernels.loops() is kernels.BY_BLOCKS
    by_blocks = history()
    assert list(by_blocks.layer) == list(compiled.layer)
    for quantity in compiled.columns.drop("layer"):
        size = compiled[quantity].abs().max()
        np.testing.assert_allclose(by_blocks[quantity], compiled[quantity], rtol=0, atol=1e-12 * size)


def test_numba_is_imported_by_the_first_sum_and_not_before():
    code = (
        "import sys, torch; from normgrowth.norms import NormTracker; assert 'numba' not in sys.modules; "
        "NormTracker(torch.nn.Linear(2, 2)); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "sums", "exact"),
    [
        (torch.float32, "compiled", 1e-12),
        (torch.float32, "compiled, no snapshot", 1e-12),
        (torch.float64, "compiled", 1e-12),
        (torch.bfloat16, "compiled", 1e-12),
        (torch.float32, "by blocks", 1e-12),
        (torch.float32, "by blocks, no snapshot", 1e-12),
        (torch.float64, "by blocks", 1e-12),
        (torch.bfloat16, "by blocks", 1e-12),
        (torch.bfloat16, "as on CUDA", 1e-6),
        (torch.float32, "as on CUDA", 1e-6),
        (torch.float64, "as on CUDA", 1e-12),
    ],
)
def test_tracker_against_whole_vectors_in_float64(monkeypatch, optimizer, dtype, sums, exact):
    net = network(dtype=dtype)
    opt, rng = OPTIMIZERS[optimizer](net.parameters()), torch.Generator().manual_seed(1)
    flat = lambda tensors: torch.cat([t.detach().double().flatten() for t in tensors])  # noqa: E731
    choose_sums(monkeypatch, sums)
    tracker = NormTracker(net.named_parameters(), by=lambda name: name.split(".")[0], gradients=True)
    if "no snapshot" not in sums:
        tracker.snapshot()
    first, wanted, length = flat(net.parameters()), [], 1.0
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(4, 6, generator=rng).to(dtype)).square().mean().backward()
        theta, grad = flat(net.parameters()), flat(p.grad for p in net.parameters())
        with tracker.step():
            opt.step()
        new = flat(net.parameters())
        delta = new - theta
        cos = (theta @ delta) / theta.norm() / delta.norm()
        length = max(length, float(delta.norm() / theta.norm()))  # of a step that dwarfs θ fewer digits are left
        similarity = (first @ new) / first.norm() / new.norm() if "no snapshot" not in sums else np.nan
        wanted.append([new.norm(), delta.norm(), theta @ delta, cos, theta @ grad, grad.norm(), similarity])
    history = tracker.history()
    total = history[(history.layer == "total") & (history.step > 0)].iloc[:, 2:].to_numpy()
    wanted = np.array(wanted, dtype=float)
    for k in (0, 1, 5):
        np.testing.assert_allclose(total[:, k], wanted[:, k], rtol=exact)
    np.testing.assert_allclose(total[:, 6], wanted[:, 6], atol=exact)
    np.testing.assert_allclose(total[:, 2], wanted[:, 2], atol=exact * (wanted[:, 0] * wanted[:, 1]).max())
    np.testing.assert_allclose(total[:, 3], wanted[:, 3], atol=exact * length)
    np.testing.assert_allclose(total[:, 4], wanted[:, 4], atol=exact * (wanted[:, 0] * wanted[:, 5]).max())
    layers = history[history.layer != "total"].groupby("step")
    sums = layers[["norm", "step_norm"]].agg(lambda x: np.sqrt((x**2).sum(min_count=1)))
    np.testing.assert_allclose(sums.norm[1:], total[:, 0], rtol=1e-12)
    np.testing.assert_allclose(layers.inner.sum()[1:], total[:, 2], rtol=1e-9, atol=1e-12)
    assert tracker.identity_error() < exact


def test_tracker_leaves_changes_between_steps_out():
    net = network()
    opt, tracker = torch.optim.SGD(net.parameters(), lr=1.0), NormTracker(net.named_parameters(), by=None)
    for _ in range(3):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        with torch.no_grad():
            net[0].weight.mul_(2)  # not a step of the optimizer
        with tracker.step():
            opt.step()
    assert (tracker.history().step_norm[1:] == 0).all()
    assert tracker.identity_error() < 1e-12


def behind_autograd(net, step):
    """Move a parameter so that its version does not show it."""
    if step == "p.data":
        net[0].weight.data.mul_(3)
    else:
        net[0].weight.grad = torch.ones_like(net[0].weight)
        torch.optim.AdamW([net[0].weight], lr=0.2, fused=True).step()


@pytest.mark.parametrize("how", ["p.data", "fused, not tracked"])
def test_identity_sees_changes_that_no_version_shows(how):
    """Each such change is part of the next step's δ. It is seen when asked, and at every 32nd step."""
    net = network()
    tracker = NormTracker(net.named_parameters())
    with pytest.raises(RuntimeError, match="no step measured"):
        tracker.identity_error()
    with tracker.step(), torch.no_grad():
        net[0].weight.mul_(2)
    version = net[0].weight._version
    behind_autograd(net, how)
    assert net[0].weight._version == version
    assert tracker.identity_error() > 1e-3
    with tracker.step():
        pass
    assert tracker.history().step_norm.iloc[-1] > 0.1
    again = NormTracker(net.named_parameters())
    for _ in range(CHECK_EVERY + 1):
        behind_autograd(net, how)
        with again.step(), torch.no_grad():
            net[0].weight.mul_(0.5)
    assert again.identity_error() > 1e-3


def test_sparse_gradients_are_read():
    table = nn.Embedding(5, 3, sparse=True)
    tracker = NormTracker(table.named_parameters(), gradients=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    with tracker.step():
        torch.optim.SGD(table.parameters(), lr=0.1).step()
    row = tracker.history().iloc[-1]
    grad = table.weight.grad.to_dense()
    assert row.grad_norm == pytest.approx(float(grad.norm()))
    assert row.step_norm == pytest.approx(0.1 * float(grad.norm()), rel=1e-6)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("fused", [False, True])
def test_tracker_of_every_nth_step_sees_that_step_alone(every, fused):
    """The fused optimizers change parameters without raising their version."""
    theta = nn.Parameter(torch.arange(1.0, 10))
    adam, tracker = torch.optim.AdamW([theta], 0.1, fused=fused), NormTracker([("w", theta)], every=every, by=None)
    path = [theta.detach().double().clone()]
    for _ in range(10):
        theta.grad = torch.ones(9)
        with tracker.step():
            adam.step()
        path.append(theta.detach().double().clone())
    history = tracker.history()
    assert history.step.tolist() == list(range(0, 11, every))
    np.testing.assert_allclose(history.norm, [norm([x]) for x in path[::every]], rtol=1e-12)
    lengths = [norm([path[step] - path[step - 1]]) for step in history.step[1:]]
    np.testing.assert_allclose(history.step_norm[1:], lengths, rtol=1e-12)
    assert tracker.identity_error() < 1e-12


EMPTY = nn.Parameter(torch.empty(0))
EMPTY.ds_id = 3
REFUSED = [
    ({"named_parameters": [("_fsdp_wrapped_module.w", nn.Parameter(torch.ones(2)))]}, r"FSDP1.*use FSDP2 \(fully"),
    ({"named_parameters": [("w", EMPTY)]}, "ZeRO-3"),
    ({"named_parameters": []}, "got 0 of them"), ({"every": 0}, "every ≥ 1; got 2 of them.* every = 0"),
    ({"by": lambda name: "total"}, "no layer may be named 'total'"),
    ({"named_parameters": [("theta", nn.Parameter(torch.tensor([3 + 4j])))]}, "theta is complex"),
    ({"named_parameters": [("theta", nn.Parameter(torch.empty(2, device="meta")))]}, "theta has no values yet"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_tracked_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        NormTracker(**{"named_parameters": nn.Linear(2, 2).named_parameters()} | arguments)


def test_a_model_gives_its_own_names_and_parameters_without_names_are_refused():
    model = torch.nn.Linear(2, 1)
    assert NormTracker(model).layers == NormTracker(model.named_parameters()).layers
    for nameless in (model.parameters(), model.state_dict()):
        with pytest.raises(TypeError, match=r"a model or its named_parameters\(\)"):
            NormTracker(nameless)


def test_an_optimizer_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"put `with tracker.step\(\):` around"):
        NormTracker(nn.Linear(2, 2).named_parameters()).attach(object())


def test_an_optimizer_of_another_model_is_warned_of():
    nets = [nn.Linear(2, 2) for _ in range(2)]
    tracker = NormTracker(nets[0].named_parameters())
    with pytest.warns(UserWarning, match="none of the tracked parameters") as caught:
        tracker.attach(torch.optim.SGD(nets[1].parameters(), 0.1))
    assert caught[0].filename == __file__


def moved(theta, tracker):
    """One step θ' = 1.5 θ; how far the last row is from sums in float64."""
    before = theta.detach().double()
    with tracker.step(), torch.no_grad():
        theta.mul_(1.5)
    row, delta = tracker.history().iloc[-1], theta.detach().double() - before
    return row.step_norm / float(delta.norm()) - 1, row.inner / float((before * delta).sum()) - 1


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("layout", ["plain", "transposed", "every second column"])
def test_views_follow_a_storage_that_is_exchanged(layout, rows):
    """A new storage, a transposed one and one with gaps give the sums of their elements."""
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(200, 2 * rows, generator=rng)
    theta = nn.Parameter({"plain": data, "transposed": data.T, "every second column": data[:, ::2]}[layout])
    tracker = NormTracker([("theta", theta)], by=None, gradients=True)
    for _ in range(2):
        assert max(map(abs, moved(theta, tracker))) < 1e-6
    theta.data = theta.detach().clone() * 3
    theta.grad = torch.randn(theta.shape, generator=rng)
    assert max(map(abs, moved(theta, tracker))) < 1e-6
    exact = float((theta.detach() / 1.5 * theta.grad).double().sum())
    assert tracker.history().projection.iloc[-1] == pytest.approx(exact, rel=1e-4, abs=1e-3)


def test_an_end_of_a_step_without_its_beginning_is_refused():
    with pytest.raises(RuntimeError, match="without a before"):
        NormTracker(nn.Linear(2, 2)).after()


@pytest.mark.parametrize("sums", ["compiled", "by blocks"])
def test_parameters_of_four_types_are_one_norm_by_layer(monkeypatch, sums):
    """Whole numbers that each type holds; layers and types by turns, sizes on both sides of what counts as small."""
    choose_sums(monkeypatch, sums)
    sizes = [5, 1, 1 << 14, (1 << 14) + 1, 0, 3, 40_000]
    types = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    named = {
        f"{'ab'[i % 2]}.{i}": nn.Parameter(torch.full((n,), i + 1.0, dtype=types[i % 4])) for i, n in enumerate(sizes)
    }
    tracker = NormTracker(named.items(), by=lambda name: name[0], gradients=True)
    tracker.snapshot()
    for i, p in enumerate(named.values()):
        p.grad = torch.full_like(p, i - 3.0)
    with tracker.step(), torch.no_grad():
        for p in named.values():
            p.add_(2.0)
    rows = tracker.history().query("step == 1").set_index("layer")
    flat = {layer: [(i + 1.0, i - 3.0) for i, n in enumerate(sizes) if layer in ("ab"[i % 2], "total")
                    for _ in range(n)]
            for layer in ("a", "b", "total")}  # fmt: skip
    for layer, pairs in flat.items():
        theta, grad = np.array(pairs).T
        new, row = theta + 2, rows.loc[layer]
        assert (row.norm**2, row.step_norm**2, row.inner) == pytest.approx((new @ new, 4 * len(theta), 2 * theta.sum()))
        assert (row.projection, row.grad_norm**2) == pytest.approx((theta @ grad, grad @ grad))
        assert row.cos_similarity == pytest.approx(theta @ new / np.linalg.norm(theta) / np.linalg.norm(new))


def test_the_last_snapshot_is_of_the_parameters_as_they_were_then():
    """Also where they had been changed outside of a step; what comes later is compared with it alone."""
    theta = nn.Parameter(torch.tensor([1.0, 0.0]))
    tracker = NormTracker([("theta", theta)], by=None)
    tracker.snapshot()
    with torch.no_grad():
        theta.copy_(torch.tensor([3.0, 4.0]))
    tracker.snapshot()
    for target in ([4.0, 3.0], [0.0, 7.0]):
        with tracker.step(), torch.no_grad():
            theta.copy_(torch.tensor(target))
    assert tracker.history().cos_similarity.iloc[1:].tolist() == pytest.approx([24 / 25, 4 / 5])
