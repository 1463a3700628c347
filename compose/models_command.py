"""`tidemill models`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.compose.output import JsonOption, print_document, spinner

DIRECTORY = Path("data/models")
models_app = typer.Typer(no_args_is_help=True, help="Pre-trained models to start a run from.")


@models_app.command()
def get(
    name: Annotated[
        str, typer.Argument(help="A short name (smollm2), a directory, or a repository of the Hugging Face hub.")
    ],
    into: Annotated[Path, typer.Option("--into", help="Where model directories are kept.")] = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Get a model as a Hugging Face directory, and print where it is.

    `smollm2` is SmolLM2-135M-Instruct, dequantized once from an installed package; no network is needed.

    Example: `tidemill train --model "$(tidemill models get smollm2)"`
    """
    directory = fetch(name, into, Console(stderr=True))
    print_document({"name": name, "directory": str(directory)}, [str(directory)], as_json)


def fetch(name: str, into: Path, console: Console) -> Path:
    """Return the directory of a model; make it if it does not exist. Raises LookupError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with spinner(console, f"getting the model {name}"):
        from tidemill.trainer.pretrained import get_model

        return get_model(name, into)
