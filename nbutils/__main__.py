"""The command line: ``nbutils norms SOURCE …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from nbutils.checkpoints import Series

SOURCES = """\
SOURCE is a folder of checkpoints (step1000, checkpoint-300000, step_20k, …), a repository of the Hugging Face Hub whose
revisions name steps (EleutherAI/pythia-70m), one revision of it (org/name@step1000), or a folder of the Hub's cache
(models--org--name). Several make one series: google/multiberts-seed_0-step_0k google/multiberts-seed_0-step_20k …

columns of the table
  step, layer      total; with --by layer also embeddings, block 0, … (or encoder 0, …, text encoder 0, …), head, rest;
                   with --by type attention, mlp, norm, …; with --by tensor each tensor
  norm             parameter norm ρ
  cos_similarity   cosine between these parameters and those of the step before
  displacement_sq  ‖Δ‖², Δ the difference to the step before
  inner            2θ·Δ, θ the parameters of the step before; ρ² grows by displacement_sq + inner
"""


UNDETERMINED = "not determined by this series"


def parser() -> argparse.ArgumentParser:
    """All options of the command."""
    top = argparse.ArgumentParser(prog="nbutils", description="Tools of an executable book on parameter norm growth.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    norms = commands.add_parser(
        "norms",
        help="norm growth along a series of checkpoints",
        description="Parameter norm, direction and norm budget along a series of checkpoints. No model is built.",
        epilog=SOURCES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    norms.add_argument("source", nargs="+", metavar="SOURCE", help="folders, or Hub repositories; see below")
    norms.add_argument(
        "--by", choices=("total", "layer", "type", "tensor"), default="total", help="rows of each as well"
    )
    norms.add_argument("--out", type=Path, metavar="CSV", help="write the table here; the same command again goes on")
    norms.add_argument("--plot", type=Path, metavar="PNG", help="draw the curve (.png, .svg or .pdf)")
    norms.add_argument("--match", default="*", metavar="PATTERN", help="only folders or revisions such as 'stage1-*'")
    norms.add_argument("--step", metavar="REGEX", help=r"its one group is the step in a name, such as 'phase2_(\d+k)'")
    norms.add_argument("--json", action="store_true", help="print all of the result as JSON, and nothing else")
    norms.add_argument("--jobs", type=int, default=1, metavar="N", help="tensors read at once")
    norms.add_argument("--no-keep", action="store_true", help="delete each download after use")
    norms.add_argument("--overwrite", action="store_true", help="begin --out anew")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 2 if there is nothing to measure, with one line that says why; 130 if interrupted."""
    options = parser().parse_args(arguments)
    for path, endings in ((options.out, None), (options.plot, (".png", ".svg", ".pdf"))):
        if path and not path.resolve().parent.is_dir():
            return _failed(f"{path}: its folder does not exist")
        if path and endings and path.suffix not in endings:
            return _failed(f"{path}: give a name that ends in {', '.join(endings)}")
    if options.plot:
        try:
            import matplotlib  # noqa: F401
            import seaborn  # noqa: F401
        except ImportError:
            return _failed("--plot needs matplotlib and seaborn: pip install 'nbutils[plot]', or these two")
    from nbutils import checkpoints

    try:
        result = checkpoints.series(
            options.source,
            by=options.by,
            out=options.out,
            match=options.match,
            step=options.step,
            jobs=options.jobs,
            keep=not options.no_keep,
            overwrite=options.overwrite,
            progress=True,
        )
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _failed(f"stopped{'; the same command goes on from here' if options.out else ''}", 130)
    if options.json:
        print(as_json(result))
    elif not options.out:
        print(result.table.to_csv(index=False, lineterminator="\n"), end="")
    print(summary(result), file=sys.stdout if options.out and not options.json else sys.stderr)
    if options.plot:
        plot(result, options.plot)
    return 0


def _failed(why: str, code: int = 2) -> int:
    print(f"nbutils norms: {why}", file=sys.stderr)
    return code


def as_json(result: Series) -> str:
    """The table as a list of rows, and what did not count with its reasons."""
    import json

    rows = json.loads(result.table.to_json(orient="records", double_precision=15))
    skips = {kind: [skip._asdict() for skip in getattr(result, kind)] for kind in ("duplicates", "skipped")}
    found = {"table": rows, **skips, "left_out": result.left_out, "parameters": result.parameters}
    return json.dumps(found, indent=1, ensure_ascii=False)


