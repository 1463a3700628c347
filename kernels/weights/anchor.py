"""Anchors: a whole weight version as a Hugging Face checkpoint directory, at any URL that fsspec supports.

An anchor contains the base model's configuration and tokenizer and the version's weights in their own element types,
so that any engine can load it unchanged. Its marker, `anchor.json`, is written last and lists every other file with
size and digest: a directory without a marker is an unfinished anchor, and every reader refuses a file that does not
match the marker. A local anchor is read in place; a remote one is copied first.

Several ranks write an anchor together: each writes its own files, with the tensors assigned to it. The rank that
writes a tensor gathers it, one tensor at a time, and streams it to the store: a rank holds its own parts of the
weights and one whole tensor; a single process holds only its weights. The first rank creates the directory, writes
the index and, last, the marker. One rank writes the same bytes as one process without ranks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from pathlib import Path

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from tidemill.kernels.compiled import Bits
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import (
    COMPUTE_TYPES,
    INDEX,
    WeightFilesError,
    data_pieces,
    file_header,
    file_names,
    file_order,
    index_of,
    map_checkpoint,
    split_files,
)
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.tensor_parts import Parts, Span, TensorLike, as_part, balanced, exchange, spans_of_all
from tidemill.schemas.records import Anchor, Claim
from tidemill.schemas.stored_object import StoreUnavailableError, put_object

MARKER = "anchor.json"
MARKER_FORMAT = 1
CONFIG = "config.json"
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files that an anchor copies from the base model in addition to its configuration, as glob patterns."""

READ_BYTES = 1 << 22


Files = Mapping[str, Claim]
"""The files of an anchor by name, with size and digest, as its marker lists them."""


def anchor_uri(root: str, run_id: str, branch: str, version: int) -> str:
    """Return the location of a version's anchor below the store's root."""
    return f"{root.rstrip('/')}/{run_id}/anchors/{branch}/v{version}"


