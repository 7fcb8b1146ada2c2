"""An agent on the OpenAI SDK (`pip install openai`): three turns with tool calls between them.

    python examples/openai_tools.py http://localhost:8000 MODEL

For the connector are only the header, an id that all turns of this run share, and `final`, with
which the last turn's KV is freed at once. Leave both out, and it recognises the agent all the same.
"""

import json
import sys
import time
import uuid

import openai

URL, MODEL = sys.argv[1:]
TURNS = 3
FILES = {"README.md": "It adds two numbers. " * 20, "add.py": "def add(a, b): return a - b\n" * 10}
READ = {
    "name": "read_file",
    "description": "Read a file of the project.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"enum": list(FILES)}},
        "required": ["path"],
    },
}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
headers = {"X-Session-ID": f"agent-{uuid.uuid4()}"}
history = [{"role": "user", "content": "Find the fault in this project. " * 20}]
for turn in range(1, TURNS + 1):
    is_last = turn == TURNS
    answer = client.chat.completions.create(
        model=MODEL,
        messages=history,
        max_tokens=200,
        tools=[{"type": "function", "function": READ}],
        # So that any model calls it. With "auto" the model chooses, and ends when it is done.
        tool_choice="none" if is_last else {"type": "function", "function": {"name": "read_file"}},
        extra_headers=headers,
        extra_body={"kv_transfer_params": {"continuum": {"final": is_last}}},
    )
    usage, message = answer.usage, answer.choices[0].message
    kept = getattr(usage.prompt_tokens_details, "cached_tokens", 0)
    print(f"turn {turn}: {kept} of {usage.prompt_tokens} tokens were kept")
    history.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
    for call in message.tool_calls or []:
        time.sleep(1)  # a tool takes its time
        path = json.loads(call.function.arguments)["path"]
        history.append({"role": "tool", "tool_call_id": call.id, "content": FILES[path]})
