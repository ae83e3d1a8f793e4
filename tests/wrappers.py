"""Optimizers that hold or replace another, written after the published algorithms and the ways of their authors' code.

What matters is kept: which constructor runs, what is written by ``p.data``, when gradients exist, and what a closure is
called for.
"""

import collections
import contextlib

import torch
from torch import nn
from torch.optim import Optimizer


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class SAM(Optimizer):
    """Foret et al. 2021. Ascend by ρ∇L/‖∇L‖, take the gradient there, go back, and step with it."""

    def __init__(self, params, base_optimizer, rho=0.05, restore="exact", **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.restore = restore

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        length = torch.stack([p.grad.norm() for p in parameters(self)]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                ascent = p.grad * (group["rho"] / (length + 1e-12))
                self.state[p]["old"], self.state[p]["ascent"] = p.data.clone(), ascent
                p.add_(ascent)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in parameters(self):
            if self.restore == "exact":
                p.data = self.state[p]["old"]
            else:  # as in earlier versions, and up to rounding
                p.sub_(self.state[p]["ascent"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        evaluate = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        evaluate()
        self.second_step()


class FlatSAM(torch.optim.SGD):
    """SAM in one class without an optimizer in it: the closure is evaluated twice, or two methods are called."""

    rho = 0.05

    @torch.no_grad()
    def first_step(self):
        self.old = [p.clone() for p in parameters(self)]
        length = torch.stack([p.grad.norm() for p in parameters(self)]).norm()
        for p in parameters(self):
            p.data.add_(p.grad * (self.rho / length))

    @torch.no_grad()
    def second_step(self):
        for p, old in zip(parameters(self), self.old, strict=True):
            p.data.copy_(old - self.param_groups[0]["lr"] * p.grad)


class Lookahead(Optimizer):
    """Zhang et al. 2019. The constructor of torch's class does not run; slow weights are written by ``p.data``."""

    def __init__(self, optimizer, la_steps=3, la_alpha=0.5):
        self.optimizer, self.la_steps, self.la_alpha, self.count = optimizer, la_steps, la_alpha, 0
        self.state = collections.defaultdict(dict)
        for p in parameters(optimizer):
            self.state[p]["cached_params"] = p.data.clone()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.la_steps == 0:
            for p in parameters(self):
                slow = self.state[p]["cached_params"]
                p.data.mul_(self.la_alpha).add_(slow, alpha=1 - self.la_alpha)
                slow.copy_(p.data)
        return loss


class ScheduleFree:
    """Defazio et al. 2024, the wrapper: no class of torch; the base steps on z, and the parameters are y or x."""

    def __init__(self, base, momentum=0.9):
        self.base, self.momentum, self.count, self.is_training = base, momentum, 0, True

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def state(self):
        return self.base.state

    def zero_grad(self):
        self.base.zero_grad()

    @torch.no_grad()
    def switch(self, to):
        for p in parameters(self):
            if to in self.state[p]:
                p.copy_(self.state[p][to])

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in parameters(self):
            for name in "xyz":
                self.state[p].setdefault(name, p.clone())
            p.copy_(self.state[p]["z"])
        self.base.step()
        self.count += 1
        for p in parameters(self):
            state = self.state[p]
            state["z"].copy_(p)
            state["x"].lerp_(state["z"], 1 / self.count)
            state["y"].copy_(state["x"]).lerp_(state["z"], 1 - self.momentum)
            p.copy_(state["y"])


class WithAverage(Optimizer):
    """An average of the weights, swapped in by ``p.data``; unknown names reach the optimizer in it."""

    def __init__(self, optimizer, decay=0.9):
        self.optimizer, self.decay = optimizer, decay
        self.average = [p.data.clone() for p in parameters(optimizer)]

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, closure=None, **options):
        loss = self.optimizer.step(closure)
        for average, p in zip(self.average, parameters(self.optimizer), strict=True):
            average.lerp_(p.data, 1 - self.decay)
        return loss

    @contextlib.contextmanager
    def swapped(self):
        for _ in range(2):
            for average, p in zip(self.average, parameters(self.optimizer), strict=True):
                kept = average.clone()
                average.copy_(p.data)
                p.data.copy_(kept)
            if _ == 0:
                yield


class Noam:
    """The warm-up of the annotated transformer: rates by step, and no class of torch."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * min(self.count**-0.5, self.count * 4**-1.5)
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class Projected(torch.optim.SGD):
    """An optimizer of one's own by ``super().step``, which torch's hooks see twice, and a projection after it."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for p in parameters(self):
            p.clamp_(-1, 1)
        return loss


class Both:
    """Several optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Larc:
    """Layer-wise rates by scaled gradients, as in apex: no class of torch."""

    def __init__(self, optimizer, trust=0.02):
        self.optim, self.trust = optimizer, trust

    def __getstate__(self):
        return self.optim.__getstate__()

    @property
    def param_groups(self):
        return self.optim.param_groups

    def zero_grad(self):
        self.optim.zero_grad()

    @torch.no_grad()
    def step(self):
        for p in parameters(self):
            p.grad.data *= self.trust * p.norm() / p.grad.norm()
        self.optim.step()


class Master(Optimizer):
    """Steps on copies in float64 that it writes back after the step, as wrappers for half precision do.

    Others are stepped on directly.
    """

    def __init__(self, model_parameters, others=()):
        self.model_parameters, self.others = list(model_parameters), list(others)
        self.copies = [nn.Parameter(p.detach().double()) for p in self.model_parameters]
        self.optimizer = torch.optim.AdamW(self.copies + self.others, 0.05)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        for p in self.model_parameters + self.others:
            p.grad = None

    def step(self):
        for copy, p in zip(self.copies, self.model_parameters, strict=True):
            copy.grad = p.grad.double()
        self.optimizer.step()
        for copy, p in zip(self.copies, self.model_parameters, strict=True):
            p.data.copy_(copy.data)


class Fused(Optimizer):
    """A step within backward, in which each gradient is freed as soon as it is used (Lv et al. 2023)."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        for p in parameters(self):
            p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        p.grad = None

    def step(self, closure=None):
        pass


class OwnStep(Optimizer):
    """Chooses its ``step`` when it is made, so that the class's, and with it torch's hooks, is never called."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.step = self.update

    @torch.no_grad()
    def update(self, closure=None):
        for p in parameters(self):
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    def step(self, closure=None):
        raise AssertionError("never called: the object has a step of its own, as in optimizers that choose one")


class Named(Optimizer):
    """Takes its closure under another name, and after another argument."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, factor, *, evaluate_loss):
        with torch.enable_grad():
            evaluate_loss()
        for p in parameters(self):
            p.sub_(p.grad, alpha=factor * self.param_groups[0]["lr"])


class LineSearch(Optimizer):
    """Armijo's rule as in Vaswani et al. 2019: the loss by the closure, ``backward`` here, then losses alone."""

    def __init__(self, params):
        super().__init__(params, dict(lr=8.0))

    def step(self, closure):
        self.zero_grad(set_to_none=False)
        loss = closure()
        loss.backward()
        start = [p.detach().clone() for p in parameters(self)]
        square = sum(p.grad.square().sum() for p in parameters(self))
        rate = self.param_groups[0]["lr"]
        with torch.no_grad():
            while rate > 1e-3:
                for p, old in zip(parameters(self), start, strict=True):
                    p.copy_(old).sub_(p.grad, alpha=rate)
                if closure() <= loss - 0.1 * rate * square:
                    break
                rate /= 2


class Decayed:
    """Writes parameters that are in none of its groups, as for a decay or an average within a model."""

    def __init__(self, optimizer, decayed, all_parameters):
        self.optimizer, self.decayed, self.all_parameters = optimizer, decayed, list(all_parameters)

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for p in self.decayed:
            p.mul_(0.9)

    def zero_grad(self):
        for p in self.all_parameters:
            p.grad = None
