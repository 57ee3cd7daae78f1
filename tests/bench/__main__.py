"""The command line of `scripts/bench`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import anyio

from host_client.config import Settings
from host_client.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    ApiUnreachable,
    PodpipeError,
    PrerequisiteError,
)
from tests.bench import (
    report,
    row_address,
    row_create,
    row_end,
    row_files,
    row_gateway,
    row_run,
    row_scale,
    row_session,
    row_transfer,
)
from tests.bench.harness import Result, Row, measure
from tests.bench.lab import Lab
from tests.soak import __main__ as soak

ROWS: tuple[Row[Lab], ...] = (
    *row_run.ROWS,
    *row_session.ROWS,
    *row_create.ROWS,
    *row_end.ROWS,
    *row_scale.ROWS,
    *row_files.ROWS,
    *row_gateway.ROWS,
    *row_address.ROWS,
    *row_transfer.ROWS,
)
EXIT_INTERRUPTED = 130
QUICK_RUNS = 2

EPILOG = """\
examples:
  scripts/bench                        all rows; the numbers are kept in build/bench/
  scripts/bench run session --runs 10  two rows, ten samples of each side
  scripts/bench --quick read-64k       two samples of each side, to see that a row works
  scripts/bench --list
  scripts/bench soak --help            not a row: mixed calls under random faults

exit codes: 0 every target met, 1 one missed or a row failed, 2 usage, 4 no cluster
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run rows and report.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["soak"]:
        return soak.main(words[1:])
    arguments = _parse(words)
    if arguments.list:
        for row in ROWS:
            target = f"at most {row.target:.3f}" if row.target else "no target"
            if row.limit:
                target = f"at most {row.limit:g} s"
            print(f"{row.name:16} {target:16} {row.ours} / {row.baseline}")
        return EXIT_DONE
    rows = [row for row in ROWS if not arguments.rows or row.name in arguments.rows]
    # A CI job is cancelled by SIGTERM; cleaning up is the same as for ctrl-C, which a shell script
    # that starts us in the background has set to be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    began = datetime.now(UTC)
    progress = report.Progress()
    results: list[Result[Lab]] = []
    lab: Lab | None = None
    code = EXIT_DONE
    try:
        lab = Lab(Settings.from_env(), progress.tell)
        anyio.run(_run_rows, lab, rows, arguments.runs, progress, results)
    except* PodpipeError as group:
        error = _first(group)
        progress.say(f"bench: {error}{_advice(error)}")
        code = error.exit_code if isinstance(error, PodpipeError) else EXIT_FAILED
    except* KeyboardInterrupt:
        progress.say("bench: interrupted")
        code = EXIT_INTERRUPTED
    progress.clear()
    if lab is None or not results:
        return code or EXIT_FAILED
    report.show(results)
    path = arguments.json or report.ROOT / "build" / "bench" / f"{began:%Y%m%dT%H%M%SZ}.json"
    report.write(path, report.document(results, began, lab.versions))
    progress.say(f"kept in {path}")
    if code == EXIT_DONE and any(result.verdict in ("MISS", "FAILED") for result in results):
        code = EXIT_FAILED
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure podpipe beside what it replaces, in turns, and compare the medians.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="NAME", help="rows to run; all by default")
    parser.add_argument("--runs", type=int, metavar="N", help="samples of each side of each row")
    parser.add_argument(
        "--quick",
        action="store_const",
        const=QUICK_RUNS,
        dest="runs",
        help=f"{QUICK_RUNS} samples: a look, no measurement",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the numbers")
    parser.add_argument("--list", action="store_true", help="list the rows and their targets")
    arguments = parser.parse_args(argv)
    known = [row.name for row in ROWS]
    if unknown := [name for name in arguments.rows if name not in known]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.runs is not None and arguments.runs < 1:
        parser.error("--runs has to be at least 1")
    return arguments


async def _run_rows(
    lab: Lab,
    rows: Sequence[Row[Lab]],
    runs: int | None,
    progress: report.Progress,
    results: list[Result[Lab]],
) -> None:
    """Fill `results`; a row that fails does not keep the others from running."""
    async with lab.entered():
        for row in rows:
            progress.say(
                f"{row.name}: {row.ours}, {runs or row.runs} times in turns with {row.baseline}"
            )
            results.append(await _run_row(lab, row, runs or row.runs, progress))


async def _run_row(lab: Lab, row: Row[Lab], runs: int, progress: report.Progress) -> Result[Lab]:
    before = os.getloadavg()[0]
    try:
        async with row.sides(lab) as sides:
            ours, baseline = await measure(
                sides,
                runs=runs,
                warmups=row.warmups,
                burst=row.burst,
                tell=lambda text: progress.tell(f"{row.name}: {text}"),
            )
    except (ApiUnreachable, PrerequisiteError):
        raise  # no other row will fare better
    except (PodpipeError, ExceptionGroup, TimeoutError, OSError) as caught:
        error = _first(caught)
        failure = f"{type(error).__name__}: {error}"
        return Result(row, load=(before, os.getloadavg()[0]), failure=failure)
    return Result(row, ours, baseline, (before, os.getloadavg()[0]))


def _first(error: BaseException) -> BaseException:
    """The first exception within groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _advice(error: BaseException) -> str:
    if isinstance(error, ApiUnreachable | PrerequisiteError):
        return "\nbench: it needs a cluster with the sandbox image: scripts/cluster up, scripts/image load"
    return ""


if __name__ == "__main__":
    sys.exit(main())
