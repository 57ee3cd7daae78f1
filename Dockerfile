# The sandbox image: `slim` (what scripts/image builds) and `full` (compilers, pip, uv, Node). `reaper`
# is no sandbox: the host's side with a kubectl, for the CronJob of `podpipe render admin`.
#
# Docker with BuildKit, podman and buildah build it alike. Two optional build secrets serve machines
# behind an intercepting proxy or a mirror, and leave nothing in the image: `ca_bundle` (certificates)
# and `apt_conf` (apt options; apt ignores APT_CONFIG when the file is not there).
ARG BASE_IMAGE=debian:trixie-slim
FROM ${BASE_IMAGE} AS base

# No program may raise its rights, and no two sandboxes may share a host key: both go in the layer
# that brought them, and so do apt's leftovers.
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_conf \
    set -eu; \
    export APT_CONFIG=/run/secrets/apt_conf DEBIAN_FRONTEND=noninteractive; \
    apt-get update -q; \
    apt-get install -y -q --no-install-recommends \
        bash bash-static ca-certificates curl git gzip openssh-client openssh-server procps python3 \
        python3-venv ripgrep rsync systemd-standalone-sysusers tar tini; \
    groupadd --gid 1000 sandbox; \
    useradd --uid 1000 --gid 1000 --home-dir /home/sandbox --create-home --shell /bin/bash \
        --password '*' sandbox; \
    : "a login shell sets PATH anew, without what was installed into the home"; \
    echo 'PATH=$HOME/.local/bin:$PATH' > /etc/profile.d/podpipe.sh; \
    : "one file to map instead of a dozen to open: a tenth of what bash takes to start"; \
    localedef --add-to-archive /usr/lib/locale/C.utf8; \
    install -d -o 1000 -g 1000 /workspace; \
    install -d -o 1000 -g 1000 -m 0700 /run/podpipe; \
    find / -xdev -type f -perm /6000 -exec chmod ug-s {} +; \
    apt-get clean; \
    rm -rf /etc/ssh/ssh_host_* /var/lib/apt/lists/* /var/log/* /var/cache/debconf/*-old /tmp/*

# Bytecode that is never checked against its source: the root file system is read-only, and an
# import that writes or looks twice is latency at every start.
COPY requirements.txt /opt/requirements.txt
RUN --mount=type=secret,id=ca_bundle \
    set -eu; \
    if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi; \
    python3 -m venv /opt/podpipe; \
    /opt/podpipe/bin/python -m pip install --no-cache-dir --no-compile --disable-pip-version-check \
        --quiet --requirement /opt/requirements.txt; \
    /opt/podpipe/bin/python -m pip uninstall --yes --quiet pip; \
    echo /app > "$(/opt/podpipe/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/podpipe.pth"; \
    find /opt/podpipe -name __pycache__ -prune -exec rm -rf {} +; \
    /opt/podpipe/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/podpipe/lib; \
    rm -rf /tmp/*

ENV PATH=/opt/podpipe/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/sandbox \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/sandbox
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/podpipe/bin/python", "-I", "-m", "in_pod_server", "serve"]

FROM base AS app
USER 0:0
COPY in_pod_server /app/in_pod_server
COPY in_pod_server/mcp_server.py /app/mcp_server.py
RUN /opt/podpipe/bin/python -m compileall -q --invalidation-mode unchecked-hash /app

FROM base AS full
USER 0:0
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_conf \
    set -eu; \
    export APT_CONFIG=/run/secrets/apt_conf DEBIAN_FRONTEND=noninteractive; \
    if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi; \
    apt-get update -q; \
    apt-get install -y -q --no-install-recommends \
        build-essential nodejs npm pkg-config python3-dev python3-pip; \
    /usr/bin/python3 -m pip install --no-cache-dir --break-system-packages --quiet \
        --root-user-action ignore uv==0.13.8; \
    find / -xdev -type f -perm /6000 -exec chmod ug-s {} +; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/debconf/*-old /tmp/*
# What a user installs goes to the home: it is the only place that can be written and that lasts. In
# files and not in ENV, because a command's environment is the daemon's short list.
RUN printf '[global]\nbreak-system-packages = true\n' > /etc/pip.conf; \
    printf 'prefix=${HOME}/.local\ncache=${HOME}/.cache/npm\nupdate-notifier=false\n' > /etc/npmrc
COPY --from=app /app /app
USER 1000:1000

FROM base AS reaper
USER 0:0
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=apt_conf \
    set -eu; \
    export APT_CONFIG=/run/secrets/apt_conf DEBIAN_FRONTEND=noninteractive; \
    apt-get update -q; \
    apt-get install -y -q --no-install-recommends kubectl; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/debconf/*-old /tmp/*
COPY in_pod_server /app/in_pod_server
COPY host_client /app/host_client
COPY manifests /app/manifests
RUN /opt/podpipe/bin/python -m compileall -q --invalidation-mode unchecked-hash /app
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/podpipe/bin/python", "-I", "-m", "host_client", "reap"]

FROM base AS slim
COPY --from=app /app /app
