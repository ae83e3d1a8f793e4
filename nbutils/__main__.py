"""The command line: ``nbutils norms SOURCE …``, ``nbutils report SOURCE …``, ``nbutils check NOTEBOOK …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils import __version__

if TYPE_CHECKING:
    from nbutils.checkpoints import Series

SOURCES = """\
SOURCE is a folder of checkpoints (step1000, checkpoint-300000, step_20k, …), a repository of the Hugging Face Hub whose
revisions name steps (EleutherAI/pythia-70m), one revision of it (org/name@step1000), or a folder of the Hub's cache
(models--org--name). Several make one series: google/multiberts-seed_0-step_0k google/multiberts-seed_0-step_20k …
"""
TABLE = """
columns of the table
  step, layer      total; with --by layer also embeddings, block 0, … (or encoder 0, …, text encoder 0, …), head, rest;
                   with --by type attention, mlp, norm, …; with --by tensor each tensor
  norm             parameter norm ρ
  cos_similarity   cosine between these parameters and those of the step before
  displacement_sq  ‖Δ‖², Δ the difference to the step before
  inner            2θ·Δ, θ the parameters of the step before; ρ² grows by displacement_sq + inner
"""


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="nbutils", description="Tools of an executable book on parameter norm growth.")
    top.add_argument("--version", action="version", version=f"nbutils {__version__}, of norm-growth")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, does: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
        shape = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(name, help=does, description=description, epilog=epilog, formatter_class=shape)

    what = "Parameter norm, direction and norm budget along a series of checkpoints. No model is built."
    norms = command("norms", "norm growth along a series of checkpoints", what, SOURCES + TABLE)
    norms.add_argument(
        "--by", choices=("total", "layer", "type", "tensor"), default="total", help="rows of each as well"
    )
    norms.add_argument("--plot", type=Path, metavar="PNG", help="draw the curve (.png, .svg or .pdf)")
    norms.add_argument("--json", action="store_true", help="print all of the result as JSON, and nothing else")
    what = "The same as one page to send, its figures in it, beside what noise of the same lengths would have done."
    report = command("report", "norm growth along a series, as one page to send", what, SOURCES)
    report.add_argument("-o", "--output", type=Path, metavar="HTML", default=Path("report.html"), help="the page")
    for each in (norms, report):
        each.add_argument("source", nargs="+", metavar="SOURCE", help="folders, or Hub repositories; see below")
        each.add_argument(
            "--out", type=Path, metavar="CSV", help="write the table here; the same command again goes on"
        )
        each.add_argument(
            "--match", default="*", metavar="PATTERN", help="only folders or revisions such as 'stage1-*'"
        )
        each.add_argument("--step", metavar="REGEX", help=r"its one group is the step in a name: 'phase2_(\d+k)'")
        each.add_argument("--no-keep", action="store_true", help="delete each download after use")
        each.add_argument("--overwrite", action="store_true", help="begin --out again")
    what = "Judge chapters that papermill ran. Ends with 1 if one did not run to its end, or a check of it fails."
    check = command("check", "judge notebooks that papermill ran", what)
    check.add_argument("notebook", nargs="+", type=Path, metavar="NOTEBOOK", help="what papermill wrote")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 1 if a notebook is not sound; 2 if there is nothing to do, with one line that says why.

    Interrupted, it returns 130.
    """
    options = parser().parse_args(arguments)
    try:
        return {"norms": _norms, "report": _report, "check": _check}[options.command](options)
    except (ValueError, OSError) as error:
        return _failed(options, str(error))
    except KeyboardInterrupt:
        on = "; the same command goes on from here" if getattr(options, "out", None) else ""
        return _failed(options, f"stopped{on}", 130)


def _norms(options: argparse.Namespace) -> int:
    _writable(options.out)
    _writable(options.plot, ".png", ".svg", ".pdf")
    if options.plot:
        _can_draw("--plot")
    result = _series(options, options.by)
    from nbutils.checkpoints import report

    if options.json:
        print(report.as_json(result))
    elif not options.out:
        print(result.table.to_csv(index=False, lineterminator="\n"), end="")
    print(report.summary(result), file=sys.stdout if options.out and not options.json else sys.stderr)
    if options.plot:
        report.plot(result, options.plot)
    return 0


def _report(options: argparse.Namespace) -> int:
    _writable(options.out)
    _writable(options.output, ".html")
    _can_draw("a report")
    result = _series(options, "layer")
    from nbutils.checkpoints import page

    page.write(result, " ".join(options.source), options.output)
    print(options.output)
    return 0


def _check(options: argparse.Namespace) -> int:
    from nbutils.claims.check import judge

    found = [judge(notebook) for notebook in options.notebook]
    for _, lines in found:
        print(*lines, sep="\n")
    return 0 if all(sound for sound, _ in found) else 1


def _series(options: argparse.Namespace, by: str) -> Series:
    from nbutils import checkpoints

    how = {"match": options.match, "step": options.step, "keep": not options.no_keep, "overwrite": options.overwrite}
    return checkpoints.series(options.source, by=by, out=options.out, progress=True, **how)


def _writable(path: Path | None, *endings: str) -> None:
    if path and not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")
    if path and endings and path.suffix not in endings:
        raise ValueError(f"{path}: give a name that ends in {', '.join(endings)}")


def _can_draw(what: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{what} needs matplotlib: pip install matplotlib, or 'norm-growth[plot]'") from None


def _failed(options: argparse.Namespace, why: str, code: int = 2) -> int:
    print(f"nbutils {options.command}: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
