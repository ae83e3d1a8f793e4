"""The command line, ``normgrowth norms SOURCE …`` and so on. Each command is a function; its docstring is its help."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normgrowth import __version__

if TYPE_CHECKING:
    from normgrowth.checkpoints import MeasuredSeries
    from normgrowth.checkpoints.places import Checkpoint

SOURCES = """\
SOURCE is a folder of checkpoints (step1000, checkpoint-300000, step_20k, …), a repository of the Hugging Face Hub whose
revisions name steps (EleutherAI/pythia-70m), one revision of it (org/name@step1000), or a folder of the Hub's cache
(models--org--name). Several make one series: google/multiberts-seed_0-step_0k google/multiberts-seed_0-step_20k …
"""
MODEL = """\
MODEL is the folder of one model of transformers as save_pretrained leaves it, or a repository of the Hub: org/name, or
org/name@revision. It is measured in float64, casts inside the model included; where the memory has no room for that, in
float32 at the largest c that stays finite. Code that comes with a model is never run.
"""


NO_NUMBER = {  # why a column of a table has a row without a number
    "own": "in this layer all tokens are alike, up to rounding",
    "centred": "in this layer all tokens are alike, up to rounding",
    "anisotropy": "there is one token alone",
    "anisotropy_scaled": "there is one token alone",
    "log_ratio": "the last scale has no next one",
    "euler": "the outputs have no derivative at this scale",
    "residual": "the outputs have no derivative at this scale",
}


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
    norms.add_argument(
        "--by",
        choices=("total", "layer", "type", "tensor"),
        help="more rows (default: total for a series, layer for a single model)",
    )
    norms.add_argument("--trained", action="store_true", help="without tensors that are the same in all checkpoints")
    norms.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw the curve, or the bars of one model (.png, .svg or .pdf)"
    )
    report = command("report", _report, SOURCES)
    report.add_argument("-o", "--output", type=Path, metavar="HTML", default=Path("report.html"), help="the page")
    report.add_argument(
        "--saturation", action="store_true", help="load the last checkpoint, and measure its similarity"
    )
    _add_measurement_options(report.add_argument_group("with --saturation"))
    for subparser in (norms, report):
        _add_series_options(subparser)
    models = [
        command("saturation", _saturation, MODEL),
        command("heads", _heads, MODEL),
        command("degree", _degree, MODEL),
    ]
    for subparser in models:
        _add_model_options(subparser)
    ray = command("ray", _ray, MODEL)
    _add_ray_options(ray)
    for subparser in (norms, *models, ray):
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
    _add_measurement_options(subparser)


def _add_measurement_options(subparser: argparse._ActionsContainer) -> None:
    _add_text_options(subparser)
    subparser.add_argument("--c", type=float, default=1000.0, help="scale of the parameters (default 1000)")


def _add_ray_options(subparser: argparse.ArgumentParser) -> None:
    subparser.add_argument("model", metavar="MODEL", help="a folder, or a Hub repository; see below")
    _add_text_options(subparser)
    subparser.add_argument("--scales", type=_scales, metavar="C,C,…", help="values of c (default: 0.8,0.9, … 10,1000)")
    subparser.add_argument("--parts", action="store_true", help="scale each part by itself, too")
    subparser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves (.png, .svg or .pdf)")


def _scales(text: str) -> list[float]:
    """The numbers of an option such as ``1,1.1,2``."""
    scales = [float(number) for number in text.split(",")]
    if not all(0 < c < float("inf") for c in scales):
        raise ValueError
    return scales


_scales.__name__ = "list of positive numbers"  # as argparse calls it in an error


def _add_text_options(subparser: argparse._ActionsContainer) -> None:
    subparser.add_argument(
        "--text", type=Path, metavar="FILE", help="sentences, one a line (default: 24 of Python's docstrings)"
    )
    subparser.add_argument("--tokenizer", metavar="PLACE", help="a folder or repository, if MODEL has none")


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
    """Norm, direction and norm budget along a series of checkpoints, or the norms of one model. No model is built.

    columns of the table
      step, layer      total; with --by layer also embeddings, block 0, … (or encoder 0, …, text encoder 0, …), head,
                       rest (such as the last norm); with --by type attention, mlp, norm, …; with --by tensor each
                       tensor
      norm             parameter norm ρ
      cos_similarity   cosine between these parameters and those of the step before
      displacement_sq  ‖Δ‖², Δ the difference from the step before
      inner            2θ·Δ, θ the parameters of the step before; ρ² grows by displacement_sq + inner

    SOURCE may also be one model: its folder or file of weights, org/name@revision, or org/name without revisions that
    name a step. Its table has layer, norm, share of ρ² in %, and parameters.
    """
    _check_figure(options.plot)
    _check_outputs(options.out, options.plot)
    if len(options.source) == 1 and options.match == "*" and not (options.step or options.trained):
        from normgrowth.checkpoints.single import locate

        checkpoint = locate(options.source[0])
        if checkpoint:
            return _norms_of_model(options, checkpoint)
    result = _series(options, options.by or "total")
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


def _check_figure(path: Path | None) -> None:
    """Raise ValueError if a figure would have no format that it can be drawn in."""
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: give a name that ends in .png, .svg or .pdf")


def _norms_of_model(options: argparse.Namespace, checkpoint: Checkpoint) -> int:
    """Print the norms of a single model, and write and draw them."""
    from normgrowth.checkpoints.single import measure
    from normgrowth.report import single as report

    if options.out and options.out.with_name(options.out.name + ".state.json").exists():
        raise ValueError(f"{options.out}: belongs to a series, and {options.source[0]} is a single model")
    measured = measure(checkpoint, options.by or "layer", not options.no_keep)
    print(report.as_json(measured) if options.json else report.as_text(measured))
    if options.out:
        measured.table.to_csv(options.out, index=False, lineterminator="\n")
    if options.plot:
        report.plot(measured, options.plot)
    return 0


def _report(options: argparse.Namespace) -> int:
    """Norm growth along a series as one page to send, beside its no-drift curve.

    The no-drift curve √(ρ₀² + Σ‖Δ‖²) is the norm if no interval had drifted. It is arithmetic on the series: what noise
    does under the same optimizer, a training with normgrowth.norms.NoiseGradients shows.

    With --saturation the last checkpoint is loaded: a model of transformers, with its tokenizer or that of --tokenizer.
    The page then has its similarity to itself with all parameters times --c, by layer, on the sentences of --text.
    Without this option no model is built.
    """
    sentences, description = _sentences(options.text)
    _check_outputs(options.out, options.output)
    result = _series(options, "layer")
    from normgrowth.report import page

    section = _similarity_of_last(result, options, sentences, description) if options.saturation else ""
    page.write(result, " ".join(options.source), options.output, similarity=section)
    print(options.output)
    return 0


def _similarity_of_last(
    result: MeasuredSeries, options: argparse.Namespace, sentences: list[str], description: str
) -> str:
    """The section of a report on the similarity of the last checkpoint, or on why it was not measured."""
    from normgrowth.report import similarity

    try:
        models = _models()
        saved = models.load(result.last, sentences, tokenizer=options.tokenizer)
        with _errors_of(saved.model):
            table = models.similarity(saved, options.c)
    except (ValueError, OSError, OverflowError) as error:
        print(f"normgrowth report: similarity not measured: {error}", file=sys.stderr)
        return similarity.not_measured(str(error))
    tokens = sum(map(len, saved.sentences))
    model = f"{result.last}: {type(saved.model).__name__}, {description}"
    return similarity.section(table, tokens, model)


def _saturation(options: argparse.Namespace) -> int:
    """The model against itself with all parameters times c, by layer, and an untrained model likewise.

    columns of the table; layer 0 is the embedding
      raw                mean cosine between representations of the model and of itself with all parameters times c
      common             the part of raw that all tokens share: the product of the mean directions at 1 and at c
      own                the rest of raw over the largest value that it could have: 1 for a saturated layer
      centred            raw after the mean over all tokens is taken from both; misleads where few tokens are far longer
                         than the others, as the first of a sentence in many language models: where own is low, take own
      anisotropy         ω, mean cosine of two different tokens of the model
      anisotropy_scaled  ω′, that at scale c; common is at most about √(ωω′), so a raw near it says little
    """
    return _print_measurement(options, "similarity")


def _heads(options: argparse.Namespace) -> int:
    """What the heads attend to with all parameters times c, and those of an untrained model.

    columns of the table; --json has every head
      argmax-like, …  heads of the layer that attend to one position, to many alike (mean-like), to a sink, or
                      otherwise; a sink is a learned key beside the tokens, as of gpt-oss, and not the first token
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


