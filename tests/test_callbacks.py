"""The tracker in the loops that people use. Under plain SGD δ = −η∇L, so θ·δ = −η θ·∇L and ‖δ‖ = η‖∇L‖."""

import math
import re
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from normgrowth import callbacks
from normgrowth.norms import NormTracker, norm
from workflow import ROOT

LR = 0.05


def network(seed=0, tied=False):
    rng = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=rng, dtype=torch.float64)
    if tied:
        net[2].weight = net[0].weight
    return net


def assert_of_sgd(tracker, model, steps, rtol=1e-8):
    """Each step is −η times the gradient that it used, and the last norm is that of the parameters."""
    rows = tracker.history().query("layer == 'total'")
    assert list(rows.step) == list(range(steps + 1)) and tracker.steps == steps
    later = rows[1:]
    np.testing.assert_allclose(later.inner, -LR * later.projection, rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(later.step_norm, LR * later.grad_norm, rtol=rtol)
    assert (later.step_norm > 0).all()
    np.testing.assert_allclose(rows.norm.iloc[-1], norm(model), rtol=1e-12)
    assert tracker.identity_error() < 1e-12


def batches(count, seed=1):
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("closed", [False, True])
def test_a_plain_loop_and_a_closure(closed):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    tracker = NormTracker(model.named_parameters(), gradients=True)
    detach = tracker.attach(optimizer)

    def loss_of(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for x in batches(5):
        if closed:
            optimizer.step(partial(loss_of, x))
        else:
            loss_of(x)
            optimizer.step()
    assert_of_sgd(tracker, model, 5)
    with pytest.raises(ValueError, match="on this optimizer already"):
        tracker.attach(optimizer)
    detach()
    optimizer.step()
    assert tracker.steps == 5


def test_what_else_an_optimizer_is_given_reaches_it():
    class Scaled(torch.optim.SGD):
        def step(self, function, factor):
            function()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= factor * p.grad

    model = network()
    optimizer, tracker = Scaled(model.parameters(), LR), NormTracker(model, gradients=True)
    tracker.attach(optimizer)
    optimizer.step(lambda: model(batches(1)[0]).square().mean().backward(), 0.5)
    row = tracker.history().iloc[-1]
    assert row.step_norm == pytest.approx(0.5 * row.grad_norm)


def test_steps_that_a_scaler_skips_are_no_steps_and_gradients_are_unscaled():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tracker = NormTracker(model.named_parameters(), gradients=True)
    tracker.attach(optimizer)
    by_hand = NormTracker(model.named_parameters())
    for i, x in enumerate(batches(6)):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * (math.inf if i == 2 else 1.0)).backward()
        with by_hand.step():
            scaler.step(optimizer)
        scaler.update()
    assert_of_sgd(tracker, model, 5)
    assert by_hand.steps == 5


def test_accelerate_counts_steps_and_not_batches():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # kept from other tests of this process
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))
    tracker = NormTracker(model.named_parameters(), gradients=True)
    tracker.attach(optimizer)
    by_hand = NormTracker(model.named_parameters())
    for x in batches(12):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            with by_hand.step():
                optimizer.step()
            optimizer.zero_grad()
    assert_of_sgd(tracker, model, 3)
    assert by_hand.steps == 3


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return {"loss": self.net(x).square().mean()}


def trainer_of(folder, steps, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, learning_rate=LR, lr_scheduler_type="constant", optim="sgd",
        per_device_train_batch_size=2, gradient_accumulation_steps=3, logging_steps=1, save_steps=2, max_grad_norm=0.1,
        use_cpu=True, disable_tqdm=True, report_to=["tensorboard"], seed=0, **options,
    )  # fmt: skip
    rows = [{"x": x} for x in batches(40).flatten(0, 1)]
    with torch.random.fork_rng():
        return Trainer(model=Regression(), args=arguments, train_dataset=rows)


def test_trainer_with_accumulation_clipping_logs_and_resumption(tmp_path):
    trainer = trainer_of(tmp_path, 2)
    norms = callbacks.for_trainer(trainer, gradients=True)
    trainer.train()
    assert_of_sgd(norms.tracker, trainer.model, 2)
    assert norms.tracker.history().grad_norm.max() <= 0.1 + 1e-6  # as clipped
    logged = [line for line in trainer.state.log_history if "norm/total" in line]
    assert [line["norm/total"] for line in logged] == norms.tracker.history().query("layer == 'total'").norm[
        1:
    ].tolist()
    again = trainer_of(tmp_path, 4)
    norms = callbacks.for_trainer(again, gradients=True)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_of_sgd(norms.tracker, again.model, 4)


