#!/usr/bin/env python3
"""Writes a container image of one layer without Docker: the same bytes for the same content.

Usage: mkimage.py --name NAME:TAG --entrypoint PATH [--ldd] [--strip] [--user UID] (--digest | OUT) SOURCE:TARGET...

OUT is an archive as `docker save` writes it, which `ctr images import` and `kind load image-archive`
read; `-` is standard output. --ldd adds, for every ELF file given, the shared libraries and the loader it
runs with on this machine. --strip leaves debug information out. --digest prints what the image is made
from as one hash and writes nothing: it tells whether a build would change anything.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile

# Changing what this file writes must change the digest.
FORMAT = "1"
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("--user", default="65532:65532")
    parser.add_argument("--ldd", action="store_true")
    parser.add_argument("--strip", action="store_true")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("words", nargs="+")
    given = parser.parse_intermixed_args()
    given.out = None if given.digest else given.words.pop(0)
    return given


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def collect(pairs, with_libraries):
    """Maps each path in the image to the file it comes from."""
    files = {}
    for pair in pairs:
        source, target = pair.split(":", 1)
        files[target.lstrip("/")] = source
    if with_libraries:
        for source in list(files.values()):
            if is_elf(source):
                told = subprocess.run(["ldd", source], capture_output=True, text=True, check=False).stdout
                if "not found" in told:
                    sys.exit(f"mkimage: {source} lacks a library here:\n{told}")
                for library in LIBRARY.findall(told):
                    files.setdefault(library.lstrip("/"), os.path.realpath(library))
    return files


def digest(given, files):
    """One hash of the settings and of every file's path, mode and content."""
    total = hashlib.sha256(json.dumps([FORMAT, given.name, given.entrypoint, given.user, given.strip]).encode())
    for target in sorted(files):
        content = hashlib.sha256()
        with open(files[target], "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                content.update(block)
        total.update(f"{target}\0{os.access(files[target], os.X_OK)}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def entry(name, kind=tarfile.REGTYPE, mode=0o644, size=0):
    """A header that says nothing of this machine or of today."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode, size
    return info


def layer(files, strip, out):
    """Writes the layer and returns its hash."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar, tempfile.TemporaryDirectory() as work:
        made = set()

        def parents(path):
            parts = path.split("/")[:-1]
            for count in range(1, len(parts) + 1):
                folder = "/".join(parts[:count])
                if folder not in made:
                    made.add(folder)
                    tar.addfile(entry(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))

        parents("tmp/")
        parents("etc/")
        for name, text in ACCOUNTS.items():
            tar.addfile(entry(name, size=len(text)), io.BytesIO(text.encode()))
        for target in sorted(files):
            source = files[target]
            mode = 0o755 if os.access(source, os.X_OK) else 0o644
            if strip and is_elf(source):
                copy = os.path.join(work, "stripped")
                subprocess.run(["strip", "-o", copy, source], check=True)
                source = copy
            parents(target)
            with open(source, "rb") as file:
                tar.addfile(entry(target, mode=mode, size=os.path.getsize(source)), file)
    out.flush()
    out.seek(0)
    hashed = hashlib.sha256()
    for block in iter(lambda: out.read(1 << 20), b""):
        hashed.update(block)
    return hashed.hexdigest()


def write(given, files, stream):
    with tempfile.TemporaryFile() as body:
        layer_hash = layer(files, given.strip, body)
        config = json.dumps({
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "Entrypoint": [given.entrypoint],
                "User": given.user,
            },
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + layer_hash]},
            "history": [{"created_by": "sallyport"}],
        }).encode()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        layer_name = layer_hash + "/layer.tar"
        manifest = json.dumps([{"Config": config_name, "RepoTags": [given.name], "Layers": [layer_name]}]).encode()
        size = body.seek(0, os.SEEK_END)
        body.seek(0)
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            tar.addfile(entry(config_name, size=len(config)), io.BytesIO(config))
            tar.addfile(entry(layer_name, size=size), body)
            tar.addfile(entry("manifest.json", size=len(manifest)), io.BytesIO(manifest))


def main():
    given = arguments()
    files = collect(given.words, given.ldd)
    if given.digest:
        print(digest(given, files))
    elif given.out == "-":
        write(given, files, sys.stdout.buffer)
    else:
        # Beside the target, so that an archive is there whole or not at all.
        with open(given.out + ".part", "wb") as out:
            write(given, files, out)
        os.replace(given.out + ".part", given.out)


if __name__ == "__main__":
    main()
