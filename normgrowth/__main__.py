"""The command line, ``normgrowth norms SOURCE …`` and so on. Each command is a function; its docstring is its help."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normgrowth import __version__

if TYPE_CHECKING:
    from normgrowth.checkpoints import MeasuredSeries

SOURCES = """\
SOURCE is a folder of checkpoints (step1000, checkpoint-300000, step_20k, …), a repository of the Hugging Face Hub whose
revisions name steps (EleutherAI/pythia-70m), one revision of it (org/name@step1000), or a folder of the Hub's cache
(models--org--name). Several make one series: google/multiberts-seed_0-step_0k google/multiberts-seed_0-step_20k …
"""
MODEL = """\
MODEL is the folder of one model of transformers as save_pretrained leaves it, or a repository of the Hub: org/name, or
org/name@revision. It is loaded in float32, and heads are computed in float64; code that comes with it is never run.
"""


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    description = "Parameter norms, saturation, heads and degree of your own models."
    top = argparse.ArgumentParser(prog="normgrowth", description=description)
    top.add_argument("--version", action="version", version=f"normgrowth {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], epilog: str) -> argparse.ArgumentParser:
        docstring = inspect.getdoc(run) or ""
        subparser = commands.add_parser(
            name,
            help=docstring.partition("\n")[0],
            description=docstring,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(run=run)
        return subparser

    norms = command("norms", _norms, SOURCES)
    norms.add_argument("--by", choices=("total", "layer", "type", "tensor"), default="total", help="more rows")
    norms.add_argument("--trained", action="store_true", help="without tensors that are the same in all checkpoints")
    norms.add_argument("--plot", type=Path, metavar="PNG", help="draw the curve (.png, .svg or .pdf)")
    report = command("report", _report, SOURCES)
    report.add_argument("-o", "--output", type=Path, metavar="HTML", default=Path("report.html"), help="the page")
    for subparser in (norms, report):
        _add_series_options(subparser)
    models = [
        command("saturation", _saturation, MODEL),
        command("heads", _heads, MODEL),
        command("degree", _degree, MODEL),
    ]
    for subparser in models:
        _add_model_options(subparser)
    for subparser in (norms, *models):
        subparser.add_argument("--json", action="store_true", help="print all of the result as JSON, and nothing else")
    return top


def _add_series_options(subparser: argparse.ArgumentParser) -> None:
    subparser.add_argument("source", nargs="+", metavar="SOURCE", help="folders, or Hub repositories; see below")
    subparser.add_argument("--out", type=Path, metavar="CSV", help="the table; the same command again goes on")
    subparser.add_argument("--match", default="*", metavar="PATTERN", help="only names such as 'stage1-*'")
    subparser.add_argument("--step", metavar="REGEX", help=r"its one group is the step in a name: 'phase2_(\d+k)'")
    subparser.add_argument("--no-keep", action="store_true", help="delete each download after use")


def _add_model_options(subparser: argparse.ArgumentParser) -> None:
    subparser.add_argument("model", metavar="MODEL", help="a folder, or a Hub repository; see below")
    subparser.add_argument(
        "--text", type=Path, metavar="FILE", help="sentences, one a line (default: 24 of Python's docstrings)"
    )
    subparser.add_argument("--tokenizer", metavar="PLACE", help="a folder or repository, if MODEL has none")
    subparser.add_argument("--c", type=float, default=1000.0, help="scale of the parameters (default 1000)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 2 after an error, or 130 when stopped; the reason is printed to stderr."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError, OverflowError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        print(f"normgrowth {options.command}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = "; with --out, the same command goes on from here" if hasattr(options, "out") else ""
        print(f"normgrowth {options.command}: stopped{hint}", file=sys.stderr)
        return 130


def _norms(options: argparse.Namespace) -> int:
    """Parameter norm, direction and norm budget along a series of checkpoints. No model is built.

    columns of the table
      step, layer      total; with --by layer also embeddings, block 0, … (or encoder 0, …, text encoder 0, …), head,
                       rest; with --by type attention, mlp, norm, …; with --by tensor each tensor
      norm             parameter norm ρ
      cos_similarity   cosine between these parameters and those of the step before
      displacement_sq  ‖Δ‖², Δ the difference from the step before
      inner            2θ·Δ, θ the parameters of the step before; ρ² grows by displacement_sq + inner
    """
    if options.plot and options.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{options.plot}: give a name that ends in .png, .svg or .pdf")
    result = _series(options, options.by, options.plot)
    from normgrowth.report import summary

    if options.json:
        print(summary.as_json(result))
    elif not options.out:
        print(result.table.to_csv(index=False, lineterminator="\n"), end="")
    is_stdout_free = options.out and not options.json
    print(summary.summarise(result), file=sys.stdout if is_stdout_free else sys.stderr)
    if options.plot:
        from normgrowth.report import page

        page.plot(result, options.plot)
    return 0


def _report(options: argparse.Namespace) -> int:
    """Norm growth along a series as one page to send, beside what noise of the same lengths would have done."""
    result = _series(options, "layer", options.output)
    from normgrowth.report import page

    page.write(result, " ".join(options.source), options.output)
    print(options.output)
    return 0


def _saturation(options: argparse.Namespace) -> int:
    """The model against itself with all parameters times c, by layer, and an untrained model likewise.

    columns of the table; layer 0 is the embedding
      raw         mean cosine between representations of the model and of itself with all parameters times c
      centred     the same after the mean over all tokens is taken from both
      anisotropy  mean cosine of two different tokens: where it is high, a high raw cosine says little
    """
    return _print_measurement(options, "similarity")


def _heads(options: argparse.Namespace) -> int:
    """What the heads attend to with all parameters times c, and those of an untrained model.

    columns of the table; --json has every head
      argmax-like, …  heads of the layer that attend to one position, to many alike (mean-like), to a sink, or otherwise
      positions       mean number of positions attended
      masked          largest weight of a head on positions that it should not see: 0, or the mask leaks
    """
    return _print_measurement(options, "attention")


def _degree(options: argparse.Namespace) -> int:
    """The degree of the outputs in all parameters, measured at --c and those of c = 1, 10, 100 below it.

    columns of the table; the degree is the k with f(cθ) = c^k f(θ), of the first sentence
      euler      the k that fits best at c, by Euler's identity
      residual   error of that fit, over the size of the output: near 0 where there is a degree
      log_ratio  the same k from the outputs at c and at the next scale
    """
    return _print_measurement(options, "degree", control=False)


def _print_measurement(options: argparse.Namespace, measure: str, control: bool = True) -> int:
    """Print what a function of ``normgrowth.models`` measures, by default of an untrained model as well."""
    sentences, source = _sentences(options.text)
    try:
        from transformers import utils
    except ImportError:
        raise ValueError("a saved model needs transformers: pip install 'transformers[torch]'") from None
    import pandas as pd

    from normgrowth import models

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    measured = getattr(models, measure)
    trained = models.load(options.model, sentences, tokenizer=options.tokenizer)
    tables = {"trained": measured(trained, options.c)}
    if control:
        tables["untrained"] = measured(models.untrained(trained), options.c)
    class_name = type(trained.model).__name__
    parameters = trained.model.num_parameters()
    tokens = sum(map(len, trained.sentences))
    if options.json:
        rows = pd.concat(tables, names=["of"]).reset_index().to_json(orient="records", double_precision=15)
        document = {
            "model": options.model,
            "class": class_name,
            "kind": trained.kind,
            "parameters": parameters,
            "sentences": source,
            "tokens": tokens,
            "c": options.c,
            "table": json.loads(rows),
        }
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        print(f"{class_name}, {trained.kind}, {parameters:,} parameters; {source}, {tokens} tokens; c = {options.c:g}")
        by_layer = {name: models.by_layer(table) for name, table in tables.items()}
        table = pd.concat(by_layer, axis=1) if control else by_layer["trained"]
        print(table.round(4).to_string())
    return 0


def _sentences(file: Path | None) -> tuple[list[str], str]:
    """Sentences and a description of them: the lines of a file, or 24 sentences that ship with the package."""
    if file is None:
        from normgrowth import sentences

        return sentences.first(24), "24 sentences of Python's docstrings"
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: no sentence in it: give one a line")
    return lines, f"{len(lines)} sentences of {file}"


def _series(options: argparse.Namespace, by: str, figure: Path | None) -> MeasuredSeries:
    """Measure the series, once it is certain that the results can be written and drawn.

    Raises:
        ValueError: the folder of an output does not exist, or a figure is wanted and matplotlib is missing.
    """
    from normgrowth import checkpoints

    for path in (options.out, figure):
        if path and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist")
    if figure:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError(f"{figure} needs matplotlib: pip install matplotlib, or 'norm-growth[plot]'") from None
    return checkpoints.series(
        options.source,
        by=by,
        out=options.out,
        match=options.match,
        step=options.step,
        keep=not options.no_keep,
        trained=getattr(options, "trained", False),
    )


if __name__ == "__main__":
    raise SystemExit(main())
