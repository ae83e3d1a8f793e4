"""Which defects are planted: those listed in ``tests/mutants.yml``, and a random sample of what cosmic-ray makes.

A place in the code is drawn first, then one of the defects there: a sum has ten replacements, a comparison six.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import yaml
from tqdm import tqdm

from workflow import ROOT

LIST = ROOT / "tests" / "mutants.yml"
# What is mutated, and the tests of it where these are not called like it. Its own examples are asked, too.
MODULES = {
    "nbutils/chapters/*.py": (),
    "nbutils/checkpoints/*.py": ("checkpoints", "sources", "store", "weights"),
    "nbutils/claims/*.py": ("claims", "report"),
    "nbutils/fits.py": (),
    "nbutils/device.py": ("data_device",),
    "nbutils/heads.py": (),
    "nbutils/homogeneity/*.py": ("algebra", "rules", "homogeneity"),
    "nbutils/models.py": (),
    "nbutils/names.py": (),
    "nbutils/norms/*.py": ("norms",),
    "nbutils/optimizers.py": ("training",),
    "nbutils/samples.py": ("samples", "claims"),
    "nbutils/saturation/*.py": ("saturation", "scaling"),
    "nbutils/sublayers.py": (),
    "nbutils/text/*.py": ("text",),
    "nbutils/training.py": (),
    "nbutils/trainings/*.py": ("trainings", "training", "growth"),
    "workflow/alarms.py": (),
    "workflow/compare.py": (),
    "workflow/findings.py": ("findings", "report"),
    "workflow/report.py": ("report", "findings", "alarms"),
    "workflow/stale.py": (),
    "workflow/summaries.py": ("report",),
}
OTHERS = {"ensemble": "training", "figure1": "projection", "limit_networks": "limits"}  # modules of chapters
EQUIVALENT = ROOT / "tests" / "equivalent.yml"  # generated defects that nothing can see, each with its reason
# In the place of arithmetic: Python refuses them of floats at once, so that anybody's tests kill them.
BITS = {"RShift", "LShift", "BitOr", "BitAnd", "BitXor"}
CHOICES = ("choose", "Size", "Recipe")


class Mutant(NamedTuple):
    """One defect: ``becomes`` in the place of ``text``, which stands once in ``file``."""

    id: str
    file: str
    text: str
    becomes: str
    breaks: str  # what is wrong then, in words
    tests: tuple[str, ...]  # files, relative to the root
    equivalent: str = ""  # why nothing can see it


def chosen(words: Sequence[str]) -> list[Mutant]:
    """The listed mutants with one of the words in id or file; all without a word.

    Raises:
        ValueError: there is none, or one that no longer applies.
    """
    found = [mutant for mutant in load() if not words or any(word in f"{mutant.id} {mutant.file}" for word in words)]
    if not found or misplaced(found):
        raise ValueError("\n".join(misplaced(found)) or f"no mutant has {' or '.join(words)} in its id or file")
    return found


def load(file: Path = LIST) -> list[Mutant]:
    """The listed mutants.

    Raises:
        ValueError: an unknown or missing field, an id used twice; the message names the mutant.
    """
    found: dict[str, Mutant] = {}
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
        changed = Path(entry.get("file", ""))
        names = entry.pop("tests", None) or [changed.parent.name if changed.stem == "__init__" else changed.stem]
        try:
            mutant = Mutant(**entry, tests=(*(f"tests/test_{name}.py" for name in names), str(changed)))
        except TypeError as error:
            raise ValueError(f"{file.name}: mutant {entry.get('id', entry)!r}: {error}") from None
        if mutant.id in found:
            raise ValueError(f"{file.name}: mutant {mutant.id!r} is listed twice")
        found[mutant.id] = mutant
    return list(found.values())


def misplaced(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """A line for each mutant that no longer applies: its text must stand exactly once in its file, and change it."""
    said = []
    for mutant in mutants:
        file = root / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.text) if file.is_file() else 0
        if mutant.text == mutant.becomes:
            said.append(f"{mutant.id}: {mutant.text!r} becomes itself")
        elif count != 1:
            said.append(f"{mutant.id}: {mutant.text!r} stands {count} times in {mutant.file}; it must stand there once")
        said += [f"{mutant.id}: there is no {test}" for test in mutant.tests if not (root / test).is_file()]
    return said


class Place(NamedTuple):
    """Where defects can be made, from line and column to line and column, and which: operator and occurrence."""

    file: str
    start: tuple[int, int]
    defects: tuple[tuple[str, int], ...]


def files() -> dict[str, tuple[str, ...]]:
    """All files that are mutated, and the tests that judge each."""
    found = {}
    for pattern, names in MODULES.items():
        for path in sorted(ROOT.glob(pattern)):
            file = str(path.relative_to(ROOT))
            own = names or (OTHERS.get(path.stem, path.stem),)
            tests = [f"tests/test_{name}.py" for name in own]
            found[file] = (*(test for test in tests if (ROOT / test).is_file()), file)
    return found


def left_alone(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """From where to where no defect is made; lines from 1, columns in characters.

    Nothing evaluates annotations of types; ``strict=True`` of a ``zip`` is itself a test, of what is as long as it is;
    sizes and rates of our own trainings are choices, of which another is no less right.
    """
    lines = source.splitlines()

    def place(line: int, column: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:column].decode())

    found = []
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if called == "zip":
            parts += [keyword.value for keyword in node.keywords]
        if called in CHOICES:
            parts += [inner for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
        for part in parts:
            if isinstance(part, ast.expr):
                found.append((place(part.lineno, part.col_offset), place(part.end_lineno, part.end_col_offset)))
    return found


def places(file: str) -> list[Place]:
    """Every place in a file where one of cosmic-ray's operators can make a defect that is no refused one."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / file).read_text(encoding="utf-8")
    lines, nodes, spared = source.splitlines(), list(ast_nodes(get_ast(source))), left_alone(source)
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in sorted(operator_names()):
        operator = get_operator(name)
        _, *pair = name.split("_")  # what is replaced, by what
        if operator.arguments() or (set(pair[1:]) & BITS and pair[0] not in BITS):
            continue
        made = (span for node in nodes for span in operator().mutation_positions(node))
        for occurrence, (start, _) in enumerate(made):
            star = lines[start[0] - 1].startswith("*,", start[1])  # of a signature, taken for a product
            if not star and not any(first <= start < last for first, last in spared):
                found[start].append((name, occurrence))
    return [Place(file, start, tuple(defects)) for start, defects in sorted(found.items())]


