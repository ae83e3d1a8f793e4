"""The command line: ``nbutils norms SOURCE …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
    norms.add_argument("--no-keep", action="store_true", help="delete each download after use")
    norms.add_argument("--overwrite", action="store_true", help="begin --out again")
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
    from nbutils.checkpoints import report

    try:
        result = checkpoints.series(
            options.source,
            by=options.by,
            out=options.out,
            match=options.match,
            step=options.step,
            keep=not options.no_keep,
            overwrite=options.overwrite,
            progress=True,
        )
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _failed(f"stopped{'; the same command goes on from here' if options.out else ''}", 130)
    if options.json:
        print(report.as_json(result))
    elif not options.out:
        print(result.table.to_csv(index=False, lineterminator="\n"), end="")
    print(report.summary(result), file=sys.stdout if options.out and not options.json else sys.stderr)
    if options.plot:
        report.plot(result, options.plot)
    return 0


def _failed(why: str, code: int = 2) -> int:
    print(f"nbutils norms: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
