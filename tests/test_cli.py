"""The command line as its users meet it: every test starts `python -m oomwatch` as a process."""

from __future__ import annotations

import ast
import html.parser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import yaml

from oomwatch.cli import COMMANDS
from oomwatch.report.json_report import read_schema

FIXTURES = Path(__file__).parent / "fixtures" / "cli"
REFUSED = str(FIXTURES / "refused.log")
HEALTHY = str(FIXTURES / "healthy.log")
SERVER = "vllm serve /models/Qwen3-14B --max-model-len 131072"
# A name that an attacker may give to a file: a colour, a line break, a title of the terminal.
HOSTILE = "evil\x1b[31m\n\x1b]0;owned\x07.log"
CONTROL = re.compile(r"[^\n\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f]")


def start(arguments: Sequence[str], **options) -> subprocess.Popen[bytes]:
    """The product as a process, away from the settings of whoever runs the tests."""
    env = {"PATH": os.environ["PATH"], "TZ": "UTC", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}
    env.update(options.pop("env", {}))
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-m", "oomwatch", *arguments], env=env, **options)


class Done(NamedTuple):
    status: int
    out: str
    err: str


def run(arguments: Sequence[str], stdin: bytes = b"", **options) -> Done:
    with start(arguments, stdin=subprocess.PIPE, **options) as process:
        out, err = process.communicate(stdin, timeout=120)
    return Done(process.returncode, (out or b"").decode(), (err or b"").decode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the rows below run: the files that they name."""
    path = tmp_path_factory.mktemp("cli")
    text = Path(REFUSED).read_bytes()
    (path / "refused.log").write_bytes(text)
    (path / HOSTILE).write_bytes(text)
    (path / "healthy.log").write_bytes(Path(HEALTHY).read_bytes())
    (path / "empty.log").touch()
    # Bytes of every value in no order: 251 is prime to 256.
    (path / "garbage.log").write_bytes(bytes(i * 251 % 256 for i in range(100_000)) * 2)
    (path / "quiet.txt").write_text("[    0.000000] Linux version 6.1.0\n")
    (path / "logs").mkdir()
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 40}')
    (path / "broken.json").write_text("{")
    (path / "list.json").write_text("[]")
    (path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 40}')
    (path / "secret.log").write_bytes(text)
    (path / "secret.log").chmod(0)
    return path


class Row(NamedTuple):
    arguments: str
    status: int
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    stdin: bytes = b""


KV = "KV cache is too small for one request"
LOG = "diagnose --log refused.log"
UNDECIDED = ("UNDECIDED", "Not seen, and would settle it")

ROWS = [
    Row("--version", 0, ("oomwatch ",)),
    Row("--help", 0, (*COMMANDS, "Examples:")),
    Row("-h", 0, ("Commands:",)),
    *(
        Row(f"{name} --help", 0, ("Usage: oomwatch", "Examples:", "  oomwatch"))
        for name in COMMANDS
    ),
    # wrong use: one line, and where to look
    Row("diagnos", 2, (), ("No such command 'diagnos'", "'diagnose'", "oomwatch --help")),
    Row("frobnicate", 2, (), ("No such command 'frobnicate'", "oomwatch --help")),
    Row("'x\x1b[31m'", 2, (), ("No such command",)),
    Row("--frobnicate", 2, (), ("--frobnicate", "oomwatch --help")),
    Row("diagnose --lgo x", 2, (), ("--lgo", "--log", "oomwatch diagnose --help")),
    Row("diagnose stray.log", 2, (), ("stray.log", "oomwatch diagnose --help")),
    Row("diagnose --log", 2, (), ("--log", "requires an argument")),
    Row(f"{LOG} --format pdf", 2, (), ("'pdf'", "markdown")),
    Row(f"{LOG} --engine tgi", 2, (), ("'tgi'", "sglang")),
    Row(f"{LOG} --lang fr", 2, (), ("'fr'", "zh")),
    Row(f"{LOG} --since yesteryear", 2, (), ("'yesteryear' is no time", "2h")),
    Row(f"{LOG} --until ''", 2, (), ("is no time",)),
    Row(f"{LOG} --since 99999999999999999999999-01-01", 2, (), ("is no time",)),
    Row(f"{LOG} --model-config broken.json", 2, (), ("--model-config broken.json",)),
    Row(f"{LOG} --model-config list.json", 2, (), ("list.json", "not a model configuration")),
    Row(f"{LOG} --model-config logs", 2, (), ("logs", "no config.json")),
    Row(f'{LOG} --command "vllm serve \'m"', 2, (), ("--command", "quote")),
    Row(f"{LOG} --model-config missing.json", 2, (), ("missing.json", "No such file")),
    Row(f"{LOG} -o missing/report.txt", 2, (), ("missing/report.txt", "No such file")),
    Row(f"{LOG} -o logs", 2, (), ("logs", "directory")),
    Row("diagnose --pid 4999999", 3, (), ("process 4999999 is no engine",)),
    Row("diagnose --pid here", 2, (), ("--pid", "'here'")),
    Row("run", 2, (), ("SERVER", "oomwatch run --help")),
    Row("explain kv_lt_max_lne", 2, (), ("kv_lt_max_lne", "did you mean kv_lt_max_len?")),
    Row("completion tcsh", 2, (), ("'tcsh'", "fish")),
    # inputs
    Row("diagnose --log missing.log", 3, (), ("missing.log: no such file",)),
    Row("diagnose --log logs", 3, (), ("logs", "directory")),
    Row("diagnose --log 'no\x1b[31m\x07.log'", 3, (), ("no such file",)),
    Row("replay missing.tar", 3, (), ("missing.tar: no such file",)),
    Row("replay refused.log -- incidents", 3, (), ("refused.log: not a recording",)),
    Row("diagnose --log missing.log --log gone.log", 3, (), ("missing.log", "gone.log")),
    Row("diagnose --log missing.log --log refused.log", 1, (KV, "missing.log: no such file")),
    Row("diagnose --log logs --log healthy.log", 0, ("HEALTHY", "directory")),
    Row("diagnose --kernel-log missing.txt", 3, (), ("missing.txt",)),
    Row("diagnose --recording logs", 3, (), ("logs", "not a recording")),
    Row("diagnose --metrics http://127.0.0.1:9/", 3, (), ("127.0.0.1:9", "cannot connect")),
    Row("diagnose --unit 'no unit'", 3, (), ("'no unit'",)),
    Row("diagnose --pod alone", 3, (), ("'alone'", "NAMESPACE/POD")),
    Row("diagnose --log -", 1, (KV, "-:19"), (), Path(REFUSED).read_bytes()),
    Row("diagnose --log -", 0, UNDECIDED),
    Row("diagnose --log empty.log", 0, (*UNDECIDED, "empty.log")),
    Row("diagnose --log -", 0, (*UNDECIDED, "standard input: nothing was written to it")),
    Row(f"{LOG} --kernel-log gone.txt -q", 1, (KV, "error  gone.txt: no such file")),
    Row(
        f"{LOG} --command 'vllm serve acme/Other-7B --max-model-len 4096'",
        1,
        (KV, "not that of this log: it serves acme/Other-7B", "4096, the log 131072"),
    ),
    Row("diagnose --log garbage.log", 0, (*UNDECIDED, "no text log")),
    Row("diagnose --kernel-log healthy.log", 0, (*UNDECIDED, "no line in it is a kernel's")),
    Row("diagnose --kernel-log quiet.txt", 0, ("UNDECIDED",)),
    Row(f"diagnose --log '{HOSTILE}'", 1, (KV, "evil")),
    Row("diagnose --log healthy.log", 0, ("HEALTHY",)),
    Row(f"{LOG} --log healthy.log", 1, (KV,)),
    # what is printed
    Row(
        LOG, 1, (KV, "kv_lt_max_len", "refused.log:19", "--max-model-len 71424", "oomwatch explain")
    ),
    Row(f"{LOG} -q", 1, (KV, "--max-model-len 71424")),
    Row(f"{LOG} -v", 1, (KV, "refused.log:19")),
    Row(f"{LOG} --lang zh", 1, ("显存不足", "kv_lt_max_len", "--max-model-len 71424")),
    Row(f"{LOG} --color never", 1, (KV,)),
    Row(f"{LOG} --model-config config.json", 1, (KV,)),
    Row(f"{LOG} --since 2020-01-01T00:00:00Z", 1, (KV,)),
    Row(f"{LOG} --model-config model", 1, (KV,)),
    Row(f"{LOG} --until 2020-01-01", 0, ("UNDECIDED", "nothing in it is from the time asked for")),
    Row(f"{LOG} --since 2030-01-01", 0, ("UNDECIDED", "nothing in it is from the time asked for")),
    Row(f"{LOG} --format args", 1, ("--max-model-len 71424",)),
    Row(f"{LOG} --format env", 1, (), ("no remedy here is an environment variable",)),
    Row(f"{LOG} --format markdown", 1, ("## ", KV, "`kv_lt_max_len`")),
    Row(f"{LOG} -o -", 1, (KV,)),
    Row(f"{LOG} -o /dev/null", 1),
    Row("diagnose --log healthy.log --format args", 0, (), ("no change for --format args",)),
    Row("explain", 0, ("kv_lt_max_len", "host_oom_kill")),
    Row("explain KV-LT-MAX-LEN", 0, ("## What to do",)),
    Row("explain kv_lt_max_len --lang zh", 0, ("## 怎么办",)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ascii(row.arguments)[1:-1][:60])
def test_row(row, folder):
    done = run(shlex.split(row.arguments), row.stdin, cwd=folder)
    assert done.status == row.status, done.err
    for text in row.out:
        assert text in done.out
    for text in row.err:
        assert text in done.err
    assert "Traceback" not in done.out + done.err
    assert not CONTROL.search(done.out + done.err)
    if row.status > 1:
        assert not done.out
        assert re.fullmatch(r"oomwatch: .{10,}\n", done.err), "one line"
    elif not row.err:
        assert not done.err


def test_no_arguments_print_the_help():
    done = run([])
    assert done.status == 2
    assert "Commands:" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_log_that_may_not_be_read(folder):
    done = run(["diagnose", "--log", str(folder / "secret.log")])
    assert done.status == 3
    assert re.fullmatch(r"oomwatch: .*secret\.log.*\n", done.err)


# ------------------------------------------------------------------------------------ formats
@pytest.mark.parametrize("arguments", [["--json"], ["--format", "json"]])
@pytest.mark.parametrize(
    "name", ["refused.log", "healthy.log", "empty.log", "garbage.log", HOSTILE]
)
def test_json_obeys_the_schema(folder, name, arguments):
    done = run(["diagnose", "--log", name, *arguments], cwd=folder)
    answer = json.loads(done.out)
    jsonschema.validate(answer, read_schema())
    assert done.status == (1 if answer["incidents"] else 0)
    assert not CONTROL.search(done.out)


def test_args_are_the_whole_command_quoted_for_a_shell():
    command = ["vllm", "serve", "/models/my model", "--served-model-name", "it's $HOME; ls"]
    done = run(["diagnose", "--log", REFUSED, "--command", shlex.join(command), "--format", "args"])
    words = shlex.split(done.out)
    assert words[: len(command)] == command
    assert words[words.index("--max-model-len") :][:2] == ["--max-model-len", "71424"]
    assert done.out.count("\n") == 1


def test_compose_is_yaml():
    done = run(["diagnose", "--log", REFUSED, "--command", SERVER, "--format", "compose"])
    words = yaml.safe_load(done.out)["services"]["vllm"]["command"]
    assert words[words.index("--max-model-len") + 1] == "71424"


def test_k8s_is_yaml():
    done = run(["diagnose", "--log", REFUSED, "--format", "k8s"])
    (container,) = yaml.safe_load(done.out)["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["--max-model-len", "71424"]


def test_python_is_keyword_arguments():
    done = run(["diagnose", "--log", REFUSED, "--format", "python"])
    (call,) = ast.parse(f"LLM(\n{done.out})").body
    assert {word.arg: ast.literal_eval(word.value) for word in call.value.keywords}[
        "max_model_len"
    ] == 71424


class _Tags(html.parser.HTMLParser):
    """Checks that tags close in the order in which they opened, and what would load something."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_html_is_one_whole_page(folder, lang):
    done = run(["diagnose", "--log", HOSTILE, "--format", "html", "--lang", lang], cwd=folder)
    tags = _Tags()
    tags.feed(done.out)
    assert not tags.open
    assert {"html", "h1", "ol"} <= tags.seen
    assert not {"script", "link", "img", "iframe"} & tags.seen
    assert f'<html lang="{lang}">' in done.out
    assert not CONTROL.search(done.out)


# ------------------------------------------------------------------------------------ secrets
SECRET = "tOpSeCrEt"  # noqa: S105 - what no output may hold
SECRETIVE = (
    f"HF_TOKEN={SECRET}1 vllm serve /models/Qwen3-14B --api-key {SECRET}2 {SECRET}3 "
    f"--ssl-keyfile-password={SECRET}4 --otlp-traces-endpoint http://u:{SECRET}5@otel:4317"
)
SECRETIVE_FORMATS = ("text", "json", "markdown", "html", "args", "env", "compose", "k8s", "python")


@pytest.fixture(scope="module")
def secretive(tmp_path_factory):
    """A log whose server prints its secrets: as arguments, as headers, in the failure itself."""
    path = tmp_path_factory.mktemp("secretive") / "server.log"
    text = Path(REFUSED).read_text()
    text = text.replace("args: {", f"args: {{'api_key': ['{SECRET}2', '{SECRET}3'], ")
    failure = "ValueError: To serve"
    assert text.count(failure) == 1
    path.write_text(
        text.replace(
            failure, f"ValueError: Authorization: Bearer {SECRET}6 (--api-key={SECRET}2): To serve"
        )
    )
    return path


@pytest.mark.parametrize("command", [(), ("--command", SECRETIVE)], ids=["log", "command"])
@pytest.mark.parametrize("fmt", SECRETIVE_FORMATS)
def test_no_secret_is_printed(secretive, command, fmt):
    done = run(["diagnose", "--log", str(secretive), "--format", fmt, *command])
    assert done.status == 1
    assert SECRET not in done.out + done.err
    if fmt == "json":
        assert "***" in done.out
        jsonschema.validate(json.loads(done.out), read_schema())
    if fmt == "args" and command:
        assert '--api-key "$VLLM_API_KEY" --ssl' in done.out
        assert 'HF_TOKEN="$HF_TOKEN"' in done.out
    if fmt == "k8s" and command:
        (container,) = yaml.safe_load(done.out)["spec"]["template"]["spec"]["containers"]
        assert "$(VLLM_API_KEY)" in container["command"]
        assert {"HF_TOKEN", "VLLM_API_KEY"} <= {one["name"] for one in container["env"]}


@pytest.mark.parametrize("fmt", ["text", "json", "args", "compose", "k8s"])
def test_plan_prints_no_secret(fmt):
    line = SECRETIVE.replace("/models/Qwen3-14B", "Qwen/Qwen3-8B")
    words = shlex.split(line.replace("--ssl-keyfile-password", "--hf-token"))  # vLLM's own option
    goal = ["--gpu", "h100-80gb", "--goal", "concurrency=max", "--format", fmt]
    done = run(["plan", *goal, "--", "env", *words])
    assert done.status == 0, done.err
    assert SECRET not in done.out + done.err
    if fmt == "compose":
        (service,) = yaml.safe_load(done.out)["services"].values()
        assert service["environment"].items() >= {("HF_TOKEN", "${HF_TOKEN}")}
        assert "${VLLM_API_KEY}" in service["command"]


def test_run_prints_no_secret_of_its_own(secretive, tmp_path):
    """The server's output passes as it is; the report on it does not repeat what is secret."""
    copy = tmp_path / "copy"
    server = ["env", f"HF_TOKEN={SECRET}1", "sh", "-c", f"cat {secretive}; exit 1", "vllm", "serve"]
    done = run(["run", "--log-copy", str(copy), "--", *server, "--api-key", f"{SECRET}2"])
    assert done.status == 1
    assert SECRET in done.out
    assert KV in done.err
    assert SECRET not in done.err


def test_errors_print_no_password():
    done = run(["diagnose", "--metrics", f"http://user:{SECRET}@127.0.0.1:9/metrics"])
    assert done.status == 3
    assert SECRET not in done.err


def test_a_running_server_keeps_its_secrets(tmp_path):
    program = tmp_path / "vllm"
    program.write_text("import time\ntime.sleep(600)\n")
    words = [sys.executable, str(program), "serve", "m", "--api-key", SECRET, f"{SECRET}2"]
    with subprocess.Popen(words, env={"HF_TOKEN": SECRET, "VLLM_API_KEY": SECRET}) as server:
        try:
            for arguments in (["check"], ["check", "--json"], ["diagnose", "--json"]):
                done = run(arguments)
                assert str(server.pid) in done.out, "it is found"
                assert SECRET not in done.out + done.err
                assert ("***" in done.out) is (arguments[0] == "diagnose")
        finally:
            server.kill()


# ------------------------------------------------------------------------------------ -o
def test_a_file_is_put_in_place_whole(tmp_path):
    target, kept = tmp_path / "report.json", tmp_path / "kept"
    target.write_text("old")
    os.link(target, kept)
    done = run(["diagnose", "--log", REFUSED, "--json", "-o", str(target)])
    assert (done.status, done.out, done.err) == (1, "", "")
    assert json.loads(target.read_text())["verdict"] == "oom"
    assert kept.read_text() == "old", "a new file took the place, the old one was not written to"
    assert target.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "kept"}


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "report.txt"
    victim.write_text("mine")
    link.symlink_to(victim)
    run(["diagnose", "--log", REFUSED, "-o", str(link)])
    assert victim.read_text() == "mine"
    assert not link.is_symlink()
    assert "kv_lt_max_len" in link.read_text()


