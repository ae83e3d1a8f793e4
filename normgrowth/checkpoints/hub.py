"""The Hub: revisions of a repository, and downloads of a revision's weights or of a whole saved model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normgrowth.checkpoints.files import shards_of, weight_files
from normgrowth.checkpoints.layouts import ReadError

TEXTS = ["*.json", "*.txt", "*.model", "*.spm", "*.tiktoken"]  # configuration and tokenizer


@contextmanager
def _plain_errors(name: str, wanted: str) -> Iterator[None]:
    """Raise errors of the Hub's client as built-in ones, which name what could not be fetched and what to do."""
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
        is_missing = isinstance(error, errors.EntryNotFoundError | errors.RevisionNotFoundError)
        is_offline = isinstance(error, errors.LocalEntryNotFoundError)  # a kind of EntryNotFoundError
        if is_missing and not is_offline:
            raise ReadError(f"{name}: {wanted}: not on the Hub") from error
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConnectionError(
            f"{name}: cannot get {wanted} from the Hub ({type(error).__name__}: {first_line}). Without a network, give "
            "a folder of checkpoints or of the Hub's cache (…/hub/models--org--name)"
        ) from error


def revisions(repo: str) -> dict[str, str]:
    """Commits of the branches and tags of a repository."""
    with _plain_errors(f"{repo}: no such folder; as a repository of the Hub", "the list of its revisions"):
        from huggingface_hub import HfApi

        refs = HfApi().list_repo_refs(repo)
    return {ref.name: ref.target_commit for ref in [*refs.branches, *refs.tags]}


def snapshot(repo: str, revision: str, weights: bool) -> Path:
    """The folder of a saved model in the Hub's cache: configuration, tokenizer and, if wanted, weights, but no code.

    Without a network the folder is returned as an earlier download has left it.
    """
    no_network: ConnectionError | None = None
    try:
        revisions(repo)  # without a network this fails at once; the rest would try again for half a minute
        if weights:
            download(f"{repo}@{revision}", revision)
    except ConnectionError as error:
        no_network = error
    try:
        with _plain_errors(f"{repo}: no such folder; as a repository of the Hub", "its configuration"):
            from huggingface_hub import snapshot_download

            folder = snapshot_download(
                repo, revision=revision, allow_patterns=TEXTS, local_files_only=no_network is not None
            )
            return Path(folder)
    except ConnectionError as error:
        raise no_network or error from None  # the first error says what is wrong with the network


def download(label: str, commit: str, scratch: str | None = None) -> Path:
    """The folder with a revision's weights in one format; of shards, those that the index names.

    Files go to ``scratch``, or by default to the Hub's cache.
    """
    repo = label.partition("@")[0]
    with _plain_errors(label, "its weights"):
        from huggingface_hub import HfApi, snapshot_download

        def folder_with(names: list[str]) -> Path:
            return Path(
                snapshot_download(repo, revision=commit, allow_patterns=[*names, "config.json"], local_dir=scratch)
            )

        names = weight_files(HfApi().list_repo_files(repo, revision=commit))
        if names[0].endswith(".index.json"):
            names = list(shards_of(folder_with(names) / names[0]))
        return folder_with(names)
