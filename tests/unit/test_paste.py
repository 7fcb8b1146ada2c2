"""What people paste -> the options of the server that it starts."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from continuum_connector.tools.checks import paste
from continuum_connector.tools.checks.paste import NoServerError, Pasted
from tests.corpus import cases, pastes

TWO = ["m", "-tp", "2"]
SIZE = ["--tensor_parallel_size", "2"]
MODEL = ["--model", "m", "-tp", "2"]


def one(text: str) -> Pasted:
    [found] = paste.read(text)
    return found


SHELL = [
    "vllm serve m -tp 2",
    "vllm\tserve m -tp 2   # with a comment",
    "vllm serve m \\\n  -tp 2",
    "vllm serve m -tp 2 > log 2>&1 &",
    "vllm serve m -tp 2 2>/dev/null",
    "vllm serve m -tp 2 &> log",
    "vllm serve m -tp 2 && echo",
    "vllm serve m -tp 2 | tee log",
    "vllm serve m -tp 2 </dev/null; echo",
    "#!/bin/bash\nset -e\nsource venv/bin/activate\n# two GPUs\nexec vllm serve m -tp 2",
    "CUDA_VISIBLE_DEVICES=0,1 nohup /opt/vllm/bin/vllm serve m -tp 2 &",
    "numactl --cpunodebind=0 vllm serve m -tp 2",
    "uv run --with vllm vllm serve m -tp 2",
    "python3 -m vllm.entrypoints.cli.main serve m -tp 2",
    'bash -c "vllm serve m -tp 2"',
    "bash -lc 'cd /x && exec vllm serve m -tp 2 2>&1 | tee log'",
    "tmux new-session -d -s llm 'vllm serve m -tp 2'",
    "ssh gpu1 \"sh -c 'vllm serve m -tp 2'\"",
    "docker run --entrypoint /bin/sh img:1 -c 'vllm serve m -tp 2'",
    "docker run --gpus all --entrypoint vllm img serve m -tp 2",
    "docker run -it my.registry/llm:1 vllm serve m -tp 2",
    "(cd /srv; vllm serve m -tp 2)",
    "[Unit]\nDescription=vllm serve\n[Service]\nUser=llm\nExecStart=/usr/bin/vllm serve m -tp 2",
    "MODEL=m\nTP=2\nvllm serve $MODEL -tp ${TP}",
    'export MODEL=m TP=2; vllm serve "$MODEL" -tp "${TP:-8}"',
]


@pytest.mark.parametrize("text", SHELL)
def test_a_shell_line_or_a_script(text: str) -> None:
    found = one(text)
    assert (found.words, found.unknown) == (TWO, [])


@pytest.mark.parametrize("case", pastes.CASES, ids=lambda case: case.name)
def test_the_corpus(case: cases.Case) -> None:
    """What vLLM makes of these is asked in tests/vllm/test_corpus.py."""
    text = case.text.replace("{TINY}", "/m")
    if case.wants == pastes.VERDICTS["none"]:
        with pytest.raises(NoServerError):
            paste.read(text)
        return
    found = one(text)
    if case.wants == pastes.WELL:
        assert not found.unknown
        assert {"/m", "fp8"} <= {part for word in found.words for part in word.split("=")}


OPTIONS = [
    "--model m -tp 2",
    "python -m vllm.entrypoints.openai.api_server --model m -tp 2",
    "docker run --gpus all -p 8000:8000 -v ~/x:/y --ipc=host vllm/vllm-openai:v1 --model m -tp 2",
    "docker run -d --rm --name a -eA=b --shm-size 1g reg.io/a/vllm@sha256:1 --model m -tp 2",
    "sudo podman run --device nvidia.com/gpu=all custom:1 --model m -tp 2",
    "docker run --entrypoint python3 img -m vllm.entrypoints.openai.api_server --model m -tp 2",
    "kubectl run llm --image=vllm/vllm-openai -- --model m -tp 2",
    "- --model\n- m\n- -tp\n- '2'",
    "args: [--model, m, -tp, 2]",
    'llm = {\n  image = "vllm/vllm-openai";\n  cmd = [ "--model" "m"\n "-tp" "2" ];\n};',
    'FROM vllm/vllm-openai\nENV A=b\nCMD ["--model", "m", "-tp", "2"]',
    "services:\n  llm:\n    image: vllm/vllm-openai\n    command: --model m -tp 2",
    "services:\n  llm:\n    image: vllm/vllm-openai\n    command: [--model, m, -tp, '2']",
    "services:\n  a:\n    image: x\n    entrypoint: [python3, -m]\n"
    "    command: vllm.entrypoints.openai.api_server --model m -tp 2",
    "services:\n  redis:\n    image: redis\n    command: redis-server --port 1\n"
    "  llm:\n    image: vllm/vllm-openai\n    command: >\n      --model m\n      -tp 2\n",
]


@pytest.mark.parametrize("text", OPTIONS)
def test_options_of_an_image_of_a_module_or_alone(text: str) -> None:
    assert one(text).words == MODEL


MANIFEST = """
# Source: chart/templates/deployment.yaml
apiVersion: v1
kind: Service
metadata: {name: s}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  template:
    spec:
      initContainers:
      - {name: init, image: busybox, command: [sh, -c, "sleep 1"]}
      containers:
      - name: engine
        image: vllm/vllm-openai:latest
        command: ["/bin/sh", "-c"]
        args:
        - |
          vllm serve m \\
            -tp $(TP) --port $PORT --kv-transfer-config '{"kv_connector":"X"}'
        env:
        - {name: TP, value: "4"}
        - {name: CONTINUUM_DRAM_BYTES, value: 64GiB}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: a, key: b}}