def test_nothing_is_left_where_the_file_cannot_be(tmp_path):
    (tmp_path / "report").mkdir()
    done = run(["diagnose", "--log", REFUSED, "-o", str(tmp_path / "report")])
    assert done.status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


# ------------------------------------------------------------------------------------ colours
@pytest.mark.parametrize(
    ("arguments", "env", "coloured"),
    [
        ([], {}, False),
        (["--color", "always"], {}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "always", "--json"], {}, False),
    ],
)
def test_colours_in_a_pipe(arguments, env, coloured):
    done = run(["diagnose", "--log", REFUSED, *arguments], env=env)
    assert ("\x1b[" in done.out) is coloured


def on_a_terminal(arguments: Sequence[str], env: dict[str, str]) -> str:
    """What the product writes to a terminal of its own."""
    master, terminal = os.openpty()
    chunks = []
    with start(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as process:
        os.close(terminal)
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # Linux says EIO when the last writer is gone
                break
            chunks.append(chunk)
        process.wait(timeout=60)
    os.close(master)
    return b"".join(chunks).decode()


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_on_a_terminal(env, coloured):
    text = on_a_terminal(["diagnose", "--log", REFUSED], env)
    assert KV in text
    assert ("\x1b[" in text) is coloured


# ------------------------------------------------------------------------------------ streams
@pytest.mark.parametrize(
    "arguments", [["--help"], ["explain"], ["diagnose", "--log", REFUSED, "--json"]]
)
def test_a_reader_that_has_gone_is_no_fault(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(arguments, stdout=writer)
    os.close(writer)
    assert (done.status, done.err) == (141, "")


def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("wb") as full:
        done = run(["diagnose", "--log", REFUSED], stdout=full)
    assert done.status == 4
    assert re.fullmatch(r"oomwatch: the output cannot be written: .*\n", done.err)


def test_closed_streams_are_no_fault():
    command = [sys.executable, "-m", "oomwatch", "diagnose", "--log", REFUSED]
    script = 'exec "$@" >&- 2>&- <&-'
    done = subprocess.run(["sh", "-c", script, "sh", *command], check=False)
    assert done.returncode == 1


def test_any_encoding_of_the_terminal():
    for encoding in ("ascii", "latin-1", "gbk"):
        done = subprocess.run(
            [sys.executable, "-m", "oomwatch", "diagnose", "--log", REFUSED, "--lang", "zh"],
            capture_output=True,
            check=False,
            env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": encoding},
        )
        assert (done.returncode, done.stderr) == (1, b"")
        assert b"kv_lt_max_len" in done.stdout


def test_ctrl_c():
    with start(["diagnose", "--log", "-"], stdin=subprocess.PIPE) as process:
        # More than a pipe holds: once this is written, the product is reading it.
        process.stdin.write(b"INFO 03-02 03:12:04 [a.py:1] nothing\n" * 8000)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == (b"", b"")


# ------------------------------------------------------------------------------------ size
def test_a_named_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with start(["diagnose", "--json", "--log", str(pipe)]) as process:
        pipe.write_bytes(Path(REFUSED).read_bytes())  # waits for the reader
        out, _ = process.communicate(timeout=60)
    assert json.loads(out)["incidents"][0]["cause"] == "kv_lt_max_len"


def test_a_kernel_log_from_a_pipe_without_events(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with start(["diagnose", "--json", "--kernel-log", str(pipe)]) as process:
        pipe.write_bytes(b"[    1.000000] Linux version 6.1.0\n")
        out, _ = process.communicate(timeout=60)
    sources = {each["name"]: each["status"] for each in json.loads(out)["sources"]}
    assert sources[str(pipe)] == "ok"


def test_more_logs_than_files_may_be_open(tmp_path):
    arguments = []
    for number in range(150):
        path = tmp_path / f"{number}.log"
        path.write_bytes(Path(REFUSED if number == 149 else HEALTHY).read_bytes())
        arguments += ["--log", str(path)]
    limit = 'ulimit -n 100; exec "$@"'
    command = [sys.executable, "-m", "oomwatch", "diagnose", "--json", *arguments]
    done = subprocess.run(["sh", "-c", limit, "sh", *command], capture_output=True, check=False)
    assert done.stderr == b""
    assert "kv_lt_max_len" in {each["cause"] for each in json.loads(done.stdout)["incidents"]}


def test_a_big_log_in_bounded_memory(tmp_path):
    """20 MB of logged prompts that quote an OOM and of one endless line, then the failure."""
    log = tmp_path / "big.log"
    quoted = "CUDA out of memory. Tried to allocate 2.00 GiB " * 3
    line = (
        f"INFO 03-02 03:12:04 [logger.py:40] Received request c-1: prompt: {quoted!r}, params: x\n"
    )
    with log.open("wb") as out:
        out.write(line.encode() * (10 * 2**20 // len(line)))
        out.write(b"x" * (10 * 2**20) + b"\n")
        out.write(Path(REFUSED).read_bytes())
    command = [sys.executable, "-m", "oomwatch", "diagnose", "--full", "--log", str(log)]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 131072; exec "$@"', "sh", *command],  # 128 MiB, Python and all
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert KV in done.stdout
    assert "CUDA out of memory" not in done.stdout


# ------------------------------------------------------------------------------------ the rest
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, tmp_path):
    done = run(["completion", shell])
    assert done.status == 0
    assert f"_OOMWATCH_COMPLETE={shell}_complete" in done.out
    if shell == "bash":
        script = tmp_path / "oomwatch"
        script.write_text(done.out)
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("shell", "typed", "words"),
    [
        ("bash", "oomwatch dia", {"plain,diagnose"}),
        ("bash", "oomwatch diagnose --ke", {"plain,--kernel-log"}),
        ("bash", "oomwatch completion f", {"plain,fish"}),
        ("bash", "oomwatch diagnose --log ser", {"file,ser"}),
        ("bash", "oomwatch diagnose --kernel-log ", {"file,"}),
        ("bash", "oomwatch explain kv_", {"plain,kv_lt_max_len", "plain,kv_no_blocks"}),
        ("bash", "oomwatch plan --gpu h1", {"plain,h100-80gb"}),
        ("zsh", "oomwatch expl", {"plain", "explain"}),
        ("fish", "oomwatch ru", {"plain,run"}),
    ],
)
def test_completion_answers(shell, typed, words):
    typing = typed.rpartition(" ")[2]
    env = {
        "_OOMWATCH_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": typing if shell == "fish" else str(typed.count(" ")),
    }
    done = run([], env=env)
    assert done.status == 0
    said = {line.partition("\t")[0] for line in done.out.splitlines()}
    assert words <= said


@pytest.mark.parametrize("name", ["oomwatch.cli", *(f"oomwatch.cli.{name}" for name in COMMANDS)])
def test_commands_import_nothing_heavy(name):
    heavy = {"sqlalchemy", "requests", "rich", "apscheduler", "yaml", "psutil", "pynvml"}
    code = f"import sys, {name}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
