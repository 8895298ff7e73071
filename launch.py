"""Eagleray's command line.

    python launch.py --tp 2                          a conversation in the terminal (chat)
    python launch.py generate "What is 47 + 38?" --tp 2
    python launch.py generate --input requests.jsonl --output answers.jsonl --model DIR_OR_HUB_ID
    python launch.py serve --model DIR_OR_HUB_ID --tp 2 --port 8000
    python launch.py serve --name chat --detach      in a cluster that 'ray start' began
    python launch.py status
    python launch.py down chat
    python launch.py top
    python launch.py bench --num-seqs 64 --max-input 256 --max-output 256
    python launch.py bench --shape qwen3-30b-a3b --num-layers 4 --num-seqs 16
    python launch.py doctor --model qwen3-30b-a3b

Exit codes: 0 for success; 2 for a mistake in the command or its input, for what doctor finds wrong,
or where standard output is closed or full; 1 for a fault of the engine, or where the reader of the
output has ended; 130 after Ctrl-C.

The flags of the engine, of sampling and of serving are derived from the fields of `EngineConfig`,
`SamplingParams` and `ServeConfig`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import logging
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from cluster.commands.process_one import leave_process_one
from cluster.commands.standard_streams import check_output, prepare_standard_streams
from configs.engine import EngineConfig
from configs.options import flag_of
from configs.serve import ServeConfig, checked_api_key
from configs.shapes import SHAPES
from scheduler.errors import ClientError, EaglerayError
from scheduler.params import SamplingParams


class _ChatDefaultGroup(typer.core.TyperGroup):
    """Flags without a command are those of `chat`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_for_chat = bool(args) and args[0].startswith("-") and args[0] not in ("--help", "-h")
        return super().parse_args(ctx, ["chat", *args] if is_for_chat else args)


app = typer.Typer(
    cls=_ChatDefaultGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Tensor-parallel inference for Qwen3 on a Ray cluster.",
)


def _flags_of(
    options_class: type[Any], panel: str, **flag_types: Any
) -> dict[str, inspect.Parameter]:
    """One command-line parameter per field that has a flag. `flag_types`: the types of flags that
    differ from those of their fields.
    """
    types = typing.get_type_hints(options_class) | flag_types
    flags = {}
    for field in dataclasses.fields(options_class):
        flag, default = flag_of(field), field.metadata.get("flag_default")
        if flag is not None:
            option = typer.Option(flag, help=field.metadata["help"], rich_help_panel=panel)
            flag_type = types[field.name] if default is not None else types[field.name] | None
            flags[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[flag_type, option],
                default=default,
            )
    return flags


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    if values["model"] is None:
        del values["model"]
    return EngineConfig(**values)


def _sampling_params(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values | {"stop": values["stop"] or None})


