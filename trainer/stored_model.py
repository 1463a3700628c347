"""A model of which each rank reads only its own rows, from the files of a checkpoint directory.

Invariants:

- no rank holds the whole model: it is built on torch's `meta` device, where tensors need no memory, sharded over the
  ranks, and filled with the rank's rows of each weight; the files are memory-mapped;
- weights and buffers have the same bits as in a whole load (`model.load_model`). The conversion table of transformers
  gives the stored tensors of each weight. Only two of its conversions are implemented here: renaming and the stacking
  of experts. A directory that needs another one is refused (NotByRowsError) and loaded whole instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import COMPUTE_TYPES, WeightFilesError, map_checkpoint
from tidemill.trainer.choices import Experts

Source = str | list[list[str]]
"""The stored tensor of a weight; or, for each part of its second dimension, the tensors of its experts, in order."""


class NotByRowsError(ValueError):
    """The weights of a checkpoint directory must be loaded whole; the message says why."""


class StoredModel:
    """The causal model of a checkpoint directory in fp32, with the given implementation of its experts.

    Raises NotByRowsError if the weights of the directory must be loaded whole.
    """

    def __init__(self, directory: str, experts: Experts | None = None) -> None:
        self._directory, self._experts = directory, experts
        if not (Path(directory) / "config.json").is_file():
            raise NotByRowsError("there is no config.json")
        outline = self.outline()
        if getattr(outline.config, "quantization_config", None):
            raise NotByRowsError("its weights are quantised")
        try:
            self._stored = map_checkpoint(Path(directory))
        except WeightFilesError as error:
            raise NotByRowsError(str(error)) from error
        self._sources = _sources(outline, self._stored)

    def outline(self) -> PreTrainedModel:
        """Return the model without memory for its weights; its computed buffers are on the CPU."""
        options = {} if self._experts is None else {"experts_implementation": self._experts.value}
        config = AutoConfig.from_pretrained(self._directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
            module._is_hf_initialized = False
        # As in a whole load: marked parameters are not initialised, so that only the buffers are computed.
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        model.initialize_weights()
        return model.eval()

    def fill(self, model: PreTrainedModel, device: torch.device) -> None:
        """Load the weights of a sharded outline, on `device`, and its stored buffers."""
        made: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in made:
                made[id(tensor)] = self._filled(name, tensor, device)
            # Tied weights stay one tensor.
            state[name] = made[id(tensor)]
        model.load_state_dict(state, assign=True)

    def rows(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return this rank's rows of each weight of a sharded model, in fp32 on the CPU."""
        return {name: self._read(name, parameter) for name, parameter in model.named_parameters()}

    def _filled(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        read = self._read(name, tensor)
        if not isinstance(tensor, DTensor):
            return read.to(tensor.device, tensor.dtype)
        mesh, placements = tensor.device_mesh, tensor.placements
        # Without the check, which would communicate with the other ranks; shape and stride are of the whole tensor.
        shape, stride = tensor.shape, tensor.stride()
        whole = DTensor.from_local(
            read.to(device, tensor.dtype), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return nn.Parameter(whole)

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a weight in fp32, or all rows if it is not sharded."""
        own = slice(*own_rows(tensor)) if isinstance(tensor, DTensor) else ...
        source = self._sources[name]
        if isinstance(source, str):
            return _copied(self._stored[source], own)
        if not (experts := [keys[own] if isinstance(own, slice) else keys for keys in source])[0]:
            return torch.empty(0, *tensor.shape[1:])
        return torch.cat([torch.stack([_copied(self._stored[key]) for key in keys]) for keys in experts], 1)


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """Return the first row held here of a tensor sharded over its first dimension, and the row after the last."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]


def _copied(weight: Weight, rows: slice | EllipsisType = ...) -> Tensor:
    """Return a copy in fp32."""
    return torch.from_numpy(np.array(weight.bits[rows])).view(getattr(torch, weight.dtype)).float()


def _sources(model: PreTrainedModel, stored: Mapping[str, Weight]) -> dict[str, Source]:
    """Return the sources of each weight and stored buffer of an outline, by the first of its names.

    Raises NotByRowsError.
    """
    wanted = model.state_dict(keep_vars=True)
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    found: dict[str, Source] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            # A whole load ignores it too, for example rotary frequencies and heads that predict further tokens.
            continue
        if pattern is None:
            again, found[name] = name in found, key
        else:
            converter = next(each for each in converters if pattern in each.source_patterns)
            if not _only_stacks(converter):
                raise NotByRowsError(f"{key} is converted by {converter.operations}")
            parts = found.setdefault(name, [[] for _ in converter.source_patterns])
            again = isinstance(parts, str)
            if not isinstance(parts, str):
                parts[converter.source_patterns.index(pattern)].append(key)
        if again:
            raise NotByRowsError(f"{name} is stored more than once, also as {key}")
    named: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        named.setdefault(id(tensor), []).append(name)
    return {names[0]: _one_source(names, wanted[names[0]], found, stored) for names in named.values()}


def _only_stacks(converter: WeightConverter) -> bool:
    """Return whether a converter only stacks experts and then, if at all, concatenates the parts of each."""
    first, *others = converter.operations
    stacks = type(first) is MergeModulelist and first.dim == 0 and len(converter.target_patterns) == 1
    if not others:
        return stacks and len(converter.source_patterns) == 1
    return stacks and len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1


def _one_source(names: list[str], tensor: Tensor, found: Mapping[str, Source], stored: Mapping[str, Weight]) -> Source:
    """Return the source of a weight with these names; tied weights may all be stored. Raises NotByRowsError."""
    sources = [found[name] for name in names if name in found]
    if not sources:
        raise NotByRowsError(f"it does not store {names[0]}")
    source, *copies = sources
    for copy in copies:
        both = isinstance(source, str) and isinstance(copy, str)
        if not both or not np.array_equal(stored[str(source)].bits, stored[str(copy)].bits):
            raise NotByRowsError(f"{' and '.join(names)} are tied and stored with different values")
    parts = [[source]] if isinstance(source, str) else source
    weights = [[stored[key] for key in part] for part in parts]
    if others := {weight.dtype for part in weights for weight in part} - set(COMPUTE_TYPES):
        raise NotByRowsError(f"{names[0]} is stored as {', '.join(sorted(others))}")
    shapes = [{weight.bits.shape for weight in part} for part in weights]
    if isinstance(source, str):
        fits = shapes == [{tuple(tensor.shape)}]
    else:
        fits = all(len(part) == len(tensor) and len(of) == 1 for part, of in zip(weights, shapes, strict=True))
        rows = sum(shape[0] for of in shapes for shape in of)
        fits = fits and rows == tensor.shape[1] and {shape[1:] for of in shapes for shape in of} == {tensor.shape[2:]}
    if not fits:
        raise NotByRowsError(f"{names[0]} is stored in another shape than {list(tensor.shape)}")
    return source
