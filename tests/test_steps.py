"""Steps as the tracker measures them against the whole vectors of a loop in float64, whatever wraps what."""

import contextlib
import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from normgrowth.norms import NormTracker, norm
from tests import wrappers

LR = 0.05


class Model(nn.Module):
    """An embedding, two blocks with weights on both sides of what counts as small, and a head."""

    def __init__(self, sparse=False, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(11, 8, sparse=sparse)
        self.blocks = nn.ModuleList([nn.Linear(8, 3000), nn.Linear(3000, 8)])
        self.head = nn.Linear(8, 4)
        rng = torch.Generator().manual_seed(0)
        self.to(dtype)
        for p in self.parameters():
            p.data = (0.2 * torch.randn(p.shape, generator=rng, dtype=torch.float64)).to(dtype)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def batches(count=7):
    return torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(1))


def matrices(model):
    return [p for p in model.blocks.parameters() if p.ndim == 2]


def others(model):
    chosen = set(map(id, matrices(model)))
    return [p for p in model.parameters() if id(p) not in chosen]


def plain(make):
    """A loop of ``zero_grad``, ``backward`` and ``step``; ``make`` gives the optimizer of a model."""

    def loop(model):
        optimizer = make(model)

        def iterate(ids):
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()

        return [optimizer], iterate

    return loop


def closed(make, before=False, evaluations=1):
    """A loop with a closure; with ``before`` a gradient is there already when the step begins, as for SAM."""

    def loop(model):
        optimizer = make(model)

        def iterate(ids):
            def closure():
                optimizer.zero_grad()
                loss = model(ids)
                loss.backward()
                return loss

            if before:
                closure()
            optimizer.step(closure)

        return [optimizer], iterate

    return loop


def sam(restore):
    def loop(model):
        optimizer = wrappers.SAM(model.parameters(), torch.optim.SGD, lr=LR, momentum=0.9, restore=restore)

        def iterate(ids):
            model(ids).backward()
            optimizer.first_step(zero_grad=True)
            model(ids).backward()
            optimizer.second_step(zero_grad=True)

        return [optimizer], iterate

    return loop


def two(first, second):
    """Two optimizers on one model, with the tracker on each."""

    def loop(model):
        optimizers = [first(model), second(model)]

        def iterate(ids):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(ids).backward()
            for optimizer in optimizers:
                optimizer.step()

        return optimizers, iterate

    return loop


def by_turns(model):
    """As for two networks against each other: each has a gradient and a step of its own in an iteration."""
    optimizers = [torch.optim.AdamW(matrices(model), LR), torch.optim.SGD(others(model), LR)]

    def iterate(ids):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            optimizer.zero_grad()
            (sign * model(ids)).backward()
            optimizer.step()

    return optimizers, iterate


def in_backward(model):
    optimizers = {p: torch.optim.AdamW([p], LR, foreach=False) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values()), lambda ids: model(ids).backward()


def in_backward_by_torch(model):
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": LR})
    return _get_in_backward_optimizers(model), lambda ids: model(ids).backward()


def layer_by_layer(model):
    """The Trainer's stand-in for optimizers that step within backward: its own ``step`` does nothing."""
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    optimizers, backward = in_backward(model)
    dummy = LayerWiseDummyOptimizer(optimizer_dict=dict(enumerate(optimizers)))

    def iterate(ids):
        backward(ids)
        dummy.step()

    return [dummy], iterate


def accelerated(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(wrappers.Lookahead(torch.optim.SGD(model.parameters(), LR)))

    def iterate(ids):
        for part in ids.view(2, -1):
            with accelerator.accumulate(model):
                accelerator.backward(model(part))
                optimizer.step()
                optimizer.zero_grad()

    return [optimizer], iterate


def scheduled(order):
    """A schedule, which puts a ``step`` of its own on the optimizer, made before the tracker or after it."""

    def loop(model):
        optimizer = wrappers.Lookahead(torch.optim.SGD(model.parameters(), LR))
        optimizer.defaults = {}
        make = lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))  # noqa: E731
        schedulers = [make()] if order == "before" else []

        def iterate(ids):
            if not schedulers:
                schedulers.append(make())
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
            schedulers[0].step()

        return [optimizer], iterate

    return loop


