"""The replica role: a vLLM engine with its OpenAI-compatible server that follows the weight versions of a branch."""

from __future__ import annotations

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.environment import prepare_environment
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings

__all__ = ["ReplicaSettings", "run"]


def run(kafka: KafkaSettings, run: RunSettings, replica: ReplicaSettings, chat: ChatSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        RuntimeError: vLLM is not installed, was imported before its environment was set, or cannot be
            `batch_invariant` on this device.
        ValueError: vLLM refuses an argument of `vllm_args`.
    """
    prepare_environment(replica.threads, replica.batch_invariant)
    # Imported here because vLLM reads its environment when it is imported.
    from tidemill.consumers.replica.role import serve

    serve(kafka, run, replica, chat)
