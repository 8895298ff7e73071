"""An agent with a tool, over HTTP, with the official `openai` client.

    python launch.py serve --model Qwen/Qwen3-8B --tp 2
    python examples/tool_agent.py "How many days are left until Christmas?"

The small default model was never trained to call tools. `--force` makes the first answer a call all
the same: the server then generates only what the schema of the tool allows.
"""

import argparse
import datetime
import json
from typing import Any

import openai

DAY = {"type": "string", "format": "date"}
DAYS = {"type": "object", "properties": {"date": DAY}, "required": ["date"]}
DAYS_UNTIL = {"name": "days_until", "description": "Days from today to a date.", "parameters": DAYS}


def days_until(arguments: str) -> str:
    """Run the tool. What goes wrong is told to the model, which may do better."""
    try:
        date = datetime.date.fromisoformat(json.loads(arguments)["date"])
    except (ValueError, KeyError) as error:
        return f"error: {error}"
    return str((date - datetime.date.today()).days)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--force", action="store_true", help="begin with a call")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": args.question}]
    tools: Any = [{"type": "function", "function": DAYS_UNTIL}]
    choice: Any = "required" if args.force else "auto"
    for _ in range(8):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=tools, tool_choice=choice
        )
        message, choice = answer.choices[0].message, "auto"
        messages.append(message)
        for call in message.tool_calls or []:
            result = days_until(call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            print(message.content)
            return


if __name__ == "__main__":
    main()
