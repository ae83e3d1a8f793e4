"""The command line: ``nbutils norms SOURCE …`` and the others, one function each."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
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
DRAWING = "pip install matplotlib, or 'norm-growth[plot]'"
MODEL = """\
MODEL is the folder of one model of transformers as save_pretrained leaves it, or a repository of the Hub: org/name, or
org/name@revision. It is loaded in float32, and heads are computed in float64; code of its own is never run.
"""
SATURATION = """
columns of the table; layer 0 is the embedding
  raw         mean cosine between representations of the model and of itself with all parameters times c
  centred     the same after the mean over all tokens is taken from both
  anisotropy  mean cosine of two different tokens: where it is high, a high raw cosine says little
"""
HEADS = """
columns of the table; --json has every head
  argmax-like, …  heads of the layer that attend to one position, to many alike (mean-like), to a sink, or otherwise
  positions       mean number of positions attended
  masked          largest weight of a head on positions that it should not see: 0, or the mask leaks
"""
DEGREE = """
columns of the table; the degree is the k with f(cθ) = c^k f(θ), of the first sentence
  scale      c
  euler      the k that fits best at c, by Euler's identity
  residual   what that k leaves, over the size of the output: near 0 where there is a degree
  log_ratio  the same k from the outputs at c and at the next scale
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
    what = "The model against itself with all parameters times c, by layer, and an untrained one against itself."
    similar = command("saturation", "saturation of a saved model", what, MODEL + SATURATION)
    what = "What the heads attend to with all parameters times c, and those of an untrained model."
    attends = command("heads", "what the heads of a saved model attend to", what, MODEL + HEADS)
    what = "The degree of the outputs in all parameters, measured at c = 1, 10, 100 and --c."
    power = command("degree", "degree of a saved model in its parameters", what, MODEL + DEGREE)
    for each in (similar, attends, power):
        each.add_argument("model", metavar="MODEL", help="a folder, or a Hub repository; see below")
        each.add_argument(
            "--text", type=Path, metavar="FILE", help="sentences, a line each, in place of some of Python's docs"
        )
        each.add_argument("--tokenizer", metavar="PLACE", help="a folder or repository, if MODEL has none")
        each.add_argument("--c", type=float, default=1000.0, help="scale of the parameters (default 1000)")
        each.add_argument("--json", action="store_true", help="print all of the result as JSON, and nothing else")
    for each in (similar, attends):
        each.add_argument("--seed", type=int, default=0, help="of the untrained model (default 0)")
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
        return {"norms": _norms, "report": _report, "check": _check}.get(options.command, _saved)(options)
    except (ValueError, OSError, OverflowError) as error:
        return _failed(options, str(error))
    except KeyboardInterrupt:
        on = "; the same command goes on from here" if getattr(options, "out", None) else ""
        return _failed(options, f"stopped{on}", 130)


def _norms(options: argparse.Namespace) -> int:
    _writable(options.out)
    _writable(options.plot, ".png", ".svg", ".pdf")
    if options.plot:
        _needs("matplotlib", "--plot", DRAWING)
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
    _needs("matplotlib", "a report", DRAWING)
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


def _saved(options: argparse.Namespace) -> int:
    sentences, source = _sentences(options.text)
    _needs("transformers", "a saved model", "pip install 'transformers[torch]'")
    import pandas as pd
    from transformers.utils import logging

    from nbutils.checkpoints import saved

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    measure = {"saturation": saved.similarity, "heads": saved.attention, "degree": saved.degree}[options.command]
    mine = saved.load(options.model, sentences, tokenizer=options.tokenizer)
    models = {"trained": mine}
    if options.command != "degree":
        models["untrained"] = saved.untrained(mine, options.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        tables = {name: measure(one, options.c) for name, one in models.items()}
    name, size, tokens = type(mine.model).__name__, mine.model.num_parameters(), sum(map(len, mine.sentences))
    if options.json:
        facts = {"model": options.model, "class": name, "kind": mine.kind, "parameters": size, "sentences": source}
        rows = pd.concat(tables, names=["of"]).reset_index().to_json(orient="records", double_precision=15)
        facts |= {"tokens": tokens, "c": options.c, "table": json.loads(rows)}
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        print(f"{name}, {mine.kind}, {size:,} parameters; {source}, {tokens} tokens; c = {options.c:g}")
        shown = [saved.by_layer(table) for table in tables.values()]
        print((pd.concat(shown, axis=1, keys=tables) if shown[1:] else shown[0]).round(4).to_string())
    for each in caught:
        print(f"nbutils {options.command}: {each.message}", file=sys.stderr)
    return 0


def _sentences(file: Path | None) -> tuple[list[str], str]:
    """Sentences, and what they are: the lines of a file, or 24 that every Python has."""
    if file is None:
        from nbutils.text import sentences

        return sentences(24), "24 sentences of Python's docstrings"
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: no sentence in it: give one a line")
    return lines, f"{len(lines)} sentences of {file}"


def _series(options: argparse.Namespace, by: str) -> Series:
    from nbutils import checkpoints

    how = {"match": options.match, "step": options.step, "keep": not options.no_keep, "overwrite": options.overwrite}
    return checkpoints.series(options.source, by=by, out=options.out, progress=True, **how)


def _writable(path: Path | None, *endings: str) -> None:
    if path and not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")
    if path and endings and path.suffix not in endings:
        raise ValueError(f"{path}: give a name that ends in {', '.join(endings)}")


def _needs(package: str, what: str, do: str) -> None:
    try:
        import_module(package)
    except ImportError:
        raise ValueError(f"{what} needs {package}: {do}") from None


def _failed(options: argparse.Namespace, why: str, code: int = 2) -> int:
    print(f"nbutils {options.command}: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
