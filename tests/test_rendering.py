"""When pages cannot be rendered, what is said is Sphinx's own cause, and the pages that were there stay."""

import pytest

from workflow.pages import build

EXTENSION = "import sys; sys.path.insert(0, {folder!r}); extensions = ['planted']"
PAGE = "A page\n======\n\nIts text.\n"
BAD = "A page\n======\n\n.. no-such-directive::\n"
FIGURE = "A page\n======\n\n.. image::\n"
PLANTED = {  # conf.py, the extension, the first page; what is said
    "a configuration that raises": ("import nothing_of_that_name", "", PAGE, "No module named 'nothing_of_that_name'"),
    "a configuration that is no Python": ("x = (", "", PAGE, "'(' was never closed"),
    "an extension that is not there": ("extensions = ['no_such']", "", PAGE, "Could not import extension no_such"),
    "an extension that raises": (EXTENSION, "def setup(app): raise ValueError('planted')", PAGE, "ValueError: planted"),
    "a handler that raises": (
        EXTENSION,
        "def fail(app, error): raise KeyError('planted')\ndef setup(app): app.connect('build-finished', fail)",
        PAGE,
        "threw an exception (exception: 'planted')",
    ),
    "a theme that is not there": ("html_theme = 'no_such'", "", PAGE, "no theme named 'no_such' found"),
    "a raise after a warning": (
        EXTENSION,
        "def fail(app, error): raise KeyError('planted')\ndef setup(app): app.connect('build-finished', fail)",
        BAD,
        "threw an exception (exception: 'planted')",
    ),
    "a directive that is not there": ("", "", BAD, 'index.rst:4: ERROR: Unknown directive type "no-such-directive".'),
    "a directive without its argument": ("", "", FIGURE, 'Error in "image" directive: 1 argument(s) required, 0'),
    "a page that is not there": ("", "", PAGE + "\n.. toctree::\n\n   none\n", "index.rst:6: WARNING: toctree"),
    "killed": (EXTENSION, "import os\ndef setup(app): os.kill(os.getpid(), 9)", PAGE, "Sphinx ended with status -9"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_said_is_sphinxs_cause(tmp_path, planted, capsys):
    configuration, extension, page, expected = PLANTED[planted]
    source, target = tmp_path / "staging" / "source", tmp_path / "html"
    source.mkdir(parents=True)
    target.mkdir()
    (target / "index.html").write_text("as they were")
    (source / "conf.py").write_text(configuration.format(folder=str(source)))
    (source / "planted.py").write_text(extension)
    (source / "index.rst").write_text(page)
    with pytest.raises(RuntimeError) as error:
        build.sphinx(tmp_path / "staging", target, tmp_path / "sphinx.log", "-W", "--keep-going", "-n")
    message = str(error.value)
    assert message.startswith("not rendered: ") and expected in message and "\n" not in message
    assert not any(words in message for words in ("report", "traceback", "Traceback", str(source)))
    assert (target / "index.html").read_text() == "as they were"
    assert "planted" not in expected or "planted" in capsys.readouterr().err
