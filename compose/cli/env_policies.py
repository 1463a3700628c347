"""Policies for `tidemill env try`: a local model through transformers, and any OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import GenerationFailed, Policy, Reply
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import Completion, Sampling
from tidemill.producers.sampling.replicas import ReplicaIdentity, ReplicaSession
from tidemill.schemas.chat.format import load_chat_format
from tidemill.schemas.chat.messages import Message, Tool, checked_message, checked_messages, checked_tools
from tidemill.schemas.config import ChatSettings
from tidemill.schemas.records import Task, VersionSpan

UNLIMITED = 2**31 - 1
"""Context of a model whose configuration names no limit, such as one with ALiBi."""


class LocalModel(ReplicaSession):
    """A Hugging Face causal model in this process, in place of the replicas. Turns are sampled one after another."""

    def __init__(self, directory: Path, max_tokens: int, temperature: float, seed: int) -> None:
        """Load the model. Raises as `load_model`, and TemplateRefused for a chat template that cannot be used."""
        import torch

        from tidemill.trainer.model import load_model

        self.identity = ReplicaIdentity("local", "")
        self._chat = load_chat_format(str(directory), ChatSettings())
        self._model: Any = load_model(str(directory)).eval()
        torch.manual_seed(seed)
        self._max_tokens, self._temperature = max_tokens, temperature
        self._one = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        return None

    def policy(self, task: Task) -> RolloutPolicy:
        """Return the policy of one episode: the completion layer of rollouts with this model."""
        most = getattr(self._model.config.get_text_config(), "max_position_embeddings", UNLIMITED)
        limits = RolloutSettings(
            max_context_tokens=most, max_turn_tokens=self._max_tokens, temperature=self._temperature
        )
        return RolloutPolicy(self._chat, self, limits, task.max_turns)

    async def complete(self, prompt: list[int], sampling: Sampling) -> Completion:
        """Sample one turn from the model's own distribution."""
        async with self._one:
            return await asyncio.to_thread(self._sample, prompt, sampling)

    def _sample(self, prompt: list[int], sampling: Sampling) -> Completion:
        import torch

        with torch.no_grad():
            made = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=sampling.max_tokens,
                do_sample=True,
                temperature=sampling.temperature,
                top_k=0,
                top_p=1.0,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=sampling.stop_token_ids[0] if sampling.stop_token_ids else None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids = made.sequences[0, len(prompt) :]
        scores = torch.stack([logits[0].float() for logits in made.logits]).log_softmax(-1)
        logprobs = scores.gather(1, ids[:, None]).squeeze(1).tolist()
        found = ids.tolist()
        finish = "stop" if found[-1] in sampling.stop_token_ids else "length"
        return Completion(found, logprobs, (VersionSpan(0, 0, len(found)),), finish)


class EndpointModel:
    """An OpenAI endpoint. Open it as an async context manager."""

    def __init__(self, base_url: str, api_key: str, max_tokens: int) -> None:
        self.base_url, self._api_key, self.max_tokens = base_url.rstrip("/"), api_key, max_tokens
        self.model = ""

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(headers={"authorization": f"Bearer {self._api_key}"})
        try:
            async with self.session.get(f"{self.base_url}/models") as response:
                self.model = str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            await self.session.close()
            raise ConnectionError(f"{self.base_url}/models does not list a model: {error!r}") from error
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.session.close()

    def policy(self, task: Task) -> EndpointPolicy:
        return EndpointPolicy(self, task.max_turns)


class EndpointPolicy(Policy):
    """A policy whose turns an OpenAI endpoint makes; it keeps its newest conversation."""

    def __init__(self, endpoint: EndpointModel, most: int) -> None:
        self._endpoint, self._left = endpoint, most
        self.conversation: Sequence[Message] = ()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Reply:
        self._left -= 1
        if self._left < 0:
            raise GenerationFailed("more calls of the policy than the task allows (max_turns)")
        endpoint = self._endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": checked_messages(messages),
            "max_tokens": max_tokens or endpoint.max_tokens,
        }
        if tools:
            body["tools"] = list(checked_tools(tools))
        answer = ""
        try:
            async with endpoint.session.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
                answer = await response.text()
            choice = json.loads(answer)["choices"][0]
            reply = Reply(checked_message(choice["message"], "message"), choice["finish_reason"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GenerationFailed(f"{endpoint.base_url}: {error!r}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise GenerationFailed(f"{endpoint.base_url} answered no completion: {answer[:300]}") from error
        self.conversation = [*messages, reply.message]
        return reply
