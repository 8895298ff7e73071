"""`ray up` with the cluster file for hosts, on hosts that are reached by ssh: deploy, send a
request, tear down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from configs.paths import SOURCE_ROOT
from tests.cluster.nodes.hosts import Host, hosts, why_not
from tests.cluster.processes import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nodes]
SSHD = "/usr/sbin/sshd"
MISSING = [tool for tool in (SSHD, "ssh", "ssh-keygen", "rsync") if shutil.which(tool) is None]
WHY_NOT = f"{MISSING} is not installed (Debian: openssh-server, rsync)" if MISSING else why_not()
SUM = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}


@pytest.fixture
def home() -> Iterator[Path]:
    """The home directory of the user who runs `ray up`. It is not below /tmp, so the hosts see it
    too.
    """
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def allow_ssh(host: Host, home: Path) -> None:
    options = {
        "HostKey": home / "host_key",
        "AuthorizedKeysFile": home / "key.pub",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "UsePAM": "no",
        "PidFile": "none",
    }
    Path("/run/sshd").mkdir(exist_ok=True)
    flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
    host.run(SSHD, *flags)


def cluster_file(made: list[Host], home: Path) -> Path:
    """The cluster file, with other addresses and another key, and without steps for what is
    installed already.
    """
    config: dict[str, Any] = yaml.safe_load(
        (SOURCE_ROOT / "configs" / "clusters" / "on_premise.yaml").read_text()
    )
    config["provider"]["head_ip"] = made[0].address
    config["provider"]["worker_ips"] = [host.address for host in made[1:]]
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(home / "key")}
    assert config["setup_commands"][0].startswith("make ")
    config["setup_commands"][0] = f"ln -sfn {sys.prefix} ~/eagleray/.venv"
    config["file_mounts"]["~/.ray/auth_token"] = str(home / ".ray" / "auth_token")
    path = home / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def has_no_raylet(host: Host) -> bool:
    return not any("/raylet " in command for command in host.commands())


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_hosts_are_brought_up_deployed_to_asked_and_torn_down(home: Path) -> None:
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(command, check=True)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("a token for the tests, of enough letters")

    def ray(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ray")), *arguments],
            cwd=SOURCE_ROOT,
            env=os.environ | {"HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with hosts(3) as made:
        for host in made:
            allow_ssh(host, home)
        file = str(cluster_file(made, home))
        launch = "cd ~/eagleray && .venv/bin/python launch.py"
        ray("up", "-y", "--no-config-cache", file)
        deploy = f"{launch} serve --detach --host 0.0.0.0 --tp 2 --device cpu"
        said = ray("exec", file, f"{deploy} && {launch} status")
        assert "it stays" in said and "RUNNING" in said, said
        url = f"http://{made[0].address}:8000"
        answer = httpx.post(f"{url}/v1/chat/completions", json=SUM, timeout=30).json()
        assert answer["choices"][0]["message"]["content"] == "85", json.dumps(answer)
        ray("exec", file, f"{launch} down eagleray")
        ray("down", "-y", file)
        for host in made:
            gone = partial(has_no_raylet, host)
            wait_until(gone, f"the end of Ray on {host.name}", 20.0)
