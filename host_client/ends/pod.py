"""The pod's end as a program. The host sends it over the channel before anything else."""

from __future__ import annotations

import os

from host_client.ends import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXIT_LOST = 3


def main() -> None:
    """Do the one job that the host names, below $HOME."""
    channel = wire.Channel(0, 1, on_silence=_gone)
    try:
        _, payload = channel.receive()
        channel.start()
        job = wire.parsed(payload, dict)
        # Only the one that is needed was sent along.
        if job["role"] == "send":
            from host_client.ends import sender

            sources = [
                sender.Source(name, _resolved(path, must_exist=True))
                for name, path in job["sources"]
            ]
            sender.Sender(channel, _ignore, _ignore, on_lost=_gone, eager=job["eager"]).run(sources)
        else:
            from host_client.ends import receiver, target

            where = target.Target(
                _resolved(job["path"], must_exist=False),
                contents=job["contents"],
                into=job["into"],
                delete=job["delete"],
            )
            end = receiver.Receiver(channel, where, _ignore, _ignore)
            end.run()
            end.report()
    except (wire.Refused, wire.Broken) as error:
        _refuse(channel, str(error))
    except OSError as error:
        _refuse(channel, f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    except wire.Lost:
        _gone()
    # At once: threads that wait for a host which has nothing more to say are not waited for.
    os._exit(0)


def _resolved(path: str, *, must_exist: bool) -> str:
    """The real path of something in the home.

    Raises:
        wire.Refused: it leads out of the home, or is not there.
    """
    home = os.path.realpath(os.path.expanduser("~"))
    real = os.path.realpath(os.path.join(home, path))
    if real != home and not real.startswith(home + "/"):
        raise wire.Refused(f"{path} leads out of the home, to {real}")
    if must_exist and not os.path.lexists(real):
        raise wire.Refused(f"there is no {path} in the sandbox's home")
    return real


def _refuse(channel: wire.Channel, why: str) -> None:
    try:
        channel.send(wire.REFUSAL, why.encode("utf-8", "backslashreplace"))
        channel.flush()
    except wire.Lost:
        _gone()


def _gone() -> None:
    os._exit(EXIT_LOST)


def _ignore(*_: Any) -> None:
    """Nobody watches here."""
