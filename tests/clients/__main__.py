"""`python -m tests.clients`: real client programs against the server, one after another.

Installs each program in an environment of its own, runs its driver against a server on loopback,
prints what worked and writes docs/clients.md. Ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.clients import matrix, recording
from tests.clients.environments import Environment, default_folder
from tests.clients.programs import PROGRAMS, Program
from tests.clients.recording import Recorded, Recorder
from tests.clients.running import Outcome, run
from tests.clients.server import model_api, scripted_api, serve


def main() -> int:
    """Run the programs that the command line names; returns the exit code."""
    options = _options()
    names = options.only or [program.name for program in PROGRAMS]
    programs = [program for program in PROGRAMS if program.name in names]
    if unknown := set(names) - {program.name for program in programs}:
        all_names = ", ".join(program.name for program in PROGRAMS)
        sys.exit(f"no such program: {', '.join(sorted(unknown))}; there are {all_names}")
    outcomes: dict[str, Outcome] = {}
    for program in programs:
        began_s = time.monotonic()
        outcome, requests = _run(program, options)
        outcomes[program.name] = outcome
        _report(program, outcome, requests, time.monotonic() - began_s, options.verbose)
        if options.record is not None and requests:
            recording.write(requests, options.record, program.name)
    if not options.no_page:
        matrix.update(outcomes)
    failed = [name for name, outcome in outcomes.items() if outcome.has_failed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} programs passed", *failed)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="may be given repeatedly")
    parser.add_argument("--environments", type=Path, metavar="DIR", default=default_folder())
    parser.add_argument("--skip-install", action="store_true", help="take what is installed")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the bodies of requests")
    parser.add_argument("--no-page", action="store_true", help="leave docs/clients.md as it is")
    parser.add_argument("--verbose", action="store_true", help="print what the programs print")
    return parser.parse_args()


def _run(program: Program, options: argparse.Namespace) -> tuple[Outcome, list[Recorded]]:
    environment = Environment(options.environments, program)
    if options.skip_install and not environment.is_ready():
        return Outcome(checks={"install": "is not installed"}), []
    try:
        environment.install()
    except subprocess.SubprocessError as error:
        return Outcome(checks={"install": str(error)}), []
    with _served(program) as (recorder, url):
        return run(environment, url), recorder.requests


@contextlib.contextmanager
def _served(program: Program) -> Iterator[tuple[Recorder, str]]:
    with model_api() if program.engine == "model" else scripted_api() as api:
        recorder = Recorder(api)
        with serve(recorder) as url:
            yield recorder, url


def _report(
    program: Program, outcome: Outcome, requests: list[Recorded], took_s: float, verbose: bool
) -> None:
    """Print the checks of a program and the requests that were refused."""
    print(f"{program.name} ({program.version}), {took_s:.0f} s, {len(requests)} requests")
    if verbose:
        print(outcome.log)
    for name, result in (outcome.checks | outcome.left).items():
        print(f"  {name:20} {result}")
    refusals = {
        f"  {request.status} {request.method} {request.path} {request.reason.decode()[:600]}"
        for request in requests
        if request.reason or request.status >= 400
    }
    print("".join(f"{refusal}\n" for refusal in sorted(refusals)), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
