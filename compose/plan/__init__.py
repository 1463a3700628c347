"""`tidemill plan`: the memory of trainer and replica on given devices, and estimates for a step and its delta."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from tidemill.compose.options import SettingsOf, given, with_settings
from tidemill.compose.output import CsvOption, JsonOption, print_json, print_rows
from tidemill.consumers.replica.config import EngineDtype
from tidemill.trainer.choices import Compute, ServingFormat


@with_settings
def plan(
    settings_of: SettingsOf,
    model: Annotated[
        str | None,
        typer.Option(help="Directory of the model (its config.json is enough), or its name on the Hugging Face hub."),
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="COUNTxGIB", help="GPUs, for instance 8x80.")] = None,
    cpu: Annotated[
        str | None,
        typer.Option(metavar="COUNTxGIB", help="Hosts without a GPU, for instance 1x23; a role takes a host."),
    ] = None,
    row_tokens: Annotated[int | None, typer.Option(help="Tokens in a row of the trainer.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of the longest rollout, and of a request.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests that a replica serves at the same time.")] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks of an engine, tensor or expert parallel. Default: replica.tensor_parallel if it is set; "
            "otherwise the fewest that fit.",
        ),
    ] = None,
    data_parallel: Annotated[
        int | None, typer.Option(min=1, help="Engines of a replica; they share the experts, and no other weights.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate, for the size of a delta.")] = None,
    density: Annotated[
        float | None, typer.Option(min=1e-6, max=1.0, help="Share of the elements that a step changes, if you know it.")
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=0, help="Tokens of a prompt. Default: half of the context.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=1e-3, help="Peak TFLOP/s of one device in the type that it computes in.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=1e-3, max=1.0, help="Share of the peak that you expect a step to reach.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show whether trainer and replica fit into the memory of some devices, before anything is loaded.

    The tables show GiB of one device, by content and by the number of devices of a trainer or a replica. Then follow
    estimates for a step and its delta, each with its assumptions; times only with `--peak-tflops` and `--share`. If
    trainer and replica do not fit, the command shows what to change, and the exit status is 1.

    Settings apply as in the roles: for instance, `--set trainer.kl.coefficient=0` leaves out the reference model.
    All numbers are computed from the model's configuration. A device counts as full at 90 %.

    Examples: `tidemill plan --model Qwen/Qwen3-8B --gpus 8x80` · `tidemill plan --model DIRECTORY --cpu 1x23 --json`
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tidemill.compose.models_command import DIRECTORY
    from tidemill.compose.plan.estimates import Estimate, delta_estimates, step_estimates
    from tidemill.compose.plan.fit import devices_of, document, fit, print_plan
    from tidemill.compose.plan.memory import (
        BF16,
        FP32,
        ReplicaCase,
        TrainerCase,
        replica_host_bytes,
        trainer_host_bytes,
    )
    from tidemill.trainer.model import size_of_name

    devices = devices_of(gpus, cpu)
    if (peak_tflops is None) != (share is None):
        raise ValueError("a time needs both --peak-tflops and --share: the peak of a device, and the share you expect")
    settings = settings_of(given(
        trainer__model=model, trainer__row_tokens=row_tokens, trainer__optimizer__learning_rate=learning_rate,
        replica__max_model_len=context, replica__max_num_seqs=requests,
        replica__tensor_parallel=tensor_parallel, replica__data_parallel=data_parallel,
    ))  # fmt: skip
    trainer, replica, longest = settings.trainer, settings.replica, settings.replica.max_model_len
    fetched = DIRECTORY / trainer.model.replace("/", "--")
    size = size_of_name(str(fetched) if (fetched / "config.json").is_file() else trainer.model)
    prompt = longest // 2 if prompt is None else min(prompt, longest)
    half = trainer.compute is Compute.BFLOAT16 or (trainer.compute is Compute.AUTO and devices.gpu)
    reference = trainer.kl.coefficient > 0
    adam = trainer.optimizer
    delta = {each.name: each for each in delta_estimates(size, adam.learning_rate, adam.betas[0], density)}
    one_rank = TrainerCase(
        ranks=1,
        row_tokens=max(trainer.row_tokens, longest),
        reference=reference,
        compute_bytes=BF16 if half else FP32,
        checkpointed=trainer.checkpoint_activations,
        gpu=devices.gpu,
        density=delta["density"].value,
        delta_bytes=delta["delta_bytes"].value,
        beside=trainer.publish_beside,
        on_device=trainer.publish.on_device,
        older=trainer.score_older_every > 0,
        blocks=trainer.serving_format is not ServingFormat.BF16,
        expert_parallel=trainer.expert_parallel,
    )
    found = fit(
        size,
        devices,
        one_rank,
        ReplicaCase(
            tensor_parallel=replica.tensor_parallel if "tensor_parallel" in replica.model_fields_set else 0,
            data_parallel=replica.data_parallel,
            requests=replica.max_num_seqs,
            context=longest,
            step_tokens=replica.max_num_batched_tokens,
            value_bytes=FP32 if replica.dtype is EngineDtype.FLOAT32 and not devices.gpu else BF16,
            changed=delta["changed_elements"].value,
            gpu=devices.gpu,
        ),
    )
    ranks = found.trainer.devices if found.trainer else devices.count
    step = step_estimates(
        size,
        rollouts=settings.run.groups_per_step * settings.feed.group_size,
        prompt=prompt,
        sampled=longest - prompt,
        repeated=trainer.checkpoint_activations,
        frozen=reference + (trainer.minibatches > 1 or (reference and not trainer.kl.in_loss)),
        pace=None if peak_tflops is None or share is None else (ranks, peak_tflops, share),
    )
    estimates = [*step, *delta.values()]
    if devices.gpu:
        estimates += [
            Estimate("trainer_host_bytes", trainer_host_bytes(size, replace(one_rank, ranks=ranks)), "for each rank"),
            Estimate("replica_host_bytes", replica_host_bytes(size), "for each replica: its copy of the version"),
        ]
    if as_json:
        print_json(document(trainer.model, size, devices, found, estimates))
    elif as_csv:
        rows = ((part.role, part.devices, name, n) for part in found.parts for name, n in part.bytes.items())
        print_rows(("role", "devices", "holds", "bytes"), rows, as_csv=True)
    else:
        print_plan(size, devices, found, estimates)
    raise typer.Exit(0 if found.fits else 1)
