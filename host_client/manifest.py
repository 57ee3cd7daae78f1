"""Templates to objects: jinja2 in, parsed YAML out, no value able to change the structure.

Every `{{ expression }}` passes through `yaml_scalar`, which dumps it as a YAML value of its own:
strings come out double-quoted and escaped, whatever they hold. Templates need no quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from host_client.clock import timestamp
from host_client.config import DEFAULT_RUNTIME_CLASS, DEFAULT_STORAGE_CLASS, Settings
from host_client.identity import home_claim
from host_client.sandbox import Sandbox
from in_pod_server import contract

MANIFESTS = Path(__file__).resolve().parent.parent / "manifests"

Object = dict[str, Any]


def yaml_scalar(value: object) -> str:
    """`value` as YAML that stands on one line and means nothing else.

    Stock `tojson` is not YAML-safe (surrogate pairs, C1 controls); PyYAML's own dumper is.

    Raises:
        yaml.YAMLError: a type that YAML has no plain form for.
        UnicodeEncodeError: a lone surrogate, which no API object can hold.
    """
    dumped: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=False,
        width=1_000_000, sort_keys=False,
    )  # fmt: skip
    return dumped.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Writes every string double-quoted, also within lists and maps: the one style of one line."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text.encode()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _quoted)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(  # noqa: S701 - YAML, not HTML: the finalizer escapes
        loader=jinja2.FileSystemLoader(MANIFESTS),
        undefined=jinja2.StrictUndefined,
        finalize=yaml_scalar,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["timestamp"] = timestamp
    environment.globals["c"] = contract
    return environment


def render_all(template: str, **values: object) -> list[Object]:
    """The documents of a template.

    Args:
        template: its path below `manifests`.
        values: what its expressions name.
    """
    text = _environment().get_template(template).render(**values)
    return list(yaml.safe_load_all(text))


def _render(template: str, **values: object) -> Object:
    (document,) = render_all(template, **values)
    return document


def namespace(settings: Settings, name: str = "") -> Object:
    """A namespace with restricted Pod Security enforced.

    Args:
        settings: name the one of the sandboxes.
        name: another one.
    """
    return _render("namespace.yaml.j2", namespace=name or settings.namespace)


def record(sandbox: Sandbox, settings: Settings) -> Object:
    """The record of a sandbox."""
    return _render("record.yaml.j2", sandbox=sandbox, namespace=settings.namespace)


def home(settings: Settings, storage_class: str) -> Object:
    """The user's home claim.

    Args:
        settings: whose, and how large.
        storage_class: empty for the cluster's default.
    """
    return _render(
        "home.yaml.j2",
        namespace=settings.namespace,
        home_claim=home_claim(settings.user_key),
        user_key=settings.user_key,
        user_id=settings.user,
        storage_class=storage_class,
        storage_size=settings.storage_size,
        access_mode=settings.storage_access_mode,
    )


def pod(
    sandbox: Sandbox, settings: Settings, runtime_class: str, access_modes: Sequence[str]
) -> Object:
    """The pod of the sandbox's present incarnation.

    Args:
        sandbox: a record that the API has given a uid.
        settings: namespace, pull secrets, and whether a proxy of the cluster leads to apps.
        runtime_class: empty for the cluster's default.
        access_modes: of the home's claim; one that a single node writes keeps its pods together.
    """
    return _render(
        "pod.yaml.j2",
        sandbox=sandbox,
        namespace=settings.namespace,
        home_claim=home_claim(sandbox.user_key),
        runtime_class=runtime_class,
        one_node="ReadWriteMany" not in access_modes,
        pull_secrets=settings.pull_secrets,
        led_by=settings.gateway.name,
    )


def gateway(sandbox: Sandbox, settings: Settings) -> list[Object]:
    """The Service of a sandbox, and the Ingress or HTTPRoute that leads to it; none for GATEWAY=local.

    Args:
        sandbox: a record that the API has given a uid.
        settings: name the namespace, and say what leads to apps.
    """
    if not settings.gateway.in_cluster:
        return []
    return render_all(
        "gateway.yaml.j2",
        sandbox=sandbox,
        namespace=settings.namespace,
        gateway=settings.gateway,
        hosts=[settings.gateway.host(sandbox.id, app) for app in ("", "*")],
    )


def everything(sandbox: Sandbox, settings: Settings) -> list[Object]:
    """All objects of a sandbox as they would be made, for a person to read; touches no cluster.

    Classes are the settings' own, or what they are tried with first.
    """
    runtime_class = (
        DEFAULT_RUNTIME_CLASS if settings.runtime_class is None else settings.runtime_class
    )
    storage_class = (
        DEFAULT_STORAGE_CLASS if settings.storage_class is None else settings.storage_class
    )
    return [
        namespace(settings),
        home(settings, storage_class),
        record(sandbox, settings),
        *gateway(sandbox, settings),
        pod(sandbox, settings, runtime_class, [settings.storage_access_mode]),
    ]