def summary(result: Series) -> str:
    """What the series says, in lines: growth with intervals, local exponents, norm budget, and what did not count."""
    from nbutils.checkpoints.sources import grouped

    table = result.table
    total = table[table.layer == "total"]
    resumed = f", {result.resumed} of them from the run before" if result.resumed else ""
    first, last = total.iloc[0], total.iloc[-1]
    lines = [
        f"{len(total)} checkpoint{'s' if len(total) > 1 else ''}, steps {first.step} to {last.step}{resumed}; "
        f"{result.parameters:,} parameters",
        f"norm {first.norm:.6g} to {last.norm:.6g}{_exponent(total)}",
        *growth(total),
        *budget(total),
        *_by_layer(table),
    ]
    for title, skips in (("duplicates", result.duplicates), ("skipped", result.skipped)):
        if skips:
            lines.append(f"{title}, not counted:")
            lines += [f"  {line}" for line in (grouped(skips) if title == "skipped" else skips)]
    if result.left_out:
        reasons: dict[str, list[str]] = {}
        for name, why in result.left_out.items():
            reasons.setdefault(why, []).append(name)
        lines.append("tensors left out:")
        for why, names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"  {why}: {', '.join(names[:2])}{more}")
    return "\n".join(lines)


def growth(total: pd.DataFrame, samples: int = 200) -> list[str]:
    """Power laws with 95 % intervals from moving-block resamples, and the local exponent of each octave."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scipy, on resamples that a form fits badly; they are counted below
        return _growth(total, samples)


def _growth(total: pd.DataFrame, samples: int) -> list[str]:
    t, rho, enough = _curve(total)
    few = f"no fit: at least 5 norms that differ, at steps above 0, are needed; there are {len(t)}"
    return [*(_fits(t, rho, samples) if enough else [few]), *_octaves(t, rho)]


def _curve(rows: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """Steps above 0 and their norms, and whether these are enough for a fit: one rule for text and figure."""
    after = rows[(rows.step > 0) & (rows.norm > 0)]
    t, rho = after.step.to_numpy(float), after.norm.to_numpy(float)
    return t, rho, len(t) >= 5 and rho.min() < rho.max()


def _fits(t: NDArray[np.float64], rho: NDArray[np.float64], samples: int) -> list[str]:
    import numpy as np

    from nbutils import fits

    block = max(2, round(len(t) ** (1 / 2)))
    lines = [
        f"fits over steps {t[0]:.0f} to {t[-1]:.0f}, with 95 % intervals from the scatter around each curve "
        f"(residuals in blocks of {block}; another seed may differ more):"
    ]
    for form in ("sqrt", "square", "log", "power", "power_offset")[: 5 if len(t) > 6 else 4]:
        label, names = fits.FORMS[form].label, fits.FORMS[form].parameters
        try:
            found = fits.fit(form, t, rho)
            if form == "power_offset" and abs(found.values["p"]) < fits.P_NEAR_0:
                lines.append(f"  {label}: {UNDETERMINED} (p runs to 0: a logarithm fits as well)")
                continue

            def parameters(t: np.ndarray, rho: np.ndarray, form: str = form) -> list[float]:
                try:
                    return list(fits.fit(form, t, rho).values.values())
                except RuntimeError:  # a resample that the form does not fit
                    return [np.nan] * len(fits.FORMS[form].parameters)

            draws = fits.bootstrap(found, t, parameters, block=block, samples=samples, seed=0)
        except RuntimeError:
            lines.append(f"  {label}: no fit")
            continue
        kept = draws[np.isfinite(draws).all(1)]
        if len(kept) < 0.9 * samples:
            lines.append(f"  {label}: {UNDETERMINED} (R² = {found.r2:.4f})")
            continue
        low, high = np.quantile(kept, [0.025, 0.975], axis=0)
        values = list(zip(names, found.values.values(), low, high, strict=True))
        if why := _undetermined(values, float(rho.max())):
            lines.append(f"  {label}: {UNDETERMINED} ({why})")
            continue
        told = ", ".join(f"{name} = {value:.4g} [{a:.4g}, {b:.4g}]" for name, value, a, b in values)
        lines.append(f"  {label}: {told}; R² = {found.r2:.4f}")
    return lines


def _undetermined(values: list[tuple[str, float, float, float]], size: float) -> str:
    """Why estimates with intervals mean nothing, or ``""``; ``size`` is that of the norms.

    >>> _undetermined([("a", 15000.0, 3.0, 13000.0), ("p", 0.02, 0.01, 0.4), ("b", -15000.0, -13000.0, 27.0)], 60.0)
    'a = 1.5e+04 lies outside its own interval [3, 1.3e+04]'
    """
    from nbutils.fits import P_NEAR_0

    if len(values) == 3:  # a·tᵖ + b
        _, p, low, high = values[1]
        if low < P_NEAR_0 and high > -P_NEAR_0:
            return f"p = {p:.3g} [{low:.3g}, {high:.3g}] may be 0: a logarithm fits as well"
    for name, value, low, high in values:
        rounding = 1e-6 * {"p": 1.0, "b": size}.get(name, abs(value))
        if not low - rounding <= value <= high + rounding:
            return f"{name} = {value:.4g} lies outside its own interval [{low:.4g}, {high:.4g}]"
    return ""


def _octaves(t: NDArray[np.float64], rho: NDArray[np.float64]) -> list[str]:
    """Local exponents, in octaves counted back from the last step."""
    import numpy as np

    from nbutils import fits

    count = int(np.log2(t[-1] / t[0])) if len(t) else 0
    if not count:
        return []
    edges = t[-1] * 2.0 ** np.arange(-count, 1)
    names = [f"{edge:.0f}" if edge >= 100 else f"{edge:.3g}" for edge in edges]
    octaves = zip(names, names[1:], fits.local_exponents(t, rho, edges), strict=False)
    told = ", ".join(f"{start}–{end}: {slope:.3f}" for start, end, slope in octaves)
    return [f"exponent d ln ρ / d ln t by octave: {told}"]


def budget(total: pd.DataFrame) -> list[str]:
    """Shares of the growth of ρ² over all intervals."""
    moved, inner = total.displacement_sq.sum(), total.inner.sum()
    grown = moved + inner
    if len(total) < 2:
        return []
    shares = f", {moved / grown:.1%} and {inner / grown:.1%}" if abs(grown) > 1e-9 * (moved + abs(inner)) > 0 else ""
    return [
        f"norm budget: ρ² grew by {grown:.6g} = ‖Δ‖² {moved:.6g} + 2θ·Δ {inner:.6g}{shares} (of intervals, not steps)"
    ]


def _exponent(rows: pd.DataFrame) -> str:
    """Of one layer, between its first step above 0 and its last."""
    import math

    t, rho, _ = _curve(rows)
    if len(t) < 2:
        return ""
    return f"; exponent {math.log(rho[-1] / rho[0]) / math.log(t[-1] / t[0]):.3f} from step {t[0]:.0f} to {t[-1]:.0f}"


def _by_layer(table: pd.DataFrame) -> list[str]:
    lines = []
    for layer, rows in table.groupby("layer", sort=False):
        if layer == "total":
            continue
        lines.append(f"  {layer}: {rows.norm.iloc[0]:.6g} to {rows.norm.iloc[-1]:.6g}{_exponent(rows)}")
    return ["by layer:", *lines] if lines else []


def plot(result: Series, path: Path) -> None:
    """Norm against step, by layer where there are layers, with the fitted square root beside it."""
    import matplotlib.pyplot as plt
    import numpy as np

    from nbutils import figures, fits

    figures.use_style()
    table = result.table
    total, parts = table[table.layer == "total"], table[table.layer != "total"]
    ax = figures.axes("step $t$", r"parameter norm $\rho$")
    layers = list(dict.fromkeys(parts.layer))
    blocks = [layer for layer in layers if layer.split(" ")[-1].isdigit()]
    colours = dict(zip(blocks, plt.get_cmap("viridis")(np.linspace(0.05, 0.85, max(len(blocks), 1))), strict=False))
    fixed = {"embeddings": figures.ORANGE, "head": figures.GREEN, "rest": figures.PINK}
    for layer, rows in parts.groupby("layer", sort=False):
        named = layer not in blocks or layer in (blocks[0], blocks[-1])
        colour = colours.get(layer, fixed.get(layer))
        ax.plot(rows.step, rows.norm, color=colour, linewidth=1.2, label=layer if named else None)
    ax.plot(total.step, total.norm, "o-", color=figures.BLUE, label="total", markersize=3.5 if len(total) < 60 else 2)
    t, rho, enough = _curve(total)
    if enough:
        a, b = fits.fit("sqrt", t, rho).values.values()
        line, label = np.linspace(t[0], t[-1], 300), f"fit $a\\sqrt{{t}}+b$\n$a$ = {a:.4g}, $b$ = {b:.4g}"
        ax.plot(line, a * np.sqrt(line) + b, label=label, **figures.THEORY)
    elif len(t):
        line = np.linspace(total.step.iloc[0], t[-1], 300)
        ax.plot(line, rho[-1] * np.sqrt(line / t[-1]), label=r"$\propto\sqrt{t}$", **figures.THEORY)
    ax.set_ylim(bottom=0)
    if layers:  # many curves: beside them
        ax.figure.set_figwidth(8.4)
        ax.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1))
    else:
        ax.legend(fontsize=9)
    ax.figure.savefig(path, dpi=200)
    plt.close(ax.figure)


if __name__ == "__main__":
    raise SystemExit(main())