def test_the_trainer_goes_on_with_the_history_of_the_folder_that_it_resumes_from(tmp_path):
    """Into a folder where another run has left a checkpoint of the same step."""
    for folder, seed in (("a", 0), ("b", 1)):
        trainer = trainer_of(tmp_path / folder, 2)
        trainer.model.net = network(seed)
        norms = callbacks.for_trainer(trainer, gradients=True)
        trainer.train()
        if folder == "a":
            first = norms.tracker.history()
    again = trainer_of(tmp_path / "b", 4)
    norms = callbacks.for_trainer(again, gradients=True)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_of_sgd(norms.tracker, again.model, 4)
    np.testing.assert_allclose(norms.tracker.history().norm[: len(first)], first.norm)
    (tmp_path / "a" / "checkpoint-2" / "norms.pt").unlink()
    again = trainer_of(tmp_path / "b", 4)
    norms = callbacks.for_trainer(again)
    with pytest.warns(UserWarning, match=r"no .*a/checkpoint-2/norms\.pt: norms begin at step 2"):
        again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert norms.tracker.steps == 2


def test_the_trainer_resumes_from_the_last_checkpoint(tmp_path):
    trainer = trainer_of(tmp_path, 2)
    callbacks.for_trainer(trainer, gradients=True)
    trainer.train()
    again = trainer_of(tmp_path, 4)
    norms = callbacks.for_trainer(again, gradients=True)
    again.train(resume_from_checkpoint=True)
    assert_of_sgd(norms.tracker, again.model, 4)


def test_a_training_that_was_interrupted_is_not_measured_by_its_old_tracker(tmp_path):
    from transformers import TrainerCallback

    class Interrupted(TrainerCallback):
        is_due = True

        def on_step_end(self, *args, **kwargs):
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    trainer = trainer_of(tmp_path, 2)
    norms = callbacks.for_trainer(trainer)
    trainer.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    old = norms.tracker
    trainer.train()
    assert old.steps == 1 and norms.tracker.steps == 2


def test_norms_of_gradients_by_layer_reach_the_log(tmp_path):
    trainer = trainer_of(tmp_path, 2)
    norms = callbacks.for_trainer(trainer, gradients=True, by=lambda name: name.split(".")[1])
    trainer.train()
    logged = [line for line in trainer.state.log_history if "norm/total" in line]
    rows = norms.tracker.history().query("step > 0")
    for layer in ("0", "2", "total"):
        of_layer = rows[rows.layer == layer].grad_norm.tolist()
        assert [line[f"grad_norm/{layer}"] for line in logged] == of_layer


def test_trainers_reporters_get_the_norms(tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = trainer_of(tmp_path, 2)
    callbacks.for_trainer(trainer)
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = reader.EventAccumulator(str(file)).Reload()
    assert any(tag.endswith("norm/total") for tag in events.Tags()["scalars"])


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_reads_the_gradient_of_its_own_step(tmp_path, package):
    pl = pytest.importorskip(package)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), LR)

    def fit(steps, **options):
        norms, module = callbacks.for_lightning(gradients=True), Module()
        logger = pl.loggers.CSVLogger(tmp_path / f"{steps}")
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", callbacks=[norms], logger=logger, log_every_n_steps=1,
            accumulate_grad_batches=2, gradient_clip_val=0.5, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches(40), batch_size=None), **options)
        return norms, module, trainer, logger

    norms, module, trainer, logger = fit(3)
    assert_of_sgd(norms.tracker, module, 3)
    logger.save()
    assert "norm/total" in next((tmp_path / "3").rglob("metrics.csv")).read_text()
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    norms, module, *_ = fit(5, ckpt_path=tmp_path / "three.ckpt")
    assert_of_sgd(norms.tracker, module, 5)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_two_optimizers_of_lightning_are_one_step(tmp_path, package):
    pl = pytest.importorskip(package)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = network(0), network(1)

        def training_step(self, batch, _):
            for optimizer, loss in zip(self.optimizers(), (self.critic, self.generator), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss(batch).square().mean())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), LR) for net in (self.critic, self.generator)]

    module, norms = Module(), callbacks.for_lightning(gradients=True)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[norms], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(4), batch_size=None))
    assert_of_sgd(norms.tracker, module, 4)


