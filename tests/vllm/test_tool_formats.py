"""The corpus is what vLLM's own tool parsers read: same text, same names."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from continuum_connector import toolcalls
from continuum_connector.toolcalls import THINKING, kinds_of, parse, spoken

tomllib = pytest.importorskip("tomllib")  # Python 3.11
pytest.importorskip("vllm.tool_parsers")  # where newer vLLMs have them

CORPUS = Path(__file__).parents[1] / "unit" / "tool_outputs"
DOCS = (Path(__file__).parents[2] / "docs" / "tool-calls.md").read_text()
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<｜end▁of▁sentence｜>")
MORE_MARKERS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]"),
    *("<tool_calls>", "</tool_calls>", "<|action_start|>", "<|plugin|>", "<|action_end|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_end|>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "｜DSML｜", "<|python_end|>"),
)
MARKERS = [  # that may be tokens
    marker
    for marker in (*toolcalls.BEGINNINGS, *toolcalls.ENDS, *THINKING, *THINKING.values())
    if marker[0] in "<[" and marker.count("<") <= 1
]
SAMPLES = [
    ("hermes", "hermes_qwen", "one call"),
    ("hermes", "hermes_qwen", "two calls after some words"),
    ("hermes", "hermes_qwen", "only the end of the thinking"),
    ("qwen3_coder", "qwen3_coder", "two parameters, no outer tag"),
    ("qwen3_coder", "qwen3_coder", "two calls"),
    ("llama3_json", "llama", "bare JSON"),
    ("llama3_json", "llama", "with its tag"),
    ("llama3_json", "llama", "two with a semicolon"),
    ("llama3_json", "llama", "words, then JSON"),
    ("llama3_json", "llama", "JSON for a person"),
    ("pythonic", "llama", "python-style list"),
    ("pythonic", "llama", "python-style with values that nest"),
    ("pythonic", "llama", "a list for a person"),
    ("llama4_pythonic", "llama", "python-style with Llama 4's tags"),
    ("olmo3", "llama", "Olmo 3's lines"),
    ("mistral", "mistral", "name, then arguments"),
    ("deepseek_v31", "deepseek", "V3.1"),
    ("deepseek_v32", "deepseek", "V3.2, after the thinking"),
    ("glm45", "glm", "pairs"),
    ("minimax_m2", "xml_invoke", "MiniMax"),
    ("minimax_m3", "xml_invoke", "MiniMax M3"),
    ("phi4_mini_json", "other_markers", "Phi-4-mini"),
    ("granite", "other_markers", "Granite 3"),
    ("jamba", "other_markers", "Jamba, Hunyuan"),
    ("internlm", "other_markers", "InternLM 2"),
    ("apertus", "other_markers", "Apertus"),
    ("lfm2", "other_markers", "LFM2"),
    ("deepseek_v3", "deepseek", "V3, one call"),
    ("deepseek_v4", "deepseek", "V4, a call ends the thinking"),
    ("deepseek_v41", "deepseek", "V4.1, a call ends the thinking"),
    ("dots", "xml_invoke", "Dots"),
    ("ernie45", "hermes_qwen", "one call"),
    ("functiongemma", "agents", "FunctionGemma, no shell"),
    ("gemma4", "agents", "Gemma 4"),
    ("gigachat3", "other_markers", "GigaChat 3"),
    ("glm47", "glm", "pairs"),
    ("granite-20b-fc", "other_markers", "Granite 20B"),
    ("granite-20b-fc", "other_markers", "Granite 20B, three calls"),
    ("granite4", "hermes_qwen", "one call"),
    ("hunyuan_a13b", "other_markers", "Jamba, Hunyuan"),
    ("hy_v3", "glm", "Hunyuan 3"),
    ("inkling", "other_markers", "Inkling, where a call ends the thinking"),
    ("k2_horizon", "glm", "K2 Horizon, pairs"),
    ("kimi_k2", "kimi", "one call"),
    ("kimi_k2", "kimi", "a space behind the name"),
    ("kimi_k3", "other_markers", "Kimi K3, two calls"),
    ("ling3", "glm", "pairs"),
    ("llama4_json", "llama", "bare JSON"),
    ("longcat", "other_markers", "LongCat"),
    ("longcat", "other_markers", "LongCat, two calls"),
    ("mimo", "qwen3_coder", "two calls"),
    ("minicpm5", "xml_invoke", "MiniCPM 5"),
    ("muse", "harmony", "Muse: to itself, to a tool"),
    ("muse_glimmer", "harmony", "Muse: to itself, to a tool"),
    ("musespark1x", "harmony", "Muse: to itself, to a tool"),
    ("poolside_v1", "glm", "pairs"),
    ("qwen3_json", "hermes_qwen", "one call"),
    ("qwen3_xml", "qwen3_coder", "two calls"),
    ("seed_oss", "qwen3_coder", "two calls"),
    ("step3p5", "qwen3_coder", "two calls"),
    ("step5", "qwen3_coder", "two calls"),
    ("xlam", "mistral", "the list"),
]
NOT_COMPARED = {  # the corpus has them, but vLLM's class alone cannot read a text here
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "hy_v4": "takes the suffix of its tags from the checkpoint's vocabulary",
    "openai": "a stub: vLLM reads harmony by its tokens",
    "step3": "reads streams and other wrappings than the corpus' sample",
}
ALIASES = {"muse", "musespark1x", "step5"}  # what older or newer vLLMs call one of the others
WRITTEN_BY_OTHERS = {  # than the parsers that SAMPLES compares with
    "<|START_ACTION|>": "Cohere, as NOT_COMPARED says",
    "<TOOLCALL>": "Nemotron Nano 2, whose checkpoint brings a parser",
}
UNREAD = {  # as docs/tool-calls.md says
    "beam": "no sample of it is known to us",
    "hf": "reads what a checkpoint's own template declares",
    "plamo3": "special tokens of its own",
}


@functools.cache
def tokenizer() -> Any:
    """Bytes, and the markers as tokens: some parsers look them up."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    known = (*MARKERS, *MORE_MARKERS)
    bpe.add_tokens([AddedToken(m, normalized=False) for m in dict.fromkeys(known)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def names_of(parser: str, text: str) -> list[str]:
    """The names that vLLM's parser finds."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(parser)
    except KeyError:
        pytest.skip(f"this vLLM has no parser {parser}")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=tools
    )
    try:
        read = parser_class(tokenizer(), request.tools).extract_tool_calls(text, request)
    except RuntimeError as why:  # vLLM 0.26's MiniMax M3 is a binary that its CPU wheel lacks
        if "_rust_tool_parser" not in str(why):
            raise
        pytest.skip(str(why))
    return [call.function.name for call in read.tool_calls]


def reasoning_of(parser: str, text: str) -> tuple[str | None, str | None]:
    """What vLLM's parser takes for the thinking, and what for the rest."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    try:
        parser_class = ReasoningParserManager.get_reasoning_parser(parser)
    except KeyError:
        pytest.skip(f"this vLLM has no reasoning parser {parser}")
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    try:
        return parser_class(tokenizer()).extract_reasoning(text, request)
    except ValueError as why:  # vLLM 0.26's Mistral wants its own tokenizer
        pytest.skip(str(why))


@pytest.mark.vllm
@pytest.mark.parametrize(("parser", "file", "name"), SAMPLES)
def test_vllm_reads_the_same_calls(parser: str, file: str, name: str) -> None:
    samples = tomllib.loads((CORPUS / f"{file}.toml").read_text())["sample"]
    text = next(sample["text"] for sample in samples if sample["name"] == name)
    for end in ENDS:
        text = text.removesuffix(end)
    theirs = names_of(parser, spoken(text)[0])
    assert list(parse(text).tools) == list(dict.fromkeys(theirs))


@pytest.mark.vllm
def test_every_tool_parser_of_vllm_is_compared_or_named() -> None:
    from vllm.tool_parsers import ToolParserManager

    known = {parser for parser, _, _ in SAMPLES} | NOT_COMPARED.keys() | UNREAD.keys()
    theirs = {*ToolParserManager.tool_parsers, *getattr(ToolParserManager, "lazy_parsers", ())}
    assert theirs, "vLLM keeps its tool parsers elsewhere now: list them from there"
    assert sorted(theirs - known) == [], (
        "vLLM parses formats that nobody has looked at: for each, write a sample into "
        "tests/unit/tool_outputs and name it in SAMPLES; or name it in UNREAD and in "
        "docs/tool-calls.md, and its clients have to declare their `tools`"
    )


def test_the_docs_say_who_writes_each_format() -> None:
    """By vLLM's name for its parser, or by a link to who else writes it."""
    table = DOCS.partition("## Formats that are read")[2].partition("The first call")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    writers = [row.rstrip("| ").rpartition(" | ")[2] for row in rows]
    assert all(writer.startswith("`") or "](https://" in writer for writer in writers)
    named = re.findall(r"`([^`]+)`", " ".join(writers))
    known = {*NOT_COMPARED, *(parser for parser, _, _ in SAMPLES)}
    assert sorted(named) == sorted(known - ALIASES)


def test_every_marker_that_is_read_has_somebody_who_writes_it() -> None:
    compared = {(file, name) for _, file, name in SAMPLES}
    written = [
        sample["text"]
        for path in CORPUS.glob("*.toml")
        for sample in tomllib.loads(path.read_text())["sample"]
        if (path.stem, sample["name"]) in compared
    ]
    texts = [toolcalls.DECORATED.sub(r"<\1\2\3>", text) for text in written]
    lonely = {m for m in toolcalls.VALUE_MARKERS if not any(m in text for text in texts)}
    assert lonely == WRITTEN_BY_OTHERS.keys()
    (agents,) = [
        row for row in toolcalls.FORMATS if not any(re.search(row, text) for text in texts)
    ]
    assert "execute_command|" in agents


@pytest.mark.parametrize("parser", UNREAD)
def test_the_docs_name_what_is_not_read(parser: str) -> None:
    assert f"`{parser}`" in DOCS.partition("Not read:")[2].partition("##")[0]


THINKERS = [  # a reasoning parser, what opens its thinking, what begins its calls
    ("qwen3", "<think>", "<tool_call>"),
    ("glm45", "<think>", "<tool_call>"),
    ("nemotron_v3", "<think>", "<tool_call>"),
    ("kimi_k2", "<think>", "<|tool_calls_section_begin|>"),
    ("minimax_m2", "<think>", "<minimax:tool_call>"),
    ("mistral", "[THINK]", "[TOOL_CALLS]"),
    ("seed_oss", "<seed:think>", "<seed:tool_call>"),
    ("deepseek_v4", "<think>", "<｜DSML｜tool_calls>"),
    ("deepseek_v41", "<think>", "<｜DSML｜ calls>"),
    ("deepseek_r1", "<think>", "<｜tool▁calls▁begin｜>"),
    ("step3", "<think>", "<｜tool_calls_begin｜>"),
    ("qwen3", "<think>", "<function="),
]


@pytest.mark.vllm
@pytest.mark.parametrize(("parser", "opener", "call"), THINKERS)
def test_a_call_ends_the_thinking_where_vllm_ends_it(parser: str, opener: str, call: str) -> None:
    thought, said = reasoning_of(parser, f"{opener}Let me see. {call}")
    assert thought
    assert spoken(f"{opener}Let me see. {call}")[0] == (call if said else "")


def test_the_markers_of_a_real_tokenizer_are_found_by_their_ids() -> None:
    known = tokenizer().get_added_vocab()
    kinds = kinds_of(tokenizer())
    assert kinds.keys() == {known[marker] for marker in MARKERS}
    assert {kinds[known[marker]] for marker in THINKING if marker in MARKERS} == {"think"}
    assert {kinds[known[marker]] for marker in toolcalls.ENDS} == {"end"}
    assert kinds[known["<tool_call>"]] == "call"
