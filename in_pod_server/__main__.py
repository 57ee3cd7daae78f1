"""`python -I -m in_pod_server serve|tools`: start the daemon, or print its tools."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from in_pod_server import contract


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="in_pod_server", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the daemon of this sandbox")
    for name, default in (
        ("socket", contract.SOCKET),
        ("home", contract.HOME),
        ("workspace", contract.WORKSPACE),
        ("run-dir", contract.RUN_DIR),
        ("log-dir", contract.LOG_DIR),
        ("podinfo", contract.PODINFO_DIR),
    ):
        serve.add_argument(f"--{name}", type=Path, default=Path(default), help=argparse.SUPPRESS)
    serve.add_argument(
        "--gateway-port", type=int, default=contract.GATEWAY_PORT, help=argparse.SUPPRESS
    )
    commands.add_parser("tools", help="print the tools as the host's tools.json holds them")
    args = parser.parse_args(argv)
    if args.command == "tools":
        return _print_tools()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Its INFO lines quote what callers sent.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    from in_pod_server.daemon import DaemonError, Options, Paths, serve

    paths = Paths(
        socket=args.socket,
        home=args.home,
        workspace=args.workspace,
        run_dir=args.run_dir,
        log_dir=args.log_dir,
        podinfo=args.podinfo,
    )
    raw = os.environ.get(contract.ENV_MAX_FILE_BYTES) or str(contract.MAX_FILE_BYTES)
    if not raw.isdecimal() or int(raw) == 0:
        sys.stderr.write(f"{contract.ENV_MAX_FILE_BYTES}={raw!r} is no number of bytes\n")
        return 2
    idle = os.environ.get(contract.ENV_IDLE_SECONDS) or "0"
    if not idle.isdecimal():
        sys.stderr.write(f"{contract.ENV_IDLE_SECONDS}={idle!r} is no number of seconds\n")
        return 2
    try:
        return serve(
            paths,
            Options(
                max_file_bytes=int(raw),
                idle_seconds=int(idle),
                sandbox_id=os.environ.get(contract.ENV_SANDBOX_ID, ""),
                gateway_port=args.gateway_port,
                gateway_address=os.environ.get(contract.ENV_GATEWAY_ADDRESS, ""),
            ),
        )
    except DaemonError as exc:
        sys.stderr.write(f"podpipe daemon: {exc}\n")
        return 1


def _print_tools() -> int:
    import anyio

    from in_pod_server.files import Home
    from in_pod_server.gateway.gateway import Gateway
    from in_pod_server.launch import Launcher
    from in_pod_server.processes import ProcessTable
    from in_pod_server.server import build_server, describe_tools

    nowhere = Path(contract.HOME)
    launcher = Launcher(home=nowhere, run_dir=nowhere, user=contract.USER, tmp_dir=nowhere)
    processes = ProcessTable(launcher, log_dir=nowhere)
    server = build_server(
        processes=processes,
        home=Home([]),
        workspace=Home([]),
        gateway=Gateway("", nowhere, nowhere, nowhere, 0),
    )
    sys.stdout.write(anyio.run(describe_tools, server))
    return 0


if __name__ == "__main__":
    sys.exit(main())
