"""Publishes images and the chart, signed with a key, and a list of the Python packages in each image (SBOM)."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from devcluster import binaries, dockerfiles
from devcluster.settings import REPOSITORY, ClusterError

# Lists packages with their versions and digests as CycloneDX does.
LISTER = "cyclonedx-bom==7.5.0"


@dataclass(frozen=True)
class Release:
    """What is released where: images that were built with a `tag` as REGISTRY/dovetail/NAME:VERSION, and files in
    `folder`. `key` is cosign's private key, whose password is in COSIGN_PASSWORD. `requirements` is the rollout image's
    list. `insecure`: the registry has no TLS."""

    registry: str
    tag: str
    key: Path
    folder: Path
    requirements: str
    insecure: bool

    def publish(self) -> list[str]:
        """Publish it, and return the commands that check it with the public key.

        Raises: ClusterError with one sentence."""
        if not self.key.is_file():
            raise ClusterError(f"there is no key {self.key} (cosign generate-key-pair makes one)")
        if "COSIGN_PASSWORD" not in os.environ:
            raise ClusterError("set COSIGN_PASSWORD to the password of the key")
        self.folder.mkdir(parents=True, exist_ok=True)
        lists = {name: self._list_packages(name) for name in dockerfiles.FOLDERS}
        version = dockerfiles.released()
        pushed = dockerfiles.push(list(lists), self.tag, self.registry, version, self.insecure)
        checks = []
        for name, packages in lists.items():
            image = f"{self.registry}/dovetail/{name}@{pushed[name]}"
            checks += [self._sign(image), self._attest(image, packages)]
        checks.append(self._sign(self._push_chart()))
        (self.folder / "values.yaml").write_text(values(self.registry, version, pushed))
        return checks

    def _list_packages(self, image: str) -> Path:
        file = self.requirements if image == "rollout" else f"{image}.txt"
        target = self.folder / f"{image}.cdx.json"
        words = ["cyclonedx-py", "requirements", f"requirements/{file}", "--output-reproducible", "-o", str(target)]
        _run(str(REPOSITORY / ".venv/bin/uv"), "tool", "run", "--from", LISTER, *words)
        return target

    def _push_chart(self) -> str:
        """The chart in the registry, by its digest."""
        helm = str(binaries.path_of("helm"))
        package = _run(helm, "package", "helm/dovetail", "--destination", str(self.folder)).rpartition(": ")[2].strip()
        plain = ["--plain-http"] if self.insecure else []
        told = _run(helm, "push", package, f"oci://{self.registry}/charts", *plain)
        found = re.search(r"Digest: (sha256:[0-9a-f]{64})", told)
        if found is None:
            raise ClusterError(f"helm push named no digest: {told.strip()}")
        return f"{self.registry}/charts/dovetail@{found[1]}"

    def _sign(self, artifact: str) -> str:
        self._cosign("sign", artifact)
        return self._check("verify", artifact)

    def _attest(self, image: str, packages: Path) -> str:
        kind = ("--type", "cyclonedx")
        self._cosign("attest", *kind, "--predicate", str(packages), image)
        return self._check("verify-attestation", *kind, image)

    def _cosign(self, what: str, *words: str) -> None:
        # By the key alone: no public log is told of a private registry's images.
        private = ("--use-signing-config=false", "--tlog-upload=false", "--yes")
        _run(_program(), what, "--key", str(self.key), *private, *self._plain, *words)

    def _check(self, what: str, *words: str) -> str:
        public = self.key.with_suffix(".pub")
        return " ".join(["cosign", what, "--key", str(public), "--insecure-ignore-tlog", *self._plain, *words])

    @property
    def _plain(self) -> list[str]:
        return ["--allow-http-registry"] if self.insecure else []


def values(registry: str, tag: str, digests: dict[str, str]) -> str:
    """Chart values that name these images by digest."""
    lines = ["# helm install with these values:", "images:", f"  registry: {registry}", f"  tag: {json.dumps(tag)}"]
    lines += [f"  {name}: {{digest: {json.dumps(digest)}}}" for name, digest in digests.items()]
    return "\n".join(lines) + "\n"


def _program() -> str:
    return shutil.which("cosign") or str(binaries.path_of("cosign"))


def _run(*words: str) -> str:
    done = subprocess.run(words, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ClusterError(f"{Path(words[0]).name} {words[1]} failed: {' '.join(last)}")
    return done.stdout + done.stderr
