"""The Hub: revisions of a repository, and the files with the weights of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.weights import shards_of, weight_files

TEXTS = ["*.json", "*.txt", "*.model", "*.spm", "*.tiktoken"]  # configuration and tokenizer


@contextmanager
def _asking(name: str, what: str) -> Iterator[None]:
    """Say plainly what is missing when the Hub does not answer."""
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise ConnectionError(f"{name}: to read it, pip install huggingface_hub, or 'norm-growth[hub]'") from error
    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{name}: not on the Hub, or no access to it") from error
    except ReadError as error:
        raise ReadError(f"{name}: {error}") from error
    except Exception as error:  # each version of the client raises its own kinds
        gone = isinstance(error, errors.EntryNotFoundError | errors.RevisionNotFoundError)
        if gone and not isinstance(error, errors.LocalEntryNotFoundError):  # that one is of a missing network
            raise ReadError(f"{name}: {what}: not on the Hub") from error
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConnectionError(
            f"{name}: cannot get {what} from the Hub ({type(error).__name__}: {first}). Without a network, give a "
            "folder of checkpoints or of the Hub's cache (…/hub/models--org--name)"
        ) from error


def revisions(repo: str) -> dict[str, str]:
    """Commits of the branches and tags of a repository."""
    with _asking(f"{repo}: no such folder; as a repository of the Hub", "the list of its revisions"):
        from huggingface_hub import HfApi

        refs = HfApi().list_repo_refs(repo)
    return {ref.name: ref.target_commit for ref in [*refs.branches, *refs.tags]}


def snapshot(repo: str, revision: str, weights: bool) -> Path:
    """The folder of a saved model in the Hub's cache, with its files and no code; without a network as it is there."""
    first: ConnectionError | None = None
    try:
        revisions(repo)  # without a network this fails at once; the rest would try again for half a minute
        if weights:
            download(f"{repo}@{revision}", revision)
    except ConnectionError as error:
        first = error
    try:
        with _asking(f"{repo}: no such folder; as a repository of the Hub", "its configuration"):
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(repo, revision=revision, allow_patterns=TEXTS, local_files_only=bool(first)))
    except ConnectionError as error:
        raise first or error from None  # which says what is wrong with the network


def download(label: str, commit: str, scratch: str | None = None) -> Path:
    """The folder with a revision's weights in one format, of shards those in the index."""
    repo = label.partition("@")[0]
    with _asking(label, "its weights"):
        from huggingface_hub import HfApi, snapshot_download

        def fetched(names: list[str]) -> Path:
            return Path(snapshot_download(repo, revision=commit, allow_patterns=names, local_dir=scratch))

        names = weight_files(HfApi().list_repo_files(repo, revision=commit))
        if names[0].endswith(".index.json"):
            names = shards_of(fetched(names) / names[0])
        return fetched(names)
