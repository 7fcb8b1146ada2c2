"""Agents of other makers, each as its maker's quick start has it, with one tool.

    PYTHON client_agents.py NAME URL WORDS     # of the environment that holds the client

Prints a line of JSON per turn: tokens of its prompt, and how many of them the server had cached,
as the client itself says. It knows nothing of us: only the address is set. Runs without this
checkout's packages.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

MODEL = "tiny"
KEY = "none"  # vLLM asks for none
Turn = tuple[int, int]  # tokens of the prompt, cached ones among them


def output(words: str, path: str) -> str:
    """What the tool returns: new text each time."""
    output.calls += 1  # type: ignore[attr-defined]
    return f" {path}{words[output.calls :: 3]}"  # type: ignore[attr-defined]


output.calls = 0  # type: ignore[attr-defined]


def openai_agents(url: str, words: str, api: str) -> Iterator[Turn]:
    """The OpenAI Agents SDK, over either of its two APIs."""
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_default_openai_api(api)  # type: ignore[arg-type]
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def read_file(path: str) -> str:
        """Read a file."""
        return output(words, path)

    agent = agents.Agent(name="Reader", instructions="Read it.", tools=[read_file], model=MODEL)
    found = asyncio.run(agents.Runner.run(agent, words))
    for answer in found.raw_responses:
        usage = answer.usage
        yield usage.input_tokens, usage.input_tokens_details.cached_tokens


def anthropic_sdk(url: str, words: str) -> Iterator[Turn]:
    """The Anthropic SDK's tool runner over the server's messages endpoint."""
    import anthropic

    @anthropic.beta_tool
    def read_file(path: str) -> str:
        """Read a file."""
        return output(words, path)

    client = anthropic.Anthropic(base_url=url, api_key=KEY)
    asked: Any = {"role": "user", "content": words}
    # Threads leave the history to the server, and vLLM keeps none: it would answer the rest alone.
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=96, tools=[read_file], messages=[asked], thread=False
    )
    for message in runner:
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        yield usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached, cached


def langgraph_agent(url: str, words: str) -> Iterator[Turn]:
    """LangGraph's agent, as LangChain makes it, with langchain-openai."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def read_file(path: str) -> str:
        """Read a file."""
        return output(words, path)

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY)  # type: ignore[arg-type]
    found = create_agent(model, [read_file]).invoke({"messages": [("user", words)]})
    for message in found["messages"]:
        if usage := getattr(message, "usage_metadata", None):
            yield usage["input_tokens"], usage["input_token_details"].get("cache_read", 0)


def mini_swe_agent(url: str, words: str) -> Iterator[Turn]:
    """mini-swe-agent; its environment runs nothing."""
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    class Scripted:
        """Every command has some output."""

        config: Any = None

        def execute(self, action: Any, cwd: str = "") -> dict[str, Any]:
            return {"output": output(words, "ls"), "returncode": 0, "exception_info": ""}

        def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
            return {}

        def serialize(self) -> dict[str, Any]:
            return {}

    model = LitellmModel(
        model_name=f"openai/{MODEL}", model_kwargs={"api_base": f"{url}/v1", "api_key": KEY}
    )
    says = {"system_template": "You fix it.", "instance_template": "{{ task }}", "step_limit": 3}
    agent = DefaultAgent(model, Scripted(), **says)  # type: ignore[arg-type]
    agent.run(words)
    for message in agent.messages:
        if usage := message.get("extra", {}).get("response", {}).get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            yield usage["prompt_tokens"], details.get("cached_tokens") or 0


CLIENTS: dict[str, Callable[[str, str], Iterator[Turn]]] = {
    "openai-agents": lambda url, words: openai_agents(url, words, "responses"),
    "openai-agents-chat": lambda url, words: openai_agents(url, words, "chat_completions"),
    "anthropic": anthropic_sdk,
    "langgraph": langgraph_agent,
    "mini-swe-agent": mini_swe_agent,
}

if __name__ == "__main__":
    name, url, words = sys.argv[1:]
    for prompt_tokens, cached_tokens in CLIENTS[name](url, words):
        print(json.dumps([prompt_tokens, cached_tokens]))
