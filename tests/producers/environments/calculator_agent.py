"""An agent program: the `openai` client, its own tools, any number of calls. It reads its task from stdin."""

import json
import sys

from openai import OpenAI

TOOLS = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b}


def main() -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set for this episode
    task = json.load(sys.stdin)
    messages = task["messages"]
    while True:
        turn = client.chat.completions.create(model="policy", messages=messages, tools=task["tools"])
        said = turn.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return  # the environment scores the last conversation
        for call in said.tool_calls:
            try:
                result = str(TOOLS[call.function.name](**json.loads(call.function.arguments)))
            except (KeyError, TypeError, ValueError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
