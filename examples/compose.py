"""A Serve application with logic of its own in front of an engine.

    python examples/compose.py            then: curl 'http://127.0.0.1:8000/?a=47&b=38'

`Checked` asks the model for a sum three times, each time with another seed, and answers with the
sum that most answers agree on. The engine is a deployment like any other: its handle is bound into
`Checked`, and `chat` takes the arguments of `LLM.chat`.
"""

import argparse
import asyncio
import collections
import signal

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from cluster.serve.application import build
from eagleray import SamplingParams


@serve.deployment
class Checked:
    """Asks several times and lets the answers vote."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self.engine = engine

    async def __call__(self, request: Request) -> dict[str, object]:
        a, b = request.query_params["a"], request.query_params["b"]
        question = [{"role": "user", "content": f"What is {a} + {b}?"}]
        many = [SamplingParams(temperature=0.7, max_tokens=8, seed=seed) for seed in range(3)]
        outputs = await asyncio.gather(*(self.engine.chat.remote(question, one) for one in many))
        votes = collections.Counter(output.text for [output] in outputs)
        [(answer, count)] = votes.most_common(1)
        return {"answer": answer, "agreed": f"{count} of {len(many)}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    ray.init()
    serve.start(http_options={"port": args.port})
    engine = build({"engine": {"tensor_parallel_size": args.tp}})
    serve.run(Checked.bind(engine), name="checked")
    print(f"ready on http://127.0.0.1:{args.port}/?a=47&b=38", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
