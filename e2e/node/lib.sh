# shellcheck shell=bash
# What the scripts of this folder share; sourced, never run. Settings come from the environment.

NODE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$NODE_DIR/../.." && pwd)
CACHE=${SALLYPORT_CACHE:-$ROOT/.cache}
# All of the cluster's state: certificates, etcd's data, containers, logs, process ids.
RUN=${SALLYPORT_NODE_RUN:-$ROOT/.cache/node-run}
TAG=${SALLYPORT_IMAGE_TAG:-dev}

NODE=sallyport-node
POD_CIDR=10.244.0.0/24
SERVICE_CIDR=10.96.0.0/16
SERVICE_API=10.96.0.1 # the first address of the range is always the API server's
SERVICE_DNS=10.96.0.10
API_PORT=${SALLYPORT_API_PORT:-6443}
CNI_PLUGINS=${CNI_PLUGINS:-/usr/lib/cni}
BRIDGE=sallyport0
# The pods' control groups are below one of this checkout's own: a kubelet ends every pod it finds below its
# root and does not know, those of another kubelet on this machine as well.
CGROUP=sallyport-node-$(printf '%s' "$RUN" | cksum | cut -d' ' -f1)
NFT_TABLE=sallyport_node
# Folders with fixed names that containerd, the kubelet and pods with hostPaths write to. The node has them on
# memory of its own.
NODE_DIRS=(/run/netns /run/containerd /run/sallyport-cni /var/lib/cni /var/lib/kubelet /var/log/containers
    /var/log/pods /etc/cni/net.d /opt/cni/bin)
PAUSE_IMAGE=localhost/sallyport-pause:1
PROGRAMS=(coredns etcd helm kube-apiserver kube-controller-manager kube-proxy kube-scheduler kubectl kubelet)

# Where Debian keeps what root runs; a user's PATH may lack it.
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'node: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The address that pods and the host reach the API server under.
node_ip() {
    local ip
    # A documentation address: nothing is sent, the kernel only picks a route.
    ip=$(ip -4 route get 192.0.2.1 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p')
    printf '%s\n' "${ip:-127.0.0.1}"
}

# The hash of what the binary is made from. Two toolchains give two binaries, so the folder's name has both.
source_hash() {
    (cd "$NODE_DIR" && sha256sum build kubenode/go.mod kubenode/go.sum kubenode/main.go kubenode/pause/main.go) |
        sha256sum | cut -c1-16
}

# The folder of the compiled programs. Without Go, one that another Go built does as well.
programs_dir() {
    local hash found
    hash=$(source_hash)
    if command -v go >/dev/null 2>&1; then
        printf '%s\n' "$CACHE/kubenode/$hash-$(go env GOVERSION)"
        return
    fi
    for found in "$CACHE/kubenode/$hash"-*; do
        [ -x "$found/kubenode" ] && printf '%s\n' "$found" && return
    done
    printf '%s\n' "$CACHE/kubenode/$hash-none"
}

kubectl() { "$RUN/bin/kubectl" "$@"; }
ctr() { command ctr --address "$RUN/containerd.sock" --namespace k8s.io "$@"; }

# The folders of our control group: version 1 has a tree for each controller, version 2 has one.
cgroups() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        printf '%s\n' "/sys/fs/cgroup/$CGROUP"
        return
    fi
    local tree
    for tree in /sys/fs/cgroup/*/; do
        [ -e "${tree}cgroup.procs" ] && printf '%s\n' "$tree$CGROUP"
    done
}

# When a process started, in the kernel's ticks: with its number it names one process for good. Prints
# nothing for one that has ended, also while nobody has collected it yet.
started_at() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 !~ /[ZX]/ { print $20 }'; }

# start NAME COMMAND...: in the background, with a log and the process's identity in the state.
start() {
    local name=$1 pid
    shift
    mkdir -p "$RUN/log" "$RUN/pid"
    setsid "$@" >"$RUN/log/$name.log" 2>&1 </dev/null &
    pid=$!
    printf '%s %s\n' "$pid" "$(started_at "$pid")" >"$RUN/pid/$name"
}

# Prints the process id of NAME if that very process still runs.
running() {
    local pid since
    read -r pid since 2>/dev/null <"$RUN/pid/$1" || return 1
    [ -n "$since" ] && [ "$(started_at "$pid")" = "$since" ] || return 1
    printf '%s\n' "$pid"
}

# stop NAME [SIGNAL]: asks, waits up to 5 s, then insists.
stop() {
    local name=$1 pid i
    if pid=$(running "$name"); then
        kill "-${2:-TERM}" "$pid" 2>/dev/null || true
        for ((i = 0; i < 50; i++)); do
            running "$name" >/dev/null || break
            sleep 0.1
        done
        running "$name" >/dev/null && kill -KILL "$pid" 2>/dev/null
    fi
    rm -f "$RUN/pid/$name"
}

# await SECONDS WHAT COMMAND...: until the command succeeds. Fails early when a started program has ended.
await() {
    local limit=$1 what=$2 begun=$SECONDS file name
    shift 2
    until "$@" >/dev/null 2>&1; do
        for file in "$RUN"/pid/*; do
            [ -e "$file" ] || continue
            name=${file##*/}
            running "$name" >/dev/null || { tail -n 5 "$RUN/log/$name.log" >&2; die "$name has ended; its log is $RUN/log/$name.log"; }
        done
        [ $((SECONDS - begun)) -lt "$limit" ] || die "$what: not within $limit s; logs are in $RUN/log"
        sleep 0.2
    done
}