def sample(count: int, seed: int, words: Sequence[str] = ()) -> list[Mutant]:
    """So many generated defects, at places drawn without replacement from all files together, or those with a word.

    Raises:
        ValueError: there are fewer places.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    judges, reasons = files(), equivalents()
    judges = {file: tests for file, tests in judges.items() if not words or any(word in file for word in words)}
    everywhere = [place for file in tqdm(judges, desc="places", leave=False) for place in places(file)]
    if count > len(everywhere):
        raise ValueError(f"a sample of {count} from {len(everywhere)} places: ask for fewer")
    rng = random.Random(seed)
    drawn = []
    for place in rng.sample(everywhere, len(everywhere)):
        operator, occurrence = rng.choice(place.defects)
        source = (ROOT / place.file).read_text(encoding="utf-8")
        try:
            becomes = mutate_code(source, get_operator(operator)(), occurrence)
            compile(becomes, place.file, "exec")
        except (AttributeError, SyntaxError):  # the operator of exceptions knows no dotted names
            continue
        name = f"{place.file}:{place.start[0]}:{place.start[1]} {operator.removeprefix('core/')}"
        breaks = changed(source, becomes)
        reason = reasons.get((place.file, breaks), "")
        drawn.append(Mutant(name, place.file, source, becomes, breaks, judges[place.file], reason))
        if len(drawn) == count:
            break
    return drawn


def tool() -> str:
    """What generates, with its version."""
    return f"cosmic-ray {version('cosmic-ray')}"


def equivalents() -> dict[tuple[str, str], str]:
    """Reasons why nothing can see a generated defect, by file and changed line."""
    entries = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    return {(entry["file"], entry["change"]): entry["reason"] for entry in entries}


def changed(source: str, becomes: str) -> str:
    """Which function differs, and its first line that does, before and after.

    >>> changed("def f(a):\\n    return a + 2\\n", "def f(a):\\n    return a - 2\\n")
    'f: return a + 2 → return a - 2'
    """
    pairs = enumerate(zip(source.splitlines(), becomes.splitlines(), strict=False), 1)
    number, old, new = next((n, old.strip(), new.strip()) for n, (old, new) in pairs if old != new and old.strip())
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= number <= node.end_lineno
    ]
    return f"{max(around, key=lambda node: node.lineno).name + ': ' if around else ''}{old} → {new}"
