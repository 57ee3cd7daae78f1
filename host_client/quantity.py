"""Kubernetes quantities, and the caps that a sandbox's limits are held to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from host_client.errors import UsageError

_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?")
_SCALE = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}


def quantity(text: str, what: str) -> Decimal:
    """The value of a Kubernetes quantity such as 500m, 2 or 4Gi.

    Args:
        text: the quantity.
        what: the setting or argument it came from, for the error.

    Raises:
        UsageError: not a positive quantity.
    """
    match = _QUANTITY.fullmatch(text)
    if not match:
        example = "500m or 2" if "cpu" in what.lower() else "512Mi or 4Gi"
        raise UsageError(f"{what}={text[:40]!r} is not a Kubernetes quantity such as {example}")
    value = Decimal(match[1]) * _SCALE[match[2] or ""]
    if not value:
        raise UsageError(f"{what}={text!r} has to be more than 0")
    return value


@dataclass(frozen=True, slots=True)
class Cap:
    """What a limit of a resource has to be, whatever the settings say.

    Args:
        setting: the setting that holds its maximum.
        least: with less, the sandbox's own daemon does not start in the time of a call.
        step: what Kubernetes rounds to.
    """

    setting: str
    least: str
    step: str


CAPS: Mapping[str, Cap] = {
    "cpu": Cap("MAX_CPU_LIMIT", "50m", "1m"),
    "memory": Cap("MAX_MEMORY_LIMIT", "128Mi", "1"),
}


def refuse_beyond_cap(text: str, what: str, resource: str, most: str) -> None:
    """Refuse a limit that no sandbox may have.

    Args:
        text: the limit, a quantity.
        what: the setting or argument it came from.
        resource: a name of `CAPS`.
        most: the maximum, a quantity.

    Raises:
        UsageError: it is no quantity, above the maximum, too little, or finer than its step.
    """
    value, cap = quantity(text, what), CAPS[resource]
    if value > quantity(most, cap.setting):
        raise UsageError(f"{what}={text} is above the maximum of {most} (setting {cap.setting})")
    if value < quantity(cap.least, what):
        raise UsageError(
            f"{what}={text} is too little: a sandbox needs {cap.least} to work in at least"
        )
    if value % quantity(cap.step, what):
        raise UsageError(f"{what}={text} is not a whole number of {cap.step}")
