"""A trainer that uses only the publisher of Tidemill: AdamW on any Hugging Face causal model.

    python foreign_trainer.py --model DIRECTORY --text FILE --bootstrap HOST:PORT --run-id RUN --store ROOT --steps N

It trains next-token prediction on windows of a text, in fp32, and publishes the tensors that an engine serves, in bf16.
If it is killed and started again with the same arguments, it continues after the last published version.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tidemill.kernels.weights.publish import PublishSettings, WeightPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model", "text", "bootstrap", "run-id", "store"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--topic-prefix", default="tidemill.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    return parser.parse_args()


def batches(model: str, text: str, window: int = 32, rows: int = 8) -> Iterator[torch.Tensor]:
    """Draw token ids from the text without end, as i8[rows, window]."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(Path(text).read_text())["input_ids"])
    while True:
        starts = torch.randint(0, len(ids) - window, (rows,))
        yield torch.stack([ids[start : start + window] for start in starts])


def served(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that an engine serves, one at a time; a tied weight is yielded once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.to(torch.bfloat16)


def train(wanted: argparse.Namespace, publisher: WeightPublisher) -> None:
    model = AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=wanted.learning_rate)
    data = batches(wanted.model, wanted.text)
    torch.manual_seed(0)
    # There is no checkpoint: earlier steps are trained again, and the publisher finds that they are published.
    for step in range(wanted.steps + 1):
        if step:
            ids = next(data)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        manifest = publisher.publish(step, served(model), learning_rate=wanted.learning_rate if step else 0.0)
        print(f"version {manifest.version}: {manifest.n_changed} of {manifest.n_elements} changed", flush=True)


def main() -> None:
    wanted = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    kafka = KafkaSettings(bootstrap=wanted.bootstrap, topic_prefix=wanted.topic_prefix)
    run = RunSettings(run_id=wanted.run_id)
    settings = PublishSettings(anchor_every=4)
    store = StoreSettings(root=wanted.store)
    with WeightPublisher.open(kafka, run, store, settings, base_model=wanted.model) as publisher:
        train(wanted, publisher)


if __name__ == "__main__":
    main()
