"""Names of the shell: what stands before a command, runs another one, or takes no time."""

from __future__ import annotations


def _words(line: str) -> frozenset[str]:
    return frozenset(line.split())


# Keywords that stand before a command, and those after which none comes.
BEFORE = _words("if then else elif while until do ! { time")
INSTEAD = _words("for case select fi done esac } function [[ ]]")
INSTANT = _words(
    "cd pushd popd source . export set unset shopt alias true false : ulimit umask trap local "
    "declare readonly echo printf test [ exit return break continue mkdir touch pwd clear"
)
# Behind a pipe they take as long as what feeds them.
FILTERS = _words("head tail grep egrep rg sed awk sort uniq wc cut tr tee cat less more jq")
# A wrapper, the options of it that take a value, and how many words before the command.
WRAPPERS: dict[str, tuple[frozenset[str], int]] = {
    "sudo": (_words("-u -g -h -p -C -U -r -t"), 0),
    "env": (_words("-u -C -S"), 0),
    "timeout": (_words("-s -k --signal --kill-after"), 1),
    "gtimeout": (_words("-s -k --signal --kill-after"), 1),
    "time": (_words("-f -o"), 0),
    "nice": (_words("-n"), 0),
    "ionice": (_words("-c -n -p"), 0),
    "stdbuf": (_words("-i -o -e"), 0),
    "xargs": (_words("-n -P -I -L -d -s -a -E"), 0),
    "nohup": (_words(""), 0),
    "setsid": (_words(""), 0),
    "command": (_words(""), 0),
    "builtin": (_words(""), 0),
    "exec": (_words("-a"), 0),
    "npx": (_words("-p --package"), 0),
    "uvx": (_words("--from --with"), 0),
}
# `uv run x` and the like stand for x.
RUNNERS = _words("uv poetry pipenv pdm hatch rye conda mamba bundle")
RUNNER_VALUES = _words("-n --name -p --python --with --extra --group --project")
SHELLS = _words("bash sh zsh dash ash")
# Commands whose first word says what they do; and words after which the next one does, too.
SUBCOMMANDS = _words(
    "git pip npm yarn pnpm bun cargo docker podman kubectl apt apt-get make go uv poetry conda "
    "systemctl brew gh dotnet mvn gradle gradlew terraform helm bazel rustup ninja just tox nox "
    "snap dnf yum apk service composer mix bundle rake gem swift zig deno vllm"
)
TWO_DEEP = _words("run compose pip mod pr issue container image stash")
