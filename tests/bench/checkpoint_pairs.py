"""Consecutive checkpoints from real gradient steps, to measure deltas on: `checkpoint_pairs.py MODEL OUT`.

A model's fp32 weights take AdamW steps on real text, the documentation of the installed Python packages, either to
predict the next token or, for an encoder, to find a passage's neighbour among others. After several steps in which the
moments settle, each learning rate takes several steps, one rate after the other, and every version is written as it
would be served: in bfloat16, in float16, and with matrices in float8_e4m3fn with a power-of-two scale that the first
version fixed for each. One JSON line per step names its two versions, its loss and its learning rate.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from synthetic import fp8_scale
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
TEMPERATURE = 0.05

Loss = Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]


def documentation() -> Iterator[str]:
    """Yield the descriptions of the installed packages, one package at a time, ordered by name."""
    for metadata in sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA")):
        _, _, text = metadata.read_text("utf-8", errors="replace").partition("\n\n")
        if len(text) > 2000:
            yield text


def batches(model: Path, rows: int, tokens: int) -> Iterator[torch.Tensor]:
    """Yield token numbers i8[rows, tokens]; row 2k + 1 follows row 2k in the text. Starts again at the end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    while True:
        for text in documentation():
            numbers = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
            for part in numbers.split(rows * tokens):
                if part.numel() == rows * tokens:
                    yield part.reshape(rows, tokens)


def next_token_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each token after the first of its row."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def neighbour_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of finding each even row's successor among all odd rows, by cosine of mean states."""
    states = torch.nn.functional.normalize(model(input_ids=tokens).last_hidden_state.mean(dim=1), dim=-1)
    likeness = states[0::2] @ states[1::2].T / TEMPERATURE
    return torch.nn.functional.cross_entropy(likeness, torch.arange(likeness.shape[0]))


def load(model: Path, objective: str) -> tuple[PreTrainedModel, Loss]:
    """Load the model of a checkpoint directory in fp32, and the loss for its training."""
    if objective == "neighbour":
        return AutoModel.from_pretrained(model, dtype=torch.float32), neighbour_loss
    config = AutoConfig.from_pretrained(model)
    if getattr(config, "use_bidirectional_attention", False):
        config.use_bidirectional_attention = False
    return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32), next_token_loss


class ServedView:
    """Writes a model's weights as safetensors in the types of serving, one tensor at a time."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self._weights = dict(model.named_parameters())
        self._directory = directory
        self._scales = {name: fp8_scale(float(weight.detach().abs().max())) for name, weight in self._weights.items()}

    def write(self, version: int) -> None:
        """Write every view of a version."""
        for served in SERVED:
            path = self.path(version, served)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(path, self._weights, lambda name, served=served: self._cast(name, served))

    def path(self, version: int, served: str) -> Path:
        """Path of a view of a version."""
        return self._directory / f"{version:03d}" / f"{served}.safetensors"

    def _cast(self, name: str, served: str) -> torch.Tensor:
        weight = self._weights[name].detach()
        if served != "float8_e4m3fn":
            return weight.to(SERVED[served])
        return weight.to(torch.bfloat16) if weight.dim() < 2 else (weight * self._scales[name]).to(SERVED[served])


def write_safetensors(path: Path, names: dict[str, torch.Tensor], cast: Callable[[str], torch.Tensor]) -> None:
    """Write `cast(name)` of every name to one file, with one tensor at a time in memory."""
    header, end = {}, 0
    for name in names:
        tensor = cast(name)
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(cast(name).contiguous().view(torch.uint8).numpy().data)


def train(chosen: argparse.Namespace) -> None:
    """Take the steps, write the versions and print a line for each step."""
    torch.manual_seed(chosen.seed)
    model, loss_of = load(chosen.model, chosen.objective)
    view = ServedView(model, chosen.out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, chosen.beta2), fused=True)
    data = batches(chosen.model, chosen.rows, chosen.tokens)
    rates = chosen.learning_rates
    schedule = [(rates[0], False)] * chosen.warmup + [(rate, True) for rate in rates for _ in range(chosen.steps)]
    version = 0
    for learning_rate, written in schedule:
        if written and version == 0:
            view.write(version)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if written:
            version += 1
            view.write(version)
            print(json.dumps(_told(view, version, learning_rate, float(loss.detach()), model)), flush=True)


def _told(
    view: ServedView, version: int, learning_rate: float, loss: float, model: PreTrainedModel
) -> dict[str, object]:
    return {
        "base": {served: str(view.path(version - 1, served)) for served in SERVED},
        "target": {served: str(view.path(version, served)) for served in SERVED},
        "lr": learning_rate,
        "loss": loss,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory with config.json, weights and tokenizer")
    parser.add_argument("out", type=Path, help="folder for the versions, made if it is not there")
    parser.add_argument("--objective", choices=["next-token", "neighbour"], default="next-token")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6, 5e-6])
    parser.add_argument("--beta2", type=float, default=0.95, help="decay of Adam's second moment; the first's is 0.9")
    parser.add_argument(
        "--warmup", type=int, default=12, help="steps at the first learning rate before the first version"
    )
    parser.add_argument("--steps", type=int, default=1, help="versions of each learning rate")
    parser.add_argument("--rows", type=int, default=1, help="passages in a batch; an even number for neighbours")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a passage")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
