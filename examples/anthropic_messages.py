"""An agent on the Anthropic SDK (`pip install anthropic`): the same loop over vLLM's /v1/messages.

    python examples/anthropic_messages.py http://localhost:8000 MODEL

Nothing here is for the connector: it knows the agent by the prompt, which begins with all that was
said before. So keep the history as it was sent, and add to its end.
"""

import sys
import time
from itertools import count

import anthropic

URL, MODEL = sys.argv[1:]
FILES = {"README.md": "It adds two numbers. " * 20, "add.py": "def add(a, b): return a - b\n" * 10}
READ = {
    "name": "read_file",
    "description": "Read a file of the project.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": list(FILES)}},
        "required": ["path"],
    },
}

client = anthropic.Anthropic(base_url=URL, api_key="none")
history = [{"role": "user", "content": "Find the fault in this project, please. " * 20}]
for turn in count(1):
    answer = client.messages.create(model=MODEL, max_tokens=1000, messages=history, tools=[READ])
    kept = answer.usage.cache_read_input_tokens or 0
    print(f"turn {turn}: {kept} of {kept + answer.usage.input_tokens} tokens were kept")
    results = []
    for call in (block for block in answer.content if block.type == "tool_use"):
        time.sleep(1)  # a tool takes its time
        output = FILES[call.input["path"]]
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": output})
    if not results:
        break
    history.append({"role": "assistant", "content": answer.content})
    history.append({"role": "user", "content": results})
