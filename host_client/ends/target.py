"""Where a transfer goes to: a folder that things go into, a folder's contents, or one new name."""

from __future__ import annotations

import os

from host_client.ends import places


class Target:
    """Where to receive.

    Args:
        path: absolute, as realpath gives it.
        contents: what arrives is the contents of this folder, made if need be.
        into: it is a folder, made if need be, that what arrives goes into.
        delete: remove what did not arrive (with `contents` only).
    """

    def __init__(self, path: str, *, contents: bool, into: bool, delete: bool) -> None:
        self.path = path
        self.contents = contents
        self.into = into
        self.delete = delete

    def lacks(self, name: str) -> bool:
        """Whether nothing is there yet of something that is called so by the sender."""
        try:
            if self.contents:
                return not os.listdir(self.path)
            if self.into or os.path.isdir(self.path):
                return not os.path.lexists(os.path.join(self.path, name))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return not os.path.lexists(self.path)

    def open(self) -> tuple[places.Tree, str]:
        """The tree to write below, and the name that the one thing that arrives gets, if another.

        Raises:
            OSError: it is no folder, or cannot be made.
        """
        if self.contents or self.into or os.path.isdir(self.path):
            return places.Tree(places.open_folder(self.path, create=True)), ""
        parent, name = os.path.split(self.path)
        return places.Tree(places.open_folder(parent, create=True)), name
