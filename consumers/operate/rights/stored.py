"""Claimed bytes of an erased user: deleted from the object store, and from nowhere else.

A claim is a record's word, and records come from processes that may be broken or hostile: only what lies below the
configured root is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import fsspec

from tidemill.schemas.records import Claim


class StoreRefused(ConnectionError):
    """The store did not delete an object; the erasure can be run again."""


@dataclass(slots=True)
class Cleared:
    """What became of claimed bytes."""

    deleted: int = 0
    absent: int = 0
    """Were gone already."""
    foreign: list[str] = field(default_factory=list)
    """Lie outside the store's root: left alone, to be looked at by a person."""


def delete_claims(root: str, claims: Iterable[Claim]) -> Cleared:
    """Delete what claims point to below `root` (a directory or an fsspec URL). Raises StoreRefused."""
    cleared = Cleared()
    for claim in claims:
        _delete(root, claim.uri, cleared)
    return cleared


def _delete(root: str, uri: str, cleared: Cleared) -> None:
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        home, folder = fsspec.core.url_to_fs(root)
        inside = path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")
        if type(filesystem) is not type(home) or not inside:
            cleared.foreign.append(uri)
            return
        filesystem.rm_file(path)
        cleared.deleted += 1
    except FileNotFoundError:
        cleared.absent += 1
    except (OSError, ValueError, ImportError) as error:
        raise StoreRefused(
            f"the claimed bytes at {uri} could not be deleted: {error}; run the erasure again"
        ) from error