"""


def test_a_manifest() -> None:
    found = one(MANIFEST)
    config = ["--kv-transfer-config", '{"kv_connector":"X"}']
    assert found.words == ["m", "-tp", "4", *config], "without the port that nobody knows"
    assert found.environ == {"TP": "4", "CONTINUUM_DRAM_BYTES": "64GiB"}
    assert (found.name, found.unknown, found.is_inside) == ("engine", ["$PORT"], True)


def test_a_file_of_options_for_config() -> None:
    text = """# ours
model: m
no-enable-prefix-caching: true
enforce-eager: false
tensor-parallel-size: 2
middleware: [a, b]
kv-transfer-config: {kv_connector: X}
"""
    words = ["--model", "m", "--no-enable-prefix-caching", "--tensor-parallel-size", "2"]
    more = ["--middleware", "a", "b", "--kv-transfer-config", '{"kv_connector": "X"}']
    assert one(text).words == [*words, *more]


def test_each_server_of_a_text_is_found() -> None:
    text = "vllm serve a --port 1 &\nvllm serve b --port 2"
    assert [each.words[0] for each in paste.read(text)] == ["a", "b"]
    assert [each.words[0] for each in paste.read(f"{MANIFEST}\n---\n{MANIFEST}")] == ["m", "m"]


@pytest.mark.parametrize(
    ("text", "words", "unknown"),
    [
        ("vllm serve m --port $PORT -tp 2", TWO, ["$PORT"]),
        ("vllm serve m --port=${PORT} -tp 2", TWO, ["${PORT}"]),
        ("vllm serve m -tp ${TP:-2}", TWO, ["${TP:-2}"]),
        ("vllm serve m -tp $(nvidia-smi -L | wc -l)", ["m"], ["$(nvidia-smi -L | wc -l)"]),
        ("vllm serve $MODEL -tp 2", ["-tp", "2"], ["$MODEL"]),
        ('vllm serve m "${ARGS[@]}"', ["m"], ["${ARGS[@]}"]),
        ("vllm serve m -x '$NOT'", ["m", "-x", "$NOT"], []),
        ('vllm serve m -x "a\\$b"', ["m", "-x", "a$b"], []),
        ("echo $HOME; vllm serve m -tp 2", TWO, []),
        ("HF_TOKEN=$T vllm serve m -tp 2", TWO, []),
        ("CONTINUUM_DRAM_BYTES=$D vllm serve m -tp 2", TWO, ["$D"]),
        ("services:\n  a:\n    image: vllm/vllm-openai\n    command: m -tp ${TP:-2}", TWO,
         ["${TP:-2}"]),
    ],
)  # fmt: skip
def test_what_only_a_shell_knows_is_not_seen(
    text: str, words: list[str], unknown: list[str]
) -> None:
    found = one(text)
    assert (found.words, found.unknown) == (words, unknown)


def test_the_environment_that_a_text_sets(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("# x\nA=1\nexport B='2'\n\nC\n")
    docker = f"docker run --env-file {tmp_path}/env -e D=4 --env=E=5 -e F vllm/vllm-openai m"
    assert one(docker).environ == {"A": "1", "B": "2", "D": "4", "E": "5"}
    assert one("docker run --env-file /no vllm/vllm-openai m").unknown == ["the file /no"]
    compose = f"services:\n  a:\n    image: vllm\n    env_file: {tmp_path}/env\n    command: m\n"
    assert one(compose + "    environment:\n      D: 4\n      T: true").environ == {
        "A": "1",
        "B": "2",
        "D": "4",
        "T": "true",
    }
    assert one("env A=b X=c=d vllm serve m Y=1").environ == {"A": "b", "X": "c=d"}
    assert one("export A=b; C=d\nvllm serve m").environ == {"A": "b", "C": "d"}
    assert paste.of_words(["nohup", "env", "A=b", "vllm", "serve", "m"])[0].environ == {"A": "b"}


def test_a_variable_whose_name_is_part_of_another_is_not_seen() -> None:
    text = "export VLLM_USE_V1_X=1\nvllm serve m\nVLLM_USE_V1: 1"
    assert one(text).unknown == ["VLLM_USE_V1"]


def test_a_path_in_a_container_is_the_folder_that_is_mounted_there(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    words = f"-v {tmp_path}:/models:ro vllm/vllm-openai --model=/models/llama --x /models/none"
    found = one(f"docker run {words}")
    assert found.words == [f"--model={tmp_path}/llama", "--x", "/models/none"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sleep 1", "`sleep 1` is not `vllm serve`"),
        ("vllm bench serve --model m", "is not `vllm serve`"),
        ("vllm chat --model m", "is not `vllm serve`"),
        ("docker run redis", "is not `vllm serve`"),
        ("vllm serve 'm", "a quotation is not closed"),
        ("args: [--model, '{{ .Values.model }}']", "what `helm template` prints"),
        ("args: [--model", "it is no YAML"),
        ("apiVersion: v1\nkind: Service\nmetadata: {name: s}", "starts no server"),
        ("", "starts no server"),
    ],
)
def test_a_text_that_starts_no_server_is_one_sentence(text: str, part: str) -> None:
    with pytest.raises(NoServerError, match=re.escape(part)) as why:
        paste.read(text)
    assert "\n" not in str(why.value)


def test_a_template_of_chat_in_an_option_is_no_helm_template() -> None:
    assert one("vllm serve m --chat-template '{{ messages }}'").words[0] == "m"


@pytest.mark.parametrize(
    ("text", "words", "unknown"),
    [
        ('cmd = ["vllm", "serve", "m"]\nfor _ in x:\n  cmd.append("-a")', ["m", "-a"], []),
        ('two = ["-tp", "2"]\nrun(["vllm", "serve", "m", *two])', TWO, []),
        ('two = ["-tp", "2"]\nrun(["vllm", "serve", "m"] + two + more)', TWO, ["more"]),
        ('run("vllm serve m -tp " + str(2) + " --port " + port)', TWO, ["port"]),
        ('self.words = "vllm serve {} -tp 2".format(model)', ["-tp", "2"], ["{}"]),
        ('p = Popen(["vllm", "serve", "m", "-tp", TWO["tp"]])', ["m"], ["TWO['tp']"]),
    ],
)
def test_a_program_in_python_is_read_as_far_as_it_says_itself_what_it_starts(
    text: str, words: list[str], unknown: list[str]
) -> None:
    found = one(text)
    assert (found.words, found.unknown) == (words, unknown)


def test_each_server_of_a_program_in_python_is_found() -> None:
    text = 'cmd = "vllm serve a"\nrun(cmd)\ncmd = "vllm serve b"\nrun(cmd)'
    assert [each.words for each in paste.read(text)] == [["a"], ["b"]]


def test_a_sum_of_many_parts_in_python_is_not_slow() -> None:
    began = time.process_time()
    assert one('run("vllm serve m "' + ' + x + " -a"' * 60 + ")").words[0] == "m"
    assert time.process_time() - began < 5


def test_what_an_engines_options_turn_off_is_off() -> None:
    text = "engine_kwargs: {enable_prefix_caching: false, tensor_parallel_size: 2}\n"
    found = one(f"{text}model_loading_config: {{model_id: m}}")
    assert found.words == ["--model", "m", "--no-enable_prefix_caching", *SIZE]


@pytest.mark.parametrize("text", ["--x {}", "--x '{}'", '--x "{}"', "--x {}'"])
def test_a_word_of_a_megabyte_is_not_slow(text: str) -> None:
    began = time.process_time()
    with contextlib.suppress(NoServerError):
        assert one(f"vllm serve m {text.format('a' * (1 << 20))}").words[0] == "m"
    assert time.process_time() - began < 20, "it took two minutes"


@pytest.mark.parametrize(
    "text",
    [
        "a='vllm serve '\n" + "a=a+a\n" * 25,
        "a=['vllm', 'serve']\n" + "a+=a\n" * 25,
        "a=['vllm', 'serve']\n" + "a=[*a,*a]\n" * 25,
        "a='vllm serve '\n" + "a=f'{a}{a}'\n" * 25,
    ],
)
def test_a_program_that_doubles_what_it_has_takes_no_more_than_a_file_may(text: str) -> None:
    commands, _ = paste._of_python(text)
    assert sum(len(word) for words in commands for word in words) < 4 * paste.MAX_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "a='vllm serve '\n" + 'a="$a$a"\n' * 25,
        "a=(vllm serve)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 25,
        "a=vllm\n" + "a+=$a\n" * 25,
    ],
)
def test_a_script_that_doubles_what_it_has_takes_no_more_than_a_file_may(text: str) -> None:
    script = paste.read_script(text)
    assert len(script.known["a"]) < 4 * paste.MAX_BYTES
