"""`tidemill env`: environments listed, shown, tried and checked."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.compose.models_command import DIRECTORY, fetch
from tidemill.compose.options import key_values
from tidemill.compose.output import CsvOption, JsonOption, harmless, json_values, print_rows
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import EnvironmentFailed, TaskQuery, checked_score
from tidemill.producers.environments.check import ScriptedPolicy, check_environment, task_of
from tidemill.producers.environments.find import listed
from tidemill.producers.environments.open import open_environment
from tidemill.schemas.chat.format import chatml, load_chat_format
from tidemill.schemas.chat.messages import checked_tools
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import CHATML_TOKENS, ChatSettings, EnvironmentEntry

env_app = typer.Typer(no_args_is_help=True, help="Environments: list, show, try and check them.")

NameArgument = Annotated[str, typer.Argument(help="An installed environment, or package.module:object.")]
OptionOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the environment; may be repeated."),
]
SeedOption = Annotated[int, typer.Option(help="Seed of the tasks.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Directory, smollm2, or a name on the hub.")]


def awaited(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a command from an asynchronous function."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:  # noqa: ANN401 - typer's values
        asyncio.run(command(**arguments))

    return wrapped


@env_app.command("list")
def list_environments(
    family: Annotated[str, typer.Argument(help="Only this one or this family, for instance reasoning_gym.")] = "",
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """List the installed environments; for those that cannot be used, with the reason.

    Your own environments need no installation: name them as package.module:object.

    Example: `tidemill env list reasoning_gym`
    """
    found = list(listed(family))
    if not found:
        raise LookupError(f"there is no environment or family {family!r}: `tidemill env list` lists all")
    document = [{"name": each.name, "about": each.about, "problem": each.problem} for each in found]
    rows = ((each.name, f"not offered: {each.problem}" if each.problem else each.about) for each in found)
    print_rows(("name", "about"), rows, as_json=as_json, as_csv=as_csv, document=document)


@env_app.command()
@awaited
async def show(
    name: NameArgument, option: OptionOption = None, model: ModelOption = None, seed: SeedOption = 0,
    as_json: JsonOption = False, as_csv: CsvOption = False,
) -> None:  # fmt: skip
    """Show an environment: its options, an example task, its prompt as a model reads it, its reward components.

    With --csv it prints only the options.

    Example: `tidemill env show reasoning_gym:chain_sum --model smollm2`
    """
    async with _opened(name, option) as environment:
        draft = next(iter(environment.tasks(TaskQuery(seed))), None)
        if draft is None:
            raise ValueError(f"environment {name} gives no task: check its options, or give others with --option")
        try:
            payload = json.loads(draft.payload)
        except ValueError as error:
            raise ValueError(f"the payload of its tasks is no JSON document: {draft.payload!r:.60}") from error
        policy = ScriptedPolicy([""], draft.max_turns)
        try:
            score = checked_score(await environment.play(task_of(environment, name, draft, seed), policy))
            components = [{"name": part.name, "weight": part.weight} for part in score.rewards]
        except Exception as error:  # noqa: BLE001 - an environment may not support an empty turn
            components = [{"name": f"unknown: an empty turn ends in {error!r}", "weight": 0.0}]
        messages, tools = policy.requests[0] if policy.requests else ([], ())
        template = ChatTemplate(chatml(), {}, CHATML_TOKENS, ChatSettings())
        if model is not None:
            directory = fetch(model, DIRECTORY, Console(stderr=True))
            template = load_chat_format(str(directory), ChatSettings()).template
        prompt = template.text(messages, checked_tools(tools)) if messages else ""
        shown = {
            "name": name,
            "version": environment.version,
            "isolation": environment.isolation,
            "network": environment.network,
            "options": environment.option_rows(),
            "task": payload,
            "max_turns": draft.max_turns,
            "prompt": prompt,
            "rewards": components,
        }
    if as_json:
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    heads = ("name", "type", "value", "meaning")
    rows = [[each[head] for head in heads] for each in shown["options"]]
    if as_csv:
        print_rows(heads, rows, as_csv=True)
        return
    network = "with network" if shown["network"] else "without network"
    where = "in the worker's loop" if shown["isolation"] == "loop" else f"in a process of its own, {network}"
    typer.echo(f"{name}, version {environment.version}, runs {where}\n")
    print_rows(heads, rows)
    weighed = ", ".join(f"{each['name']} × {each['weight']:g}" for each in components)
    typer.echo(f"\nreward: {weighed}\nexample task (at most {draft.max_turns} turns): {draft.payload[:500]}")
    typer.echo(f"\nits prompt:\n{prompt}")


@env_app.command("try")
@awaited
async def try_environment(
    name: NameArgument,
    option: OptionOption = None,
    model: ModelOption = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Base URL of an OpenAI endpoint, a replica's too: http://host:port/v1.")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key of the endpoint.")] = "none",
    n: Annotated[int, typer.Option("--n", min=1, help="Number of episodes, each with a different task.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Greatest number of tokens in a turn.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature of --model.")] = 1.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Play episodes and print their transcripts and rewards. Status 1 if none of them ends in a reward.

    With --model the tokens are sampled here, by transformers, in the format of rollouts; with --endpoint by any server
    that implements OpenAI's chat protocol. With --csv it prints only the rewards.

    Example: `tidemill env try ledger --model smollm2 --n 2`
    """
    from tidemill.compose.cli.env_policies import EndpointModel, LocalModel

    if (model is None) == (endpoint is None):
        raise typer.BadParameter("give one of --model and --endpoint")
    sampler: EndpointModel | LocalModel
    if endpoint is not None:
        sampler = EndpointModel(endpoint, api_key, max_tokens)
    else:
        sampler = LocalModel(fetch(str(model), DIRECTORY, Console(stderr=True)), max_tokens, temperature, seed)
    episodes = []
    async with _opened(name, option) as environment, sampler:
        for draft in islice(environment.tasks(TaskQuery(seed)), n):
            task = task_of(environment, name, draft, seed)
            policy = sampler.policy(task)
            failure, score = "", None
            try:
                played = checked_score(await environment.play(task, policy))
                if not policy.conversation:
                    raise EnvironmentFailed("the policy was never called")  # a worker fails such a rollout too
                score = played
            except Exception as error:  # noqa: BLE001 - any error of the environment's is a failed rollout
                failure = f"{type(error).__name__}: {error}"
            episode = {
                "conversation": policy.conversation,
                "rewards": {part.name: part.value for part in score.rewards} if score else {},
                "reward": score.total if score else None,
                "success": score.success if score else None,
                "failure": failure,
            }
            episodes.append(episode)
            if not (as_json or as_csv):
                typer.echo(f"── episode {len(episodes)} " + "─" * 60)
                for message in policy.conversation:
                    text = str(message["content"])
                    for call in message.get("tool_calls") or ():
                        text += f"\n→ {call['function']['name']}({call['function']['arguments']})"
                    typer.echo(harmless(f"{message['role']}: {text.strip()}"))
                if score is None:
                    typer.echo(harmless(f"failed: {failure}\n"))
                else:
                    parts = ", ".join(f"{part.name} {part.value:g}" for part in score.rewards)
                    typer.echo(f"reward {score.total:g} ({parts}){', solved' if score.success else ''}\n")
    failed = sum(bool(each["failure"]) for each in episodes)
    if as_json:
        typer.echo(json.dumps(json_values(episodes), indent=2, ensure_ascii=False))
    elif as_csv:
        heads = ("reward", "success", "failure", "rewards")
        print_rows(heads, ([each[head] for head in heads] for each in episodes), as_csv=True)
    else:
        typer.echo(f"{sum(bool(each['success']) for each in episodes)} of {len(episodes)} solved, {failed} failed")
    raise typer.Exit(1 if failed == len(episodes) else 0)