def _ray(options: argparse.Namespace) -> int:
    """What the model still does with all parameters, or those of a part, times c, and what an untrained model does.

    columns of the table
      agreement            share of positions where the most likely next token is that of the model at c = 1; of an
                           encoder, share of sentences whose nearest other one is that at c = 1
      accuracy, loss       of the next token; the loss in nats is that at the best temperature, at most ln(vocabulary)
      effective_positions  of a head: exp of the entropy of its weights, mean over queries, median over heads
      raw, common, centred similarity of the last representations to those at c = 1: see normgrowth saturation --help
    Below it stands, for each part, the c > 1 at which the agreement halves. An untrained model's may halve as soon:
    what it predicts means nothing, as accuracy and loss say. parts, which the model itself tells:
      queries and keys     what acts through attention weights alone, relative position biases included
      values and outputs   the rest of attention
      gates                the nonlinear factor of a gated feed-forward layer, and the router of experts
      up and down          the rest of the feed-forward layers
      gains, embeddings    of norms, with their biases; of tokens and positions, with a head that is tied to them
      head                 an output layer of its own, or a pooler
    """
    _check_figure(options.plot)
    _check_outputs(None, options.plot)
    sentences, source = _sentences(options.text)
    models = _models()
    from normgrowth.report import ray as report

    saved = models.load(options.model, sentences, tokenizer=options.tokenizer)
    with _errors_of(saved.model):
        table = models.ray(saved, options.scales, parts=options.parts)
        control = models.ray(models.untrained(saved), options.scales)
    description = {
        "model": options.model,
        "class": type(saved.model).__name__,
        "kind": saved.kind,
        "parameters": saved.model.num_parameters(),
        "sentences": source,
        "tokens": sum(map(len, saved.sentences)),
    }
    write = report.as_json if options.json else report.as_text
    print(write(table, control, description))
    if options.plot:
        report.plot(table, options.plot)
    return 0


