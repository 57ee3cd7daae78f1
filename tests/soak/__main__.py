"""The command line of `scripts/bench soak`."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from functools import partial

import anyio

from host_client.config import Settings
from host_client.errors import EXIT_DONE, EXIT_FAILED, PodpipeError, root_cause
from host_client.interrupts import interruptible
from tests.bench.lab import Lab
from tests.bench.report import Progress
from tests.soak.faults import RealCluster
from tests.soak.run import Plan, soak
from tests.soak.tally import Tally

EPILOG = """\
examples:
  scripts/bench soak                           30 minutes on the cluster at hand
  scripts/bench soak --minutes 5 --seed 7      with the dice of an earlier run
  scripts/bench soak --calls 2000 --json       one JSON document on stdout

It kills, freezes and slows its own kubectls, kills its containers and pods, and restarts the API
server where that is the node provider's. Everything it makes belongs to a throw-away user.

exit codes: 0 nothing lost, run twice or falsely claimed, 1 something was, 2 usage, 4 no cluster
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and report.

    Returns:
        The exit code.
    """
    arguments = _parse(argv)
    progress = Progress()
    plan = Plan(
        seconds=arguments.minutes * 60 if arguments.minutes else float("inf"),
        calls=arguments.calls,
        seed=arguments.seed,
    )
    found: list[Tally] = []

    async def work() -> int:
        lab = Lab(Settings.from_env(), progress.tell)
        async with lab.entered():
            sandboxes = [
                (await lab.host.launcher.create()).sandbox.id for _ in range(arguments.sandboxes)
            ]
            ground = RealCluster(lab.host)
            if not ground.restarts_api:
                progress.say("soak: the API server is not ours to restart; all other faults come")
            progress.say(f"soak: seed {plan.seed}, sandboxes {', '.join(sandboxes)}")
            found.append(await soak(lab.host, ground, sandboxes, plan, progress.tell, progress.say))
        return EXIT_DONE if found[0].good else EXIT_FAILED

    try:
        code = anyio.run(partial(interruptible, work))
    except Exception as caught:
        error = root_cause(caught)
        if not isinstance(error, PodpipeError | TimeoutError):
            raise
        progress.say(f"soak: {type(error).__name__}: {error}")
        code = error.exit_code if isinstance(error, PodpipeError) else EXIT_FAILED
    progress.clear()
    for tally in found:
        print(json.dumps(tally.to_json(), indent=1) if arguments.json else tally.text())
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench soak",
        description="Mixed calls under random faults: none may be lost, none run twice.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=0.0, help="how long; 30 by default")
    length.add_argument("--calls", type=int, default=0, metavar="N", help="or so many calls")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random")
    parser.add_argument("--sandboxes", type=int, default=2, metavar="N", help="2 by default")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(argv)
    if min(arguments.minutes, arguments.calls) < 0 or arguments.sandboxes < 1:
        parser.error("--minutes, --calls and --sandboxes have to be positive")
    if not arguments.minutes and not arguments.calls:
        arguments.minutes = 30.0
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1_000_000)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
