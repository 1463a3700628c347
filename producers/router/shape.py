"""An answer as the client asked for it: without what only the recording needs, with the signed interaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.producers.router.ask import Wanted

_TOKENS = ("token_ids", "prompt_token_ids", "weight_versions", "weight_incarnation")


def shaped(document: Mapping[str, Any], wanted: Wanted, token: str) -> dict[str, Any]:
    """A chunk or body for the client; `token` goes with it where it is not empty."""
    hidden = () if wanted.token_ids else _TOKENS
    shown = {name: value for name, value in document.items() if name not in hidden}
    shown["choices"] = [_choice(choice, wanted, hidden) for choice in document.get("choices", ())]
    return {**shown, "tidemill": {"interaction": token}} if token else shown


def _choice(choice: Mapping[str, Any], wanted: Wanted, hidden: tuple[str, ...]) -> dict[str, Any]:
    shown = {name: value for name, value in choice.items() if name not in hidden}
    return shown if wanted.logprobs else {**shown, "logprobs": None}
