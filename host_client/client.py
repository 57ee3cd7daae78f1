"""The demo and CI job: prove that a sandbox's home outlives its pod, byte for byte.

    python -m host_client.client [--json] [--junit FILE]      or      python host_client/client.py

Four blocks, as in the agent-sandbox MCP example: write a random blob, suspend and resume, read it
back with an equal sha256, bring the file to the host and hash it again. It works as a throw-away
user with a home of its own, and deletes both at the end, also when it fails or is interrupted. The
exit code is 0 only if every sum was equal.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anyio

if not __package__:  # run as a file: the checkout is beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from host_client.config import Settings
from host_client.errors import EXIT_DONE, EXIT_FAILED, PodpipeError, StillStarting, root_cause
from host_client.host import Host
from host_client.identity import home_claim
from host_client.interrupts import EXIT_INTERRUPTED, interruptible
from host_client.session import SandboxSession

BLOB = "random.bin"
BLOB_BYTES = 256
TTL_MINUTES = 15
"""If even the cleaning up is killed, the sandbox ends itself by then."""
ANSWER_SECONDS = 180
"""For an image that has to be pulled first."""
CLEANUP_SECONDS = 60.0


class Mismatch(PodpipeError):
    """What came back is not what was written."""


@dataclass(slots=True)
class Block:
    """One block of the run, for the report."""

    title: str
    seconds: float = 0.0
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Run:
    """One run of the four blocks.

    Args:
        settings: the cluster; its user is replaced by the throw-away one.
        quiet: say nothing on stdout, for `--json`.
    """

    def __init__(self, settings: Settings, *, quiet: bool) -> None:
        self._settings = replace(settings, user=f"client-{secrets.token_hex(4)}", session="client")
        self._out = sys.stderr if quiet else sys.stdout
        self.blocks: list[Block] = []

    def _say(self, text: str) -> None:
        print(f"[host] {text}", file=self._out, flush=True)

    @contextmanager
    def _block(self, title: str) -> Iterator[dict[str, Any]]:
        block = Block(title)
        self.blocks.append(block)
        print(f"\n{'=' * 60}\n{title}\n{'=' * 60}", file=self._out, flush=True)
        start = time.monotonic()
        try:
            yield block.facts
        except BaseException as error:
            block.failure = str(error) or type(error).__name__
            raise
        finally:
            block.seconds = round(time.monotonic() - start, 3)

    async def blocks_in_order(self) -> int:
        """All four blocks, then the cleaning up, whatever happened; 0 if all of it went well.

        Raises:
            Mismatch: a sum differed, or a file was missing.
            PodpipeError: podpipe or the cluster failed.
        """
        async with Host(self._settings) as host:
            try:
                await self._proof(host)
            finally:
                with anyio.fail_after(CLEANUP_SECONDS, shield=True):
                    await self._clean_up(host)
        return EXIT_DONE

    async def _proof(self, host: Host) -> None:
        with self._block("Session 1 — write a random blob to the PVC") as facts:
            status = await host.launcher.create(ttl_minutes=TTL_MINUTES)
            ref = status.sandbox.id
            session = await self._answering(host, ref)
            self._say(f"sandbox {ref}, pod {session.pod.name}")
            self._say(f"tools advertised by server: {await session.list_tools()}")
            before = await self._call(host, ref, "list_blobs", {})
            self._say(f"list_blobs (before write) -> {before}")
            self._expect("list_blobs before the write", before, [])
            wrote = await self._call(
                host, ref, "write_random_blob", {"name": BLOB, "size_bytes": BLOB_BYTES}
            )
            self._say(f"write_random_blob({BLOB!r}, {BLOB_BYTES}) -> {wrote}")
            self._expect("bytes_written", wrote["bytes_written"], BLOB_BYTES)
            facts |= {"sandbox_id": ref, "pod": session.pod.name, "wrote": wrote}
        with self._block("Suspend → Resume — the PVC persists, the container fs does not") as facts:
            old = session.pod
            self._say(f"suspending sandbox {ref} (its pod is deleted; record and PVC stay)...")
            await host.launcher.suspend(ref)
            await host.sessions.forget(ref)
            self._say(f"pod {old.name} is gone (sandbox is Suspended)")
            self._say(f"resuming sandbox {ref} (a fresh pod gets the same PVC)...")
            self._say(f"waiting up to {ANSWER_SECONDS}s for its new pod to answer...")
            session = await self._answering(host, ref)
            self._say(f"pod {session.pod.name} answers")
            if session.pod.uid == old.uid:
                raise Mismatch(f"pod {session.pod.name} is still the one from before the suspend")
            facts |= {"old_pod_uid": old.uid, "new_pod_uid": session.pod.uid}
        with self._block("Session 2 — read the blob back from the PVC") as facts:
            after = await self._call(host, ref, "list_blobs", {})
            self._say(f"list_blobs (after restart) -> {after}")
            self._expect("list_blobs after the restart", after, [BLOB])
            read = await self._call(host, ref, "read_blob", {"name": BLOB})
            self._say(f"read_blob({BLOB!r}) -> {read}")
            self._expect("sha256 after the restart", read["sha256"], wrote["sha256"])
            self._say(f"OK — sha256 matches across pod restart: {read['sha256']}")
            facts |= {"read": read}
        with self._block("Return the file to the host and re-hash locally") as facts:
            with tempfile.TemporaryDirectory(prefix="podpipe-client-") as folder:
                returned = Path(folder) / f"returned-{BLOB}"
                await self._download(host, ref, wrote["path"], returned)
                self._say(f"read_file {ref}:{wrote['path']} -> {returned.name}")
                data = returned.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            self._say(f"returned {len(data)} bytes; host sha256={digest}")
            self._expect("sha256 on the host", digest, wrote["sha256"])
            self._say("OK — PVC contents survived pod restart and round-trip back to the host")
            facts |= {"bytes": len(data), "sha256": digest}

    async def _answering(self, host: Host, ref: str) -> SandboxSession:
        with anyio.move_on_after(ANSWER_SECONDS):
            while True:
                try:
                    return await host.sessions.open(ref, resume=True)
                except StillStarting as waiting:
                    self._say(f"still starting: {waiting.detail}")
        raise StillStarting(f"sandbox {ref} did not answer in {ANSWER_SECONDS} s", detail="")

    async def _call(self, host: Host, ref: str, tool: str, arguments: dict[str, Any]) -> Any:
        answer = await host.sessions.call(ref, tool, arguments)
        if answer.get("isError"):
            raise PodpipeError("\n".join(c.get("text", "") for c in answer["content"]))
        facts = answer["structuredContent"]
        return facts["result"] if set(facts) == {"result"} else facts

    async def _download(self, host: Host, ref: str, path: str, target: Path) -> None:
        offset = 0
        with target.open("wb") as out:
            while True:
                part = await self._call(
                    host, ref, "read_file", {"path": path, "offset": offset, "encoding": "base64"}
                )
                out.write(base64.b64decode(part["content"]))
                if not part["truncated"]:
                    return
                offset = part["next_offset"]

    @staticmethod
    def _expect(what: str, got: object, wanted: object) -> None:
        if got != wanted:
            raise Mismatch(f"{what}: got {got!r}, expected {wanted!r}")

    async def _clean_up(self, host: Host) -> None:
        """Destroy every sandbox of the throw-away user and purge its home."""
        for status in await host.launcher.list_all():
            await host.sessions.forget(status.sandbox.id)
            await host.launcher.destroy(status.sandbox.id)
            self._say(f"sandbox {status.sandbox.id} is destroyed")
        if await host.launcher.purge_home():
            self._say(f"home {home_claim(self._settings.user_key)} is purged")


def _junit(blocks: Sequence[Block]) -> str:
    """The blocks as a JUnit report."""
    suite = ElementTree.Element(
        "testsuite",
        name="podpipe.client",
        tests=str(len(blocks)),
        failures=str(sum(bool(block.failure) for block in blocks)),
        time=f"{sum(block.seconds for block in blocks):.3f}",
    )
    for block in blocks:
        case = ElementTree.SubElement(
            suite, "testcase", classname="podpipe.client", name=block.title,
            time=f"{block.seconds:.3f}",
        )  # fmt: skip
        if block.failure:
            ElementTree.SubElement(case, "failure", message=block.failure)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the blocks and report.

    Returns:
        0 if every line held, 1 or the error's own code if not, 130 if interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="client.py",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog="example:\n  python host_client/client.py --junit report.xml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a JUnit report")
    arguments = parser.parse_args(argv)
    error = ""
    code = EXIT_DONE
    blocks: list[Block] = []
    try:
        run = Run(Settings.from_env(), quiet=arguments.json)
        blocks = run.blocks
        code = anyio.run(interruptible, run.blocks_in_order)
        if code == EXIT_INTERRUPTED:
            error = "interrupted"
    except Exception as caught:
        root = root_cause(caught)
        error = str(root) or type(root).__name__
        code = root.exit_code if isinstance(root, PodpipeError) else EXIT_FAILED
    if error:
        print(f"client.py: FAILED: {error}", file=sys.stderr)
    if arguments.junit:
        arguments.junit.write_text(_junit(blocks), encoding="utf-8")
    if arguments.json:
        report = {"ok": not error, "error": error, "blocks": [asdict(block) for block in blocks]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    return code


if __name__ == "__main__":
    sys.exit(main())
