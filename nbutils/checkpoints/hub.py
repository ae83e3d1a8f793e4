"""The Hub: revisions of a repository, and the files with the weights of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nbutils.checkpoints.layouts import ReadError
from nbutils.checkpoints.weights import plain_name, refuse_adapter, shards_of, weight_files

TEXTS = ("*.json", "*.txt", "*.model", "*.spm", "*.tiktoken")  # configuration and tokenizer
Check = Callable[[str, Mapping[str, tuple[int, ...]]], None]


@contextlib.contextmanager
def asking(repo: str, what: str) -> Iterator[None]:
    """Say plainly what is missing when the Hub does not answer."""
    try:
        from huggingface_hub import errors as hub
    except ImportError as error:
        raise ConnectionError(f"{repo}: to read it, pip install huggingface_hub, or 'norm-growth[hub]'") from error
    try:
        yield
    except hub.RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{repo}: not on the Hub, or no access to it") from error
    except ReadError as error:
        raise ReadError(str(error) if repo in str(error) else f"{repo}: {error}") from error
    except Exception as error:  # each version of the client raises its own kinds
        gone = isinstance(error, hub.EntryNotFoundError | hub.RevisionNotFoundError)
        if gone and not isinstance(error, hub.LocalEntryNotFoundError):  # that one is of a missing network
            raise ReadError(f"{repo}: {what}: not on the Hub") from error
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise ConnectionError(
            f"{repo}: cannot get {what} from the Hub ({type(error).__name__}: {first}). Without a network, give a "
            "folder of checkpoints or of the Hub's cache (…/hub/models--org--name)"
        ) from error


def revisions(repo: str, asker: str) -> dict[str, str]:
    """Commits of the branches and tags of a repository; ``asker`` begins the sentence of a refusal."""
    with asking(asker, "the list of its revisions"):
        from huggingface_hub import HfApi

        refs = HfApi().list_repo_refs(repo)
    return {ref.name: ref.target_commit for ref in [*refs.branches, *refs.tags]}


def snapshot(repo: str, revision: str, asker: str, weights: bool) -> Path:
    """The folder of a saved model in the Hub's cache, with its files and no code; without a network as it is there."""
    try:
        revisions(repo, asker)  # without a network this fails at once; the rest would try again for half a minute
        if weights:
            download(repo, revision, asker, None, None)
        with asking(asker, "its configuration"):
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(repo, revision=revision, allow_patterns=list(TEXTS)))
    except ConnectionError:
        with contextlib.suppress(ImportError):
            from huggingface_hub import try_to_load_from_cache

            for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
                if isinstance(found := try_to_load_from_cache(repo, name, revision=revision), str):
                    return Path(found).parent
        raise


def download(repo: str, commit: str, label: str, scratch: str | None, check: Check | None) -> Path:
    """The folder with a revision's weights in one format, of shards those in the index.

    Headers come before bodies: ``check`` refuses shapes by name before the values are downloaded.
    """
    with asking(label, "its weights"):
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import SafetensorsParsingError

        def fetched(names: list[str]) -> Path:
            return Path(snapshot_download(repo, revision=commit, allow_patterns=names, local_dir=scratch))

        api = HfApi()
        names = weight_files(api.list_repo_files(repo, revision=commit))
        if names[0].endswith(".index.json"):
            names = shards_of(fetched(names) / names[0])
        if names[0].endswith(".safetensors"):
            with contextlib.suppress(SafetensorsParsingError):  # the reader says why
                files = [api.parse_safetensors_file_metadata(repo, name, revision=commit) for name in names]
                shapes = {plain_name(name): tuple(t.shape) for file in files for name, t in file.tensors.items()}
                refuse_adapter(shapes)
                if check:
                    check(label, shapes)
        return fetched(names)
