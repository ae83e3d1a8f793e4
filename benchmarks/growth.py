"""How the cost of each pair's own side grows with size: CPU time and peak memory, and their exponents.

Each point is a process of its own, forked from one that has imported everything: it warms up on the smallest size,
takes the peak of its resident memory anew, and then works five times. The least time counts: what else the machine does
adds to it, by the caches even to CPU time. Linux alone tells the peak (``VmHWM``).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.numpy import save_file
from scipy.special import stdtrit
from torch import nn
from tqdm import tqdm

from benchmarks.degrees import K_IN, encoder, tokens
from benchmarks.walk import stepwise
from nbutils import checkpoints, heads, homogeneity, models, norms, saturation, training
from nbutils.chapters import ensemble, projection, walks
from nbutils.device import generator

Work = Callable[[], object]


class Curve(NamedTuple):
    """What grows, in which variable, at which sizes; ``prepare(size, folder)`` returns the work to time."""

    what: str
    variable: str
    sizes: tuple[int, ...]
    prepare: Callable[[int, Path], Work]


class Exponent(NamedTuple):
    """p of value ∝ size^p, and its 95 % interval."""

    p: float
    low: float
    high: float


def exponent(sizes: ArrayLike, values: ArrayLike) -> Exponent:
    """Least squares of ln value on ln size; the interval is Student's, from the scatter about the line.

    Raises:
        ValueError: fewer than three points, or a value that is not positive.

    >>> exponent([1, 2, 4, 8], [3, 6, 12, 24])
    Exponent(p=1.0, low=1.0, high=1.0)
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) < 3 or not (y > 0).all():
        raise ValueError(f"an exponent needs three points or more, all positive; got {y.tolist()}")
    x, y = np.log(x) - np.log(x).mean(), np.log(y)
    p = float(x @ y / (x @ x))
    residuals = y - y.mean() - p * x
    half = stdtrit(len(x) - 2, 0.975) * math.sqrt(float(residuals @ residuals) / (len(x) - 2) / float(x @ x))
    p, half = round(p, 12), round(float(half), 12)
    return Exponent(p, p - half, p + half)


# --- Work of a given size ---------------------------------------------------------------------------------------------


def walk(n: int, t: int, count: int) -> Work:
    times = np.unique(np.geomspace(1, t, 13).astype(np.int64))  # as many times for every t
    return lambda: walks.walk_norms(walks.gaussian, n=n, times=times, walks=count, generator=generator(0, "cpu"))


def rays(scales: int, width: int) -> Work:
    first, inner, last = (nn.Linear(a, b, bias=False) for a, b in itertools.pairwise((32, width, width, 10)))
    net, rng = nn.Sequential(first, nn.ReLU(), inner, nn.ReLU(), last).double(), generator(2, "cpu")
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(0, weight.shape[1] ** -0.5, generator=rng)
    x = torch.randn(64, 32, generator=generator(0, "cpu"), dtype=torch.float64)
    along, accuracies = np.linspace(1, 2, scales), np.linspace(0, 1, 101)
    return lambda: projection.along_ray(net, x, along, accuracies, generator=generator(1, "cpu"))


def files(folder: Path, count: int, megabytes: int) -> Work:
    """Checkpoints of four float32 tensors each."""
    rng, values = np.random.default_rng(0), megabytes * 2**20 // 16
    for step in range(count):
        place = folder / f"{count}-{megabytes}" / f"step{step}"
        place.mkdir(parents=True)
        drawn = {f"h.{i}.w": rng.standard_normal(values, dtype=np.float32) for i in range(4)}
        save_file(drawn, place / "model.safetensors")
    return lambda: checkpoints.series(folder / f"{count}-{megabytes}")


def sentences(count: int) -> Work:
    model = models.CausalLM(1000, 64, 4, 4, 64, generator=generator(0, "cpu"))
    rng = generator(1, "cpu")
    lengths = torch.randint(8, 16, (count,), generator=rng).tolist()
    drawn = [torch.randint(1000, (length,), generator=rng).tolist() for length in lengths]
    return lambda: saturation.similarity_many(model, drawn, max_tokens=512)


def many_heads(count: int) -> Work:
    scores = heads.causal_mask(torch.randn(16, count, 64, 64, generator=generator(0, "cpu")))
    return lambda: heads.summarise(heads.saturated(scores))