def projected_by_a_hook(model):
    """A projection in a hook of the step itself, put there before the tracker's."""
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def iterate(ids):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    @torch.no_grad()
    def project(*_):
        for p in matrices(model):
            p.data.clamp_(-0.3, 0.3)

    optimizer.register_step_post_hook(project)
    return [optimizer], iterate


def clipped_by_a_hook(model):
    """Gradients clipped in a hook that is put on the optimizer after the tracker."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    hooks = []

    def clip_gradients(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def iterate(ids):
        if not hooks:
            hooks.append(optimizer.register_step_pre_hook(clip_gradients))
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    return [optimizer], iterate


def decayed_by_its_own_step(model):
    """A ``step`` put on the object, which writes after the one of its class."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    step_of_class = optimizer.step

    def step(closure=None):
        step_of_class(closure)
        for p in model.parameters():
            p.data.mul_(0.99)

    optimizer.step = step

    def iterate(ids):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    return [optimizer], iterate


def closure_by_another_name(model):
    optimizer = wrappers.Named(model.parameters(), LR)

    def iterate(ids):
        def evaluate():
            optimizer.zero_grad()
            model(ids).backward()

        optimizer.step(1.0, evaluate_loss=evaluate)

    return [optimizer], iterate


def line_search(model):
    """The closure gives the loss alone, and the optimizer calls ``backward``."""
    optimizer = wrappers.LineSearch(model.parameters())
    return [optimizer], lambda ids: optimizer.step(lambda: model(ids))