# Parameters that stand for several flags: the flags, and the function that builds the parameter
# from their values.
FLAG_GROUPS: dict[str, tuple[dict[str, inspect.Parameter], Callable[[dict[str, Any]], Any]]] = {
    "config": (_flags_of(EngineConfig, "Engine"), _engine_config),
    "sampling_defaults": (
        _flags_of(SamplingParams, "Sampling", stop=list[str] | None),
        _sampling_params,
    ),
    "serve_options": (_flags_of(ServeConfig, "Serving"), dict),
}


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with those of its parameters that `FLAG_GROUPS` names replaced by those flags."""
    command_parameters = inspect.signature(command, eval_str=True).parameters
    groups = {name: FLAG_GROUPS[name] for name in command_parameters if name in FLAG_GROUPS}
    own_parameters = [p for p in command_parameters.values() if p.name not in groups]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own_parameters]
    for flags, _ in groups.values():
        parameters += flags.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        with _errors_to_exit_codes():
            for name, (flags, build) in groups.items():
                values[name] = build({field_name: values.pop(field_name) for field_name in flags})
            command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@app.command()
@_with_flags
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Questions; asked through the chat template if there is one."),
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", help="JSONL file of requests.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="JSONL file for the answers; by default standard output."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT as it is, without the chat template.")
    ] = False,
    *,
    config: EngineConfig,
    sampling_defaults: SamplingParams,
) -> None:
    """Generate text for PROMPTs or for a file of requests."""
    _start_logging(config.log_level)
    if output is None:
        check_output()
    from cluster.commands.generate import run_generate  # loads Ray

    run_generate(
        config, sampling_defaults, prompts=prompts or [], input=input, output=output, raw=raw
    )


@app.command()
@_with_flags
def chat(*, config: EngineConfig, sampling_defaults: SamplingParams) -> None:
    """Talk with the model in the terminal; also without a command: launch.py --tp 2."""
    _start_logging(config.log_level)
    check_output()
    from cluster.commands.chat import run_chat  # loads Ray

    run_chat(config, sampling_defaults)


def _synthetic_option(flag: str, text: str, default: float) -> Any:
    return typer.Option(
        flag, help=f"{text} [synthetic requests; {default}]", rich_help_panel="Made-up requests"
    )


@app.command()
@_with_flags
def bench(
    input: Annotated[
        Path | None, typer.Option("--input", help="JSONL file of requests, as for generate.")
    ] = None,
    num_seqs: Annotated[
        int | None, _synthetic_option("--num-seqs", "Number of requests.", 256)
    ] = None,
    max_input: Annotated[
        int | None,
        _synthetic_option("--max-input", "Longest prompt; the shortest is a tenth.", 1024),
    ] = None,
    max_output: Annotated[
        int | None,
        _synthetic_option("--max-output", "Longest output; the shortest is a tenth.", 1024),
    ] = None,
    temperature: Annotated[
        float | None, _synthetic_option("--temperature", "0 is greedy.", 0.6)
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate", help="Requests per second, Poisson; all at once if left out."
        ),
    ] = None,
    num_warmup: Annotated[
        int, typer.Option("--num-warmup", help="Tiny requests sent first, which are not timed.")
    ] = 1,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"Random weights instead of a model: {', '.join(SHAPES)}."),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", help="With --shape: only so many layers.")
    ] = None,
    *,
    config: EngineConfig,
) -> None:
    """Time the requests of a file, or synthetic ones, and print one JSON line. --seed (default 0)
    also draws prompts, lengths and arrivals.
    """
    config = dataclasses.replace(config, seed=config.seed or 0)
    _start_logging(config.log_level)
    check_output()
    from cluster.commands.bench import BenchJob, run_bench  # loads Ray and torch

    run_bench(
        BenchJob(
            config=config,
            input=input,
            num_seqs=num_seqs,
            max_input=max_input,
            max_output=max_output,
            temperature=temperature,
            request_rate=request_rate,
            num_warmup=num_warmup,
            shape=shape,
            num_layers=num_layers,
        )
    )


@app.command()
@_with_flags
def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8000,
    name: Annotated[
        str, typer.Option("--name", help="Name of the engine in its cluster.")
    ] = "eagleray",
    route_prefix: Annotated[
        str, typer.Option("--route-prefix", help="Path below which it is served.")
    ] = "/",
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it serves; it stays in the cluster.")
    ] = False,
    *,
    config: EngineConfig,
    serve_options: dict[str, Any],
    sampling_defaults: SamplingParams,
) -> None:
    """Serve the OpenAI API through Ray Serve until SIGTERM or Ctrl-C."""
    _start_logging(config.log_level)
    from cluster.serve.run import ServeJob, run_serve  # loads Ray

    if serve_options["api_key"] is None:
        serve_options["api_key"] = _key_of_environment()
    sampling = dataclasses.asdict(sampling_defaults)
    sampling = {name: value for name, value in sampling.items() if value is not None}
    run_serve(
        ServeJob(
            config=ServeConfig(engine=config, sampling=sampling, **serve_options),
            host=host,
            port=port,
            name=name,
            route_prefix=route_prefix,
            detach=detach,
        )
    )


RAY_ADDRESS_OPTION = typer.Option("--ray-address", help="Ray cluster to ask.")
URL_OPTION = typer.Option("--url", help="Address of the server.")
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def status(ray_address: Annotated[str | None, RAY_ADDRESS_OPTION] = None) -> None:
    """List the engines that are served in a running Ray cluster."""
    with _errors_to_exit_codes():
        from cluster.commands.engines import run_status  # loads Ray

        run_status(ray_address)


@app.command()
def down(
    name: Annotated[str, typer.Argument(help="Name of the engine.")],
    ray_address: Annotated[str | None, RAY_ADDRESS_OPTION] = None,
) -> None:
    """Stop serving an engine in a running Ray cluster, once its running requests have finished."""
    with _errors_to_exit_codes():
        from cluster.commands.engines import run_down  # loads Ray

        run_down(name, ray_address)


@app.command()
def top(
    url: Annotated[str, URL_OPTION] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print the numbers once and end.")] = False,
) -> None:
    """Show a running server live: requests, tokens per second, cache use, step times."""
    with _errors_to_exit_codes():
        from cluster.commands.top import run_top

        run_top(url.rstrip("/"), once=once)


@app.command()
def trace(
    url: Annotated[str, URL_OPTION] = DEFAULT_URL,
    seconds: Annotated[float, typer.Option("--seconds", help="How far to look back.")] = 10.0,
    output: Annotated[Path, typer.Option("--output", help="File to write.")] = Path("trace.json"),
) -> None:
    """Write the last steps of a running server as a trace for Chrome's tracing page or Perfetto."""
    with _errors_to_exit_codes():
        from cluster.commands.trace import run_trace

        message = run_trace(url.rstrip("/"), seconds, output, _key_of_environment())
        print(message, flush=True)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Directory of a model, or a shape of bench: what it needs."),
    ] = None,
) -> None:
    """Report what is installed, which devices there are, which kernels would run, and what is
    wrong; of a model, its size and whether it fits.
    """
    with _errors_to_exit_codes():
        from cluster.commands.doctor import examine

        lines, problems = examine(model)
        for line in lines:
            print(line)
        for problem in problems:
            print(f"PROBLEM: {problem}")
        plural = "" if len(problems) == 1 else "s"
        summary = f"{len(problems)} problem{plural} found" if problems else "no problems found"
        print(summary, flush=True)
        if problems:
            raise typer.Exit(2)


def _key_of_environment() -> str | None:
    key = os.environ.get("EAGLERAY_API_KEY")
    return checked_api_key(key) if key else None


def _start_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("eagleray")
    logger.addHandler(handler)
    logger.setLevel(level.upper())


@contextlib.contextmanager
def _errors_to_exit_codes() -> Iterator[None]:
    """Turn our errors into one line and an exit code. SIGTERM, and the end of the terminal unless
    that is ignored (`nohup`), stop a command as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        yield
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except EaglerayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def main() -> None:
    """Run the command that the program's arguments name."""
    prepare_standard_streams()
    leave_process_one()
    gc.disable()  # during the start only: a command that runs for long enables it again
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ClientError as error:  # of printing; commands report theirs
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