def tracked(parameters: int) -> Work:
    model = nn.ParameterList(torch.zeros(parameters // 8) for _ in range(8))
    made: list[norms.NormTracker] = []

    def step() -> None:
        if not made:  # in the first step, so that what it keeps is seen; the least time is that of another
            made.append(norms.NormTracker(model.named_parameters()))
        (tracker,) = made
        tracker.before()
        with torch.no_grad():
            for parameter in model:
                parameter += 0.01
        tracker.after()

    return step


def members(count: int) -> Work:
    batches = [torch.randint(64, (8, 17), generator=generator(0, "cpu"))]
    trained = ensemble.grid(np.geomspace(1e-4, 1e-2, count), (0.1,))
    return lambda: ensemble.train_ensemble(
        lambda seed: models.CausalLM(64, 16, 2, 2, 16, generator=generator(seed, "cpu")),
        batches, trained, steps=5, every=5, device="cpu", progress=False,
    )  # fmt: skip


def deep_training(depth: int) -> Work:
    net = models.CausalLM(500, 64, depth, 4, 32, generator=generator(0, "cpu"))
    batch = torch.randint(500, (8, 33), generator=generator(1, "cpu"))
    return lambda: training.train(net, [batch], steps=4, every=4, device="cpu", progress=False)


def algebra(depth: int) -> Work:
    net = encoder(depth, 64)
    return lambda: homogeneity.degree(net, K_IN, approximate=True)


def measured(depth: int) -> Work:
    net, x = encoder(depth, 64), tokens(64)
    return lambda: homogeneity.measure_degree(net, x, [1000, 2000], k_in=K_IN)


CURVES = (
    Curve("random walk, 20 walks to t = 10⁶", "n", (4096, 16384, 65536, 262144), lambda n, _: walk(n, 10**6, 20)),
    Curve("random walk, 20 walks, n = 10⁴", "t", (10**3, 10**5, 10**7, 10**9), lambda t, _: walk(10**4, t, 20)),
    Curve("the same, step by step", "t", (8, 16, 32, 64), lambda t, _: lambda: stepwise(10**4, t, 20, 0)),
    Curve("projection sweep, 101 accuracies", "scales", (32, 64, 128, 256), lambda s, _: rays(s, 128)),
    Curve("projection sweep, 32 scales", "width", (128, 256, 512, 1024), lambda d, _: rays(32, d)),
    Curve("series of checkpoints of 8 MB", "checkpoints", (2, 4, 8, 16), lambda k, f: files(f, k, 8)),
    Curve("series of 2 checkpoints", "megabytes", (16, 32, 64, 128), lambda m, f: files(f, 2, m)),
    Curve("representation similarity", "sentences", (50, 100, 200, 400), lambda s, _: sentences(s)),
    Curve("saturated heads, 16 sentences of 64 tokens", "heads", (8, 16, 32, 64), lambda h, _: many_heads(h)),
    Curve("norm tracking, one step", "parameters", (2**19, 2**20, 2**21, 2**22), lambda p, _: tracked(p)),
    Curve("trainings at once, width 16", "trainings", (8, 16, 32, 64), lambda m, _: members(m)),
    Curve("language-model training, 4 steps", "depth", (2, 4, 8, 16), lambda d, _: deep_training(d)),
    Curve("degree by algebra", "depth", (3, 6, 12, 24), lambda d, _: algebra(d)),
    Curve("degree by measurement", "depth", (3, 6, 12, 24), lambda d, _: measured(d)),
)


# --- Measurement ------------------------------------------------------------------------------------------------------


def memory(field: str) -> float:
    """``VmHWM`` (peak) or ``VmRSS`` of this process, MB; NaN where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return math.nan
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def point(curve: Curve, size: int, repeats: int = 5) -> tuple[float, float]:
    """Least CPU time (s) and peak memory above the start (MB) of one size, in a process of its own.

    Raises:
        RuntimeError: the process ended without a result.
    """
    context = multiprocessing.get_context("fork")  # spawned ones would import torch again, two seconds each
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_point, args=(curve, size, repeats, there))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError(f"{curve.what}: the process for {curve.variable} = {size} ended early") from None
    finally:
        child.join()


def _point(curve: Curve, size: int, repeats: int, connection: Any) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        warm, work = (curve.prepare(s, Path(folder) / str(i)) for i, s in enumerate((curve.sizes[0], size)))
        warm()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # or the work fits into what the warm-up left, and takes nothing
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, seconds = memory("VmRSS"), []
        for _ in range(repeats):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
        connection.send((min(seconds), max(memory("VmHWM") - before, 0.0)))


def measure(curve: Curve) -> dict[str, Any]:
    """A row: the exponent of time and its interval, that of memory if each size needs over 1 MB, and the points."""
    points = [(size, *point(curve, size)) for size in curve.sizes]
    p = exponent(curve.sizes, [seconds for _, seconds, _ in points])
    megabytes = [mb for _, _, mb in points]
    made = {"what": curve.what, "variable": curve.variable, "from": curve.sizes[0], "to": curve.sizes[-1]}
    made |= {"exponent": p.p, "low": p.low, "high": p.high, "peak_mb_first": megabytes[0], "peak_mb": megabytes[-1]}
    if min(megabytes) > 1:
        made["memory_exponent"] = exponent(curve.sizes, megabytes).p
    return made | {"points": [{"size": s, "seconds": t, "peak_mb": mb} for s, t, mb in points]}


def rows(curves: Sequence[Curve] = CURVES) -> list[dict[str, Any]]:
    importlib.import_module("torch._dynamo")  # the first vmap imports it: here, once for all
    return [measure(curve) for curve in tqdm(curves, desc="curves")]