def local_sgd(model):
    """torch's own wrapper without its class's constructor, which averages over processes after the step."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    class Averager:
        step = 0

        def average_parameters(self, params):
            for group in params:
                for p in group["params"]:
                    p.data.mul_(0.99)

    return plain(lambda model: PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), LR), Averager()))(model)


LOOPS = {
    "AdamW": plain(lambda m: torch.optim.AdamW(m.parameters(), LR)),
    "foreach": plain(lambda m: torch.optim.AdamW(m.parameters(), LR, foreach=True)),
    "fused": plain(lambda m: torch.optim.AdamW(m.parameters(), LR, fused=True)),
    "LBFGS": closed(lambda m: torch.optim.LBFGS(m.parameters(), LR, max_iter=4)),
    "SAM, closure": closed(lambda m: wrappers.SAM(m.parameters(), torch.optim.SGD, lr=LR), before=True),
    "SAM, two steps": sam("exact"),
    "SAM, two steps, restored by subtraction": sam("by subtraction"),
    "Lookahead": plain(lambda m: wrappers.Lookahead(torch.optim.AdamW(m.parameters(), LR))),
    "Lookahead of SAM, closure": closed(
        lambda m: wrappers.Lookahead(wrappers.SAM(m.parameters(), torch.optim.SGD, lr=LR)), before=True
    ),
    "schedule-free": plain(lambda m: wrappers.ScheduleFree(torch.optim.SGD(m.parameters(), LR))),
    "schedule-free, closure": closed(lambda m: wrappers.ScheduleFree(torch.optim.SGD(m.parameters(), LR))),
    "average beside": plain(lambda m: wrappers.WithAverage(torch.optim.AdamW(m.parameters(), LR))),
    "Noam": plain(lambda m: wrappers.Noam(torch.optim.Adam(m.parameters()))),
    "LARC": plain(lambda m: wrappers.Larc(torch.optim.SGD(m.parameters(), LR))),
    "super().step, projected": plain(lambda m: wrappers.Projected(m.parameters(), LR)),
    "copies in float64": plain(lambda m: wrappers.Master(m.parameters())),
    "several as one": plain(
        lambda m: wrappers.Both(torch.optim.Muon(matrices(m), LR), torch.optim.AdamW(others(m), LR))
    ),
    "Muon and AdamW": two(lambda m: torch.optim.Muon(matrices(m), LR), lambda m: torch.optim.AdamW(others(m), LR)),
    "two fused": two(
        lambda m: torch.optim.AdamW(matrices(m), LR, fused=True), lambda m: torch.optim.AdamW(others(m), LR, fused=True)
    ),
    "by turns": by_turns,
    "in backward": in_backward,
    "in backward, by torch": in_backward_by_torch,
    "in backward, the Trainer's": layer_by_layer,
    "accelerate, accumulated, around Lookahead": accelerated,
    "schedule before": scheduled("before"),
    "schedule after": scheduled("after"),
    "projected by a hook": projected_by_a_hook,
    "copies of some": plain(lambda m: wrappers.Master(matrices(m), others(m))),
    "a decay of what is in no group": plain(
        lambda m: wrappers.Decayed(torch.optim.SGD(matrices(m), LR), [m.embed.weight], m.parameters())
    ),
    "torch's local SGD": local_sgd,
    "clipped by a later hook": clipped_by_a_hook,
    "a step of its own": plain(lambda m: wrappers.OwnStep(m.parameters(), LR)),
    "decayed by a step of its own": decayed_by_its_own_step,
    "a closure by another name": closure_by_another_name,
    "line search": line_search,
}
FIRST = {  # parameters of which the first gradient of an iteration counts, and not the last
    "LBFGS": lambda model: list(model.parameters()),
    "by turns": matrices,
}
SCALED = {"LARC", "clipped by a later hook"}  # which change gradients within their step
UNUSED = {"a decay of what is in no group": others}  # parameters whose gradients no optimizer uses


def flat(tensors):
    return torch.cat([x.detach().double().flatten() for x in tensors]).numpy()


class Gradients:
    """Gradients of an iteration: clones of what accumulated in ``.grad``, the first or the last."""

    def __init__(self, model, first):
        self.of = {}
        self.first = set(map(id, first))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.keep)

    def keep(self, p):
        if not (id(p) in self.first and id(p) in self.of):
            self.of[id(p)] = p.grad.to_dense().clone() if p.grad.is_sparse else p.grad.clone()


def run(name, loop, model, options=None, count=7):
    """Rows by whole vectors, and the tracker's: ‖θ'‖, ‖δ‖, θ·δ, θ·∇L, ‖∇L‖ of each iteration."""
    gradients = Gradients(model, FIRST.get(name, lambda model: [])(model))
    optimizers, iterate = loop(model)
    tracker = NormTracker(model, gradients=True, **options or {})
    for optimizer in optimizers:
        tracker.attach(optimizer)
    wanted = []
    for ids in batches(count):
        theta = flat(model.parameters())
        gradients.of.clear()
        iterate(ids)
        new = flat(model.parameters())
        used = [p.grad if name in SCALED else gradients.of[id(p)] for p in model.parameters()]
        unused = set(map(id, UNUSED.get(name, lambda model: [])(model)))
        used = [g * (id(p) not in unused) for p, g in zip(model.parameters(), used, strict=True)]
        delta, grad = new - theta, flat(used)
        wanted.append([*map(np.linalg.norm, (new, delta)), theta @ delta, theta @ grad, np.linalg.norm(grad)])
    return np.array(wanted), tracker


def measured(tracker):
    rows = tracker.history().query("layer == 'total' and step > 0")
    return rows[["norm", "step_norm", "inner", "projection", "grad_norm"]].to_numpy()


@pytest.mark.filterwarnings("error::UserWarning:tests.*", "ignore:the optimizer has none")
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_is_what_the_loop_wrote_between_two_gradients(name):
    wanted, tracker = run(name, LOOPS[name], Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = measured(tracker)
        assert tracker.identity_error() < 1e-12
    assert rows.shape == wanted.shape
    np.testing.assert_allclose(rows, wanted, rtol=1e-9, atol=1e-11)


OUTSIDE = r"moved outside of the steps that are recorded"


@torch.no_grad()
def clip(model):
    for p in matrices(model):
        p.clamp_(-0.2, 0.2)


def clip_data(model):
    for p in matrices(model):
        p.data.clamp_(-0.2, 0.2)


def decay_data(model):
    for p in model.parameters():
        p.data.mul_(0.99)


def exchange_data(model):
    model.head.weight.data = model.head.weight.data * 0.9


@torch.no_grad()
def tie_values(model):
    model.blocks[1].bias.copy_(model.embed.weight.mean(0))


def load(model):
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})


def untracked_fused(model):
    torch.optim.AdamW(others(model), LR, fused=True).step()


WRITERS = [clip, clip_data, decay_data, exchange_data, tie_values, load, untracked_fused]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_what_is_written_between_steps_is_in_no_step_and_warns(write, dtype):
    model = Model(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    tracker = NormTracker(model)
    tracker.attach(optimizer)
    wanted = []
    for step, ids in enumerate(batches()):
        optimizer.zero_grad()
        model(ids).backward()
        theta = flat(model.parameters())
        optimizer.step()
        new = flat(model.parameters())
        wanted.append([np.linalg.norm(new), np.linalg.norm(new - theta), theta @ (new - theta)])
        if step in (0, 2, 3):
            write(model)
        with pytest.warns(UserWarning, match=OUTSIDE) if step in (0, 2, 3) else contextlib.nullcontext():
            latest = tracker.latest()
        assert latest["norm/total"] == pytest.approx(wanted[-1][0], rel=1e-12)
    np.testing.assert_allclose(measured(tracker)[:, :3], wanted, rtol=1e-9, atol=1e-11)


def test_a_write_before_the_next_step_warns_in_the_reading_after_it():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    tracker = NormTracker(model)
    tracker.attach(optimizer)
    for step, ids in enumerate(batches(9)):
        model(ids).backward()
        if step == 7:
            decay_data(model)
        optimizer.step()
    with pytest.warns(UserWarning, match=f"block 0, block 1, head {OUTSIDE}|{OUTSIDE}"):
        tracker.history()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.history()


def test_a_method_that_is_no_step_warns():
    """SAM without an optimizer in it, by two methods: no step is seen, and the norm is that of the start."""
    model = Model()
    optimizer = wrappers.FlatSAM(model.parameters(), LR)
    tracker = NormTracker(model)
    tracker.attach(optimizer)
    for ids in batches(3):
        model(ids).backward()
        optimizer.first_step()
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.second_step()
    with pytest.warns(UserWarning, match=OUTSIDE):
        assert tracker.latest()["norm/total"] != pytest.approx(norm(model))
    around = NormTracker(model)
    before = flat(model.parameters())
    with around.step():
        optimizer.first_step()
        optimizer.second_step()
    assert around.latest()["step_norm/total"] == pytest.approx(np.linalg.norm(flat(model.parameters()) - before))


@pytest.mark.parametrize("swapped", ["an average", "x of schedule-free", "the slow weights"])
def test_weights_that_are_swapped_in_and_out_again_are_no_move(swapped):
    model = Model()
    base = torch.optim.SGD(model.parameters(), LR)
    optimizer = {"x": wrappers.ScheduleFree, "a": wrappers.WithAverage, "t": wrappers.Lookahead}[swapped[0]](base)
    tracker = NormTracker(model)
    tracker.attach(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in batches():
            model(ids).backward()
            optimizer.step()
            new = norm(model)
            if swapped[0] == "a":
                with optimizer.swapped():
                    assert norm(model) != new
            elif swapped[0] == "x":
                optimizer.switch("x")
                optimizer.switch("y")
            else:
                kept = {name: p.detach().clone() for name, p in model.named_parameters()}
                load(model)
                model.load_state_dict(kept)
            assert tracker.latest()["norm/total"] == pytest.approx(new, rel=1e-12)
    assert tracker.steps == 7 and tracker.identity_error() < 1e-12


def test_one_of_two_optimizers_alone_warns():
    model = Model()
    optimizers = [torch.optim.Muon(matrices(model), LR), torch.optim.AdamW(others(model), LR, fused=True)]
    tracker = NormTracker(model)
    tracker.attach(optimizers[0])
    model(batches()[0]).backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.warns(UserWarning, match=rf"embeddings.*head {OUTSIDE}"):
        tracker.latest()


@pytest.mark.parametrize("critic", [1, 3])
def test_a_step_of_several_optimizers_ends_before_one_of_them_steps_again(critic):
    model = Model()
    often, seldom = torch.optim.SGD(matrices(model), LR), torch.optim.SGD(others(model), LR)
    tracker = NormTracker(model)
    tracker.attach(often)
    tracker.attach(seldom)
    start, path = flat(model.parameters()), []
    for ids in batches(4):
        model(ids).backward()
        for k in range(critic):
            often.step()
            if k < critic - 1:
                path.append(flat(model.parameters()))
        seldom.step()
        path.append(flat(model.parameters()))
    rows = tracker.history().query("layer == 'total'")
    np.testing.assert_allclose(rows.norm, [np.linalg.norm(x) for x in [start, *path]])
    np.testing.assert_allclose(rows.step_norm[1:], np.linalg.norm(np.diff([start, *path], axis=0), axis=1))
    assert tracker.steps == 4 * critic and tracker.identity_error() < 1e-12


@pytest.mark.parametrize("first", ["the first", "the second"])
def test_an_optimizer_that_is_left_out_of_one_step_does_not_put_the_others_out_of_step(first):
    """As where a GradScaler finds infinite gradients of one optimizer only."""
    model = Model()
    optimizers = [torch.optim.SGD(matrices(model), LR), torch.optim.SGD(others(model), LR)]
    tracker = NormTracker(model)
    for optimizer in optimizers:
        tracker.attach(optimizer)
    path = [flat(model.parameters())]
    for step, ids in enumerate(batches(5)):
        model(ids).backward()
        left_out = optimizers[first == "the second"] if step == 2 else None
        for optimizer in optimizers:
            if optimizer is not left_out:
                optimizer.step()
        path.append(flat(model.parameters()))
    rows = tracker.history().query("layer == 'total'")
    np.testing.assert_allclose(rows.norm, [np.linalg.norm(x) for x in path])
    np.testing.assert_allclose(rows.step_norm[1:], np.linalg.norm(np.diff(path, axis=0), axis=1))


@pytest.mark.parametrize("hidden", [True, False])
def test_what_is_written_between_the_steps_of_two_optimizers_is_in_neither(hidden):
    """Weights of one network are clipped before the other steps, and both have small tensors of one layer."""
    model = Model()
    critic = [model.embed.weight, model.head.bias]
    rest = [p for p in model.parameters() if all(p is not q for q in critic)]
    optimizers = [torch.optim.SGD(critic, LR), torch.optim.SGD(rest, LR)]
    tracker = NormTracker(model, by=None)
    for optimizer in optimizers:
        tracker.attach(optimizer)
    wanted = []
    for ids in batches(4):
        model(ids).backward()
        delta = np.zeros_like(flat(model.parameters()))
        for optimizer in optimizers:
            theta = flat(model.parameters())
            optimizer.step()
            delta += flat(model.parameters()) - theta
            with torch.no_grad():
                for p in critic if optimizer is optimizers[0] else []:
                    (p.data if hidden else p).clamp_(-0.3, 0.3)
        wanted.append(np.linalg.norm(delta))
    with pytest.warns(UserWarning, match=OUTSIDE):
        rows = tracker.history()
    np.testing.assert_allclose(rows.step_norm[1:], wanted)


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("name", ["SAM, closure", "Lookahead", "Muon and AdamW", "in backward", "two fused"])
def test_every_nth_step_is_that_step_alone(name, every):
    wanted, tracker = run(name, LOOPS[name], Model(), {"every": every})
    assert tracker.steps == 7
    np.testing.assert_allclose(measured(tracker), wanted[every - 1 :: every], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, wrappers.Projected, wrappers.Lookahead], ids=str)
def test_a_step_that_raises_is_forgotten(optimizer):
    """As where a notebook is interrupted within a closure, and its loop run again."""
    model = Model()
    inner = torch.optim.SGD(model.parameters(), LR)
    optimizer = optimizer(inner) if optimizer is wrappers.Lookahead else optimizer(model.parameters(), LR)
    tracker = NormTracker(model)
    tracker.attach(optimizer)

    def interrupted():
        raise KeyboardInterrupt

    model(batches()[0]).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    for _ in range(3):
        optimizer.step()
    assert tracker.steps == 3


def test_what_is_detached_is_as_before():
    model = Model()
    optimizer = wrappers.Lookahead(torch.optim.SGD(model.parameters(), LR))
    tracker = NormTracker(model)
    detach = tracker.attach(optimizer)
    for known in (optimizer, optimizer.optimizer):
        with pytest.raises(ValueError, match="on this optimizer already"):
            tracker.attach(known)
    detach()
    assert "step" not in vars(optimizer) and not optimizer.optimizer._optimizer_step_pre_hooks
    optimizer.step()
    assert tracker.steps == 0
    tracker.attach(optimizer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_an_optimizer_steps_on_its_own_parameters(duplicate):
    model = Model()
    optimizer = wrappers.ScheduleFree(torch.optim.SGD(model.parameters(), LR))
    tracker = NormTracker(model)
    tracker.attach(optimizer)
    other = duplicate(optimizer)
    before = flat(model.parameters())
    for p in wrappers.parameters(other):
        p.grad = torch.ones_like(p)
    old = flat(wrappers.parameters(other))
    other.step()
    assert (flat(model.parameters()) == before).all() and tracker.steps == 0
    assert (flat(wrappers.parameters(other)) != old).any()


def test_a_reading_in_inference_mode_leaves_the_rest_as_it_is():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    tracker = NormTracker(model, gradients=True)
    tracker.attach(optimizer)
    for ids in batches(3):
        model(ids).backward()
        theta = flat(model.parameters())
        with torch.inference_mode():
            optimizer.step()
            tracker.snapshot()
            tracker.latest()
        delta = flat(model.parameters()) - theta
        assert tracker.latest()["step_norm/total"] == pytest.approx(np.linalg.norm(delta))


EMPTY = [nn.LazyLinear(3), nn.Linear(2, 3, device="meta")]


@pytest.mark.parametrize("module", EMPTY, ids=["lazy", "meta"])
def test_parameters_without_values_are_refused(module):
    with pytest.raises(ValueError, match="weight has no values yet"):
        NormTracker(module)


def test_parameters_that_share_memory_warn():
    model = Model()
    model.blocks[1].bias.data = model.blocks[1].bias.data.clone()
    NormTracker(model)
    model.head = nn.Linear(8, 11)
    model.head.weight.data = model.embed.weight.data
    with pytest.warns(UserWarning, match="head.weight shares its memory with embed.weight"):
        NormTracker(model)


def test_gradients_that_are_freed_before_they_can_be_read_are_not_zero():
    model = Model()
    optimizer = wrappers.Fused(model.parameters(), LR)
    tracker = NormTracker(model, gradients=True)
    theta = flat(model.parameters())
    with tracker.step():
        model(batches()[0]).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"moved without gradients in \.grad"):
        latest = tracker.latest()
    assert latest["step_norm/total"] == pytest.approx(np.linalg.norm(flat(model.parameters()) - theta))
    assert not any(name.startswith(("grad_norm", "projection")) for name in latest)


def test_a_parameter_without_a_gradient_that_stays_has_none():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    tracker = NormTracker(model, gradients=True)
    tracker.attach(optimizer)
    model(batches()[0]).backward()
    model.head.weight.grad = None
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        latest = tracker.latest()
    assert latest["grad_norm/head"] == pytest.approx(float(model.head.bias.grad.norm()))
    by_layer = [value**2 for name, value in latest.items() if name.startswith("grad_norm/") and "total" not in name]
    assert latest["grad_norm/total"] ** 2 == pytest.approx(sum(by_layer)) and len(by_layer) == len(tracker.layers)


def new_head(model):
    model.head = nn.Linear(8, 4, dtype=torch.float64)


def tied(model):
    model.head = nn.Linear(8, 11, dtype=torch.float64)
    model.head.weight = model.embed.weight


def tied_later(model):
    model.blocks[1].bias = model.blocks[0].bias


def removed(model):
    del model.blocks[1]


def weight_norm(model):
    torch.nn.utils.parametrizations.weight_norm(model.head)


def adapters(model):
    model.lora_A = nn.Parameter(torch.zeros(2, 8, dtype=torch.float64))


CHANGES = [
    (new_head, r"head.weight \(2 in all\) was replaced"), (tied, r"head.weight \(2 in all\) was tied to embed.weight"),
    (tied_later, "blocks.1.bias was tied to blocks.0.bias"), (removed, r"blocks.1.weight \(2 in all\) was removed"),
    (weight_norm, "head.weight was removed"), (adapters, "lora_A came into the model"),
]  # fmt: skip


@pytest.mark.parametrize("given", ["a model", "named_parameters()", "compiled"])
@pytest.mark.parametrize(("change", "text"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_model_that_has_other_parameters_now_warns(change, text, given):
    model = Model()
    whole = torch.compile(model) if given == "compiled" else model
    tracker = NormTracker(whole.named_parameters() if given[0] == "n" else whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.latest()
    change(model)
    with pytest.warns(UserWarning, match=text):
        tracker.latest()


def test_parameters_that_come_into_an_optimizer_later_warn():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    tracker = NormTracker(list(model.named_parameters()))
    tracker.attach(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.warns(UserWarning, match=r"shape \(3,\) came into the optimizer after tracking began"):
        tracker.latest()


def test_a_list_of_parameters_whose_optimizer_has_a_replaced_one_warns():
    model = Model()
    tracker = NormTracker(list(model.named_parameters()))
    new_head(model)
    tracker.attach(torch.optim.SGD(model.parameters(), LR))
    with pytest.warns(UserWarning, match=r"head.weight \(2 in all\) is in none of the attached optimizers"):
        tracker.latest()


@pytest.mark.parametrize("rows", [7, 20, 4000])
def test_parameters_that_are_resized_are_counted_and_warn(rows):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    tracker = NormTracker(model, gradients=True)
    tracker.attach(optimizer)
    tracker.snapshot()
    for step, ids in enumerate(batches(4)):
        if step == 2:
            model.embed.weight.data = torch.ones(rows, 8, dtype=torch.float64)
            model.embed.weight.grad = None
        optimizer.zero_grad()
        model(ids % 7).backward()
        theta = flat(model.parameters())
        optimizer.step()
        delta = flat(model.parameters()) - theta
        row = measured(tracker)[-1] if step != 2 else None
        if row is None:
            with pytest.warns(UserWarning, match="embed.weight has another size than before"):
                row = measured(tracker)[-1]
        assert row[:3] == pytest.approx([norm(model), np.linalg.norm(delta), theta @ delta])
    assert tracker.identity_error() < 1e-12
    assert np.isnan(tracker.history().query("layer == 'embeddings'").cos_similarity.iloc[-1])


def test_embeddings_of_transformers_that_are_resized_or_tied_warn():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = NormTracker(model)
    tracker.attach(optimizer)
    model.resize_token_embeddings(12)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.tensor([[10, 11, 3]])
    model(ids, labels=ids).loss.backward()
    with pytest.warns(UserWarning, match=r"wte.weight (has another size|was replaced)"), tracker.step():
        optimizer.step()
        tracker.latest()
        tracker.latest()


def test_a_loop_that_writes_new_tensors_warns():
    """As with torch.func: what is tracked stays as it was."""
    weights = {"w": torch.ones(3)}
    tracker = NormTracker(weights.items(), frozen=True)
    for _ in range(256):
        with tracker.step():
            weights = {name: value * 0.9 for name, value in weights.items()}
    with pytest.warns(UserWarning, match="256 steps or more have ended and no tracked parameter has been written"):
        tracker.latest()


@pytest.mark.parametrize("fused", [True, False])
def test_parameters_that_are_views_of_a_flat_buffer_are_those_that_the_optimizer_trains(recwarn, fused):
    """As in optimizers that keep all parameters in one vector: steps and gradients are those of whole vectors."""
    model = Model()
    parameters = list(model.parameters())
    buffer = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    for p, part in zip(parameters, buffer.data.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    optimizer = torch.optim.AdamW([buffer], LR, fused=fused)
    tracker = NormTracker(model, gradients=True)
    tracker.attach(optimizer)
    wanted = []
    for ids in batches():
        model.zero_grad()
        model(ids).backward()
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        buffer.grad = gradient.clone()
        theta = flat(parameters)
        optimizer.step()
        delta = flat(parameters) - theta
        wanted.append([np.linalg.norm(delta), theta @ delta, theta @ flat([gradient])])
    rows = tracker.history().query("layer == 'total' and step > 0")
    np.testing.assert_allclose(rows[["step_norm", "inner", "projection"]], wanted, rtol=1e-9, atol=1e-12)
    assert not [warning for warning in recwarn if "optimizer" in str(warning.message)]
