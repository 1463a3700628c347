"""A harness of verifiers that asks three times; an option sets its exit code after a failed call."""

import aiohttp
import verifiers.v1 as vf


class AskThriceConfig(vf.HarnessConfig):
    exit_code: int = 0
    """The exit code of the harness after a failed call."""


class AskThriceHarness(vf.Harness[AskThriceConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {secret}"}) as http:
            for _ in range(3):
                body = {"model": ctx.model, "messages": messages}
                async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        return vf.ProgramResult(self.config.exit_code, "", await answer.text())
                    messages.append((await answer.json())["choices"][0]["message"])
                messages.append({"role": "user", "content": "and then?"})
        return vf.ProgramResult(0, "", "")


__all__ = ["AskThriceHarness"]
