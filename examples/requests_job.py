"""An agent without any SDK (`pip install requests`), with the fields of the original Continuum.

    python examples/requests_job.py http://localhost:8000 MODEL

`job_id` names the run, `is_last_step` frees its KV at the end. In `vllm_xargs` they need no
middleware. The agent wants a command in a ```bash block, as mini-swe-agent does, so no tool
parser is needed; it runs none, but has an output for each.
"""

import re
import sys
import time
import uuid

import requests

URL, MODEL = sys.argv[1:]
TURNS = 3
OUTPUTS = {"cat add.py": "def add(a, b): return a - b\n" * 10, "ls": "README.md add.py " * 20}
TASK = "Find the fault. Say which command to run, in a ```bash block: ls, or cat add.py. " * 10

job_id = f"job-{uuid.uuid4()}"
history = [{"role": "user", "content": TASK}]
for turn in range(1, TURNS + 1):
    reply = requests.post(
        f"{URL}/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": history,
            "max_tokens": 100,
            "vllm_xargs": {"job_id": job_id, "is_last_step": int(turn == TURNS)},
        },
        timeout=300,
    )
    reply.raise_for_status()
    answer, usage = reply.json()["choices"][0]["message"], reply.json()["usage"]
    kept = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    print(f"turn {turn}: {kept} of {usage['prompt_tokens']} tokens were kept")
    history.append({"role": "assistant", "content": answer["content"]})
    command = re.search(r"```bash\n(.*?)\n```", answer["content"] or "", re.DOTALL)
    time.sleep(1)  # a tool takes its time
    output = OUTPUTS.get(command[1] if command else "ls", "No such command. Try ls, or cat add.py.")
    history.append({"role": "user", "content": output})