def _print_measurement(options: argparse.Namespace, measure: str, control: bool = True) -> int:
    """Print what a function of ``normgrowth.models`` measures, by default of an untrained model as well."""
    sentences, source = _sentences(options.text)
    models = _models()
    import pandas as pd
    from tqdm import tqdm

    if measure == "degree":  # of one sentence
        source = f"the first of {source}"
        sentences = sentences[:1]
    measured = getattr(models, measure)
    trained = models.load(options.model, sentences, tokenizer=options.tokenizer)
    class_name = type(trained.model).__name__
    networks = {"trained": lambda: trained, "untrained": lambda: models.untrained(trained)}
    if not control:
        networks.pop("untrained")
    tables: dict[str, pd.DataFrame] = {}
    scale: dict[Any, Any] = {
        "c": options.c
    }  # of the trained model: c, unless something overflows there; the precision; the reason
    with _errors_of(trained.model):
        for name, network in tqdm(networks.items(), desc=measure, unit="model", disable=None):
            tables[name] = measured(network(), scale["c"])
            scale = tables["trained"].attrs
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
            **scale,
            "table": json.loads(rows),
        }
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        print(f"{class_name}, {trained.kind}, {parameters:,} parameters; {source}, {tokens} tokens; c = {scale['c']:g}")
        if scale["reason"]:
            print(
                f"in {scale['precision']} at c = {scale['c']:g}, where c = {options.c:g} was asked: {scale['reason']}"
            )
        for name, table in tables.items():
            if table.attrs["c"] != scale["c"]:
                print(f"{name}: at c = {table.attrs['c']:g}: {table.attrs['reason']}")
        by_layer = {name: models.by_layer(table) for name, table in tables.items()}
        table = pd.concat(by_layer, axis=1) if control else by_layer["trained"]
        print(table.round(4).to_string(na_rep="–"))
        for column in table.columns[table.isna().any()].get_level_values(-1).unique():
            print(f"– {column}: {NO_NUMBER.get(column, 'no number')}")
    return 0


def _models() -> ModuleType:
    """``normgrowth.models``, with ``transformers`` kept quiet; raises ValueError if that is not installed."""
    try:
        from transformers import utils
    except ImportError:
        raise ValueError("a saved model needs transformers: pip install 'transformers[torch]'") from None
    from normgrowth import models

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    return models


@contextmanager
def _errors_of(model: Any) -> Iterator[None]:
    """Turn an error of a model's own code into a ValueError of one line."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{type(model).__name__} cannot run: {type(error).__name__}: {reason}") from error


def _sentences(file: Path | None) -> tuple[list[str], str]:
    """Sentences and a description of them: the lines of a file, or 24 sentences that ship with the package."""
    if file is None:
        from normgrowth import sentences

        return sentences.first(24), "24 sentences of Python's docstrings"
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: no sentence in it: give one a line")
    return lines, f"{len(lines)} sentences of {file}"


def _check_outputs(table: Path | None, figure: Path | None) -> None:
    """Make certain that the results can be written and drawn, before anything is measured.

    Raises:
        ValueError: the folder of an output does not exist, or a figure is wanted and matplotlib is missing.
    """
    for path in (table, figure):
        if path and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist")
    if figure:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError(f"{figure} needs matplotlib: pip install matplotlib, or 'norm-growth[plot]'") from None


def _series(options: argparse.Namespace, by: str) -> MeasuredSeries:
    """Measure the series that the options describe."""
    from normgrowth import checkpoints

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