def test_the_page_on_callbacks_runs_and_names_each_column(tmp_path, monkeypatch):
    pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "book" / "callbacks.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    spaces = [{} for _ in examples]
    for example, space in zip(examples, spaces, strict=True):
        exec(compile(example, "callbacks.md", "exec"), space)
    (plain,) = [space for space in spaces if "tracker" in space and "noise" not in space]
    (null,) = [space for space in spaces if "tracker" in space and "noise" in space]
    assert null["noise"].steps == null["tracker"].steps == 100
    tracker = plain["tracker"]
    tracker.snapshot()
    plain["optimizer"].step()
    logged = {name for name in tracker.latest() if name.endswith("/total")}
    assert logged == set(re.findall(r"^\| `(\w+/total)`", text, re.M))


def test_tied_weights_count_once_however_they_are_named():
    model = network(tied=True)
    twice = NormTracker(model.named_parameters(remove_duplicate=False))
    assert twice.history().norm.iloc[-1] == pytest.approx(norm(model), rel=1e-13)


def test_what_is_unfrozen_later_is_told_or_counted_from_the_start():
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    some, every = (NormTracker(model.named_parameters(), frozen=frozen) for frozen in (False, True))
    model[0].requires_grad_(True)
    model(batches(1)[0]).square().mean().backward()
    with pytest.warns(UserWarning, match=r"0\.weight \(2 in all\) was frozen when tracking began"), some.step():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with every.step(), some.step():
            optimizer.step()
    rows = every.history().query("layer == 'total'")
    assert rows.norm.iloc[-1] == pytest.approx(norm(model), rel=1e-13)
    assert some.history().norm.iloc[-1] < rows.norm.iloc[-1]


def test_history_goes_on_from_a_state_and_refuses_another_networks():
    model = network()
    first = NormTracker(model.named_parameters())
    with first.step(), torch.no_grad():
        model[0].weight.add_(1.0)
    second = NormTracker(model.named_parameters())
    second.load_state_dict(first.state_dict())
    with second.step(), torch.no_grad():
        model[2].weight.add_(1.0)
    rows = second.history().query("layer == 'total'")
    assert list(rows.step) == [0, 1, 2] and rows.norm.iloc[-1] == pytest.approx(norm(model), rel=1e-13)
    with pytest.raises(ValueError, match="the history is of layers"):
        NormTracker([("lm_head.weight", model[0].weight)]).load_state_dict(first.state_dict())


def test_a_history_in_another_order_of_layers_goes_on_by_name():
    model = network()
    by = lambda name: name.split(".")[0]  # noqa: E731
    first = NormTracker(reversed(list(model.named_parameters())), by=by)
    with first.step(), torch.no_grad():
        model[0].weight.add_(1.0)
    second = NormTracker(model.named_parameters(), by=by)
    assert second.layers == first.layers[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
    ours, theirs = (tracker.history().set_index(["step", "layer"]) for tracker in (second, first))
    assert (ours.norm == theirs.norm[ours.index]).all()


def test_the_history_of_other_parameters_is_told():
    first = NormTracker(network(0).named_parameters())
    with pytest.warns(UserWarning, match=r"ends at ‖θ‖ = .* and the parameters have .* another run"):
        NormTracker(network(1).named_parameters()).load_state_dict(first.state_dict())


@pytest.mark.parametrize("wrap", ["compiled", "checkpointed", "parallel", "parametrized"])
def test_a_wrapped_model_has_the_layers_of_the_plain_one(wrap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def model():
        return nn.ModuleDict({"embed": nn.Embedding(5, 6), "layers": nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))})

    plain, wrapped = model(), model()
    wrapped.load_state_dict(plain.state_dict())
    if wrap == "compiled":
        wrapped = torch.compile(wrapped)
    elif wrap == "checkpointed":
        wrapped["layers"][0] = checkpoint_wrapper(wrapped["layers"][0])
    elif wrap == "parallel":
        wrapped = nn.DataParallel(torch.compile(wrapped))
    else:
        torch.nn.utils.parametrizations.weight_norm(wrapped["layers"][0])
        plain = wrapped
    for by in (lambda name: name.split(".")[0], None, NormTracker.__init__.__kwdefaults__["by"]):
        one, two = (NormTracker(net, by=by).latest() for net in (plain, wrapped))
        assert one == two
    assert {"norm/block 0", "norm/block 1", "norm/embeddings"} <= two.keys()


def test_shards_of_two_processes_are_one_norm(tmp_path):
    """FSDP2 and tensor parallelism against the full tensors, in two processes over gloo."""
    code = [sys.executable, str(ROOT / "tests" / "two_processes.py"), str(tmp_path / "meet")]
    ranks = [subprocess.Popen([*code, str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors[0][-2000:] + errors[1][-2000:]