@env_app.command()
@awaited
async def check(
    name: NameArgument,
    option: OptionOption = None,
    seed: SeedOption = 0,
    limit_s: Annotated[float, typer.Option(min=0.1, help="Longest time of one episode of an instant policy.")] = 30.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Check an environment: determinism, hostile turns, deadlines, separate held-out tasks. Status 1 if it fails.

    Example: `tidemill env check package.module:object`
    """
    found = []
    async with _opened(name, option) as environment:
        async for each in check_environment(environment, name, seed, limit_s):
            found.append(each)
            if not (as_json or as_csv):
                typer.echo(f"{'ok  ' if each.ok else 'FAIL'}  {each.name}: {each.detail}")
    broken = sum(not each.ok for each in found)
    if as_json or as_csv:
        rows = ((each.name, each.ok, each.detail) for each in found)
        print_rows(("name", "ok", "detail"), rows, as_json=as_json, as_csv=as_csv)
    else:
        typer.echo(f"{len(found) - broken} of {len(found)} clauses hold")
    if broken:
        raise typer.Exit(1)


@asynccontextmanager
async def _opened(name: str, option: list[str] | None) -> AsyncIterator[Any]:
    options = key_values(option or [])
    # Modules in the current directory can be named, as if Python had been started there.
    sys.path.insert(0, str(Path.cwd()))
    environment = await open_environment(EnvironmentEntry(name=name), options, RolloutSettings())
    try:
        yield environment
    finally:
        await environment.close()
