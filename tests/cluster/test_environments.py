"""The command line as containers run it: as process 1, as a user whom the system does not know,
with a checkout that cannot be written, little shared memory, one core, and IPv6.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.http_load import run_streams
from configs.paths import SOURCE_ROOT
from tests.cluster.processes import descendants, wait_until
from tests.cluster.serve.served import LONG, free_port

pytestmark = [pytest.mark.engine, pytest.mark.programs]

USER = "12345"  # an id without a name
# Reading is allowed everywhere, since the interpreter may be in a folder of root.
AS_USER = (
    *("setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
MOUNTS = {
    "a read-only checkout": f"mount --bind {SOURCE_ROOT} {SOURCE_ROOT} && "
    f"mount -o remount,bind,ro {SOURCE_ROOT}",
    "64 MiB of shared memory": "mount -t tmpfs -o size=64m,mode=1777 none /dev/shm",
}
PREFIXES = {"one core": ("taskset", "-c", "0"), "an unknown user": AS_USER}
PROCESS_ONE = "process 1"
ALL = (*MOUNTS, *PREFIXES, PROCESS_ONE)
START_S = 120.0


def why_not() -> str | None:
    """Why this machine cannot make the environments; None if it can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "needs root on Linux, for namespaces"
    tried = subprocess.run(
        ["unshare", "-m", "-pf", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not permitted: {tried.stderr}" if tried.returncode else None


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


WHY_NOT = why_not()
needs_namespaces = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """For temporary files, with the compiled kernels. Its path is short: sockets are among them."""
    path = Path(tempfile.mkdtemp(prefix="e", dir="/tmp"))
    path.chmod(0o777)
    compiled = Path(os.environ.get("EAGLERAY_CACHE_DIR") or Path.home() / ".cache" / "eagleray")
    if compiled.exists():
        shutil.copytree(compiled, path / "kernels", ignore=shutil.ignore_patterns("*tmp*"))
        for each in (path / "kernels", *(path / "kernels").rglob("*")):
            os.chown(each, int(USER), int(USER))
    yield path
    shutil.rmtree(path)


Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def begin(folder: Path) -> Iterator[Begin]:
    """Starts Python in an environment, without any variables but those needed."""
    begun: list[subprocess.Popen[str]] = []

    def begin(
        traits: tuple[str, ...], *arguments: str, **more_variables: str
    ) -> subprocess.Popen[str]:
        command: list[str] = []
        if PROCESS_ONE in traits or any(trait in MOUNTS for trait in traits):
            new = ["-pf", "--mount-proc"] if PROCESS_ONE in traits else []
            mounts = [MOUNTS[trait] for trait in MOUNTS if trait in traits]
            script = " && ".join([*mounts, f"cd {SOURCE_ROOT}", 'exec "$@"'])
            command += ["unshare", "-m", *new, "sh", "-c", script, "sh"]
        for trait, prefix in PREFIXES.items():
            command += prefix if trait in traits else ()
        variables = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(folder),
            "EAGLERAY_CACHE_DIR": str(folder / "kernels"),
        } | more_variables
        command += [sys.executable, *arguments]
        begun.append(
            subprocess.Popen(
                command,
                cwd=SOURCE_ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return begun[-1]

    yield begin
    for program in begun:
        for pid in descendants(program.pid) | {program.pid}:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        program.wait(10)


def process_one_of(unshare: subprocess.Popen[str]) -> int:
    """The process that has the number 1 in the namespace."""
    return int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text())


def wait_until_ready(program: subprocess.Popen[str]) -> str:
    """Its address."""
    assert program.stdout is not None
    lines = []
    for line in program.stdout:
        lines.append(line)
        if line.startswith("ready on "):
            return line.split()[2]
    raise AssertionError("".join(lines))


# Each trait only takes something away, so what works in several works in each.
TRAITS_OF_ALL_CORES = (*MOUNTS, "an unknown user", PROCESS_ONE)


@needs_namespaces
def test_generate_works_in_those_that_take_no_core(begin: Begin) -> None:
    """The home directory, which Docker sets for such a user, cannot be written."""
    command = ("launch.py", "generate", "--tp", "2", "What is 47 + 38?")
    program = begin(TRAITS_OF_ALL_CORES, *command, HOME="/")
    output, _ = program.communicate(timeout=START_S)
    assert program.returncode == 0 and "\n85\n" in output, output


WRITES = """
import os
from pathlib import Path
del os.environ["EAGLERAY_CACHE_DIR"]
import cluster  # sets the variables
folders = [os.environ[f"{name}_CACHE_DIR"] for name in ("EAGLERAY", "TRITON")]
for folder in [Path.home() / ".ray", *map(Path, folders)]:  # the first is Ray's
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").touch()
print("home", Path.home())
"""


@needs_namespaces
@pytest.mark.parametrize("home", ["/nonexistent", "/root"])
def test_files_of_a_home_directory_that_cannot_be_written_go_elsewhere(
    home: str, begin: Begin, folder: Path
) -> None:
    program = begin(TRAITS_OF_ALL_CORES, "-c", WRITES, HOME=home)
    output, _ = program.communicate(timeout=START_S)
    assert (program.returncode, output) == (0, f"home {folder}/eagleray-home-{USER}\n")


SAYS_WHICH = """
import signal, sys
from cluster.commands.process_one import leave_process_one
leave_process_one()
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, _: sys.exit(100 + number))
print("ready", flush=True)
signal.pause()
"""


@needs_namespaces
def test_process_one_passes_signals_on_and_ends_with_the_code_of_the_program() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    command = ["unshare", "-pf", "--mount-proc", sys.executable, "-c", SAYS_WHICH]
    for number in numbers:
        with subprocess.Popen(
            [*command, *(str(int(each)) for each in numbers)],
            cwd=SOURCE_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            os.kill(process_one_of(program), number)
            assert program.wait(10) == 100 + number


@dataclass
class Server:
    """A server that listens on every address there is, in all of the environments together where
    they can be made.
    """

    port: int
    program: subprocess.Popen[str]
    url: str


@pytest.fixture(scope="module")
def server(begin: Begin) -> Server:
    port = free_port()
    traits = ALL if WHY_NOT is None else ()
    host = "::" if has_ipv6() else "127.0.0.1"
    options = ("--host", host, "--port", str(port), "--tp", "2", "--spares", "off")
    program = begin(traits, "launch.py", "serve", *options)
    return Server(port, program, wait_until_ready(program))


@needs_namespaces
def test_serve_works_in_all_of_them_together(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    asked = {"messages": [{"role": "user", "content": "What is 47 + 38?"}]}
    answer = httpx.post(url, json=asked, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "85"


@needs_ipv6
def test_serve_listens_on_every_address_of_both_protocols(server: Server, begin: Begin) -> None:
    assert server.url == f"http://[::]:{server.port}"
    for url in (f"http://[::1]:{server.port}", f"http://127.0.0.1:{server.port}"):
        assert httpx.get(f"{url}/health").status_code == 200
        command = [sys.executable, "launch.py", "top", "--once", "--url", url]
        shown = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, check=True)
        assert "engines ready" in shown.stdout
        body = {"prompt": "What is", "max_tokens": 3, "ignore_eos": True}
        assert asyncio.run(run_streams(url, [body])).num_failed == 0
    again = begin((), "launch.py", "serve", "--host", "::1", "--port", str(server.port))
    output, _ = again.communicate(timeout=START_S)
    assert again.returncode == 2 and f"cannot listen on [::1]:{server.port}: " in output


@needs_namespaces
def test_process_one_reaps_what_lost_its_parent(server: Server) -> None:
    first = process_one_of(server.program)
    orphan = 'setsid sh -c "sleep 0.1" & exit'
    enter = ["nsenter", "-t", str(first), "-m", "-p", "sh", "-c", orphan]
    subprocess.run(enter, check=True)

    def children() -> list[str]:
        found = []
        for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                found.append(Path(f"/proc/{pid}/comm").read_text())
        return found

    wait_until(lambda: len(children()) == 1, "only the command below process 1", 10.0)
    assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 200


def test_ctrl_c_finishes_what_runs(server: Server) -> None:
    """The last test of this server."""
    command = process_one_of(server.program) if WHY_NOT is None else server.program.pid
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        assert client.get("/health").status_code == 200  # over a connection that stays open
        sent = LONG | {"stream": True, "max_tokens": 400}
        with client.stream("POST", "/v1/completions", json=sent) as got:
            lines = filter(None, got.iter_lines())
            next(lines)
            os.kill(command, signal.SIGINT)
            wait_until(lambda: client.get("/health").status_code == 503, "the drain", 10.0)
            assert client.post("/v1/completions", json=LONG).status_code == 503
            *_, last, end = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert end == "data: [DONE]"
    assert server.program.wait(60) == 0
