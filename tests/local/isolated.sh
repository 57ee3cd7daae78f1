#!/usr/bin/env bash
# Runs a script in namespaces of its own on a copy-on-write view of this machine, for tests of what
# a node leaves behind. usage: isolated.sh WORK_FOLDER SCRIPT [ARGUMENT...]
#
# Processes, mounts, network, cgroups and files are the script's alone: it cannot disturb a node that
# runs outside, everything it starts ends with it, and /upper is exactly what it changed on disk.
set -euo pipefail

if [[ ${1:-} != --inside ]]; then
  name=podpipe-test-$$
  folders=()
  for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [[ -e $hierarchy/cgroup.procs && ! -L $hierarchy ]] || continue
    folder=$hierarchy/$name
    mkdir "$folder"
    folders+=("$folder")
    for setting in cpuset.cpus cpuset.mems; do # empty in a new v1 group, which then takes no process
      [[ ! -e $hierarchy/$setting || -e $hierarchy/cgroup.controllers ]] ||
        cat "$hierarchy/$setting" >"$folder/$setting"
    done
  done
  # shellcheck disable=SC2317 # the trap calls it
  clean() {
    for folder in "${folders[@]}"; do find "$folder" -depth -type d -exec rmdir {} +; done
  }
  trap clean EXIT
  # The subshell moves into the groups; this shell stays outside, to remove them.
  (
    for folder in "${folders[@]}"; do sh -c "echo \$PPID" >"$folder/cgroup.procs"; done
    exec unshare --mount --net --pid --cgroup --ipc --fork --kill-child "$0" --inside "$@"
  )
  exit
fi

shift
work=$1
shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
mkdir "$work"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
cd "$work/root"
mkdir upper
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mkdir sys/fs/cgroup/init
  echo 0 >sys/fs/cgroup/init/cgroup.procs
else
  mount -t tmpfs tmpfs sys/fs/cgroup
  hierarchies=$(awk '$3 == "cgroup" {print $2, $4}' /proc/mounts)
  while read -r point options; do
    mkdir "sys/fs/cgroup/${point##*/}"
    mount -t cgroup -o "$options" cgroup "sys/fs/cgroup/${point##*/}"
  done <<<"$hierarchies"
fi
mount --bind "$work/upper" upper
ip link set lo up
exec chroot . "$@"
