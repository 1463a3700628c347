"""A harness of verifiers that runs a program with the `openai` client."""

import sys

import verifiers.v1 as vf

PROGRAM = """
import sys
from openai import OpenAI
client, messages = OpenAI(), [{"role": "user", "content": sys.argv[1]}]
for turn in range(3):
    if turn == 1:
        parts = client.chat.completions.create(model="m", messages=messages, stream=True)
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    else:
        said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
"""


class ProgramConfig(vf.HarnessConfig):
    pass


class ProgramHarness(vf.Harness[ProgramConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        variables = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret}
        return await runtime.run_program([sys.executable, "-c", PROGRAM, prompt], variables)


__all__ = ["ProgramHarness"]
