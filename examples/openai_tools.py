"""An agent on the OpenAI SDK (`pip install openai`): it reads files until it can answer.

    python examples/openai_tools.py http://localhost:8000 MODEL

Only the header is for the connector: an id that all turns of this run share. Leave it out, and the
agent is recognised by its prompt.
"""

import json
import sys
import time
import uuid
from itertools import count

import openai

URL, MODEL = sys.argv[1:]
FILES = {"README.md": "It adds two numbers. " * 20, "add.py": "def add(a, b): return a - b\n" * 10}
READ = {
    "name": "read_file",
    "description": "Read a file of the project.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": list(FILES)}},
        "required": ["path"],
    },
}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
history = [{"role": "user", "content": "Find the fault in this project. " * 20}]
headers = {"X-Session-ID": f"agent-{uuid.uuid4()}"}
for turn in count(1):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=history,
        tools=[{"type": "function", "function": READ}],
        max_tokens=1000,
        extra_headers=headers,
    )
    usage, message = answer.usage, answer.choices[0].message
    kept = getattr(usage.prompt_tokens_details, "cached_tokens", 0)
    print(f"turn {turn}: {kept} of {usage.prompt_tokens} tokens were kept")
    if not message.tool_calls:
        break
    history.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
    for call in message.tool_calls:
        time.sleep(1)  # a tool takes its time
        path = json.loads(call.function.arguments)["path"]
        history.append({"role": "tool", "tool_call_id": call.id, "content": FILES[path]})
