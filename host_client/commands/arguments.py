"""How a command is added to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Protocol

from host_client.config import SETTINGS_HELP, Settings

Command = Callable[[Settings, argparse.Namespace], Awaitable[int]]


class Add(Protocol):
    """Adds a command; the parser that it returns takes the command's own arguments."""

    def __call__(
        self,
        name: str,
        command: Command,
        text: str,
        example: str,
        *,
        sandbox: bool = True,
        json: bool = True,
    ) -> argparse.ArgumentParser:
        """Add one command.

        Args:
            name: as it is typed.
            command: what it does, and its exit code.
            text: what it is for, in a sentence.
            example: of its use, without the program's name.
            sandbox: whether it takes one.
            json: whether its answer may be asked for as JSON.
        """
        ...


def default_of(setting: str) -> str:
    """What the help says of an argument whose default is a setting."""
    return f"default: {setting}, which is {SETTINGS_HELP[setting][0]} unless set"