def begin_anchor(uri: str, base_model: Path, dtype: str | None) -> Files:
    """Empty the directory `uri` and write the files that an anchor copies from `base_model`; no weights, no marker.

    Args:
        dtype: element type to write into the configuration; None keeps the base model's.

    Raises WeightFilesError if `base_model` has no readable configuration, before anything is removed,
    StoreUnavailableError if the store fails.
    """
    try:
        config = json.loads((base_model / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WeightFilesError(f"{base_model} is not a Hugging Face model directory: {error}") from error
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    taken_over = {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode()}
    named = (source for pattern in COPIED for source in base_model.glob(pattern))
    taken_over |= {source.name: source.read_bytes() for source in named if source.is_file()}
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        if filesystem.exists(f"{path}/{MARKER}"):
            filesystem.rm_file(f"{path}/{MARKER}")
        # The weights of an unfinished anchor may be split over files with other names than the new ones.
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)
    return {name: put_object(f"{uri}/{name}", [content]) for name, content in sorted(taken_over.items())}


def finish_anchor(uri: str, files: Files) -> Anchor:
    """Write the marker, which turns the files at `uri` into an anchor.

    Raises StoreUnavailableError if the store fails.
    """
    listed = {name: {"n_bytes": file.n_bytes, "digest": file.digest} for name, file in files.items()}
    marker = json.dumps({"format": MARKER_FORMAT, "files": listed}, indent=2).encode()
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        filesystem.pipe_file(f"{path}/{MARKER}", marker)
    return Anchor(uri=filesystem.unstrip_protocol(path), n_bytes=sum(file.n_bytes for file in files.values()))


def anchor_weights(uri: str) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of an anchor, read-only, one by one; at most one file of a remote anchor is on the local disk.

    Raises WeightFilesError if the anchor is missing, unfinished or damaged, StoreUnavailableError if the store fails.
    """
    for name, file in _read_marker(uri).items():
        if name.endswith(".safetensors"):
            with tempfile.TemporaryDirectory(prefix="tidemill-anchor-") as scratch:
                yield from map_checkpoint(_checked(uri, name, file, Path(scratch))).items()


def fetch_anchor(uri: str, staging: Path, interrupt: Callable[[], None] = lambda: None) -> Path:
    """Return a local directory with an anchor's files, all checked: the anchor itself if it is local, else a copy.

    Args:
        staging: directory below which a copy gets its own directory.
        interrupt: called for each piece of a file; an error that it raises ends the fetch.

    Raises the errors of `anchor_weights`. `discard_copy` removes the copy, also an unfinished one.
    """
    files = _read_marker(uri)
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
    local = isinstance(filesystem, LocalFileSystem)
    directory = Path(path) if local else _copy_of(uri, staging)
    if not local:
        discard_copy(uri, staging)
        directory.mkdir(parents=True)
    for name, file in files.items():
        _checked(uri, name, file, directory, interrupt)
    return directory


def discard_copy(uri: str, staging: Path) -> None:
    """Remove the copy of an anchor that `fetch_anchor` made below `staging`, if there is one."""
    shutil.rmtree(_copy_of(uri, staging), ignore_errors=True)


def _copy_of(uri: str, staging: Path) -> Path:
    return staging / uri.rpartition("://")[2].strip("/").replace("/", "_")


def compute_type(weights: Mapping[str, Weight]) -> str | None:
    """Return the most frequent element type of the model; None if a type cannot be named in a configuration."""
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        if weight.dtype in COMPUTE_TYPES:
            sizes[weight.dtype] += weight.bits.size
    quantised = any(weight.dtype not in COMPUTE_TYPES for weight in weights.values())
    return sizes.most_common(1)[0][0] if sizes and not quantised else None


def _checked(uri: str, name: str, file: Claim, directory: Path, interrupt: Callable[[], None] = lambda: None) -> Path:
    """Return the local path of an anchor's file, in place or copied to `directory`, checked against the marker."""
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        local = Path(path) / name if isinstance(filesystem, LocalFileSystem) else directory / name
        try:
            if not isinstance(filesystem, LocalFileSystem):
                copied = fsspec.Callback(hooks={"interrupt": lambda *_, **__: interrupt()})
                filesystem.get_file(f"{path}/{name}", str(local), callback=copied)
            state, n_bytes = xxhash.xxh3_128(), 0
            with local.open("rb") as opened:
                while piece := opened.read(READ_BYTES):
                    interrupt()
                    state.update(piece)
                    n_bytes += len(piece)
        except FileNotFoundError as error:
            raise WeightFilesError(f"anchor {uri} has no file {name}, which its marker lists") from error
    if (n_bytes, state.hexdigest()) != (file.n_bytes, file.digest):
        raise WeightFilesError(f"{name} of anchor {uri} was changed after it was written")
    return local


@contextmanager
def _anchor_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except WeightFilesError:
        raise
    except (ImportError, ValueError) as error:
        raise WeightFilesError(f"anchor {uri} cannot be accessed: {error}") from error
    except OSError as error:
        raise StoreUnavailableError(f"anchor {uri}: the store failed: {error}") from error


def _read_marker(uri: str) -> Files:
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        try:
            written = filesystem.cat_file(f"{path}/{MARKER}")
        except FileNotFoundError as error:
            if not filesystem.isdir(path):
                raise WeightFilesError(
                    f"no finished anchor at {uri}: it does not exist; is the store's root the one that the trainer "
                    "writes to?"
                ) from error
            raise WeightFilesError(f"no finished anchor at {uri}: it has no {MARKER}, which is written last") from error
    try:
        marker = json.loads(written)
        files = {
            name: Claim(f"{uri}/{name}", int(of["n_bytes"]), str(of["digest"])) for name, of in marker["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFilesError(f"the marker of anchor {uri} cannot be read: {error!r}") from error
    if marker.get("format") != MARKER_FORMAT or any(name != Path(name).name for name in files):
        raise WeightFilesError(f"the marker of anchor {uri} is not of format {MARKER_FORMAT}")
    return files


FILE_BYTES = 5 << 30
"""Bytes of weights in one file of an anchor; Hugging Face splits checkpoints in the same way."""


def write_anchor(
    uri: str,
    base_model: Path,
    tensors: Mapping[str, TensorLike],
    file_bytes: int = FILE_BYTES,
    ranks: Ranks | None = None,
) -> Anchor:
    """Write a version as a checkpoint directory at `uri`; an unfinished or older anchor there is replaced.

    Args:
        base_model: directory from which the first rank copies configuration and tokenizer.
        tensors: every tensor of the version, by checkpoint name: whole, or this rank's parts; the parts of all ranks
            together are the whole tensors.
        file_bytes: limit above which a rank's weights are split over several files.
        ranks: the ranks that write together, each with its own call; None for this process alone.

    Raises WeightFilesError if `base_model` has no readable configuration, StoreUnavailableError if the store fails;
    every rank raises the error of the rank that failed; RanksLostError.
    """
    ranks = ranks or Ranks()
    parts = {name: as_part(name, value) for name, value in tensors.items()}
    whole = {name: part.outline() for name, part in parts.items()}
    files = _files_of_ranks(whole, file_bytes, ranks.size)
    taken_over = ranks.from_first(lambda: begin_anchor(uri, base_model, compute_type(whole)))
    spans = spans_of_all({name: (part.start, part.n) for name, part in parts.items()}, ranks)

    def write_own() -> Files:
        wholes = _wholes(parts, files, spans, ranks)

        def pieces(names: Sequence[str]) -> Iterator[bytes | memoryview]:
            yield file_header({name: whole[name] for name in names})
            for bits in islice(wholes, len(names)):
                yield from data_pieces(bits)

        try:
            return {file: put_object(f"{uri}/{file}", pieces(names)) for file, names in files[ranks.rank].items()}
        finally:
            # The other ranks need the parts of this rank, even if writing its own files fails.
            for _ in wholes:
                pass

    written = ranks.gather(write_own)

    def finish() -> Anchor:
        split_over = {file: names for of_rank in files for file, names in of_rank.items()}
        listed = dict(taken_over)
        for of_rank in written:
            listed.update(of_rank)
        if len(split_over) > 1:
            listed[INDEX] = put_object(f"{uri}/{INDEX}", [index_of(whole, split_over)])
        return finish_anchor(uri, listed)

    return ranks.from_first(finish)


FilesOfRanks = Sequence[Mapping[str, Sequence[str]]]
"""For each rank: the files that it writes, each with its tensors in order; equal on every rank."""


def _files_of_ranks(whole: Mapping[str, Weight], file_bytes: int, n_ranks: int) -> FilesOfRanks:
    sizes = {name: weight.bits.nbytes for name, weight in whole.items()}
    writers = balanced(sizes, n_ranks)
    groups = [
        split_files({name: n for name, n in sizes.items() if writers[name] == rank}, file_bytes)
        for rank in range(n_ranks)
    ]
    files = iter(file_names(sum(map(len, groups))))
    return [{next(files): file_order({name: whole[name] for name in group}) for group in own} for own in groups]


def _wholes(parts: Parts, files: FilesOfRanks, spans: Mapping[str, Sequence[Span]], ranks: Ranks) -> Iterator[Bits]:
    """Yield the whole tensors of this rank's files; in between, send its parts of the other ranks' tensors."""
    # One tensor of each rank per turn, in the order of the rank's files.
    for turn in zip_longest(*(chain.from_iterable(of_rank.values()) for of_rank in files)):
        for writer, name in enumerate(turn):
            if name is None:
                continue
            wanted = [(0, parts[name].total if rank == writer else 0) for rank in range(ranks.size)]
            made = exchange(parts[name], spans[name], wanted, ranks)
            if writer == ranks.rank:
                yield made.bits
