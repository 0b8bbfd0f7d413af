"""`python -m dflash_jax.serve` from outside: exact tokens, signals, one line for bad input."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import jax
import openai
import pytest

from dflash_jax.checkpoints.drafter import save_drafter
from dflash_jax.models.dflash2 import init_params
from tests import tiny_llama
from tests.engine import test_decode_script as decode_script

pytestmark = pytest.mark.slow
WIDTH = 3
MESSAGES = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """target/, drafter/ and an empty cache of compiled programs."""
    folder = tmp_path_factory.mktemp("serve")
    tiny_llama.write_directory(tiny_llama.hf_model(), folder / "target")
    drafter = decode_script.DRAFTER
    save_drafter(folder / "drafter", drafter, init_params(drafter, jax.random.key(0)))
    (folder / "cache").mkdir(mode=0o700)
    return folder


class Process:
    """A server process; its standard error is read as it comes."""

    def __init__(self, files: pathlib.Path, *flags: str, stdout=subprocess.PIPE) -> None:
        arguments = decode_script.arguments(files, f"--rule=fixed:{WIDTH}", "--port=0", *flags)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dflash_jax.serve", *arguments],
            cwd=decode_script.ROOT,
            env=decode_script.environment(files),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.errors.append(line)
            if line.startswith("listening on "):
                self._listening.set()
        self._listening.set()

    @property
    def url(self) -> str:
        assert self._listening.wait(120)
        lines = [line for line in self.errors if line.startswith("listening on ")]
        assert lines, self.errors
        return lines[0].split()[-1]

    def wait_ready(self) -> None:
        url = self.url
        while httpx.get(f"{url}/health").status_code != 200:
            assert self.process.poll() is None, self.errors
            time.sleep(0.1)

    def end(self, timeout: float = 30) -> tuple[int, str]:
        """(exit status, standard output)."""
        out = self.process.stdout.read()
        status = self.process.wait(timeout)
        self._reader.join(5)
        return status, out


@contextlib.contextmanager
def served(files: pathlib.Path, *flags: str, stdout=subprocess.PIPE):
    process = Process(files, *flags, stdout=stdout)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def check_quiet(process: Process) -> None:
    assert not any("Traceback" in line for line in process.errors), process.errors


def test_replies_are_those_of_decode_py(files):
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 2**64 - 1}
    done = decode_script.decode(
        files,
        f"--width={WIDTH}",
        "--prompt=hello world",
        "--max_tokens=20",
        *(f"--{name}={value}" for name, value in sampling.items()),
        f"--json_out={files}/reply.jsonl",
    )
    assert done.returncode == 0, done.stderr
    wanted = decode_script.json_lines(files / "reply.jsonl")[0]
    body = {"messages": MESSAGES, "max_tokens": 20, **sampling}
    with served(files) as process:
        process.wait_ready()
        replies = []

        def ask(number: int) -> None:
            asked = body if number % 2 else {**body, "draft": False}
            path = f"{process.url}/v1/chat/completions"
            replies.append(httpx.post(path, json=asked, timeout=60).json())

        askers = [threading.Thread(target=ask, args=[number]) for number in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        for reply in replies:
            choice = reply["choices"][0]
            assert choice["token_sha256"] == wanted["token_sha256"]
            assert choice["message"]["content"] == wanted["text"]
            assert choice["finish_reason"] == wanted["finish_reason"]
            assert reply["usage"]["prompt_tokens"] == wanted["prompt_tokens"]
            assert reply["usage"]["completion_tokens"] == len(wanted["tokens"])
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="any")
        assert [model.id for model in client.models.list()] == ["target"]
        process.process.send_signal(signal.SIGINT)
        status, out = process.end()
    assert status == 0
    check_quiet(process)
    lines = [json.loads(line) for line in out.splitlines()]
    chats = [line for line in lines if line["path"] == "/v1/chat/completions"]
    assert len(chats) == 8
    for line in chats:
        assert line["status"] == 200
        assert line["completion_tokens"] == len(wanted["tokens"])
        assert line["first_token_ms"] > 0
        assert not line["disconnected"]
        assert "hello" not in json.dumps(line)


@pytest.mark.parametrize("one", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_streams_properly(files, one):
    body = {"prompt": [1, 2, 3], "max_tokens": 90, "temperature": 0, "n": 64, "stream": True}
    with served(files) as process:
        process.wait_ready()
        path = f"{process.url}/v1/completions"
        with httpx.stream("POST", path, json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            begin = time.monotonic()
            process.process.send_signal(one)
            rest = [line for line in lines if line]
        status, _ = process.end()
        assert time.monotonic() - begin < 8
    assert status == 0
    assert rest[-1] == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in rest[:-1]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert len(ends) == 64
    check_quiet(process)


def test_a_signal_before_it_is_ready(files, tmp_path):
    cold = pathlib.Path(tmp_path)  # nothing compiled: it takes long
    (cold / "cache").mkdir(mode=0o700)
    for name in ("target", "drafter"):
        (cold / name).symlink_to(files / name)
    with served(cold) as process:
        url = process.url
        while httpx.get(f"{url}/health").status_code != 503:
            time.sleep(0.1)
        process.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        status, _ = process.end()
        assert time.monotonic() - begin < 8
    assert status == 0
    check_quiet(process)


BAD = {
    "target missing": (["--config.target=nope"], "nope"),
    "rule": (["--rule=best"], "unknown rule 'best'"),
    "port": (["--port=99999"], "port"),
    "host": (["--host=no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    "queue": (["--max_queue=0"], "--max_queue=0"),
    "timeout": (["--request_timeout_s=0"], "--request_timeout_s"),
    "unknown flag": (["--nonsense"], "nonsense"),
    "no drafter": (["--config.drafter="], "no drafter"),
    "context": (["--config.context_limit=4000"], "128"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_status_2(files, name):
    flags, says = BAD[name]
    with served(files, *flags) as process:
        status, out = process.end(120)
    check_one_line(process, status, out, says)


def test_ipv6_and_a_full_disk_behind_standard_output(files):
    with open("/dev/full", "w") as full, served(files, "--host=::1", stdout=full) as process:
        process.wait_ready()
        assert process.url.startswith("http://[::1]:")
        asked = {"prompt": [1, 2, 3], "max_tokens": 2}
        for _ in range(2):
            assert httpx.post(f"{process.url}/v1/completions", json=asked).status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(30) == 0


def test_a_used_port(files):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with served(files, f"--port={port}") as process:
            status, out = process.end(120)
    check_one_line(process, status, out, f"cannot listen on 127.0.0.1:{port}: Address already")


def check_one_line(process: Process, status: int, out: str, says: str) -> None:
    errors = [line for line in process.errors if line.startswith("error: ")]
    assert status == 2, process.errors
    assert len(errors) == 1, process.errors
    assert says in errors[0]
    assert out == ""
    check_quiet(process)
